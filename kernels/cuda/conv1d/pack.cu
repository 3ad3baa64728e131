// Weights in the layout that the convolutions read.
//
// pack_weights    (d0, d1, taps) -> (taps, d0, d1 padded), several weights: a block takes neighbouring columns (j, k)
//                 of one row i at a time, reads them side by side and writes each tap's side by side, 16 bytes a
//                 thread; without padding, of as many pairs (i, j) as fit (pack_pairs)
//                 or to (taps, d1, d0 padded): a block takes all taps of some columns j of 32 rows i, and writes each
//                 (k, j)'s rows side by side, four a thread
//                 In two parts: those rounded to tf32, and what the rounding has left
// detect_changes  a block compares elements of a weight (plans/conv1d/changes.h) with what they were, a thread every
//                 1024th
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/vectors.cuh"
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

// Stores elements of a weight side by side; or in parts, `plane` apart.
template <class T>
__device__ void store_parts(T* to, Vector<T, kVector<T>> values, int parts, int64_t plane) {
  if constexpr (std::is_same_v<T, float>) {
    if (parts == 2) {
      Vector<T, kVector<T>> second;
#pragma unroll
      for (int e = 0; e < kVector<T>; ++e) {
        const float first = first_part(values.data[e]);
        second.data[e] = values.data[e] - first, values.data[e] = first;
      }
      ptx::store_global_16(to + plane, reinterpret_cast<const uint4&>(second));
    }
  }
  ptx::store_global_16(to, reinterpret_cast<const uint4&>(values));
}

constexpr int kPackThreads = 128;
constexpr int kPackElements = 2048;  // of a block's piece: all taps of as many channels j as fit, a multiple of 8

template <class S, class T>
__device__ void pack_piece(const Packing& packing, int64_t row_length, int channels, unsigned index, T* piece) {
  const int64_t d0 = packing.d0, d1 = packing.d1, columns = max(packing.of, d1);
  const int taps = packing.taps;
  const unsigned pieces = (static_cast<unsigned>(row_length) + channels - 1) / channels;
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
  const unsigned vectors = static_cast<unsigned>(min(int64_t{channels}, row_length - first)) / kVector<T>;
  T* const to = static_cast<T*>(packing.packed) + i * row_length + first;
  for (unsigned n = threadIdx.x; n < vectors * taps; n += kPackThreads) {
    const int k = n / vectors, j = n % vectors * kVector<T>;
    Vector<T, kVector<T>> vector;
#pragma unroll
    for (int e = 0; e < kVector<T>; ++e)
      vector.data[e] = (j + e) * taps < read ? piece[(j + e) * taps + k] : narrow<T>(0);
    store_parts(to + k * d0 * row_length + j, vector, packing.parts, taps * d0 * row_length);
  }
  __syncthreads();
}

constexpr int kFlatElements = 16;  // of a thread, in a piece of one tap

// One tap: rows are copied as they lie, whatever their length.
template <class S, class T>
__device__ void pack_flat(const Packing& packing, int64_t row_length, int64_t index) {
  constexpr int kVectors = kFlatElements / kVector<T>, kFours = kVector<T> / 4;
  const unsigned across = static_cast<unsigned>(row_length / kVector<T>);
  const int64_t d1 = packing.d1, columns = max(packing.of, d1), count = packing.d0 * across;
  const S* const weight = static_cast<const S*>(packing.weight);
  const bool fours = d1 % 4 == 0 && columns % 4 == 0 && reinterpret_cast<uintptr_t>(weight) % sizeof(Vector<S, 4>) == 0;
  Vector<S, 4> from[kVectors][kFours] = {};
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int64_t n = (index * kVectors + u) * kPackThreads + threadIdx.x;
    const int64_t i = n / across, j = n % across * kVector<T>;
    if (n >= count) continue;
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const int64_t first = j + four * 4;
      if (fours) {
        if (first < d1) from[u][four] = *reinterpret_cast<const Vector<S, 4>*>(weight + i * columns + first);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (first + e < d1) from[u][four].data[e] = weight[i * columns + first + e];
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int64_t n = (index * kVectors + u) * kPackThreads + threadIdx.x;
    Vector<T, kVector<T>> vector;
#pragma unroll
    for (int e = 0; e < kVector<T>; ++e) vector.data[e] = narrow<T>(widen(from[u][e / 4].data[e % 4]));
    if (n < count)
      store_parts(static_cast<T*>(packing.packed) + n * kVector<T>, vector, packing.parts, count * kVector<T>);
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
      pieces.channels[w] > 0 ? pack_piece<S, T>(packings.each[w], pieces.row_length[w], pieces.channels[w],
                                                static_cast<unsigned>(index), piece)
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

// Of a piece: 32 rows i, and columns (j, k), all taps of some channels j. A thread loads four columns of a row, which it
// holds while the piece before is stored, and stores four rows of a column. A warp loads eight columns of 16 rows: to
// shared memory, a row of it a column, without bank conflicts.
constexpr int kTransposedRows = 32, kTransposedColumns = 40, kTransposedThreads = 320, kTransposedBlocks = 5;
constexpr int kTransposedPitch = kTransposedRows + 4;
static_assert(kTransposedColumns / kMaxTaps >= 4, "a piece has a vector of channels at least");

// Pieces in the same turn.
__global__ void __launch_bounds__(kTransposedThreads, kTransposedBlocks)
    pack_transposed(const __grid_constant__ Packings packings, const __grid_constant__ Pieces pieces) {
  __shared__ alignas(16) float piece[kTransposedColumns][kTransposedPitch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int from_row = warp % 2 * 16 + lane / 2, from_column = warp / 2 * 8 + lane % 2 * 4;
  const int to_row = lane % 8 * 4, to_column = warp * 4 + lane / 8;
  grid_dependency_sync();
  unsigned next = blockIdx.x;
  for (int w = 0; w < packings.count; ++w) {
    const Packing& packing = packings.each[w];
    const int d0 = static_cast<int>(packing.d0), d1 = static_cast<int>(packing.d1), taps = packing.taps;
    const int width = static_cast<int>(pieces.row_length[w]), channels = pieces.channels[w];
    const unsigned count = static_cast<unsigned>(pieces.count[w]), across = (d1 + channels - 1) / channels;
    const bool fours = d1 % 4 == 0 && channels % 4 == 0 && reinterpret_cast<uintptr_t>(packing.weight) % 16 == 0;
    const int64_t row = int64_t{d1} * taps, plane = row * width;
    const float* const from = static_cast<const float*>(packing.weight) + from_row * row + from_column;
    float* const to = static_cast<float*>(packing.packed) +
                      (static_cast<int64_t>(to_column % taps) * d1 + to_column / taps) * width + to_row;
    Vector<float, 4> held;
    int first, i0;  // of what is held
    const auto load = [&](unsigned index) {
      first = index % across * channels, i0 = index / across * kTransposedRows;
      held = {};
      const int columns = min(channels, d1 - first) * taps - from_column;
      if (i0 + from_row >= d0 || columns <= 0) return;
      const float* const four = from + (i0 * row + first * taps);
      if (fours) {
        held = *reinterpret_cast<const Vector<float, 4>*>(four);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (e < columns) held.data[e] = four[e];
      }
    };
    if (next < count) load(next);
    for (; next < count; next += gridDim.x) {
#pragma unroll
      for (int e = 0; e < 4; ++e) piece[from_column + e][from_row] = held.data[e];
      const bool there = i0 + to_row < width && to_column < min(channels, d1 - first) * taps;
      float* const rows = to + (static_cast<int64_t>(first) * width + i0);
      __syncthreads();
      if (next + gridDim.x < count) load(next + gridDim.x);
      if (there)
        store_parts(rows, *reinterpret_cast<const Vector<float, 4>*>(&piece[to_column][to_row]), packing.parts, plane);
      __syncthreads();
    }
    next -= count;
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
    pieces.channels[n] = kTransposedColumns / packing.taps / 4 * 4;  // whole vectors
    pieces.count[n] = (packing.d0 + kTransposedRows - 1) / kTransposedRows *
                      ((packing.d1 + pieces.channels[n] - 1) / pieces.channels[n]);
    pieces.total += pieces.count[n];
  }
  const int64_t blocks = multiprocessors() * kTransposedBlocks;
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
      constexpr int kElements = kFlatElements * kPackThreads;
      pieces.count[n] = (packing.d0 * pieces.row_length[n] + kElements - 1) / kElements;
    }
    pieces.total += pieces.count[n];
  }
  return dispatch_to_32_bits(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel = source_dtype == DType::kFloat32 ? pack<float, T> : pack<T, T>;
    // As many as are resident at once; few where perhaps nothing is to be done, and where others begin meanwhile: of 16
    // bits these are the weights of FiLM, beside which the timestep is embedded.
    const int64_t blocks = multiprocessors() * (packings.wanted ? 8 : dtype == DType::kFloat32 ? 12 : 4);
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
