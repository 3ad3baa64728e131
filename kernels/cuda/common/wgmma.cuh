// Products of a warpgroup: d (64 x N) += a (64 x 16) b (16 x N), a in registers, b in shared memory.
//
// Four consecutive warps, the first at a multiple of four, call together. Warp w holds of `a` the rows 16 w to 16 w +
// 15 in the order of mma.m16n8k16, and of `d` the same rows: d[4 i + j] is row lane / 4 + 8 (j / 2), column 8 i + 2
// (lane % 4) + j % 2. A call only begins a product: `fence` before the first one (and after registers were written by
// other means), then `commit`, then `wait` before d is read or a is written again.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace dpa::kernels::wgmma {

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending of the committed groups are under way.
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// An address in shared memory as descriptions count it: in units of 16 bytes from the block's own beginning. In a
// cluster the address's upper bits say which block it is of.
__device__ __forceinline__ uint32_t units(uint32_t address) { return (address & 0x3FFFF) >> 4; }

// Describes b in shared memory, without swizzle: pieces of 8 columns x 8 channels, 128 bytes each, a column's 8
// channels side by side; 8 columns on the next piece follows at once, 8 channels on it is `channel_pitch` units of 16
// bytes away. `address` is of the first piece, in `units`; adding units to the description moves it.
__device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t channel_pitch) {
  return static_cast<uint64_t>(8) << 32 | channel_pitch << 16 | address;
}

// The operands of one statement: the registers of d, as many as N / 2; then the four of a, and the description of b.
#define DPA_D8(d, i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define DPA_D16(d, i) DPA_D8(d, i), DPA_D8(d, i + 8)
#define DPA_D32(d, i) DPA_D16(d, i), DPA_D16(d, i + 16)
#define DPA_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define DPA_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define DPA_NAMES_32                                       \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DPA_WGMMA(n, type, registers, a0, a1, a2, a3, description)                                                \
  asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 1, 1;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
               "." type " {" DPA_NAMES_##registers "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #description     \
                                                   ", add, 1, 1, 0;\n}"                                           \
               : DPA_D##registers(d, 0)                                                                           \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b))

template <class T, int kColumns>
__device__ __forceinline__ void multiply(float (&d)[kColumns / 2], const uint4& a, uint64_t b) {
  static_assert(kColumns == 16 || kColumns == 32 || kColumns == 64, "a product has 16, 32 or 64 columns");
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (kColumns == 16 && kHalf) DPA_WGMMA(16, "f16", 8, 8, 9, 10, 11, 12);
  if constexpr (kColumns == 16 && !kHalf) DPA_WGMMA(16, "bf16", 8, 8, 9, 10, 11, 12);
  if constexpr (kColumns == 32 && kHalf) DPA_WGMMA(32, "f16", 16, 16, 17, 18, 19, 20);
  if constexpr (kColumns == 32 && !kHalf) DPA_WGMMA(32, "bf16", 16, 16, 17, 18, 19, 20);
  if constexpr (kColumns == 64 && kHalf) DPA_WGMMA(64, "f16", 32, 32, 33, 34, 35, 36);
  if constexpr (kColumns == 64 && !kHalf) DPA_WGMMA(64, "bf16", 32, 32, 33, 34, 35, 36);
}

#undef DPA_WGMMA
#undef DPA_D8
#undef DPA_NAMES_8
#undef DPA_D16
#undef DPA_NAMES_16
#undef DPA_D32
#undef DPA_NAMES_32

}  // namespace dpa::kernels::wgmma
