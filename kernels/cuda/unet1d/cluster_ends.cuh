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

  // Some of the parts of an element of the network's last output, that others have handed over.
  struct TailParts {
    static constexpr int kMost = 16;
    const uint8_t* from;
    int64_t apart;
    int count;
    uint32_t word[kMost];
    __device__ __forceinline__ void request() {
#pragma unroll
      for (int g = 0; g < kMost; g++) word[g] = g < count ? ptx::load_message_word(from + g * apart) : 0;
    }
    // Adds them up when they are there.
    __device__ __forceinline__ void add_to(float& output) {
      for (;;) {
        bool missing = false;
#pragma unroll
        for (int g = 0; g < kMost; g++) missing |= word[g] == kUnwritten;
        if (!missing) break;
        request();
      }
#pragma unroll
      for (int g = 0; g < kMost; g++) output += __uint_as_float(word[g]);
    }
  };

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
    if (step == 0) {
      for (int i = thread; i < count; i += kGroupThreads) x[i] = with_condition(a, a.initial[first + i], first + i);
      return;
    }
    const int parts = layers[0].channels / 16;
    int next = thread, next_part = 0;
    auto request = [&](TailParts& p) {
      p.from = messages_of(step - 1) + tail_word(s.sample, next_part, next), p.apart = count * 4;
      p.count = next < count ? min(TailParts::kMost, parts - next_part) : 0;
      p.request();
      if ((next_part += TailParts::kMost) >= parts) next_part = 0, next += kGroupThreads;
    };
    int i = thread, part = 0;
    float output = 0.0f, noise = 0.0f, given = 0.0f;
    bool inpainted = false;
    auto add = [&](TailParts& p) {
      if (i >= count) return;
      if (part == 0) {  // what there is to load comes before what there is to wait for
        output = a.floats[a.tail.bias + i % a.actions];
        noise = a.noise ? a.noise[static_cast<int64_t>(step - 1) * a.batch * count + first + i] : 0.0f;
        inpainted = a.condition_mask && a.condition_mask[first + i];
        given = inpainted ? a.condition_data[first + i] : 0.0f;
      }
      p.add_to(output);
      if ((part += TailParts::kMost) < parts) return;
      part = 0;
      if (a.table) {
        const float moved = rule.step(output, x[i], noise);
        x[i] = output = inpainted ? given : moved;
      }
      if (step == a.steps && s.channel == 0) a.output[first + i] = output;
      i += kGroupThreads;
    };
    // While some are added up the next are on their way.
    TailParts even, odd;
    request(even);
#pragma unroll 1
    while (i < count) {
      request(odd);
      add(even);
      request(even);
      add(odd);
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
