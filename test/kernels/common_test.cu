// The helpers that kernels share, each in a kernel of its own, against the host's arithmetic.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/cuda/common/dtype.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/reduce.cuh"

namespace dpa::kernels {
namespace {

class Device : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device here";
  }
};

/// Memory that host and device see.
template <class T>
class Shared {
 public:
  explicit Shared(size_t size) : size_(size) { EXPECT_EQ(cudaMallocManaged(&data_, size * sizeof(T)), cudaSuccess); }
  ~Shared() { cudaFree(data_); }
  Shared(const Shared&) = delete;
  T* data() { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t size_;
};

void wait() { ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess); }

template <class A>
__global__ void warp_sums(const A* in, A* out, int width) {
  out[threadIdx.x] = warp_sum(in[threadIdx.x], width);
}

TEST_F(Device, WarpSumGivesEveryLaneTheSumOfItsSet) {
  Shared<double> in(64), out(64);
  for (int i = 0; i < 64; ++i) in[i] = i * i + 1;
  for (int width = 1; width <= kWarpSize; width *= 2) {
    ASSERT_EQ(launch(warp_sums<double>, 1, 64, nullptr, in.data(), out.data(), width), cudaSuccess);
    wait();
    for (int i = 0; i < 64; ++i) {
      const double* first = in.data() + i / width * width;
      EXPECT_EQ(out[i], std::accumulate(first, first + width, 0.0)) << width << " " << i;
    }
  }
}

/// Two sums in a row through the same scratch, as its promise allows.
__global__ void block_sums(const double* in, double* out) {
  __shared__ double scratch[kWarpSize];
  const double first = block_sum(in[threadIdx.x], scratch), second = block_sum(-2 * in[threadIdx.x], scratch);
  out[threadIdx.x] = first;
  out[blockDim.x + threadIdx.x] = second;
}

TEST_F(Device, BlockSumGivesEveryThreadTheSum) {
  for (int threads = kWarpSize; threads <= 1024; threads += kWarpSize) {
    Shared<double> in(threads), out(2 * threads);
    for (int i = 0; i < threads; ++i) in[i] = 3 * i - 7;
    ASSERT_EQ(launch(block_sums, 1, threads, nullptr, in.data(), out.data()), cudaSuccess);
    wait();
    const double sum = std::accumulate(in.data(), in.data() + threads, 0.0);
    for (int i = 0; i < threads; ++i) {
      ASSERT_EQ(out[i], sum) << threads << " " << i;
      ASSERT_EQ(out[threads + i], -2 * sum) << threads << " " << i;
    }
  }
}

template <class T>
__global__ void round_trip(const T* in, T* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = narrow<T>(widen(in[i]));
}

template <class T>
void every_16_bit_value_survives() {
  Shared<T> in(65536), out(65536);
  for (unsigned i = 0; i < 65536; ++i) {
    const auto bits = static_cast<unsigned short>(i);
    std::memcpy(&in[i], &bits, sizeof bits);
  }
  ASSERT_EQ(launch(round_trip<T>, 256, 256, nullptr, in.data(), out.data()), cudaSuccess);
  wait();
  for (unsigned i = 0; i < 65536; ++i) {
    const float before = static_cast<float>(in[i]), after = static_cast<float>(out[i]);
    ASSERT_TRUE(std::isnan(before) ? std::isnan(after) : std::memcmp(&in[i], &out[i], sizeof(T)) == 0) << i;
  }
}

TEST_F(Device, WideningLosesNothing) {
  every_16_bit_value_survives<__half>();
  every_16_bit_value_survives<__nv_bfloat16>();
}

template <class T>
__global__ void round(const float* in, float* out) {
  out[threadIdx.x] = widen(narrow<T>(in[threadIdx.x]));
}

/// Halfway between two neighbours of 1 lies an even one on either side; just beyond it the farther one is nearer.
template <class T>
void rounds_to_nearest_even(int fraction_bits) {
  const float unit = std::ldexp(1.0f, -fraction_bits);
  const float given[] = {1 + unit / 2, 1 + 3 * unit / 2, 1 + unit * 0.51f, 1 + unit * 0.49f, -1 - unit / 2};
  const float expected[] = {1, 1 + 2 * unit, 1 + unit, 1, -1};
  Shared<float> in(5), out(5);
  std::copy(given, given + 5, in.data());
  ASSERT_EQ(launch(round<T>, 1, 5, nullptr, in.data(), out.data()), cudaSuccess);
  wait();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(out[i], expected[i]) << fraction_bits << " " << i;
}

TEST_F(Device, NarrowingRoundsToNearestEven) {
  rounds_to_nearest_even<__half>(10);
  rounds_to_nearest_even<__nv_bfloat16>(7);
}

__global__ void mark(int* out) { out[blockIdx.x] = 1; }

TEST_F(Device, LaunchOfNoBlocksIsNothing) {
  Shared<int> out(1);
  out[0] = 0;
  EXPECT_EQ(launch(mark, 0, 32, nullptr, out.data()), cudaSuccess);
  wait();
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(launch(mark, 1, 32, nullptr, out.data()), cudaSuccess);
  wait();
  EXPECT_EQ(out[0], 1);
}

TEST_F(Device, LaunchReportsItsOwnError) {
  Shared<int> out(1);
  EXPECT_NE(launch(mark, 1, 4096, nullptr, out.data()), cudaSuccess);
  EXPECT_NE(launch_dependent(mark, 1, 4096, nullptr, out.data()), cudaSuccess);
  cudaGetLastError();
  EXPECT_EQ(launch(mark, 1, 32, nullptr, out.data()), cudaSuccess);
  wait();
}

/// Triggers the dependent launch, sleeps, then reads `seen` and writes `data`: what the dependent kernel must not do
/// first.
__global__ void slow_producer(const int* seen, int* data, int* saw, int value) {
  trigger_dependent_launch();
  for (int i = 0; i < 200; ++i) __nanosleep(1'000'000 / 200);
  saw[blockIdx.x] = seen[blockIdx.x];
  data[blockIdx.x] = value;
}

/// Reads `data`, and writes over `seen`.
__global__ void consumer(const int* data, int* seen, int* got) {
  grid_dependency_sync();
  got[blockIdx.x] = data[blockIdx.x];
  seen[blockIdx.x] = -1;
}

class DependentLaunch : public Device {
 protected:
  static constexpr unsigned kBlocks = 8;
  cudaStream_t stream = nullptr, other = nullptr;

  void SetUp() override {
    Device::SetUp();
    if (IsSkipped()) return;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream) cudaStreamDestroy(stream);
    if (other) cudaStreamDestroy(other);
  }

  /// Runs `work`, queued on `stream` or captured into a graph and replayed.
  template <class F>
  void run(bool captured, const F& work) {
    if (!captured) {
      work();
    } else {
      cudaGraph_t graph;
      cudaGraphExec_t executable;
      ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
      work();
      ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
      ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      cudaGraphExecDestroy(executable);
      cudaGraphDestroy(graph);
    }
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
};

TEST_F(DependentLaunch, WaitsForWhatThePredecessorReadsAndWrites) {
  for (bool captured : {false, true}) {
    Shared<int> data(kBlocks), seen(kBlocks), saw(kBlocks), got(kBlocks);
    for (int round = 1; round <= 3; ++round) {
      for (unsigned i = 0; i < kBlocks; ++i) data[i] = 0, seen[i] = round;
      run(captured, [&] {
        ASSERT_EQ(launch(slow_producer, kBlocks, 1, stream, seen.data(), data.data(), saw.data(), 10 * round),
                  cudaSuccess);
        ASSERT_EQ(launch_dependent(consumer, kBlocks, 1, stream, data.data(), seen.data(), got.data()), cudaSuccess);
      });
      for (unsigned i = 0; i < kBlocks; ++i) {
        EXPECT_EQ(got[i], 10 * round) << captured;
        EXPECT_EQ(saw[i], round) << captured;
      }
    }
  }
}

TEST_F(DependentLaunch, WaitsForPredecessorsOfPredecessors) {
  for (bool captured : {false, true}) {
    Shared<int> data(kBlocks), seen(kBlocks), saw(kBlocks), got(kBlocks), again(kBlocks);
    for (unsigned i = 0; i < kBlocks; ++i) data[i] = 0, seen[i] = 1;
    run(captured, [&] {
      ASSERT_EQ(launch(slow_producer, kBlocks, 1, stream, seen.data(), data.data(), saw.data(), 5), cudaSuccess);
      ASSERT_EQ(launch_dependent(consumer, kBlocks, 1, stream, data.data(), seen.data(), got.data()), cudaSuccess);
      ASSERT_EQ(launch_dependent(consumer, kBlocks, 1, stream, data.data(), seen.data(), again.data()), cudaSuccess);
    });
    for (unsigned i = 0; i < kBlocks; ++i) EXPECT_EQ(again[i], 5) << captured;
  }
}

TEST_F(DependentLaunch, FollowsCopiesFillsAndOtherStreams) {
  for (bool captured : {false, true}) {
    Shared<int> from(kBlocks), data(kBlocks), seen(kBlocks), saw(kBlocks), got(kBlocks);
    cudaEvent_t fork, join;
    ASSERT_EQ(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&join, cudaEventDisableTiming), cudaSuccess);
    for (unsigned i = 0; i < kBlocks; ++i) from[i] = 7, data[i] = 0, seen[i] = 1;
    const size_t bytes = kBlocks * sizeof(int);
    run(captured, [&] {
      ASSERT_EQ(cudaMemcpyAsync(data.data(), from.data(), bytes, cudaMemcpyDefault, stream), cudaSuccess);
      ASSERT_EQ(launch_dependent(consumer, kBlocks, 1, stream, data.data(), seen.data(), got.data()), cudaSuccess);
      ASSERT_EQ(cudaMemsetAsync(seen.data(), 0, bytes, stream), cudaSuccess);
      ASSERT_EQ(cudaEventRecord(fork, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamWaitEvent(other, fork), cudaSuccess);
      ASSERT_EQ(launch(slow_producer, kBlocks, 1, other, seen.data(), data.data(), saw.data(), 9), cudaSuccess);
      ASSERT_EQ(cudaEventRecord(join, other), cudaSuccess);
      ASSERT_EQ(launch(mark, 1, 1, stream, from.data()), cudaSuccess);
      ASSERT_EQ(cudaStreamWaitEvent(stream, join), cudaSuccess);
      ASSERT_EQ(launch_dependent(consumer, kBlocks, 1, stream, data.data(), seen.data(), got.data()), cudaSuccess);
    });
    for (unsigned i = 0; i < kBlocks; ++i) {
      EXPECT_EQ(got[i], 9) << captured;
      EXPECT_EQ(saw[i], 0) << captured;
    }
    cudaEventDestroy(fork);
    cudaEventDestroy(join);
  }
}

TEST(Dispatch, CallsForTheTypesOfArithmeticAlone) {
  size_t size = 0;
  const auto note = [&](auto tag) {
    size = sizeof(typename decltype(tag)::type);
    return cudaSuccess;
  };
  for (auto [dtype, bytes] :
       {std::pair{DType::kFloat64, 8}, {DType::kFloat32, 4}, {DType::kFloat16, 2}, {DType::kBFloat16, 2}}) {
    EXPECT_EQ(dispatch(dtype, note), cudaSuccess);
    EXPECT_EQ(size, static_cast<size_t>(bytes));
  }
  size = 0;
  EXPECT_EQ(dispatch(DType::kFloat8E4M3, note), cudaErrorInvalidValue);
  EXPECT_EQ(size, 0u);
}

}  // namespace
}  // namespace dpa::kernels
