// Warpgroup MMA (wgmma, sm_90a alone): d (64 x N, float32) = a (64 x 16) b (16 x N), or d += a b; b in shared memory, a
// in shared memory (mma_ss) or in registers (mma_rs). float operands are multiplied in tf32, a 64 x 8 and b 8 x N, and
// their rows run along K.
//
// Four consecutive warps, the first at a multiple of four, call every function here together. An mma is asynchronous:
// `fence` before the first one (and after ordinary instructions wrote its registers), then `commit`, then `wait` before
// d is read or the registers of a are written again.
//
// Warp w holds rows 16 w to 16 w + 15 of a (in registers: as for mma.m16n8k16 or, in tf32, m16n8k8) and of d: d[4 i + j] is row lane / 4 + 8
// (j / 2), column 8 i + 2 (lane % 4) + j % 2.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace dpa::kernels::wgmma {

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns when at most kPending committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Shared-memory descriptors count in units of 16 bytes from the block's own beginning; in a cluster the upper bits of
// an address name the block. Adding units to a descriptor moves it.
__device__ __forceinline__ uint32_t units(uint32_t address) { return (address & 0x3FFFF) >> 4; }

// The layout that TMA writes: rows of 128 or 64 bytes, their 16-byte chunks swizzled over 8 rows; or core matrices of 8
// rows of 16 bytes.
enum class Swizzle : uint64_t { kNone = 0, k128 = 1, k64 = 2 };

// An operand at `address`. `leading` is the distance in bytes from one row's width to the next along the rows'
// direction (used where the rows run along M or N), `stride` that of 8 rows.
__device__ __forceinline__ uint64_t swizzled(uint32_t address, uint32_t leading, uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>(units(address)) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

// An operand without swizzle: core matrices of 8 columns x 8 channels, 128 bytes each, a column's 8 channels side by
// side; 8 columns on the next core matrix follows at once, 8 channels on it is `channel_pitch` units away. `first`: in
// units.
__device__ __forceinline__ uint64_t unswizzled(uint32_t first, uint32_t channel_pitch) {
  return static_cast<uint64_t>(8) << 32 | channel_pitch << 16 | first;
}

// The accumulators of one instruction, N / 2 registers: their constraints, and their names in its text.
#define DPA_ACC_8(i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define DPA_ACC_16(i) DPA_ACC_8(i), DPA_ACC_8(i + 8)
#define DPA_ACC_32(i) DPA_ACC_16(i), DPA_ACC_16(i + 16)
#define DPA_ACC_64(i) DPA_ACC_32(i), DPA_ACC_32(i + 32)
#define DPA_ACC_80(i) DPA_ACC_64(i), DPA_ACC_16(i + 64)
#define DPA_ACC_96(i) DPA_ACC_64(i), DPA_ACC_32(i + 64)
#define DPA_ACC_112(i) DPA_ACC_96(i), DPA_ACC_16(i + 96)
#define DPA_ACC_128(i) DPA_ACC_64(i), DPA_ACC_64(i + 64)
#define DPA_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define DPA_NAMES_16 \
  DPA_NAMES_8        \
  ",%8,%9,%10,%11,%12,%13,%14,%15"
#define DPA_NAMES_32 \
  DPA_NAMES_16       \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DPA_NAMES_64                                                 \
  DPA_NAMES_32                                                       \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DPA_NAMES_80 \
  DPA_NAMES_64       \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define DPA_NAMES_96 \
  DPA_NAMES_80       \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define DPA_NAMES_112 \
  DPA_NAMES_96        \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define DPA_NAMES_128 \
  DPA_NAMES_112       \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// a and b as descriptors: operands %a_at and %b_at, then the predicate of the addition and the two transpositions.
#define DPA_MMA_SS(n, type, registers, a_at, b_at, add_at, a_mn_at, b_mn_at)                                          \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n          \
               "k16.f32." type "." type " {" DPA_NAMES_##registers "}, %" #a_at ", %" #b_at ", add, 1, 1, %" #a_mn_at \
                                                                   ", %" #b_mn_at ";\n}"                              \
               : DPA_ACC_##registers(0)                                                                               \
               : "l"(a), "l"(b), "r"(add), "n"(kAMajorM), "n"(kBMajorN))
#define DPA_MMA_SS_TF32(n, registers, a_at, b_at, add_at)                                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
               "k8.f32.tf32.tf32 {" DPA_NAMES_##registers "}, %" #a_at ", %" #b_at ", add, 1, 1;\n}"         \
               : DPA_ACC_##registers(0)                                                                      \
               : "l"(a), "l"(b), "r"(add))
// a in four registers.
#define DPA_MMA_RS(n, type, registers, a0, a1, a2, a3, b_at)                                                      \
  asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 1, 1;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
               "." type " {" DPA_NAMES_##registers "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b_at            \
                                                   ", add, 1, 1, 0;\n}"                                           \
               : DPA_ACC_##registers(0)                                                                           \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b))

#define DPA_MMA_RS_TF32(n, registers, a0, a1, a2, a3, b_at)                                                   \
  asm volatile("{\n.reg .pred add;\nsetp.eq.u32 add, 1, 1;\nwgmma.mma_async.sync.aligned.m64n" #n             \
               "k8.f32.tf32.tf32 {" DPA_NAMES_##registers "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b_at \
                                                          ", add, 1, 1;\n}"                                   \
               : DPA_ACC_##registers(0)                                                                       \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b))

// d = a b, or d += a b where `add`. A row of an operand runs along K, or along M (kAMajorM) or N (kBMajorN).
template <class T, int kN, int kAMajorM, int kBMajorN>
__device__ __forceinline__ void mma_ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int add) {
  static_assert(kN == 64 || kN == 128 || kN == 160 || kN == 192 || kN == 224 || kN == 256,
                "mma_ss is spelled out for N of 64, 128, 160, 192, 224 and 256");
  constexpr bool kHalf = std::is_same_v<T, __half>, kFloat = std::is_same_v<T, float>;
  static_assert(kHalf || kFloat || std::is_same_v<T, __nv_bfloat16>, "operands are float16, bfloat16 or float");
  static_assert(!kFloat || (kAMajorM == 0 && kBMajorN == 0), "wgmma transposes no 32-bit operand");
  if constexpr (kN == 64 && kFloat) DPA_MMA_SS_TF32(64, 32, 32, 33, 34);
  if constexpr (kN == 128 && kFloat) DPA_MMA_SS_TF32(128, 64, 64, 65, 66);
  if constexpr (kN == 256 && kFloat) DPA_MMA_SS_TF32(256, 128, 128, 129, 130);
  static_assert(!kFloat || kN == 64 || kN == 128 || kN == 256,
                "in tf32 mma_ss is spelled out for N of 64, 128 and 256");
  if constexpr (kN == 64 && kHalf) DPA_MMA_SS(64, "f16", 32, 32, 33, 34, 35, 36);
  if constexpr (kN == 64 && !kHalf && !kFloat) DPA_MMA_SS(64, "bf16", 32, 32, 33, 34, 35, 36);
  if constexpr (kN == 128 && kHalf) DPA_MMA_SS(128, "f16", 64, 64, 65, 66, 67, 68);
  if constexpr (kN == 128 && !kHalf && !kFloat) DPA_MMA_SS(128, "bf16", 64, 64, 65, 66, 67, 68);
  if constexpr (kN == 160 && kHalf) DPA_MMA_SS(160, "f16", 80, 80, 81, 82, 83, 84);
  if constexpr (kN == 160 && !kHalf && !kFloat) DPA_MMA_SS(160, "bf16", 80, 80, 81, 82, 83, 84);
  if constexpr (kN == 192 && kHalf) DPA_MMA_SS(192, "f16", 96, 96, 97, 98, 99, 100);
  if constexpr (kN == 192 && !kHalf && !kFloat) DPA_MMA_SS(192, "bf16", 96, 96, 97, 98, 99, 100);
  if constexpr (kN == 224 && kHalf) DPA_MMA_SS(224, "f16", 112, 112, 113, 114, 115, 116);
  if constexpr (kN == 224 && !kHalf && !kFloat) DPA_MMA_SS(224, "bf16", 112, 112, 113, 114, 115, 116);
  if constexpr (kN == 256 && kHalf) DPA_MMA_SS(256, "f16", 128, 128, 129, 130, 131, 132);
  if constexpr (kN == 256 && !kHalf && !kFloat) DPA_MMA_SS(256, "bf16", 128, 128, 129, 130, 131, 132);
}

// d += a b, b's rows along K.
template <class T, int kN>
__device__ __forceinline__ void mma_rs(float (&d)[kN / 2], const uint4& a, uint64_t b) {
  constexpr bool kHalf = std::is_same_v<T, __half>, kFloat = std::is_same_v<T, float>;
  static_assert(kFloat || kN == 16 || kN == 32 || kN == 64 || kN == 128,
                "mma_rs is spelled out for N of 16, 32, 64 and 128");
  static_assert(!kFloat || kN == 64 || kN == 128 || kN == 160 || kN == 192 || kN == 224,
                "in tf32 for N of 64, 128, 160, 192 and 224");
  if constexpr (kN == 64 && kFloat) DPA_MMA_RS_TF32(64, 32, 32, 33, 34, 35, 36);
  if constexpr (kN == 128 && kFloat) DPA_MMA_RS_TF32(128, 64, 64, 65, 66, 67, 68);
  if constexpr (kN == 160 && kFloat) DPA_MMA_RS_TF32(160, 80, 80, 81, 82, 83, 84);
  if constexpr (kN == 192 && kFloat) DPA_MMA_RS_TF32(192, 96, 96, 97, 98, 99, 100);
  if constexpr (kN == 224 && kFloat) DPA_MMA_RS_TF32(224, 112, 112, 113, 114, 115, 116);
  if constexpr (kN == 16 && kHalf) DPA_MMA_RS(16, "f16", 8, 8, 9, 10, 11, 12);
  if constexpr (kN == 16 && !kHalf) DPA_MMA_RS(16, "bf16", 8, 8, 9, 10, 11, 12);
  if constexpr (kN == 32 && kHalf) DPA_MMA_RS(32, "f16", 16, 16, 17, 18, 19, 20);
  if constexpr (kN == 32 && !kHalf) DPA_MMA_RS(32, "bf16", 16, 16, 17, 18, 19, 20);
  if constexpr (kN == 64 && kHalf) DPA_MMA_RS(64, "f16", 32, 32, 33, 34, 35, 36);
  if constexpr (kN == 64 && !kHalf && !kFloat) DPA_MMA_RS(64, "bf16", 32, 32, 33, 34, 35, 36);
  if constexpr (kN == 128 && kHalf) DPA_MMA_RS(128, "f16", 64, 64, 65, 66, 67, 68);
  if constexpr (kN == 128 && !kHalf && !kFloat) DPA_MMA_RS(128, "bf16", 64, 64, 65, 66, 67, 68);
}

#undef DPA_MMA_RS_TF32
#undef DPA_MMA_RS
#undef DPA_MMA_SS_TF32
#undef DPA_MMA_SS
#undef DPA_NAMES_128
#undef DPA_ACC_128
#undef DPA_NAMES_96
#undef DPA_ACC_96
#undef DPA_NAMES_80
#undef DPA_ACC_80
#undef DPA_NAMES_64
#undef DPA_ACC_64
#undef DPA_NAMES_32
#undef DPA_ACC_32
#undef DPA_NAMES_16
#undef DPA_ACC_16
#undef DPA_NAMES_8
#undef DPA_ACC_8

}  // namespace dpa::kernels::wgmma
