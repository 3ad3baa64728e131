// Which tiles a convolution is cut into: pure functions of sizes and of the number of multiprocessors.
#pragma once
#include "kernels/plans/conv1d/shape.h"

namespace dpa::kernels::conv1d {

constexpr int kTileRows = 128;  // rows (sample, time) of an output tile of fprop and dgrad
constexpr int kChunk = 64;      // 16-bit channels, or rows of the weight gradient, that one step contracts
constexpr int kMaxSplits = 8;   // blocks of a cluster that share one output tile
constexpr int kMaxPhases = 2;
constexpr int kTf32Samples = 8, kTf32Times = 4;  // of a step of the weight gradient in float32

// Channels that a step of fprop or dgrad contracts: 128 bytes of a row.
constexpr int chunk(const Conv1d& conv) { return conv.dtype == DType::kFloat32 && !conv.halves ? kChunk / 2 : kChunk; }
// Boxes of x that are multiplied for each that there is: of pairs of float16 numbers, three.
constexpr int kRounds = 3;
constexpr int rounds(const Conv1d& conv) { return conv.halves ? kRounds : 1; }

// Whether the build has CUDA kernels.
bool built_with_kernels();

// Whether the kernels take these sizes.
bool serves(const Conv1d& conv);
// Whether fprop and dgrad by wgmma read weights as they lie in the parameter, which begins at a multiple of 16 bytes,
// instead of packed ones: in float32, with an odd number of taps and whole vectors in a row, where a box of x serves all
// taps; and where that is faster: with many weights for few rows, as packing them then takes as long as the GEMM.
bool can_read_in_place(const Conv1d& conv);
bool reads_in_place(const Conv1d& conv);
constexpr int kInPlaceTaps = 7;  // at most
// Whether the weight gradient by wgmma is compiled for the number of taps.
bool wgmma_takes_taps(const Conv1d& conv);

// How (sample, time) is cut into pieces of at most `limit` rows: whole samples where they fit, else parts of one.
struct RowTiles {
  int time, samples;  // of a piece
  int per_sample;     // pieces a sample, where samples is 1
  int64_t count;
};
RowTiles row_tiles(int64_t batch, int64_t length, int limit);

// fprop (one phase) or dgrad (a phase for each remainder of the output's time by the stride):
//   out[b, phases j + p, n] = sum over terms i of phase p and channels c of
//                             x[b, stride j + shift[p][i], c] weight[tap[p][i]] at (n, c), or (c, n) for dgrad
struct ConvPlan {
  int phases, stride;
  int terms[kMaxPhases];
  int tap[kMaxPhases][kMaxTaps], shift[kMaxPhases][kMaxTaps];
  int parts;      // of a weight, each of which is a step of a term: weight_parts
  RowTiles rows;  // row r of a tile is time r / samples of sample r % samples (split and normalised: epilogue_norm.cuh)
  // Whether one box of x serves all terms of a chunk: it holds `reach` more times from `lowest` on, and each term's
  // rows begin at another of them. Else every term has a box.
  bool together;
  int lowest, reach;
  // Near a sample's ends the outer terms meet nothing but padding: those that do not, in rows 64 w to 64 w + 63 of a
  // tile, are the terms from first_term[w] to before end_term[w]. All of them where each has a box.
  int first_term[2], end_term[2];
  int tile_rows, tile_columns;  // kTileRows or what is used of them, and 64, 128 or 256
  int column_step;              // from tile to tile: tile_columns, or fewer, which whole groups fill
  int64_t column_tiles;
  int chunks, first_chunks;  // of the contracted channels; of those of the first tensor (Conv1d)
  int splits;
  // Neighbouring tiles of columns in a cluster: 1, or as many as share a group of a normalisation whose moments the
  // cluster's blocks exchange; 0 where none is exchanged.
  int exchange;
  int passes;  // in which a warp normalises a group by itself; 0 where it does not
  int cluster() const { return splits * (exchange > 1 ? exchange : 1); }
};
ConvPlan plan_fprop(const Conv1d& conv, int multiprocessors);
ConvPlan plan_dgrad(const Conv1d& conv, int multiprocessors);
// Finds first_term and end_term, where rows, terms and `together` are known.
void find_padding(ConvPlan& plan, int64_t x_length);

// Whether every block of fprop stores whole groups of `group` channels of whole samples, each fit for a warp.
bool normalises(const Conv1d& conv, const ConvPlan& plan, int64_t group);
// plan_fprop where its blocks' warps normalise, with narrower tiles where those hold whole groups; else with an exchange
// of moments within a cluster, where its tiles hold whole groups of whole samples; else as it is.
ConvPlan plan_normalised(const Conv1d& conv, int64_t group, int multiprocessors);
constexpr int kMaxMoments = 256;  // samples by groups of a tile whose moments are exchanged
constexpr int kMaxParts = 192;    // that a block receives of them: its samples by groups by the blocks that share one
// Blocks of `rows` neighbouring rows each that the `time` rows of a sample may lie in, of `splits` blocks.
constexpr int most_blocks(int time, int rows, int splits) {
  const int most = time == 1 ? 1 : (time - 2) / rows + 2;
  return most < splits ? most : splits;
}

// A stage of weights as they lie in the parameter (kernels/cuda/conv1d/in_place.cuh): boxes of `rows` rows of `width` words,
// of which the last are not used, for the sake of shared memory's banks. Distances are in bytes.
constexpr int kInPlaceChannels = 16;  // contracted ones of a stage
constexpr int kInPlaceOutputs = 32;   // that lie evenly, in a box of dgrad
struct InPlaceStage {
  bool transposed;  // dgrad: outputs are the parameter's columns
  int taps, boxes, rows, width;
  uint32_t box_bytes, bytes;                   // of a box; from stage to stage
  uint32_t of_output, of_channel, of_outputs;  // from an output or a contracted channel to the next; over 32 outputs
};
InPlaceStage in_place_stage(const ConvPlan& plan, int taps, bool dgrad);

struct WgradPlan {
  RowTiles rows;   // pieces of at most kChunk rows; in float32 of kTf32Times times of kTf32Samples samples
  int height;      // 128 narrow channels of a tile each
  int x_channels;  // of a tile; all taps of them
  int64_t y_tiles, x_tiles;
  int splits;
};
WgradPlan plan_wgrad(const Conv1d& conv, int multiprocessors);

// The weight gradient by blocks that work on tile after tile (kernels/cuda/conv1d/wgrad_stream.cu): whether that is for
// these sizes and a float32 gradient, and how. `blocks`: of the grid.
constexpr int kStreamSamples = 16;  // at most, of a step
bool streams(const Conv1d& conv, int multiprocessors);
struct StreamPlan {
  WgradPlan tiles;
  int64_t blocks;
};
StreamPlan plan_stream(const Conv1d& conv, int multiprocessors);

}  // namespace dpa::kernels::conv1d
