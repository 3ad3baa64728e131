// A registered op as a C++ function object: a call goes through the dispatcher.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string>
#include <utility>

namespace dpa {

/// A string as a template argument.
template <size_t N>
struct OpName {
  char text[N];
  constexpr OpName(const char (&name)[N]) { std::copy_n(name, N, text); }
};

/// `inline constexpr Op<"stem", Tensor(const Tensor& a)> stem;` declares the op `dpa::stem`, with the signature of its
/// schema in ops/library.cpp; "stem.out" is its overload `out`, "other::stem" an op of another library.
template <OpName Name, class Signature>
struct Op;

template <OpName Name, class R, class... Args>
struct Op<Name, R(Args...)> {
  static constexpr const char* name() { return Name.text; }

  R operator()(Args... args) const {
    static const auto handle = find();  // finding takes a lock
    return handle.call(std::forward<Args>(args)...);
  }

 private:
  static auto find() {
    std::string op = name(), overload;
    if (op.find("::") == std::string::npos) op = "dpa::" + op;
    if (const auto dot = op.find('.'); dot != std::string::npos) {
      overload = op.substr(dot + 1);
      op.resize(dot);
    }
    return c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), overload.c_str()).template typed<R(Args...)>();
  }
};

/// Calls an op from its own autograd kernel: neither that kernel nor the ones of views and versions run again.
template <class Op, class... Args>
auto below_autograd(const Op& op, const Args&... args) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return op(args...);
}

}  // namespace dpa
