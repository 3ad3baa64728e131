// Which elements of a weight (d0, d1, taps) change detection compares: all of a small one; of a larger one an element
// of each row and column, and kSpread that are spread over all of it.
#pragma once
#include <cstdint>

#include "kernels/math/host_device.h"

namespace dpa::kernels::conv1d {

struct ComparedElements {
  static constexpr int kMost = 8192, kSpread = 256;

  int64_t d0, d1;
  int taps;

  DPA_HOST_DEVICE int64_t all() const { return d0 * d1 * taps; }
  DPA_HOST_DEVICE int64_t longer() const { return d0 > d1 ? d0 : d1; }
  DPA_HOST_DEVICE int count() const {
    const int64_t wanted = all() <= kMost ? all() : longer() + kSpread;
    return static_cast<int>(wanted < kMost ? wanted : kMost);
  }
  /// The place of element `n` of `count()`.
  DPA_HOST_DEVICE int64_t place(int n) const {
    if (all() <= kMost) return n;
    const int diagonal = count() - kSpread;
    if (n < diagonal) {  // of more rows or columns than kMost, some that are evenly apart
      const int64_t i = n * longer() / diagonal;
      return ((i % d0) * d1 + i % d1) * taps + taps / 2;
    }
    // Multiples of the golden ratio, of which only what is behind the point counts, lie evenly in every part of [0, 1).
    const uint64_t part = (static_cast<uint64_t>(n - diagonal) + 1) * 0x9E3779B97F4A7C15u;
    return static_cast<int64_t>((part >> 32) * static_cast<uint64_t>(all()) >> 32);
  }
};

}  // namespace dpa::kernels::conv1d
