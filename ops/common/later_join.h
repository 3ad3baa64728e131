// When a captured backward pass may leave gradients of parameters to a branch that it joins later.
#pragma once
#include "ops/common/check.h"

namespace dpa {

/// A kernel cannot know what becomes of its results. A node that returns them as they are lends, for the length of a
/// call, its gradient: the kernel that takes that very tensor is the node's own, with no transform around it.
class LaterJoin {
 public:
  explicit LaterJoin(const Tensor& grad);
  ~LaterJoin();
  LaterJoin(const LaterJoin&) = delete;
  LaterJoin& operator=(const LaterJoin&) = delete;

  /// Whether this is the lent one, which a kernel that it calls in turn does not get.
  static bool take(const Tensor& grad);
  /// Whether the backward pass under way reads none of the gradients that its present node gives to edges `first` up to
  /// `end`: each goes to a parameter that keeps it, or to the caller, and to nothing else. It takes time.
  static bool allowed(size_t first, size_t end);

 private:
  const Tensor* before_;
};

}  // namespace dpa
