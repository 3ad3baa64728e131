#include "ops/scheduler_step/scheduler_step.h"

namespace dpa {

void check_scheduler_step(const Tensor& model_output, const Tensor& sample, const Tensor& table, const Tensor& index,
                          const OptionalTensor& noise, double clip) {
  check_step(kSchedulerNames, model_output, sample, table, index, noise);
  DPA_CHECK(clip >= 0, "scheduler_step", "clip must be at least 0 (infinity turns it off)", clip);
}

}  // namespace dpa
