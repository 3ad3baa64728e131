// PTX instructions that neither `cuda::ptx` nor cooperative groups has in the form that these kernels need: on 32-bit
// shared-memory addresses that are computed once, `.aligned`, with a cache policy, or without a returned state. What
// `cuda::ptx` generates alike is called by its own name (mbarrier_init, fence_proxy_async, cp_async_bulk, ...). Every
// function is one instruction, or one loop around one, and says who calls it. Here: registers, memory, arithmetic;
// ptx_copy.cuh: barriers in shared memory and copies that they count; ptx_cluster.cuh: other blocks' shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cuda/ptx>
#include <type_traits>

namespace dpa::kernels::ptx {

// The 32-bit address of a pointer into shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same value, to be kept in a register: the compiler does not compute it again where it is used.
__device__ __forceinline__ uint32_t held(uint32_t value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}
template <class T>
__device__ __forceinline__ T* held(T* pointer) {
  asm volatile("mov.u64 %0, %0;" : "+l"(pointer));
  return pointer;
}

// An argument, in a register for good: ptxas would read it from the constant bank wherever it is used, and a warp waits
// some 40 clocks for that. By a shuffle, which it does not see through. All lanes of a warp call.
__device__ __forceinline__ int kept(int argument) {
  return __shfl_sync(~0u, argument + static_cast<int>(threadIdx.x % 32), 0);
}
template <class T>
__device__ __forceinline__ T* kept(T* argument) {
  const auto address = reinterpret_cast<uint64_t>(argument);
  const auto low = static_cast<uint32_t>(kept(static_cast<int>(address))),
             high = static_cast<uint32_t>(kept(static_cast<int>(address >> 32)));
  return reinterpret_cast<T*>(static_cast<uint64_t>(high) << 32 | low);
}

// Goes on when a load's value is there: an instruction reads it.
__device__ __forceinline__ void wait_for(uint32_t loaded) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0x9e3779b9;\n@p nanosleep.u32 0;\n}" ::"r"(loaded) : "memory");
}

// A barrier among the first `threads` threads that name the same id; whole warps only.
__device__ __forceinline__ void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives there, and does not wait.
__device__ __forceinline__ void arrive_threads(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Moves registers between groups of four warps of a block: every warp of the group calls it, before it needs or after
// it frees them.
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address));
  return value;
}

// 16 bytes in one instruction. Of an assignment nvcc makes four where a branch is near.
__device__ __forceinline__ void store_global_16(void* address, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Message words between blocks of one grid: not cached in L1, not reordered with accesses to the same word. The pointer's
// type is the caller's, or void: the compiler's code for addresses depends on it.
__device__ __forceinline__ uint2 load_message_8(const uint32_t* address) {
  uint2 value;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(address) : "memory");
  return value;
}
template <class T>
__device__ __forceinline__ uint4 load_message_16(const T* address) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}
template <class T>
__device__ __forceinline__ uint32_t load_message_word(const T* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
// A word behind which data lies that was written before its release.
__device__ __forceinline__ uint32_t load_acquire_word(const void* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
template <class T>
__device__ __forceinline__ void store_message_word(T* address, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// The same if `wanted`, without a branch.
template <class T>
__device__ __forceinline__ void store_message_word(T* address, uint32_t value, bool wanted) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.relaxed.gpu.global.u32 [%0], %1;\n}" ::"l"(address),
               "r"(value), "r"(static_cast<uint32_t>(wanted))
               : "memory");
}
__device__ __forceinline__ void store_message_8(uint32_t* address, const uint2& v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(address), "r"(v.x), "r"(v.y) : "memory");
}
template <class T>
__device__ __forceinline__ void store_message_16(T* address, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Hardware approximations, to about 2^-22 relative; results below the normal range are zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The smaller one, or NaN if either is.
__device__ __forceinline__ float min_or_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
#else
  return x < y || x != x ? x : y;
#endif
}

// The bits in which a or b differs from c; the bits that are set in any of three. The compiler does not take them apart
// into comparisons of single bits.
__device__ __forceinline__ uint32_t either_differs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x7e;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t or_of(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xfe;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Loads of constant data that the compiler does not move: they are issued long before their values are needed.
__device__ __forceinline__ float load_constant(const float* address) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ float2 load_constant_2(const float* address) {
  float2 v;
  asm volatile("ld.global.nc.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address));
  return v;
}

// Loads of data that is read once, past L1, which the compiler does not move.
__device__ __forceinline__ uint4 load_stream_16(const void* address, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address), "l"(policy));
  return v;
}
__device__ __forceinline__ uint2 load_stream_8(const void* address, uint64_t policy) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address), "l"(policy));
  return v;
}

// Prefetches the line of an address into L1.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

// Eight rows of 16 bytes a matrix: a thread receives word lane % 4 of row lane / 4. The whole warp calls; lane i gives
// the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrix_x2(uint32_t (&words)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Of each matrix a thread receives rows 2 (lane % 4) and the next of column lane / 4.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Transposes 8 x 8 values of 16 bits: a thread has, and receives, columns 2 (lane % 4) and the next of row lane / 4.
// The whole warp calls.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// c += a b by one warp. T is __half or __nv_bfloat16: a 16 x 16, b 16 x 8; float: a 16 x 8, b 8 x 8 in tf32.
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Four finite e4m3 as two pairs of halves: exact. Where the chip does not convert: in the upper half of 16 bits, its
// exponent a bit lower, e4m3 is a float16, the number times 2^-8.
__device__ __forceinline__ void widen_e4m3(uint32_t (&halves)[2], uint32_t four) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, "
      "high;\n}"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(four));
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t bytes = __byte_perm(four, 0, i ? 0x3424 : 0x1404);
    asm("mul.rn.f16x2 %0, %1, %2;"
        : "=r"(halves[i])
        : "r"((bytes & 0x80008000u) | ((bytes & 0x7f007f00u) >> 1)), "r"(0x5c005c00u));  // 256, twice
  }
#endif
}

// The nearest tf32 (10 bits of fraction) as float bits.
__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

}  // namespace dpa::kernels::ptx
