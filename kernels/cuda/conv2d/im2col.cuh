// A convolution by im2col: a stage is a chunk of the channels under one tap, of the pixels of the tile's rows, zeros where they
// lie beyond an edge, and its weights. The producer, a thread, brings the stages by TMA; two consumer warpgroups multiply them
// where they lie. It is a consumer's where a multiprocessor has two blocks, one of which multiplies while it works; else it has
// a warpgroup of its own, whose registers the consumers take.
#pragma once
#include "kernels/cuda/common/pipeline.cuh"
#include "kernels/cuda/conv2d/convolve.cuh"

namespace dpa::kernels::conv2d::device {

// Of each stage: whether it has arrived, and whether all consumer warps have read it.
template <class C>
struct BoxBarriers {
  static constexpr Tiling t = C::kTiling;
  static_assert(t.warps_k == 1 && t.warps_n == 1 && 2 * t.stages <= kMaxBarriers);
  DPA_DEVICE static uint32_t full(int stage) { return shared_address(Parameters<C>::at().barriers + stage); }
  DPA_DEVICE static uint32_t free(int stage) { return full(t.stages + stage); }
  DPA_DEVICE static void init() {
#pragma unroll 1
    for (int stage = 0; stage < t.stages; stage++) barrier_init(full(stage), 1), barrier_init(free(stage), kWarps);
    barrier_init_fence();
  }
};
template <class C>
DPA_DEVICE uint32_t box_address(int stage) {
  return shared_address(shared()) + parameter_bytes(C::kTiling) + stage * C::kTiling.stage_bytes();
}
// The stages of a tile's split: the first, and how many.
struct Share {
  int begin, count;
  DPA_DEVICE Share(const Conv& v, const Tile& at)
      : begin(v.stages * at.split / v.splits), count(v.stages * (at.split + 1) / v.splits - begin) {}
};

// Loads the stages of a tile: the producer's. Weights wait for nobody, so those of the first stages come before the input.
template <class C, class T>
struct BoxLoader {
  static constexpr Tiling t = C::kTiling;

  const InputMap* map;
  const uint8_t* weights;      // of the next stage, of the tile's columns
  uint32_t chunk, present;     // bytes of all columns of a chunk; of the tile's columns that there are
  int left, slabs, taps_wide;  // stages; chunks of a tap; taps of a filter's row
  int slab, kh, kw;            // of the next stage's input
  int n, y, x;                 // under the first tap of the first row
  DPA_DEVICE BoxLoader(const Conv& v, const Tile& at, const InputMap* input)
      : map(input), slabs(v.pieces / kChunkPieces), taps_wide(v.kernel_width) {
    const Share share(v, at);
    const int groups = (v.out_channels + 15) / 16 * 2, first = at.column * t.columns() / 8;
    left = share.count;
    chunk = groups * 1024, present = min(t.columns() / 8, groups - first) * 1024;
    weights = static_cast<const uint8_t*>(v.weights) + int64_t{share.begin} * chunk + first * 1024;
    const int tap = share.begin / slabs;
    slab = share.begin - tap * slabs, kh = tap / taps_wide, kw = tap - kh * taps_wide;
    const int row = at.first_row / v.out_width, column = at.first_row - row * v.out_width;
    n = row / v.out_height;
    y = (row - n * v.out_height) * v.stride - v.pad_top, x = column * v.stride - v.pad_left;
  }
  template <class Wait>
  DPA_DEVICE void load_first(int stages, PipelineState& to, Wait&& wait) {
    const int count = min(left, stages);
    PipelineState ahead = to;
    prefetch_map(map);
#pragma unroll 1
    for (int i = 0; i < count; i++) load_weights(ahead), ahead.advance(t.stages);
    wait();
#pragma unroll 1
    for (int i = 0; i < count; i++) load_input(to), to.advance(t.stages);
    left -= count;
  }
  DPA_DEVICE void load_next(PipelineState& to) {
    load_weights(to), load_input(to), to.advance(t.stages);
    left--;
  }

 private:
  // Columns that are not there keep what was in memory.
  DPA_DEVICE void load_weights(const PipelineState& to) {
    barrier_wait(BoxBarriers<C>::free(to.stage), to.phase ^ 1);
    const uint32_t barrier = BoxBarriers<C>::full(to.stage);
    barrier_expect(barrier, t.input_bytes() + present);
    copy_bulk(box_address<C>(to.stage) + t.input_bytes(), weights, present, barrier);
    weights += chunk;
  }
  DPA_DEVICE void load_input(const PipelineState& to) {
    load_box(box_address<C>(to.stage), map, slab * kChunkPieces * T::kElements, x, y, n, kw, kh,
             BoxBarriers<C>::full(to.stage));
    if (++slab < slabs) return;
    slab = 0;
    if (++kw == taps_wide) kw = 0, kh++;
  }
};

// A stage is released once the MMAs of the next one are in flight, so that the tensor cores never idle. `released` is called
// then.
template <class C, class T, class Released>
DPA_DEVICE void contract_boxes(int count, PipelineState& at, Accumulators<C>& sum, Released&& released) {
  constexpr Tiling t = C::kTiling;
  constexpr int kSteps = 4, kColumns = t.columns(), kRows = 64;  // rows: of an MMA
  const uint32_t rows_at = thread() / 128 * t.m_tiles * kRows * kChunkBytes;
  const auto release = [](int stage) {
    if ((thread() & 31) == 0) barrier_arrive(BoxBarriers<C>::free(stage));
  };
  int before = 0;
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    barrier_wait(BoxBarriers<C>::full(at.stage), at.phase);
    const uint32_t stage = box_address<C>(at.stage);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const uint64_t b = wgmma_operand(stage + t.input_bytes() + step * 256, 128, 1024);
#pragma unroll
      for (int m = 0; m < t.m_tiles; m++)
        wgmma_boxes<kColumns>(typename T::Math{}, reinterpret_cast<float(&)[kColumns / 2]>(sum[m]),
                              wgmma_box(stage + rows_at + m * kRows * kChunkBytes + step * 32), b);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0) release(before);
    released();
    before = at.stage, at.advance(t.stages);
  }
  wgmma_wait<0>();
  if (count > 0) release(before);
}

// As `convolve`. `maps`: of each convolution's input.
template <class C, class T, class Wait>
DPA_DEVICE void convolve_boxes(const Conv* convs, int count, int total, const InputMap* maps, Wait&& wait) {
  constexpr Tiling t = C::kTiling;
  constexpr bool kProducers = t.threads() > kThreads;  // a warpgroup
  bool waited = false;
  uint32_t flag = 0;
  PipelineState at, to;
  const bool produces = thread() == (kProducers ? kThreads : 0);
  const auto wait_once = [&] {
    if (!waited) flag = wait(), waited = true;
  };
  const auto for_tiles = [&](auto&& f) {
#pragma unroll 1
    for (int index = block(); index < total; index += blocks()) {
      sync_threads(1, t.threads());  // barriers are there, and the tile before has been stored
      const int which = conv_at(convs, count, index);
      const Conv& v = convs[which];
      const Tile tile = tile_at<C>(v, index - v.first_block);
      f(v, tile, BoxLoader<C, T>(v, tile, maps + which));
    }
    wait_once();
  };
  const auto multiply = [&](const Conv& v, const Tile& tile, auto&& released) {
    const Epilogue<C, T> epilogue(v, tile);
    epilogue.load_parameters();
    wait_once();
    sync_tile();
    Accumulators<C> sum = {};
    contract_boxes<C, T>(Share(v, tile).count, at, sum, released);
    finish(epilogue, sum, flag);
    fence_async();
  };
  if (produces) BoxBarriers<C>::init();
  if constexpr (!kProducers) {
    for_tiles([&](const Conv& v, const Tile& tile, BoxLoader<C, T> loader) {
      if (produces) loader.load_first(t.stages - 1, to, wait_once);
      multiply(v, tile, [&] {
        if (produces && loader.left > 0) loader.load_next(to);
        sync_warp();  // the MMAs are the warp's
      });
    });
  } else if (thread() < kThreads) {
    registers_increase<232>();
    for_tiles([&](const Conv& v, const Tile& tile, const BoxLoader<C, T>&) { multiply(v, tile, [] {}); });
  } else {
    registers_decrease<40>();
    for_tiles([&](const Conv&, const Tile&, BoxLoader<C, T> loader) {
      if (!produces) return;
      loader.load_first(t.stages, to, wait_once);
      while (loader.left > 0) loader.load_next(to);
    });
  }
}

}  // namespace dpa::kernels::conv2d::device
