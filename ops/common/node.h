// What every autograd kernel of the library shares.
//
// Autograd is a torch::autograd::Node subclass on the Autograd key, as in ATen's generated code: the one way that works
// in eager mode, under torch.compile, compiled autograd, functorch and TorchScript alike. A node's backward calls a
// registered op through the dispatcher, never a kernel.
//
// Forward-mode AD and second derivatives go through the op's formula in ATen ops (ops/<op>/formula.cpp), which autograd
// already knows how to differentiate.
#pragma once
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <limits>
#include <memory>
#include <mutex>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/common/check.h"
#include "ops/common/op.h"

namespace dpa {

using torch::autograd::variable_list;
/// Which of a node's gradients are wanted, one for each edge.
using Wanted = c10::SmallVector<bool, 16>;

/// A node that saves `N` tensors, or any number where N is 0, some of which may be undefined, and the constants of the
/// call. A subclass, `Self`, has a name and
///
///   static variable_list backward(const variable_list& gradients, const Saved& saved, const Wanted& wanted,
///                                 Constants... constants);
///
/// which returns one gradient for each edge, undefined where none is wanted. It is a function of its arguments alone,
/// for compiled autograd calls it when the node is long gone. One saved tensor it may lend (ops/common/last_use.h),
/// taking `Saved&`: `kLent` says which, and in the last backward the node does not hold that one any more.
template <class Self, size_t N, class... Constants>
class SavingNode : public torch::autograd::Node {
 public:
  template <class T>
  using Several = std::conditional_t<N == 0, std::vector<T>, std::array<T, N>>;
  using Saved = Several<Tensor>;

  std::tuple<Constants...> constants;
  static constexpr size_t kLent = std::numeric_limits<size_t>::max();  // none

  template <class... Tensors>
  void save(const Tensors&... tensors) {
    static_assert(sizeof...(tensors) == N, "a node saves exactly N tensors");
    size_t i = 0;
    ((saved_[i++] = torch::autograd::SavedVariable(tensors, /*is_output=*/false)), ...);
  }
  void save_all(const std::vector<Tensor>& tensors) {
    for (const auto& tensor : tensors) saved_.emplace_back(tensor, /*is_output=*/false);
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved_) variable.reset_data();
  }

  /// The engine calls this before a call of `apply` after which it calls `release_variables`.
  void will_release_variables() override { last_ = true; }

  variable_list apply(variable_list&& gradients) override {
    const bool last = std::exchange(last_, false);
    auto saved = unpacked();
    if constexpr (Self::kLent < N) {
      if (last) return call_lending(gradients, saved);
    }
    return call(gradients, saved, wanted(), constants);
  }

  // Compiled autograd reuses a graph that it has compiled for the same constants, and otherwise records a call of
  // the backward. Tensors and gradients are placeholders then, with sizes of no meaning, so that the backward must not
  // run.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const auto& variable : saved_) args.collect(variable, /*is_output=*/false);
    std::apply([&](const auto&... constant) { (args.collect(constant), ...); }, constants);
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 torch::dynamo::autograd::SwapSavedVariables& swapped) override {
    namespace compiled = torch::dynamo::autograd;
    for (auto& variable : saved_) swapped.before(variable);
    compiled::PackedArgs arguments;
    std::vector<at::TypePtr> types;
    for (const auto& tensor : unpacked()) {
      arguments.pack(tensor);
      types.push_back(at::TensorType::get());
    }
    const auto recorded = [wanted = wanted(), constants = constants](const variable_list& to,
                                                                     const std::vector<c10::IValue>& tensors) {
      Saved saved;
      if constexpr (N == 0) saved.resize(tensors.size());
      for (size_t i = 0; i < saved.size(); ++i) saved[i] = tensors[i].toTensor();
      return call(to, saved, wanted, constants);
    };
    const auto& compiler = compiled::getPyCompilerInterface();
    const auto function =
        compiler->bind_function(swapped.get_py_compiler(), name(), recorded, types, /*is_custom_function=*/true);
    const auto outputs = compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        compiled::get_input_metadata(next_edges()));
    auto result = compiler->call_function(swapped.get_py_compiler(), "apply_functional", function, gradients,
                                          arguments.vec(), outputs);
    for (auto& variable : saved_) swapped.after(variable);
    return result;
  }

 private:
  static variable_list call(const variable_list& gradients, Saved& saved, const Wanted& wanted,
                            const std::tuple<Constants...>& constants) {
    return std::apply([&](const auto&... constant) { return Self::backward(gradients, saved, wanted, constant...); },
                      constants);
  }
  /// A call that throws before the lent tensor is taken can be repeated.
  variable_list call_lending(const variable_list& gradients, Saved& saved) {
    hold(Self::kLent, {});
    try {
      return call(gradients, saved, wanted(), constants);
    } catch (...) {
      hold(Self::kLent, torch::autograd::SavedVariable(saved[Self::kLent], /*is_output=*/false));
      throw;
    }
  }
  void hold(size_t i, torch::autograd::SavedVariable&& variable) {
    std::lock_guard<std::mutex> lock(mutex_);
    saved_[i] = std::move(variable);
  }
  Saved unpacked() {
    std::lock_guard<std::mutex> lock(mutex_);
    Saved tensors;
    if constexpr (N == 0) tensors.resize(saved_.size());
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i] = saved_[i].unpack();
    return tensors;
  }
  Wanted wanted() const {
    Wanted each;
    for (size_t i = 0; i < num_outputs(); ++i) each.push_back(task_should_compute_output(i));
    return each;
  }

  Several<torch::autograd::SavedVariable> saved_;
  bool last_ = false;
};

/// What owns a node: a std::shared_ptr or, in newer versions of torch, a c10::intrusive_ptr.
template <class NodeType>
using NodePtr = std::conditional_t<
    std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>,
    std::shared_ptr<NodeType>, c10::intrusive_ptr<NodeType>>;

/// A node whose edges lead to `inputs`, in their order.
template <class NodeType, class... Tensors>
NodePtr<NodeType> make_node(const Tensors&... inputs) {
  NodePtr<NodeType> node;
  if constexpr (std::is_same_v<NodePtr<NodeType>, std::shared_ptr<NodeType>>) {
    // Found by its argument, for an intrusive node needs no deleter and torch then has none.
    node.reset(new NodeType(), [](auto* dead) { deleteNode(dead); });
  } else {
    node = c10::make_intrusive<NodeType>();
  }
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

/// The same, or none where no gradient of them is wanted.
template <class NodeType, class... Tensors>
NodePtr<NodeType> node_if_wanted(const Tensors&... inputs) {
  return torch::autograd::compute_requires_grad(inputs...) ? make_node<NodeType>(inputs...) : NodePtr<NodeType>();
}

/// The output, with the node, if there is one, as its history.
template <class NodePointer>
Tensor with_history(Tensor out, const NodePointer& node) {
  if (node) torch::autograd::set_history(out, node);
  return out;
}

/// The gradients as a node returns them.
template <class... Tensors>
variable_list as_list(std::tuple<Tensors...>&& gradients) {
  return std::apply([](auto&... tensors) { return variable_list{std::move(tensors)...}; }, gradients);
}

/// The mask of a backward op: one for each of the first saved tensors, which are the tensors of the edges.
template <class Mask, class Saved>
Mask mask_of(const Saved& saved, const Wanted& wanted) {
  Mask mask;
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = saved[i].defined() && wanted[i];
  return mask;
}

// What follows takes all arguments of an op: tensors, optional ones and lists of them; everything else has no
// derivative.
template <class T>
inline constexpr bool is_tensors =
    std::is_same_v<T, Tensor> || std::is_same_v<T, OptionalTensor> || std::is_same_v<T, at::TensorList>;

/// Whether any of the arguments carries a forward-mode tangent.
template <class... Args>
bool any_tangent(const Args&... args) {
  const auto has = [](const auto& arg) {
    if constexpr (std::is_same_v<std::decay_t<decltype(arg)>, at::TensorList>)
      return torch::autograd::isFwGradDefinedTensorList(arg);
    else if constexpr (is_tensors<std::decay_t<decltype(arg)>>)
      return torch::autograd::isFwGradDefined(arg);
    else
      return false;
  };
  return (has(args) || ...);
}

/// Whether a gradient of any of the arguments is wanted.
template <class... Args>
bool any_gradient(const Args&... args) {
  const auto wanted = [](const auto& arg) {
    if constexpr (is_tensors<std::decay_t<decltype(arg)>>)
      return torch::autograd::compute_requires_grad(arg);
    else
      return false;
  };
  return (wanted(args) || ...);
}

/// The Autograd kernel of an op that needs no node, such as a backward: where a derivative is wanted it is
/// `Formula`, ATen ops with derivatives of their own, and else the op.
template <class Op, auto Formula>
struct FormulaAutograd;

template <OpName Name, class R, class... Args, auto Formula>
struct FormulaAutograd<const Op<Name, R(Args...)>, Formula> {
  static R call(Args... args) {
    if (any_gradient(args...) || any_tangent(args...)) return Formula(args...);
    return below_autograd(Op<Name, R(Args...)>(), args...);
  }
};
template <const auto& op, auto Formula>
inline constexpr auto formula_autograd = &FormulaAutograd<std::remove_reference_t<decltype(op)>, Formula>::call;

}  // namespace dpa
