// `dpa::normal_draws` on CUDA: many small tensors of normal random numbers in one launch, with the bits that a launch each
// of PyTorch's `normal_` gives.
//
//   out[d, i] = sqrt(-2 log u) sin(2 pi v)     u, v from the first two words of Philox4x32-10 (Salmon et al., 2011),
//               key = the seed, counter = (offset / 4 + d, i): PyTorch gives number i of a draw to sequence i, and
//               every draw moves the offset by 4
//
// Grid: a thread a number of out, rows * numel of them; rows from `count` on are zero. `loop_inputs` has kCopyBlocks
// blocks more for each copy, which go through it side by side. The arithmetic is that of cuRAND, operation by operation,
// for the same bits: the fast sine, the exact logarithm.
#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/normal_draws/normal_draws.h"

namespace dpa::kernels {
namespace {

constexpr int kThreads = 256, kCopyBlocks = 8;

// The first two of the four words.
__device__ __forceinline__ uint2 philox(uint64_t seed, uint64_t sequence, uint64_t position) {
  uint4 c = make_uint4(static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                       static_cast<uint32_t>(sequence), static_cast<uint32_t>(sequence >> 32));
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    constexpr uint32_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57, kAdd0 = 0x9E3779B9, kAdd1 = 0xBB67AE85;
    const uint32_t high0 = __umulhi(kMultiply0, c.x), high1 = __umulhi(kMultiply1, c.z);
    c = make_uint4(high1 ^ c.y ^ k0, kMultiply1 * c.z, high0 ^ c.w ^ k1, kMultiply0 * c.x);
    k0 += kAdd0, k1 += kAdd1;
  }
  return make_uint2(c.x, c.y);
}

__device__ __forceinline__ float normal(uint2 words) {
  constexpr float kUnit = 2.3283064e-10f, kTurn = 2.3283064e-10f * 6.2831855f;  // 2^-32, 2^-32 2 pi
  const float u = static_cast<float>(words.x) * kUnit + kUnit / 2, v = static_cast<float>(words.y) * kTurn + kTurn / 2;
  float sine, cosine;
  __sincosf(v, &sine, &cosine);
  return sine * sqrtf(-2.0f * logf(u)) + 0.0f;  // PyTorch adds the mean: no number is -0
}

// Number `e` of out.
template <class T>
__device__ __forceinline__ void draw_one(const NormalDraws& a, int64_t e) {
  const int64_t draw = e / a.numel;
  if (draw >= a.rows) return;
  const bool captured = a.stream.seed_at != nullptr;
  const uint64_t seed = captured ? static_cast<uint64_t>(*a.stream.seed_at) : a.stream.seed;
  const uint64_t offset = a.stream.offset + (captured ? static_cast<uint64_t>(*a.stream.offset_at) : 0);
  const float value = draw < a.count ? normal(philox(seed, e % a.numel, offset / kDrawOffset + draw)) : 0.0f;
  static_cast<T*>(a.out)[e] = narrow<T>(value);
}

template <class T>
__global__ void __launch_bounds__(kThreads) normal_draws_kernel(const NormalDraws a) {
  draw_one<T>(a, blockIdx.x * int64_t{kThreads} + threadIdx.x);
}

// One of kCopyBlocks blocks.
template <class Word>
__device__ __forceinline__ void copy(const Copies::Copy& c, int block) {
  const auto* from = static_cast<const Word*>(c.from);
  auto* to = static_cast<Word*>(c.to);
  for (int64_t i = block * kThreads + static_cast<int>(threadIdx.x); i < c.bytes / static_cast<int64_t>(sizeof(Word));
       i += kCopyBlocks * kThreads)
    to[i] = from[i];
}

template <class T>
__global__ void __launch_bounds__(kThreads) loop_inputs_kernel(const NormalDraws a, const Copies copies) {
  const int draw_blocks = static_cast<int>(gridDim.x) - copies.count * kCopyBlocks,
            beyond = static_cast<int>(blockIdx.x) - draw_blocks;
  if (beyond < 0) return draw_one<T>(a, blockIdx.x * int64_t{kThreads} + threadIdx.x);
  const Copies::Copy& c = copies.of[beyond / kCopyBlocks];
  if ((reinterpret_cast<uintptr_t>(c.from) | reinterpret_cast<uintptr_t>(c.to) | c.bytes) % 4 == 0)
    copy<uint32_t>(c, beyond % kCopyBlocks);
  else
    copy<uint8_t>(c, beyond % kCopyBlocks);
}

}  // namespace

cudaError_t normal_draws(const NormalDraws& args, cudaStream_t stream) {
  const dim3 blocks(grid_for(args.rows * args.numel, kThreads));
  return dispatch_to_32_bits(args.dtype, [&](auto tag) {
    return launch(normal_draws_kernel<typename decltype(tag)::type>, blocks, kThreads, stream, args);
  });
}

cudaError_t loop_inputs(const NormalDraws& args, const Copies& copies, cudaStream_t stream) {
  const dim3 blocks(grid_for(args.rows * args.numel, kThreads) + copies.count * kCopyBlocks);
  return dispatch_to_32_bits(args.dtype, [&](auto tag) {
    return launch(loop_inputs_kernel<typename decltype(tag)::type>, blocks, kThreads, stream, args, copies);
  });
}

}  // namespace dpa::kernels
