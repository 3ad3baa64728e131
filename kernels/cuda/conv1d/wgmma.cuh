// Hopper's warpgroup matrix products, their operands' descriptors, tensor copies into shared memory and the calls of a
// cluster, each one instruction. sm_90a alone.
#pragma once
#include <cuda.h>

#include <type_traits>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace dpa::kernels::conv1d {

// How a tile lies in shared memory as the copy engine leaves it: rows of 128 or 64 bytes, their 16-byte pieces swizzled
// over 8 rows.
enum class Swizzle : uint64_t { k128 = 1, k64 = 2 };

// The descriptor of an operand at `address`. `across` is the distance in bytes from one row's width to the next along
// the rows' direction (used where the rows run along M or N), `down` that of 8 rows.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t across, uint32_t down, Swizzle swizzle) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(across >> 4) << 16 |
         static_cast<uint64_t>(down >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

// The whole warpgroup calls each of these. `fence` before the first product that reads registers or memory written by
// ordinary instructions; products between two `commit`s form a group; `wait` until at most `kPending` groups run.
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The operands of one product instruction: `places` names the sums, the numbers after them the descriptors, the flag of
// the addition and the two directions.
#define DPA_TEN_PLACES(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define DPA_TWO_SUMS(i, j) "+f"(d[i]), "+f"(d[j])
#define DPA_TEN_SUMS(t)                                                                                   \
  DPA_TWO_SUMS(t##0, t##1), DPA_TWO_SUMS(t##2, t##3), DPA_TWO_SUMS(t##4, t##5), DPA_TWO_SUMS(t##6, t##7), \
      DPA_TWO_SUMS(t##8, t##9)
#define DPA_PRODUCT(n, types, places, a_place, b_place, add_place, across_place, across_b_place, ...)           \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add_place ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k16.f32." types " {" places "}, %" #a_place ", %" #b_place ", add, 1, 1, %" #across_place       \
               ", %" #across_b_place ";\n}\n"                                                                   \
               : __VA_ARGS__                                                                                    \
               : "l"(a), "l"(b), "r"(add), "n"(kAcross), "n"(kAcrossB))
#define DPA_PRODUCT_128(types) \
  DPA_PRODUCT(128, types, DPA_TEN_PLACES() ", " DPA_TEN_PLACES(1) ", " DPA_TEN_PLACES(2) ", " DPA_TEN_PLACES(3) ", " DPA_TEN_PLACES(4) ", " DPA_TEN_PLACES(5) ", " "%60, %61" ", " "%62, %63", 64, 65, 66, 67, 68, DPA_TEN_SUMS(), DPA_TEN_SUMS(1), DPA_TEN_SUMS(2), DPA_TEN_SUMS(3), DPA_TEN_SUMS(4), DPA_TEN_SUMS(5), DPA_TWO_SUMS(60, 61), DPA_TWO_SUMS(62, 63))
#define DPA_PRODUCT_160(types)                                                                                        \
  DPA_PRODUCT(160, types,                                                                                             \
              DPA_TEN_PLACES() ", " DPA_TEN_PLACES(1) ", " DPA_TEN_PLACES(2) ", " DPA_TEN_PLACES(                     \
                  3) ", " DPA_TEN_PLACES(4) ", " DPA_TEN_PLACES(5) ", " DPA_TEN_PLACES(6) ", " DPA_TEN_PLACES(7),     \
              80, 81, 82, 83, 84, DPA_TEN_SUMS(), DPA_TEN_SUMS(1), DPA_TEN_SUMS(2), DPA_TEN_SUMS(3), DPA_TEN_SUMS(4), \
              DPA_TEN_SUMS(5), DPA_TEN_SUMS(6), DPA_TEN_SUMS(7))
#define DPA_PRODUCT_192(types) \
  DPA_PRODUCT(192, types, DPA_TEN_PLACES() ", " DPA_TEN_PLACES(1) ", " DPA_TEN_PLACES(2) ", " DPA_TEN_PLACES(3) ", " DPA_TEN_PLACES(4) ", " DPA_TEN_PLACES(5) ", " DPA_TEN_PLACES(6) ", " DPA_TEN_PLACES(7) ", " DPA_TEN_PLACES(8) ", " "%90, %91" ", " "%92, %93" ", " "%94, %95", 96, 97, 98, 99, 100, DPA_TEN_SUMS(), DPA_TEN_SUMS(1), DPA_TEN_SUMS(2), DPA_TEN_SUMS(3), DPA_TEN_SUMS(4), DPA_TEN_SUMS(5), DPA_TEN_SUMS(6), DPA_TEN_SUMS(7), DPA_TEN_SUMS(8), DPA_TWO_SUMS(90, 91), DPA_TWO_SUMS(92, 93), DPA_TWO_SUMS(94, 95))
#define DPA_PRODUCT_256(types) \
  DPA_PRODUCT(256, types, DPA_TEN_PLACES() ", " DPA_TEN_PLACES(1) ", " DPA_TEN_PLACES(2) ", " DPA_TEN_PLACES(3) ", " DPA_TEN_PLACES(4) ", " DPA_TEN_PLACES(5) ", " DPA_TEN_PLACES(6) ", " DPA_TEN_PLACES(7) ", " DPA_TEN_PLACES(8) ", " DPA_TEN_PLACES(9) ", " DPA_TEN_PLACES(10) ", " DPA_TEN_PLACES(11) ", " "%120, %121" ", " "%122, %123" ", " "%124, %125" ", " "%126, %127", 128, 129, 130, 131, 132, DPA_TEN_SUMS(), DPA_TEN_SUMS(1), DPA_TEN_SUMS(2), DPA_TEN_SUMS(3), DPA_TEN_SUMS(4), DPA_TEN_SUMS(5), DPA_TEN_SUMS(6), DPA_TEN_SUMS(7), DPA_TEN_SUMS(8), DPA_TEN_SUMS(9), DPA_TEN_SUMS(10), DPA_TEN_SUMS(11), DPA_TWO_SUMS(120, 121), DPA_TWO_SUMS(122, 123), DPA_TWO_SUMS(124, 125), DPA_TWO_SUMS(126, 127))

// d = a b (+ d where `add`) for a 64 x 16 and b 16 x kN, float32 sums. The whole warpgroup calls. An operand lies along
// K in its rows, or across: its rows run along M or N (kAcross for a, kAcrossB for b). Thread i of warp w holds, in d[4
// j + 2 h + e], row 16 w + i / 4 + 8 h and column 8 j + i % 4 * 2 + e.
template <class T, int kN, int kAcross, int kAcrossB>
__device__ __forceinline__ void product(float (&d)[kN / 2], uint64_t a, uint64_t b, int add) {
  static_assert(kN == 128 || kN == 160 || kN == 192 || kN == 256, "a width that is spelled out above");
  static_assert(sizeof(T) == 2, "operands are 16-bit");
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if constexpr (kN == 128) DPA_PRODUCT_128("bf16.bf16");
    if constexpr (kN == 160) DPA_PRODUCT_160("bf16.bf16");
    if constexpr (kN == 192) DPA_PRODUCT_192("bf16.bf16");
    if constexpr (kN == 256) DPA_PRODUCT_256("bf16.bf16");
  } else {
    if constexpr (kN == 128) DPA_PRODUCT_128("f16.f16");
    if constexpr (kN == 160) DPA_PRODUCT_160("f16.f16");
    if constexpr (kN == 192) DPA_PRODUCT_192("f16.f16");
    if constexpr (kN == 256) DPA_PRODUCT_256("f16.f16");
  }
}
#undef DPA_PRODUCT_128
#undef DPA_PRODUCT_160
#undef DPA_PRODUCT_192
#undef DPA_PRODUCT_256
#undef DPA_PRODUCT
#undef DPA_TEN_SUMS
#undef DPA_TWO_SUMS
#undef DPA_TEN_PLACES

// One thread copies the box at (x, y, z) of a tensor; what lies outside the tensor arrives as zeros. The barrier counts
// the bytes of the whole box.
__device__ __forceinline__ void copy_box(uint32_t destination, const CUtensorMap* map, int x, int y, int z,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Every thread of every block of the cluster calls both; what was written to shared memory before is visible after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The two halves of that barrier; the second form of the first orders no memory.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// Where `address` of one's own shared memory lies in that of block `rank` of the cluster, as a generic address.
__device__ __forceinline__ uint64_t peer_address(uint32_t address, uint32_t rank) {
  uint64_t there;
  asm("{\n.reg .u64 here;\ncvt.u64.u32 here, %1;\ncvta.shared.u64 here, here;\nmapa.u64 %0, here, %2;\n}"
      : "=l"(there)
      : "r"(address), "r"(rank));
  return there;
}
// Zeros unless `wanted`. `arrived`: nothing that uses the value goes before what stands here.
__device__ __forceinline__ float4 load_peer(uint64_t there, bool wanted) {
  float4 value = {};
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n@wanted ld.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
               : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w)
               : "l"(there), "r"(static_cast<int>(wanted)));
  return value;
}
__device__ __forceinline__ void arrived(float4& value) {
  asm volatile("" : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w));
}
__device__ __forceinline__ float load_peer_word(uint64_t there) {
  float value;
  asm volatile("ld.f32 %0, [%1];" : "=f"(value) : "l"(there));
  return value;
}
__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address));
  return value;
}

// One thread asks for a copy of `bytes`, a multiple of 16, from shared to global memory, both aligned to 16 bytes; what
// it reads must have been written before a fence. `wait_copied_out`: the thread's copies have read their sources.
__device__ __forceinline__ void copy_out(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_copied_out() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace dpa::kernels::conv1d
