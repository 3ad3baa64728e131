// Hopper's instructions of conv2d/device.cuh on the host, beside phases_emulator.h. A bulk copy happens when its barrier is
// waited for, not before; each warp of a warpgroup multiplies its own rows.
#pragma once
#include <map>
#include <type_traits>
#include <utility>

#include "test/kernels/phases_emulator.h"

namespace dpa::kernels::conv2d::device {
using namespace unet1d::device;

struct BulkBarrier {
  int count = 0, phase = 0, arrived = 0;
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
  if (barrier % 8) std::printf("a barrier at a multiple of 8\n"), std::abort();
  bulk_barriers[{block(), barrier}] = {count};
}
DPA_DEVICE void barrier_init_fence() {}
DPA_DEVICE void fence_async() {}
DPA_DEVICE void barrier_arrive(uint32_t barrier) {
  BulkBarrier& b = bulk_barrier(barrier);
  if (b.arrived++ == b.count) std::printf("a stage is used again before it was waited for\n"), std::abort();
}
DPA_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  barrier_arrive(barrier), bulk_barrier(barrier).bytes += bytes;
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
    if (b.arrived == b.count && b.issued == b.bytes) {
      for (const Copy& c : b.copies)
        if (c.from)
          std::memcpy(shared() + c.to, c.from, c.bytes);
        else
          std::memset(shared() + c.to, 0, c.bytes);
      b = {b.count, b.phase + 1};
    } else {
      yield();
    }
  }
}

DPA_DEVICE void wgmma_fence() {}
DPA_DEVICE void wgmma_commit() {}
template <int kPending>
DPA_DEVICE void wgmma_wait() {
  sync_warp();
}
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

// An input of a convolution, of which a box has the pixels under a tap for so many outputs.
struct InputMap {
  const uint8_t* x;
  int images, height, width, pieces, stride, pad_top, pad_left, out_height, out_width, outputs, element;
};
DPA_DEVICE void load_box(uint32_t to, const InputMap* map, int channel, int x, int y, int n, int kw, int kh,
                         uint32_t barrier) {
  if (to % 1024) std::printf("a box at a multiple of 1024\n"), std::abort();
  const InputMap& m = *map;
  BulkBarrier& b = bulk_barrier(barrier);
  for (int i = 0; i < m.outputs; i++) {
    const int at_y = y + kh, at_x = x + kw;
    const bool inside = n < m.images && at_y >= 0 && at_y < m.height && at_x >= 0 && at_x < m.width;
    const int64_t pixel = (int64_t{n} * m.height + at_y) * m.width + at_x;
    for (int k = 0; k < 8; k++)
      b.copies.push_back({to + i * 128 + ((k ^ (i & 7)) << 4),
                          inside ? m.x + (pixel * m.pieces + k) * 16 + channel * m.element : nullptr, 16});
    if ((x += m.stride) == m.out_width * m.stride - m.pad_left) {
      x = -m.pad_left;
      if ((y += m.stride) == m.out_height * m.stride - m.pad_top) y = -m.pad_top, n++;
    }
  }
  b.issued += m.outputs * 128;
}
template <int>
DPA_DEVICE void registers_decrease() {}
template <int>
DPA_DEVICE void registers_increase() {}
DPA_DEVICE void prefetch_map(const InputMap*) {}
DPA_DEVICE uint64_t wgmma_box(uint32_t address) { return address; }
template <int kColumns, class Type>
DPA_DEVICE void wgmma_boxes(Type type, float (&d)[kColumns / 2], uint64_t a, uint64_t b) {
  const int lane = thread() & 31, warp = thread() >> 5 & 3;
  // As mma.sync takes it: four lanes have a row's words.
  const auto word = [&](int row, int k) {
    const uint32_t at = static_cast<uint32_t>(a) + (warp * 16 + row) * 128 + k * 4;
    uint32_t found;
    std::memcpy(&found, shared() + (at ^ (at >> 7 & 7) << 4), 4);
    return found;
  };
  const int row = lane / 4, k = lane % 4;
  wgmma<kColumns>(type, d, make_uint4(word(row, k), word(row + 8, k), word(row, k + 4), word(row + 8, k + 4)), b);
}

}  // namespace dpa::kernels::conv2d::device
