// Whether launches may have clusters of blocks. Host code.
#pragma once

namespace dpa::kernels {

/// Whether the code that runs on the current device is Hopper's or later: that of an older architecture runs on a newer
/// device too, but knows no clusters.
bool has_clusters();

}  // namespace dpa::kernels
