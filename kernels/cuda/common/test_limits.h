// For tests, a GPU as small as others are; set before a process makes its first plan. Host code.
#pragma once
#include <algorithm>
#include <cstdlib>

namespace dpa::kernels {

/// What the current device has, or as much as the environment says that a smaller one has.
inline int limited(int value, const char* name) {
  const char* limit = std::getenv(name);
  return limit ? std::max(1, std::min(value, std::atoi(limit))) : value;
}
inline int limited_multiprocessors(int value) { return limited(value, "DPA_TEST_MULTIPROCESSORS"); }
/// Shared memory of a block.
inline int limited_shared_bytes(int value) { return limited(value, "DPA_TEST_SHARED_BYTES"); }

}  // namespace dpa::kernels
