// Nothing is packed on the CPU.
#include <torch/library.h>

#include "ops/pack_ahead/pack_ahead.h"

TORCH_LIBRARY_IMPL(dpa, CPU, m) { m.impl("pack_ahead", &dpa::check_pack_ahead); }
