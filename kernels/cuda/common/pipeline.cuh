// A circular buffer of pipeline stages in shared memory, filled by a producer and read by consumer warps. Each stage
// has a full barrier, on which the bytes that were issued for it arrive, and an empty barrier, at which the consumers
// arrive.
#pragma once
#include <cstdint>

#include "kernels/math/host_device.h"

namespace dpa::kernels {

/// Where a producer or a consumer is in the buffer: the stage, and the phase (parity) of the barrier that it waits for
/// next. Consumers start at {0, 0}. A producer starts there too and waits for the opposite phase of the empty barrier,
/// which a fresh barrier counts as over.
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  DPA_HOST_DEVICE void advance(int stages) {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  // By n stages, which may be more than there are.
  DPA_HOST_DEVICE void advance_by(int n, int stages) {
    stage += n;
    while (stage >= stages) stage -= stages, phase ^= 1;
  }
};

}  // namespace dpa::kernels
