// What the clustered kernel does between two steps: the end of one, whose actions come in parts, and what the next one's
// first convolution reads. By the warpgroup of the epilogue.
#pragma once
#include "kernels/cuda/unet1d/cluster_block.cuh"

namespace dpa::kernels::unet1d {

struct ClusterEnds : ClusterRole {
  __device__ explicit ClusterEnds(const ClusterRole& role) : ClusterRole(role) {}

  __device__ __forceinline__ void sync() const { ptx::sync_threads(2, kGroupThreads); }

  // Writes a word of this step, and makes the last step's unwritten again: all who share this block's units have
  // received this GEMM's input, which nobody has before all have read what the last step handed over here.
  __device__ __forceinline__ void store_and_reset(uint8_t* at, uint32_t word) const {
    ptx::store_message_word(at, word);
    ptx::store_message_word(at + (step & 1 ? -a.layout.message_bytes : a.layout.message_bytes), kUnwritten);
  }
  // The part of an action that 16 channels have, as a message: (sample, channels / 16, time, action).
  __device__ __forceinline__ int64_t tail_word(int sample, int part, int i) const {
    return a.layout.tail_message +
           (static_cast<int64_t>(sample * (layers[0].channels / 16) + part) * a.horizon * a.actions + i) * 4;
  }

  // Element i of the network's last output, from the parts that others have handed over.
  __device__ __forceinline__ float output_of(int sample, int i) const {
    const uint8_t* messages = messages_of(step - 1);
    constexpr int kTogether = 16;
    const int parts = layers[0].channels / 16;
    float output = a.floats[a.tail.bias + i % a.actions];
    for (int first = 0; first < parts; first += kTogether) {
      uint32_t word[kTogether];
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int g = 0; g < kTogether; g++)
          word[g] = first + g < parts ? ptx::load_message_word(messages + tail_word(sample, first + g, i)) : 0;
#pragma unroll
        for (int g = 0; g < kTogether; g++) missing |= word[g] == kUnwritten;
      } while (missing);
#pragma unroll
      for (int g = 0; g < kTogether; g++) output += __uint_as_float(word[g]);
    }
    return output;
  }

  // The sample after step `step - 1`, from the parts of its actions; every block that needs a sample computes it.
  __device__ __forceinline__ void advance_sample(const ThreadShare& s) const {
    float* x = reinterpret_cast<float*>(shared + a.layout.sample);
    const int count = a.horizon * a.actions;
    if (s.sample >= a.samples) {  // only fills the chunk up
      for (int i = thread; i < count; i += kGroupThreads) x[i] = 0.0f;
      return;
    }
    const int64_t first = static_cast<int64_t>(a.first_sample + s.sample) * count;
    float row[math::SchedulerStep<float>::kColumns] = {};
    if (a.table && step > 0)
#pragma unroll
      for (int c = 0; c < math::SchedulerStep<float>::kColumns; c++)
        row[c] = a.table[(step - 1) * math::SchedulerStep<float>::kColumns + c];
    const math::SchedulerStep<float> rule(row, 0, a.clip, a.noise != nullptr);
    for (int i = thread; i < count; i += kGroupThreads) {
      if (step == 0) {
        x[i] = with_condition(a, a.initial[first + i], first + i);
        continue;
      }
      // What there is to load comes before what there is to wait for.
      const float noise = a.noise ? a.noise[static_cast<int64_t>(step - 1) * a.batch * count + first + i] : 0.0f;
      const bool inpainted = a.condition_mask && a.condition_mask[first + i];
      const float given = inpainted ? a.condition_data[first + i] : 0.0f;
      float output = output_of(s.sample, i);
      if (a.table) {
        const float next = rule.step(output, x[i], noise);
        x[i] = output = inpainted ? given : next;
      }
      if (step == a.steps && s.channel == 0) a.output[first + i] = output;
    }
  }

  // Prefetches the first convolution's weights, which have left L1 since.
  __device__ __forceinline__ void prefetch_first_conv(const ClusterLayer& l, const ThreadShare& s) const {
    const float *weights = a.floats + a.head.weights + s.channel, *others = a.floats + a.head.residual + s.channel;
    for (int j = lane & 3; j < a.taps * a.actions; j += 4) ptx::prefetch(weights + j * l.channels);
    for (int j = lane & 3; j < a.actions; j += 4) ptx::prefetch(others + j * l.channels);
  }

  // Keeps the first convolution's weights of the block's channels.
  __device__ __forceinline__ void keep_first_conv() const {
    const ClusterLayer& l = layers[0];
    const int many = a.layout.head_channels, rows = a.taps * a.actions;
    if (many == 0) return;
    const int channel = ThreadShare(l, ClusterTile(l, cluster, rank), 0).channel;
    float* to = reinterpret_cast<float*>(shared + a.layout.head);
    for (int i = thread; i < (rows + a.actions) * many; i += kGroupThreads) {
      const int j = i / many, of_weights = j < rows;
      const float* from = a.floats + (of_weights ? a.head.weights : a.head.residual) + channel;
      to[i] = from[(of_weights ? j : j - rows) * l.channels + i % many];
    }
    sync();
  }
};

}  // namespace dpa::kernels::unet1d
