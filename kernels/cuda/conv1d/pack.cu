// Weights in the layout that the convolutions read.
//
// pack_weights    (d0, d1, taps) -> (taps, d0, d1 padded), several weights: a block takes neighbouring columns (j, k)
//                 of one row i at a time, reads them side by side and writes each tap's side by side, eight channels a
//                 thread; without padding, of as many pairs (i, j) as fit (pack_pairs)
//                 or to (taps, d1, d0 padded): a block takes all taps of some columns j of 32 rows i, and writes each
//                 (k, j)'s rows side by side, one a lane
//                 In two parts: those rounded to tf32, and what the rounding has left
// detect_changes  a block compares elements of a weight (plans/conv1d/changes.h) with what they were, a thread every
//                 1024th
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/conv1d/conv1d.h"
#include "kernels/cuda/conv1d/launch.cuh"
#include "kernels/plans/conv1d/changes.h"

namespace dpa::kernels::conv1d {
namespace {

__device__ float first_part(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

// Stores elements of a weight, each at one place of `to`; or in parts, `plane` apart.
template <class T, int kCount>
__device__ void store_parts(T* to, Vector<T, kCount> values, int parts, int64_t plane) {
  if constexpr (std::is_same_v<T, float>) {
    if (parts == 2) {
      Vector<T, kCount> second;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const float first = first_part(values.data[e]);
        second.data[e] = values.data[e] - first, values.data[e] = first;
      }
      *reinterpret_cast<Vector<T, kCount>*>(to + plane) = second;
    }
  }
  *reinterpret_cast<Vector<T, kCount>*>(to) = values;
}

constexpr int kPackThreads = 128;
constexpr int kPackElements = 2048;  // of a block's piece: all taps of as many channels j as fit, a multiple of 8

template <class S, class T>
__device__ void pack_piece(const Packing& packing, int64_t row_length, int channels, int64_t index, T* piece) {
  const int64_t d0 = packing.d0, d1 = packing.d1, columns = max(packing.of, d1);
  const int taps = packing.taps;
  const int64_t pieces = (row_length + channels - 1) / channels;
  const int64_t i = index / pieces, first = index % pieces * channels;
  const int read = static_cast<int>(min(int64_t{channels}, d1 - first)) * taps;
  const S* from = static_cast<const S*>(packing.weight) + (i * columns + first) * taps;
  if (d1 % 4 == 0 && columns % 4 == 0 && reinterpret_cast<uintptr_t>(packing.weight) % sizeof(Vector<S, 4>) == 0) {
#pragma unroll 4
    for (int e = threadIdx.x * 4; e < read; e += kPackThreads * 4) {
      const Vector<S, 4> four = *reinterpret_cast<const Vector<S, 4>*>(from + e);
#pragma unroll
      for (int n = 0; n < 4; ++n) piece[e + n] = narrow<T>(widen(four.data[n]));
    }
  } else {
    for (int e = threadIdx.x; e < read; e += kPackThreads) piece[e] = narrow<T>(widen(from[e]));
  }
  __syncthreads();
  const int eights = static_cast<int>(min(int64_t{channels}, row_length - first)) / 8;
  for (int n = threadIdx.x; n < eights * taps; n += kPackThreads) {
    const int k = n / eights, j = n % eights * 8;
    Vector<T, 8> eight;
#pragma unroll
    for (int e = 0; e < 8; ++e) eight.data[e] = (j + e) * taps < read ? piece[(j + e) * taps + k] : narrow<T>(0);
    store_parts<T, 8>(static_cast<T*>(packing.packed) + (k * d0 + i) * row_length + first + j, eight, packing.parts,
                      taps * d0 * row_length);
  }
  __syncthreads();
}

constexpr int kFlatVectors = 2;  // of eight elements, a thread of a piece of one tap

// One tap: rows are copied as they lie, whatever their length.
template <class S, class T>
__device__ void pack_flat(const Packing& packing, int64_t row_length, int64_t index) {
  const unsigned eights = static_cast<unsigned>(row_length / 8);
  const int64_t d1 = packing.d1, columns = max(packing.of, d1), count = packing.d0 * eights;
  const S* const weight = static_cast<const S*>(packing.weight);
  const bool fours = d1 % 4 == 0 && columns % 4 == 0 && reinterpret_cast<uintptr_t>(weight) % sizeof(Vector<S, 4>) == 0;
  Vector<S, 4> from[kFlatVectors][2] = {};
#pragma unroll
  for (int u = 0; u < kFlatVectors; ++u) {
    const int64_t n = (index * kFlatVectors + u) * kPackThreads + threadIdx.x;
    const int64_t i = n / eights, j = n % eights * 8;
    if (n >= count) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t first = j + half * 4;
      if (fours) {
        if (first < d1) from[u][half] = *reinterpret_cast<const Vector<S, 4>*>(weight + i * columns + first);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (first + e < d1) from[u][half].data[e] = weight[i * columns + first + e];
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kFlatVectors; ++u) {
    const int64_t n = (index * kFlatVectors + u) * kPackThreads + threadIdx.x;
    Vector<T, 8> eight;
#pragma unroll
    for (int e = 0; e < 8; ++e) eight.data[e] = narrow<T>(widen(from[u][e / 4].data[e % 4]));
    if (n < count) store_parts<T, 8>(static_cast<T*>(packing.packed) + n * 8, eight, packing.parts, count * 8);
  }
}

struct Pieces {
  int64_t count[kMaxPackings], row_length[kMaxPackings], total;  // pieces and rows of each packing
  int channels[kMaxPackings];                                    // of a piece
};

// The blocks take pieces in turn, on from one weight to the next.
template <class S, class T>
__global__ void __launch_bounds__(kPackThreads)
    pack(const __grid_constant__ Packings packings, const __grid_constant__ Pieces pieces) {
  __shared__ alignas(16) T piece[kPackElements];
  __shared__ int wanted[kMaxPackings];
  grid_dependency_sync();
  for (int w = threadIdx.x; w < packings.count; w += kPackThreads) wanted[w] = !packings.wanted || packings.wanted[w];
  __syncthreads();
  int64_t index = blockIdx.x;
  for (int w = 0; w < packings.count; ++w) {
    if (!wanted[w]) continue;
    for (; index < pieces.count[w]; index += gridDim.x)
      pieces.channels[w] > 0
          ? pack_piece<S, T>(packings.each[w], pieces.row_length[w], pieces.channels[w], index, piece)
          : pack_flat<S, T>(packings.each[w], pieces.row_length[w], index);
    index -= pieces.count[w];
  }
}

// Weights whose packed rows have no padding are pairs (i, j) by taps, and become taps by pairs, whatever the rows. A piece
// is some pairs, all taps of them.
//
// Convolutions and normalisations run beside this kernel. A convolution's block leaves 19 KB of a multiprocessor's shared
// memory, and what is launched after it finds no place where blocks of this kernel hold all. So there are as few blocks
// as find a place beside any of them, and each has the loads of its next kPiecesAhead pieces under way, which is as much
// in flight as memory takes.
constexpr int kPairBlocks = 3;  // a multiprocessor
constexpr int kPiecesAhead = 2, kPieceLoads = kPackElements / 4 / kPackThreads;

template <class S, class T>
__global__ void __launch_bounds__(kPackThreads, 8)
    pack_pairs(const __grid_constant__ Packings packings, const __grid_constant__ Pieces pieces) {
  struct Piece {
    int weight;  // packings.count behind the last one
    int64_t index;
  };
  __shared__ alignas(16) T memory[kPackElements];
  grid_dependency_sync();
  Piece next{0, blockIdx.x}, at[kPiecesAhead];
  Vector<S, 4> held[kPiecesAhead][kPieceLoads];
  const auto pairs_of = [&](const Piece& piece) {
    const int64_t first = piece.index * pieces.channels[piece.weight];
    return static_cast<int>(min(int64_t{pieces.channels[piece.weight]}, pieces.row_length[piece.weight] - first));
  };
  const auto load = [&](int slot) {
    while (next.weight < packings.count && next.index >= pieces.count[next.weight])
      next.index -= pieces.count[next.weight++];
    at[slot] = next;
    if (next.weight == packings.count) return;
    const Packing& packing = packings.each[next.weight];
    const int elements = pairs_of(next) * packing.taps;
    const S* from = static_cast<const S*>(packing.weight) + next.index * pieces.channels[next.weight] * packing.taps;
#pragma unroll
    for (int u = 0; u < kPieceLoads; ++u) {
      const int e = (u * kPackThreads + static_cast<int>(threadIdx.x)) * 4;
      if (e < elements) held[slot][u] = *reinterpret_cast<const Vector<S, 4>*>(from + e);
    }
    next.index += gridDim.x;
  };
#pragma unroll
  for (int slot = 0; slot < kPiecesAhead; ++slot) load(slot);
  for (;;) {
#pragma unroll
    for (int slot = 0; slot < kPiecesAhead; ++slot) {
      const Piece piece = at[slot];
      if (piece.weight == packings.count) return;
#pragma unroll
      for (int u = 0; u < kPieceLoads; ++u) {
        const int e = (u * kPackThreads + static_cast<int>(threadIdx.x)) * 4;
#pragma unroll
        for (int n = 0; n < 4; ++n) memory[e + n] = narrow<T>(widen(held[slot][u].data[n]));
      }
      load(slot);
      __syncthreads();
      const Packing& packing = packings.each[piece.weight];
      const int taps = packing.taps, eights = pairs_of(piece) / 8;
      T* const to = static_cast<T*>(packing.packed) + piece.index * pieces.channels[piece.weight];
      for (int n = threadIdx.x; n < eights * taps; n += kPackThreads) {
        const int k = n / eights, j = n % eights * 8;
        Vector<T, 8> eight;
#pragma unroll
        for (int e = 0; e < 8; ++e) eight.data[e] = memory[(j + e) * taps + k];
        *reinterpret_cast<Vector<T, 8>*>(to + k * pieces.row_length[piece.weight] + j) = eight;
      }
      __syncthreads();
    }
  }
}

// Of a piece: rows i, and columns (j, k), all taps of some channels j.
constexpr int kTransposedRows = 32, kTransposedColumns = 40, kTransposedThreads = 256;
constexpr int kTransposedElements = kTransposedRows * kTransposedColumns / kTransposedThreads;  // of a thread

// Pieces in the same turn.
__global__ void __launch_bounds__(kTransposedThreads)
    pack_transposed(const __grid_constant__ Packings packings, const __grid_constant__ Pieces pieces) {
  __shared__ float piece[kTransposedRows][kTransposedColumns + 1];
  grid_dependency_sync();
  int64_t next = blockIdx.x;
  for (int w = 0; w < packings.count; ++w) {
    const Packing& packing = packings.each[w];
    const int d0 = static_cast<int>(packing.d0), d1 = static_cast<int>(packing.d1), taps = packing.taps;
    const int width = static_cast<int>(pieces.row_length[w]), channels = pieces.channels[w];
    const unsigned across = (d1 + channels - 1) / channels;
    const float* const weight = static_cast<const float*>(packing.weight);
    float* const packed = static_cast<float*>(packing.packed);
    for (; next < pieces.count[w]; next += gridDim.x) {
      const unsigned index = static_cast<unsigned>(next);
      const int first = index % across * channels, i0 = index / across * kTransposedRows;
      const int columns = min(channels, d1 - first) * taps;
#pragma unroll
      for (int n = 0; n < kTransposedElements; ++n) {
        const int element = n * kTransposedThreads + threadIdx.x;
        const int i = i0 + element / kTransposedColumns, column = element % kTransposedColumns;
        const bool there = i < d0 && column < columns;
        piece[element / kTransposedColumns][column] =
            there ? weight[(static_cast<int64_t>(i) * d1 + first) * taps + column] : 0.f;
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kTransposedElements; ++n) {
        const int element = n * kTransposedThreads + threadIdx.x;
        const int i = i0 + element % kTransposedRows, column = element / kTransposedRows;
        const int j = first + column / taps, k = column % taps;
        if (i < width && column < columns)
          store_parts<float, 1>(packed + (static_cast<int64_t>(k) * d1 + j) * width + i,
                                {piece[element % kTransposedRows][column]}, packing.parts,
                                static_cast<int64_t>(taps) * d1 * width);
      }
      __syncthreads();
    }
    next -= pieces.count[w];
  }
}

constexpr int kCompareThreads = 1024;

template <class Bits>
__global__ void __launch_bounds__(kCompareThreads)
    compare(const __grid_constant__ Packings packings, uint32_t* seen, int* wanted) {
  const Packing& packing = packings.each[blockIdx.x];
  const ComparedElements elements{packing.d0, packing.d1, packing.taps};
  const int count = elements.count();
  grid_dependency_sync();
  bool differs = false;
#pragma unroll 4
  for (int n = threadIdx.x; n < count; n += kCompareThreads) {
    const uint32_t bits = static_cast<const Bits*>(packing.weight)[elements.place(n)];
    uint32_t& before = seen[blockIdx.x * ComparedElements::kMost + n];
    if (bits == before) continue;
    before = bits;
    differs = true;
  }
  const int any = __syncthreads_or(differs);
  if (threadIdx.x == 0) wanted[blockIdx.x] = any;
}

}  // namespace

cudaError_t pack_weights_transposed(const Packings& packings, cudaStream_t stream) {
  Pieces pieces{};
  for (int n = 0; n < packings.count; ++n) {
    const Packing& packing = packings.each[n];
    if (packing.taps > kMaxTaps) return cudaErrorInvalidValue;
    pieces.row_length[n] = padded(packing.d0);
    pieces.channels[n] = kTransposedColumns / packing.taps;
    pieces.count[n] = (packing.d0 + kTransposedRows - 1) / kTransposedRows *
                      ((packing.d1 + pieces.channels[n] - 1) / pieces.channels[n]);
    pieces.total += pieces.count[n];
  }
  const int64_t blocks = multiprocessors() * 8;  // as many as are resident at once
  return launch_dependent(pack_transposed, grid_for(std::min(pieces.total, blocks), 1), kTransposedThreads, stream,
                          packings, pieces);
}

namespace {

// Whether pack_pairs takes it: packed rows are as long as the weight's, and vectors are aligned.
bool is_even(const Packing& packing) {
  return packing.d1 % 8 == 0 && (packing.of == 0 || packing.of == packing.d1) && packing.width <= packing.d1 &&
         reinterpret_cast<uintptr_t>(packing.weight) % 16 == 0;
}

cudaError_t pack_even(DType source_dtype, DType dtype, const Packings& packings, cudaStream_t stream) {
  Pieces pieces{};
  for (int n = 0; n < packings.count; ++n) {
    const Packing& packing = packings.each[n];
    if (packing.taps > kMaxTaps) return cudaErrorInvalidValue;
    pieces.row_length[n] = packing.d0 * packing.d1;
    pieces.channels[n] = kPackElements / packing.taps / 8 * 8;
    pieces.count[n] = (pieces.row_length[n] + pieces.channels[n] - 1) / pieces.channels[n];
    pieces.total += pieces.count[n];
  }
  return dispatch_half(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel = source_dtype == DType::kFloat32 ? pack_pairs<float, T> : pack_pairs<T, T>;
    const int64_t blocks = multiprocessors() * kPairBlocks;
    return launch_dependent(kernel, grid_for(std::min(pieces.total, blocks), 1), kPackThreads, stream, packings,
                            pieces);
  });
}

}  // namespace

cudaError_t pack_weights(DType source_dtype, DType dtype, const Packings& packings, cudaStream_t stream) {
  if (dtype != DType::kFloat32 && !packings.wanted &&
      std::all_of(packings.each, packings.each + packings.count, is_even))
    return pack_even(source_dtype, dtype, packings, stream);
  Pieces pieces{};
  for (int n = 0; n < packings.count; ++n) {
    const Packing& packing = packings.each[n];
    if (packing.taps > kMaxTaps) return cudaErrorInvalidValue;
    pieces.row_length[n] = std::max(packing.width, padded(packing.d1));
    pieces.channels[n] = kPackElements / packing.taps / 8 * 8;
    pieces.count[n] = packing.d0 * ((pieces.row_length[n] + pieces.channels[n] - 1) / pieces.channels[n]);
    if (packing.taps == 1) {
      pieces.channels[n] = 0;
      constexpr int kElements = kFlatVectors * kPackThreads * 8;
      pieces.count[n] = (packing.d0 * pieces.row_length[n] + kElements - 1) / kElements;
    }
    pieces.total += pieces.count[n];
  }
  return dispatch_to_32_bits(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel = source_dtype == DType::kFloat32 ? pack<float, T> : pack<T, T>;
    // As many as are resident at once; few where perhaps nothing is to be done, and where others begin meanwhile: of 16
    // bits these are the weights of FiLM, beside which the timestep is embedded.
    const int64_t blocks = multiprocessors() * (packings.wanted ? 8 : dtype == DType::kFloat32 ? 16 : 4);
    return launch_dependent(kernel, grid_for(std::min(pieces.total, blocks), 1), kPackThreads, stream, packings,
                            pieces);
  });
}

cudaError_t detect_changes(DType source_dtype, const Packings& packings, uint32_t* seen, int* wanted,
                           cudaStream_t stream) {
  const auto kernel = source_dtype == DType::kFloat32 ? compare<uint32_t> : compare<uint16_t>;
  return launch_dependent(kernel, packings.count, kCompareThreads, stream, packings, seen, wanted);
}

}  // namespace dpa::kernels::conv1d
