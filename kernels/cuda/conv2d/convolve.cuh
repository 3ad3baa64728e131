// From a tile's sums to memory, and all tiles of a launch that a block has.
#pragma once
#include "kernels/cuda/conv2d/epilogue.cuh"

namespace dpa::kernels::conv2d::device {

// Four neighbouring lanes exchange words: a lane's word i becomes lane i's word of this lane's number.
DPA_DEVICE void transpose_quad(uint32_t (&w)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = thread() & bit;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (k & bit) continue;
      const uint32_t got = bits(shuffle_xor(as_float(upper ? w[k] : w[k | bit]), bit));
      w[k] = upper ? got : w[k], w[k | bit] = upper ? w[k | bit] : got;
    }
  }
}

// The epilogue of a block that has the whole sums of its tile, without a GroupNorm: rows go from registers to memory, and no
// thread waits for another. A quad of lanes has 8 columns of a row in fragments of 2 columns a lane, and exchanges them
// for pieces; residual pieces are loaded many at once and exchanged the other way.
template <class C, class T>
struct Direct {
  static constexpr Tiling t = C::kTiling;
  static constexpr bool kServes = t.warps_k == 1;
  static constexpr int kFragments = T::kElements / 2;  // of 8 columns, that a quad exchanges: 16 bytes a lane
  static constexpr int kQuads = kServes ? 2 * t.n_tiles / kFragments : 1, kParts = 2 * t.m_tiles;
  // Residual pieces in flight, as registers allow.
  static constexpr int kMost = t.blocks() == 1 ? 8 : 4;
  static constexpr int kTogether = kParts * kQuads <= kMost ? kQuads : kParts >= kMost ? 1 : kMost / kParts;
  static_assert(!kServes || kQuads * kFragments == 2 * t.n_tiles, "a warp's columns are whole exchanges");

  const Epilogue<C, T>& e;
  const Conv& v;
  bool whole;        // whether all columns are there
  int first_piece;   // of the tile, of this lane after the exchange of quad 0; the next quad's is 4 further
  int first_column;  // of the tile: of this lane's two of fragment 0; the next fragment's are 8 further
  int at[kParts];    // pieces to the tile's in this lane's rows; -1: no row
  DPA_DEVICE explicit Direct(const Epilogue<C, T>& epilogue) : e(epilogue), v(epilogue.v) {
    const int lane = thread() & 31, warp = thread() >> 5, q = lane & 3;
    first_column = warp % t.warps_n * t.n_tiles * 16 + q * 2;
    first_piece = warp % t.warps_n * t.n_tiles * 16 / T::kElements + (T::kElements == 8 ? q : (q & 1) * 2 + (q >> 1));
    whole = e.first_column + e.kColumns <= v.out_channels;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      const int row = fragment_row<C>(warp, part / 2) + part % 2 * 8 + (lane >> 2);
      at[part] = row < e.at.rows ? (e.at.first_row + row) * v.out_pieces + e.at.column * e.kPieces : -1;
    }
  }

  DPA_DEVICE bool has(int part, int piece) const {
    return at[part] >= 0 && (whole || e.at.column * e.kPieces + piece < v.out_pieces);
  }
  DPA_DEVICE static void exchange(uint32_t (&w)[4]) {
    if constexpr (T::kElements == 8) {
      transpose_quad(w);
    } else {
      const bool odd = thread() & 1;
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const uint32_t got = bits(shuffle_xor(as_float(odd ? w[k] : w[k + 2]), 1));
        w[k] = odd ? got : w[k], w[k + 2] = odd ? w[k + 2] : got;
      }
    }
  }
  DPA_DEVICE static float2 pair_of(const uint32_t (&w)[4], int fragment) {
    if constexpr (T::kElements == 8)
      return unpack(typename T::Math{}, w[fragment]);
    else
      return {as_float(w[2 * fragment]), as_float(w[2 * fragment + 1])};
  }
  DPA_DEVICE static void set_pair(uint32_t (&w)[4], int fragment, float2 x) {
    if constexpr (T::kElements == 8)
      w[fragment] = pack(typename T::Math{}, x.x, x.y);
    else
      w[2 * fragment] = bits(x.x), w[2 * fragment + 1] = bits(x.y);
  }

  // Of the columns of a quad's exchange.
  struct Affine {
    float2 scale[kFragments], shift[kFragments];
    DPA_DEVICE Affine(const Parameters<C>& parameters, int column) {
#pragma unroll
      for (int k = 0; k < kFragments; k++) {
        scale[k] = *reinterpret_cast<const float2*>(parameters.scale + column + k * 8);
        shift[k] = *reinterpret_cast<const float2*>(parameters.shift + column + k * 8);
      }
    }
  };
  DPA_DEVICE void store(const Accumulators<C>& sum, const Affine& affine, int part, int quad,
                        const uint4& residual) const {
    uint32_t more[4] = {residual.x, residual.y, residual.z, residual.w}, made[4];
    if (v.residual) exchange(more);
#pragma unroll
    for (int k = 0; k < kFragments; k++) {
      const float* x = sum[part / 2][quad * kFragments + k] + part % 2 * 2;
      float2 y = {x[0] * affine.scale[k].x + affine.shift[k].x, x[1] * affine.scale[k].y + affine.shift[k].y};
      const float2 added = pair_of(more, k);
      y.x += added.x, y.y += added.y;
      if (v.relu) y.x = y.x < 0.0f ? 0.0f : y.x, y.y = y.y < 0.0f ? 0.0f : y.y;
      if (!whole) {
        const int left = v.out_channels - e.first_column - first_column - (quad * kFragments + k) * 8;
        y.x = left > 0 ? y.x : 0.0f, y.y = left > 1 ? y.y : 0.0f;
      }
      set_pair(made, k, y);
    }
    exchange(made);
    const int piece = first_piece + quad * 4;
    if (has(part, piece)) store_16(static_cast<uint4*>(v.out) + at[part] + piece, {made[0], made[1], made[2], made[3]});
  }

  // Every thread of the block calls it, behind a barrier that follows `load_parameters`.
  DPA_DEVICE void run(const Accumulators<C>& sum) const {
#pragma unroll
    for (int first = 0; first < kQuads; first += kTogether) {
      uint4 residual[kParts][kTogether];
#pragma unroll
      for (int part = 0; part < kParts; part++)
#pragma unroll
        for (int k = 0; k < kTogether; k++) {
          const int piece = first_piece + (first + k) * 4;
          residual[part][k] = make_uint4(0, 0, 0, 0);
          if (v.residual && has(part, piece))
            residual[part][k] = load_16(static_cast<const uint4*>(v.residual) + at[part] + piece);
        }
#pragma unroll
      for (int k = 0; k < kTogether; k++) {
        const Affine affine(e.parameters, first_column + (first + k) * kFragments * 8);
#pragma unroll
        for (int part = 0; part < kParts; part++) store(sum, affine, part, first + k, residual[part][k]);
      }
    }
  }
};

template <int kIndex>
struct Config {
  static constexpr Tiling kTiling = kTilings[kIndex];
};

// From a tile's sums to memory.
template <class C, class T>
DPA_DEVICE void finish(const Epilogue<C, T>& epilogue, const Accumulators<C>& sum, uint32_t flag) {
  if (Direct<C, T>::kServes && epilogue.v.splits == 1 && !epilogue.v.groups)
    Direct<C, T>(epilogue).run(sum);
  else
    epilogue.run(sum, flag);
}

// All tiles of a launch that this block has. `wait` returns the call's flag when what this launch reads is complete.
template <class C, class T, class Wait>
DPA_DEVICE void convolve(const Conv* convs, int count, int total, Wait&& wait) {
  bool waited = false;
  uint32_t flag = 0;
  Barriers<C> barriers;
#pragma unroll 1
  for (int index = block(); index < total; index += blocks()) {
    const Conv& v = convs[conv_at(convs, count, index)];
    const Tile at = tile_at<C>(v, index - v.first_block);
    const Epilogue<C, T> epilogue(v, at);
    if (waited) {  // the tile before has been stored
      if (C::kTiling.wgmma) fence_async();
      sync_block();
    }
    LoaderOf<C> loader(v, at, shared_address(shared()) + sizeof(Parameters<C>));
    prefetch_weights(loader);
    epilogue.load_parameters();
    if (!waited) flag = wait(), waited = true;
    Accumulators<C> sum = {};
    contract<C, T>(loader, {v, at, loader}, barriers, sum);
    finish(epilogue, sum, flag);
  }
  if (!waited) wait();
}

}  // namespace dpa::kernels::conv2d::device
