// How a block of the one-sample kernel makes a GEMM's input, or the tail's values, of the messages:
//
//   wait      descriptors, parameters of the output, zeros around the times, the weights' arrival
//   receive   8 partial sums of each of the thread's pairs; their moments within the warp, then the block
//   write     normalised, activated, modulated, plus residual: into the GEMM's input in shared memory
#pragma once
#include "kernels/cuda/unet1d/resident_block.cuh"
#include "kernels/cuda/unet1d/resident_partial_sums.cuh"

namespace dpa::kernels::unet1d {

template <class Weight, int kPairs, SoloForm kForm>
struct SoloInputs : Block<Weight> {
  using Base = Block<Weight>;
  using Math = typename Base::Math;
  using PartialSums = PartialSumMessages<typename Math::Activation, kPairs>;
  using Base::a, Base::shared, Base::pipeline, Base::tid, Base::warp, Base::lane, Base::k, Base::step, Base::phase,
      Base::messages, Base::residual_at, Base::sums_at;
  static constexpr bool kWide = Base::kWide;
  // Whether messages are polled before held weights are waited for, or last of all. A failed poll costs a read through
  // L2, so sooner is not better; where registers are short, or float32's weights take the memory, last is.
  static constexpr bool kPollAhead = !kWide && (kPairs == 1 || (kPairs == 2 && sizeof(Weight) == 2));
  static constexpr float kEpsilon = 1e-5f;  // of the norms
  static constexpr int kElement = 2;        // bytes of a GEMM's input, of float32 twice

  const float* film = nullptr;  // of this step
  float2 v[kPairs];             // of the layer: what it makes of the messages

  __device__ __forceinline__ bool of_parts() const {
    return kForm == SoloForm::kParts || (kForm == SoloForm::kRecord && a.layout.parts);
  }

  __device__ __forceinline__ void mark(int layer, Mark what) const {
    if constexpr (kForm == SoloForm::kRecord) {
      if (tid == 0 && step + 1 == a.steps)
        a.record[(blockIdx.x * (a.layout.count + 1) + layer) * kMarks + what] = static_cast<uint32_t>(clock());
    }
  }

  struct Parameters {
    float2 bias = {}, gamma = {}, beta = {}, scale = {1.0f, 1.0f}, shift = {};
  };
  __device__ __forceinline__ void fetch(Parameters& p, const SoloLayer& l, uint32_t c) const {
    p.bias = ptx::load_constant_2(a.floats + (l.bias + c));
    if (l.norm >= 0) {
      const float* at = a.floats + (l.norm + c);
      p.gamma = ptx::load_constant_2(at);
      p.beta = ptx::load_constant_2(at + static_cast<uint32_t>(l.channels));
    }
    if (l.film >= 0) {
      const float* at = film + (l.film + c);
      if (a.film_scale) p.scale = ptx::load_constant_2(at);
      p.shift = ptx::load_constant_2(at + (a.film_scale ? static_cast<uint32_t>(l.channels) : 0u));
    }
  }

  // Zeros before and after the times: a warp a row.
  __device__ __forceinline__ void pad_input(const SoloLayer& l) const {
    const int halo = a.layout.halo;
    if (warp < 2 * halo) {
      const int row = warp < halo ? l.input - (warp + 1) * l.pitch : l.last_row + (warp - halo) * l.pitch;
#pragma unroll 1
      for (int c = lane * 16; c < l.pitch; c += 512) {
        *reinterpret_cast<uint4*>(shared + row + c) = make_uint4(0, 0, 0, 0);
        if (kWide)
          *reinterpret_cast<uint4*>(shared + row + c + a.layout.input_low - a.layout.input) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // The sums of two numbers over the warp, by the tensor cores: of four lanes each, then of the fours' sums. Each number is
  // rounded to 11 bits once for either sum, which the mean over many lanes does not show.
  static __device__ __forceinline__ void sum_of_warp(float& x, float& y) {
    const uint32_t one = __float_as_uint(1.0f);
    const uint4 selector = make_uint4(one, 0, 0, one);  // x to the upper eight rows, y to the lower ones
    float fours[4] = {}, all[4] = {};
    ptx::mma<float>(fours, selector, ptx::to_tf32(x), ptx::to_tf32(y));
    ptx::mma<float>(all, selector, ptx::to_tf32(fours[0] + fours[1]), ptx::to_tf32(fours[2] + fours[3]));
    x = all[0], y = all[2];
  }

  // Mean and inverse deviation of a slice that is one group. 16-bit weights: sums and sums of squares, to which channels that
  // are not counted, all zeros, add nothing. float32: each warp around its first value, so that nothing cancels; an even
  // number of channels is counted.
  __device__ __forceinline__ float2 moments(const float2 (&v)[kPairs], int own, const SoloLayer& l) const {
    const float inverse = l.inverse_count;
    if (kWide && (tid & ((1 << l.half_log2) - 1)) >= l.counted) own = 0;
    const float pivot = kWide ? __shfl_sync(~0u, v[0].x, 0) : 0.0f;
    float sum = 0.0f, squares = 0.0f;
    int pairs = 0;  // of the warp
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const bool valid = i < own;
      const float x = valid ? v[i].x - pivot : 0.0f, y = valid ? v[i].y - pivot : 0.0f;
      sum = i ? sum + (x + y) : x + y;
      squares = i ? fmaf(x, x, fmaf(y, y, squares)) : fmaf(x, x, y * y);
      if constexpr (kWide) pairs += __popc(__ballot_sync(~0u, valid));
    }
    float x[kConsumerWarps], y[kConsumerWarps];
    if constexpr (kWide) {
#pragma unroll
      for (int i = 16; i; i >>= 1) {
        sum += __shfl_xor_sync(~0u, sum, i);
        squares += __shfl_xor_sync(~0u, squares, i);
      }
      const float n = static_cast<float>(2 * pairs), mean = pairs ? sum * ptx::reciprocal_approx(n) : 0.0f;
      float4* parts = reinterpret_cast<float4*>(shared + sums_at);  // sum, squares around the mean, mean, count
      if (lane == 0) parts[warp] = make_float4(n * (pivot + mean), fmaxf(squares - sum * mean, 0.0f), pivot + mean, n);
      sync_consumers();
      float4 part[kConsumerWarps];
#pragma unroll
      for (int w = 0; w < kConsumerWarps; w++) part[w] = parts[w], x[w] = part[w].x;
      const float all = sum_of(x) * inverse;
#pragma unroll
      for (int w = 0; w < kConsumerWarps; w++) y[w] = fmaf(part[w].w * (part[w].z - all), part[w].z - all, part[w].y);
      return make_float2(all, rsqrtf(sum_of(y) * inverse + kEpsilon));
    } else {
      sum_of_warp(sum, squares);
      float2* parts = reinterpret_cast<float2*>(shared + sums_at);
      if (lane == 0) parts[warp] = make_float2(sum, squares);
      sync_consumers();
#pragma unroll
      for (int w = 0; w < kConsumerWarps; w += 2) {
        const float4 two = *reinterpret_cast<const float4*>(parts + w);
        x[w] = two.x, y[w] = two.y, x[w + 1] = two.z, y[w + 1] = two.w;
      }
      const float mean = sum_of(x) * inverse, square = fmaf(sum_of(y), inverse, kEpsilon);
      return make_float2(mean, ptx::rsqrt_approx(fmaxf(fmaf(-mean, mean, square), kEpsilon)));
    }
  }

  // The same where the slice has several groups, or where an odd number of channels is counted: by shuffles among the lanes
  // of a group. A warp that has nothing of a group leaves its place in the group's row as it was, and nobody adds it.
  __device__ __forceinline__ float2 moments_of_parts(const float2 (&v)[kPairs], int own, const SoloLayer& l) const {
    const int pairs = (1 << l.half_log2) - 1, group_log2 = l.flags >> kSoloGroupShift;
    const int apart = pairs >> group_log2 << group_log2;  // bits in which threads of the slice's groups differ
    const int counted =
        2 * (l.counted - (tid & pairs & ~apart)) - (l.flags & kSoloOdd ? 1 : 0);  // channels from here on
    const float pivot = __shfl_sync(~0u, v[0].x, lane & apart);
    float sum = 0.0f, squares = 0.0f, n = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const bool first = i < own && counted > 0, second = i < own && counted > 1;
      const float x = first ? v[i].x - pivot : 0.0f, y = second ? v[i].y - pivot : 0.0f;
      sum += x + y, squares = fmaf(x, x, fmaf(y, y, squares)), n += first + second;
    }
#pragma unroll
    for (int i = 16; i; i >>= 1) {
      const float more[] = {__shfl_xor_sync(~0u, sum, i), __shfl_xor_sync(~0u, squares, i), __shfl_xor_sync(~0u, n, i)};
      if (!(i & apart)) sum += more[0], squares += more[1], n += more[2];
    }
    const float mean = n > 0.0f ? sum * ptx::reciprocal_approx(n) : 0.0f;
    float4* parts = reinterpret_cast<float4*>(shared + sums_at) + ((tid & pairs) >> group_log2) * kConsumerWarps;
    // Sum, squares around the mean, mean, count.
    if ((lane & ~apart) == 0)
      parts[warp] = make_float4(n * (pivot + mean), fmaxf(squares - sum * mean, 0.0f), pivot + mean, n);
    sync_consumers();
    float4 part[kConsumerWarps];
    float x[kConsumerWarps], y[kConsumerWarps];
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w++) part[w] = parts[w];
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w++) {
      const bool others = (w ^ warp) * 32 & apart;
      part[w].y = others ? 0.0f : part[w].y, part[w].w = others ? 0.0f : part[w].w, x[w] = others ? 0.0f : part[w].x;
    }
    const float all = sum_of(x) * l.inverse_count;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w++) {
      const float apart_by = part[w].z - all;  // of another group: any, perhaps no number
      y[w] = part[w].w > 0.0f ? fmaf(part[w].w * apart_by, apart_by, part[w].y) : 0.0f;
    }
    return make_float2(all, rsqrtf(fmaf(sum_of(y), l.inverse_count, kEpsilon)));
  }

  // mish(centred * inverse_deviation * gamma + beta) * scale + shift. In 16 bits few instructions one after another: with
  // d = (1 + e^x)^2 + 1 Mish is x - 2 x / d, also where d overflows.
  static __device__ __forceinline__ float finished(float centred, float inverse_deviation, float gamma, float beta,
                                                   float scale, float shift) {
    if constexpr (kWide) {
      // A Newton step of the approximate reciprocal is a division without its branch.
      const float x = fmaf(centred, inverse_deviation * gamma, beta), e = math::exponential(fminf(x, 20.0f)),
                  n = e * (e + 2.0f), d = n + 2.0f, r = ptx::reciprocal_approx(d);
      return fmaf(x * (n * fmaf(fmaf(-d, r, 1.0f), r, r)), scale, shift);
    } else {
      constexpr float kLog2E = 1.44269504f;
      centred *= gamma;
      const float x = fmaf(centred, inverse_deviation, beta),
                  e = ptx::exp2_approx(fmaf(centred * kLog2E, inverse_deviation, beta * kLog2E)) + 1.0f;
      return fmaf(x * (-2.0f * scale), ptx::reciprocal_approx(fmaf(e, e, 1.0f)), fmaf(x, scale, shift));
    }
  }

  // The output of `from` becomes the input of `to`, or, for the last layer, the tail's values. `hold` takes weights, while
  // the messages are under way, and polls these first.
  template <class Hold>
  __device__ __forceinline__ void prepare(const SoloLayer& from, const SoloLayer& to, int layer, bool tail, Hold hold) {
    const bool first = layer == 0;
    mark(layer, kBegin);
    const uint32_t c = (tid & ((1 << from.half_log2) - 1)) * 2, t = tid >> from.half_log2,
                   slice = k << (from.half_log2 + 1);
    const int times_apart = kThreads >> from.half_log2, count = (from.pairs - tid + kThreads - 1) / kThreads;
    // A thread without a pair polls another's messages.
    const uint32_t at = ((count > 0 ? t : 0u) * from.channels + slice + c) / PartialSums::kWordSums,
                   apart = times_apart * from.channels / PartialSums::kWordSums;
    const int row = to.input + t * to.pitch + c * kElement, row_apart = times_apart * to.pitch;
    Parameters p;
    fetch(p, from, slice + c);
    const bool other = from.residual_message >= 0;  // the residual was published a layer earlier: it is there
    const float2 other_bias = ptx::load_constant_2(a.floats + (from.other_bias + slice + c));
    PartialSums residuals(messages + (at + from.residual_message), apart, phase, count);
    PartialSums sums(messages + (at + from.message), apart, phase, count);
    if (other) residuals.poll();
    auto poll = [&] {
      if (!first) sums.poll();
    };
    if (!tail) {
      if (from.pitch != to.pitch || from.last_row != to.last_row) pad_input(to);
      if (to.skip_in >= 0) {
#pragma unroll
        for (int i = 0; i < kPairs; i++) {
          if (i < count)
            Base::write_input(row + i * row_apart + to.skip_bytes,
                              reinterpret_cast<const float2*>(shared + to.skip_in)[tid + i * kThreads]);
        }
      }
    }
    if (kPollAhead) {
      if (tail)
        poll();
      else
        hold(poll);
    }
    float2 r[kPairs];  // what is added to the normalised values: residual and shift
    if (other) {
      residuals.receive(r);
      p.shift = make_float2(p.shift.x + other_bias.x, p.shift.y + other_bias.y);
    } else {
      const float2* residual = reinterpret_cast<const float2*>(shared + residual_at) + tid;
#pragma unroll
      for (int i = 0; i < kPairs; i++) r[i] = from.flags & kSoloAdd ? residual[i * kThreads] : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kPairs; i++) r[i] = make_float2(r[i].x + p.shift.x, r[i].y + p.shift.y);
    if (!kPollAhead) poll();
    if (!kPollAhead && !tail) hold(poll);  // while the words are under way
    mark(layer, kWeightsThere);
    if (first) {
      Base::template first_conv<kPairs>(v, p.bias, other_bias, 2 << from.half_log2, t, times_apart, c, count);
    } else {
      sums.receive(v);
#pragma unroll
      for (int i = 0; i < kPairs; i++) v[i] = make_float2(v[i].x + p.bias.x, v[i].y + p.bias.y);
    }
    mark(layer, kMessagesThere);
    if (from.norm >= 0) {
      const float2 moment = of_parts() ? moments_of_parts(v, count, from) : moments(v, count, from);
      mark(layer, kNormalised);
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
        v[i].x = finished(v[i].x - moment.x, moment.y, p.gamma.x, p.beta.x, p.scale.x, r[i].x);
        v[i].y = finished(v[i].y - moment.x, moment.y, p.gamma.y, p.beta.y, p.scale.y, r[i].y);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; i++)
        v[i] = make_float2(fmaf(v[i].x, p.scale.x, r[i].x), fmaf(v[i].y, p.scale.y, r[i].y));
    }
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      if (i >= count) continue;
      if (tail)
        reinterpret_cast<float2*>(shared + a.layout.stash)[tid + i * kThreads] = v[i];
      else
        Base::write_input(row + i * row_apart, v[i]);
    }
    sync_consumers();
    mark(layer, kInputWritten);
  }

  // Stores the values that later layers add or take as a skip. Only this thread reads them.
  __device__ __forceinline__ void keep(const SoloLayer& from) const {
    float2* residual = reinterpret_cast<float2*>(shared + residual_at) + tid;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      if (i * kThreads + tid >= from.pairs) continue;
      if (from.flags & kSoloKeep) residual[i * kThreads] = v[i];
      if (from.skip_out >= 0) reinterpret_cast<float2*>(shared + from.skip_out)[tid + i * kThreads] = v[i];
    }
  }
};

}  // namespace dpa::kernels::unet1d
