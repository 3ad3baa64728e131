// Hopper's instructions of conv2d/device.cuh on the host, beside phases_emulator.h. A bulk copy happens when its barrier is
// waited for, not before; a warpgroup's rows of A come from registers, so that each warp multiplies for itself.
#pragma once
#include <map>
#include <type_traits>
#include <utility>

#include "test/kernels/phases_emulator.h"

namespace dpa::kernels::conv2d::device {
using namespace unet1d::device;

struct BulkBarrier {
  int phase = 0;
  bool expected = false;
  uint32_t bytes = 0, issued = 0;
  std::vector<Copy> copies;
};
// By block and address. Barriers that a launch did not initialise are an error.
inline std::map<std::pair<int, uint32_t>, BulkBarrier> bulk_barriers;
inline BulkBarrier& bulk_barrier(uint32_t at) {
  const auto found = bulk_barriers.find({block(), at});
  if (found == bulk_barriers.end()) std::printf("a barrier that is not initialised\n"), std::abort();
  return found->second;
}
DPA_DEVICE void barrier_init(uint32_t barrier, int count) {
  if (count != 1 || barrier % 8) std::printf("a barrier of one arrival at a multiple of 8\n"), std::abort();
  bulk_barriers[{block(), barrier}] = {};
}
DPA_DEVICE void barrier_init_fence() {}
DPA_DEVICE void fence_async() {}
DPA_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  BulkBarrier& b = bulk_barrier(barrier);
  if (b.expected) std::printf("a stage is loaded again before it was waited for\n"), std::abort();
  b.expected = true, b.bytes = bytes;
}
DPA_DEVICE void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) std::printf("misaligned copy\n"), std::abort();
  if (to + bytes > here().memory.size()) std::printf("a copy beyond shared memory\n"), std::abort();
  BulkBarrier& b = bulk_barrier(barrier);
  b.copies.push_back({to, static_cast<const uint8_t*>(from), static_cast<int>(bytes)}), b.issued += bytes;
}
DPA_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  BulkBarrier& b = bulk_barrier(barrier);
  while (b.phase % 2 == static_cast<int>(parity)) {
    if (b.expected && b.issued == b.bytes) {
      for (const Copy& c : b.copies) std::memcpy(shared() + c.to, c.from, c.bytes);
      const int next = b.phase + 1;
      b = {}, b.phase = next;
    } else {
      yield();
    }
  }
}

DPA_DEVICE void wgmma_fence() {}
DPA_DEVICE void wgmma_commit() {}
template <int kPending>
DPA_DEVICE void wgmma_wait() {}
DPA_DEVICE uint64_t wgmma_operand(uint32_t address, uint32_t along_k, uint32_t along_columns) {
  return uint64_t{address} | uint64_t{along_k} << 24 | uint64_t{along_columns} << 44;
}
template <int kColumns, class Type>
DPA_DEVICE void wgmma(Type, float (&d)[kColumns / 2], const uint4& a, uint64_t b) {
  const int lane = thread() & 31;
  WarpState& w = here().warps[thread() >> 5];
  uint32_t* in = w.in[lane];
  in[0] = a.x, in[1] = a.y, in[2] = a.z, in[3] = a.w;
  collective([](WarpState&) {});
  constexpr bool kFloat = std::is_same_v<Type, float>;
  const auto value = [](uint32_t word, int i) {
    if constexpr (kFloat) {
      return as_float(word);
    } else {
      const float2 v = unpack(Type{}, word);
      return i ? v.y : v.x;
    }
  };
  const uint32_t address = b & 0xffffff, along_k = b >> 24 & 0xfffff, along_columns = b >> 44;
  constexpr int per = kFloat ? 1 : 2;
  for (int i = 0; i < kColumns / 8; i++)
    for (int j = 0; j < 4; j++) {
      const int row = lane / 4 + j / 2 * 8, column = lane % 4 * 2 + j % 2;
      float sum = d[4 * i + j];
      for (int k = 0; k < 8 * per; k++) {
        const int q = k / per % 4, half = k / per / 4;
        uint32_t word;
        std::memcpy(&word, shared() + address + half * along_k + i * along_columns + column * 16 + q * 4, 4);
        sum += value(w.in[row % 8 * 4 + q][row / 8 + half * 2], k % per) * value(word, k % per);
      }
      d[4 * i + j] = sum;
    }
  collective([](WarpState&) {});
}

}  // namespace dpa::kernels::conv2d::device
