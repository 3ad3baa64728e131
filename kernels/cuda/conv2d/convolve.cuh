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
  static constexpr int kTogether = t.blocks() == 1 || kParts * kQuads <= 4 ? kQuads : kParts >= 4 ? 1 : 4 / kParts;
  static_assert(!kServes || kQuads * kFragments == 2 * t.n_tiles, "a warp's columns are whole exchanges");

  const Epilogue<C, T>& e;
  const Conv& v;
  int lane = thread() & 31, warp = thread() >> 5;
  DPA_DEVICE explicit Direct(const Epilogue<C, T>& epilogue) : e(epilogue), v(epilogue.v) {}

  DPA_DEVICE int column_of(int fragment) const {  // of this lane's two
    return warp % t.warps_n * t.n_tiles * 16 + fragment * 8 + (lane & 3) * 2;
  }
  DPA_DEVICE int row_of(int part) const { return warp / t.warps_n * t.m_tiles * 16 + part * 8 + (lane >> 2); }
  DPA_DEVICE int piece_of(int quad) const {  // after the exchange
    const int q = lane & 3, mine = T::kElements == 8 ? q : (q & 1) * 2 + (q >> 1);
    return warp % t.warps_n * t.n_tiles * 16 / T::kElements + quad * 4 + mine;
  }
  DPA_DEVICE bool has(int row, int piece) const {
    return row < e.at.rows && e.at.column * e.kPieces + piece < v.out_pieces;
  }
  DPA_DEVICE uint4 residual_at(int row, int piece) const {
    return v.residual && has(row, piece) ? load_16(e.piece_at(v.residual, row, piece)) : make_uint4(0, 0, 0, 0);
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
  DPA_DEVICE float2 made_of(float x, float y, int column, float2 more) const {
    const auto of = [&](const float* from) { return *reinterpret_cast<const float2*>(from + column); };
    const float2 scale = of(e.parameters.scale), shift = of(e.parameters.shift);
    if (v.bias) {
      const float2 bias = of(e.parameters.bias);
      x += bias.x, y += bias.y;
    }
    x = x * scale.x + shift.x + more.x, y = y * scale.y + shift.y + more.y;
    if (v.relu) x = x < 0.0f ? 0.0f : x, y = y < 0.0f ? 0.0f : y;
    const int left = v.out_channels - e.first_column - column;
    return {left > 0 ? x : 0.0f, left > 1 ? y : 0.0f};
  }

  DPA_DEVICE void store(const Accumulators<C>& sum, int part, int quad, const uint4& residual) const {
    uint32_t more[4] = {residual.x, residual.y, residual.z, residual.w}, made[4];
    if (v.residual) exchange(more);
#pragma unroll
    for (int k = 0; k < kFragments; k++) {
      const int fragment = quad * kFragments + k;
      const float(&x)[4] = sum[part / 2][fragment];
      set_pair(made, k, made_of(x[part % 2 * 2], x[part % 2 * 2 + 1], column_of(fragment), pair_of(more, k)));
    }
    exchange(made);
    const int row = row_of(part), piece = piece_of(quad);
    if (has(row, piece)) store_16(e.piece_at(v.out, row, piece), {made[0], made[1], made[2], made[3]});
  }

  // Every thread of the block calls it, behind a barrier that follows `load_parameters`.
  DPA_DEVICE void run(const Accumulators<C>& sum) const {
#pragma unroll
    for (int first = 0; first < kQuads; first += kTogether) {
      uint4 residual[kParts][kTogether];
#pragma unroll
      for (int part = 0; part < kParts; part++)
#pragma unroll
        for (int quad = 0; quad < kTogether; quad++)
          residual[part][quad] = residual_at(row_of(part), piece_of(first + quad));
#pragma unroll
      for (int quad = 0; quad < kTogether; quad++)
#pragma unroll
        for (int part = 0; part < kParts; part++) store(sum, part, first + quad, residual[part][quad]);
    }
  }
};

template <int kIndex>
struct Config {
  static constexpr Tiling kTiling = kTilings[kIndex];
};

// All tiles of a launch that this block has. `wait` returns the call's flag when what this launch reads is complete.
template <class C, class T, class Wait>
DPA_DEVICE void convolve(const Conv* convs, int count, int total, Wait&& wait) {
  bool waited = false;
  uint32_t flag = 0;
  Barriers<C> barriers;
#pragma unroll 1
  for (int index = block(); index < total; index += blocks()) {
    int which = 0;
    while (which + 1 < count && index >= convs[which + 1].first_block) which++;
    const Conv& v = convs[which];
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
    if (Direct<C, T>::kServes && v.splits == 1 && !v.groups)
      Direct<C, T>(epilogue).run(sum);
    else
      epilogue.run(sum, flag);
  }
  if (!waited) wait();
}

}  // namespace dpa::kernels::conv2d::device
