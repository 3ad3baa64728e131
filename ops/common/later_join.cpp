#include "ops/common/later_join.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <typeinfo>
#include <unordered_map>
#include <utility>

namespace dpa {
namespace {

namespace autograd = torch::autograd;
using autograd::Node;

thread_local const Tensor* lent = nullptr;

bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() ||
         !node.post_hooks().empty() || node.tensor_post_acc_grad_hooks() != nullptr;
}
/// A function in Python may read any gradient, as FSDP2's do. Its class is torch's, in a library that this one
/// does not link.
bool is_python(const Node& node) { return std::strstr(typeid(node).name(), "PyNode") != nullptr; }

/// The graph of a pass.
struct BackwardPass {
  int task = -1;
  bool plain = true;                          // without hooks and Python: nobody reads a parameter's `grad` meanwhile
  std::unordered_map<const Node*, int> uses;  // edges to each node

  void add(Node& node) {
    plain = plain && !has_hooks(node) && !is_python(node);
    for (const auto& edge : node.next_edges()) ++uses[edge.function.get()];
  }
  /// Of the pass under way, `node` being the present one. Its root is in no list, unless it is the present node.
  static const BackwardPass& current(Node& node) {
    static thread_local BackwardPass pass;
    const int task = autograd::get_current_graph_task_id();
    if (pass.task == task) return pass;
    pass = {};
    pass.task = task;
    const auto& nodes = *autograd::get_current_graph_task_nodes_in_graph();
    for (Node* const each : nodes) pass.add(*each);
    if (nodes.count(&node) == 0) pass.add(node);
    return pass;
  }
};

/// Whether what the node gives to an edge is a parameter's only gradient, which becomes its `grad` as it is, or
/// what torch.autograd.grad returns.
bool is_kept(const autograd::Edge& edge, const BackwardPass& pass) {
  auto* const leaf = dynamic_cast<autograd::AccumulateGrad*>(edge.function.get());
  if (leaf == nullptr || pass.uses.at(leaf) != 1 || has_hooks(*leaf)) return false;
  const auto& found = *autograd::get_current_graph_task_exec_info();
  if (const auto info = found.find(leaf); info != found.end() && info->second.captures_ != nullptr)
    return !info->second.needed_;  // nobody has it before the caller
  return pass.plain && !leaf->variable.grad().defined() && leaf->variable.is_contiguous();
}

}  // namespace

LaterJoin::LaterJoin(const Tensor& grad) : before_(std::exchange(lent, &grad)) {}
LaterJoin::~LaterJoin() { lent = before_; }

bool LaterJoin::take(const Tensor& grad) {
  const auto* const mine = std::exchange(lent, nullptr);
  return mine != nullptr && mine->is_same(grad);
}

bool LaterJoin::allowed(size_t first, size_t end) {
  const auto node = autograd::get_current_node();
  if (!node || autograd::get_current_graph_task_id() == -1 || c10::GradMode::is_enabled()) return false;
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  const auto& pass = BackwardPass::current(*node);
  for (size_t i = first; i < end; ++i)
    if (node->task_should_compute_output(i) && !is_kept(node->next_edge(i), pass)) return false;
  return true;
}

}  // namespace dpa
