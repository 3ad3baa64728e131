// How a saved tensor's memory serves the rest of the backward that reads it.
#pragma once
#include <utility>

#include "ops/common/check.h"

namespace dpa {

/// An op's kernel gets its tensors from a caller that holds them until it returns. A node that holds one for the last
/// time lends its own reference for the length of a call; the kernel that takes it decides when the tensor is freed.
/// Where a transform or a trace is between them, or another reference exists, the tensor lives as long as without this.
class LastUse {
 public:
  explicit LastUse(Tensor& tensor) : before_(std::exchange(lent_, &tensor)) {}
  ~LastUse() { lent_ = before_; }
  LastUse(const LastUse&) = delete;
  LastUse& operator=(const LastUse&) = delete;

  /// The tensor: with the lent reference if it is the lent one, else with one more.
  static Tensor take(const Tensor& tensor) {
    return lent_ != nullptr && lent_->is_same(tensor) ? std::move(*lent_) : tensor;
  }

 private:
  Tensor* before_;
  static inline thread_local Tensor* lent_ = nullptr;
};

}  // namespace dpa
