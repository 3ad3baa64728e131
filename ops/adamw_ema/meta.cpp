#include <torch/library.h>

#include "ops/adamw_ema/adamw_ema.h"

namespace dpa {
namespace {

void adamw_ema_meta(const AdamWEmaArguments&) {}

}  // namespace

TORCH_LIBRARY_IMPL(dpa, Meta, m) { m.impl("adamw_ema_", &adamw_ema_kernel<&adamw_ema_meta>); }

}  // namespace dpa
