// One element of an LLTM cell, as a function of scalars: its state from its three gates, and the derivatives.
#pragma once
#include "kernels/math/host_device.h"
#include "kernels/math/hyperbolic.h"

namespace dpa::math {

/// cell' = cell + elu(candidate) * sigmoid(input gate);  h' = tanh(cell') * sigmoid(output gate)
template <class A>
struct LltmCell {
  A input_gate, output_gate, candidate, slope;  // activated; `slope` is the derivative of elu
  A cell, squashed;                             // cell' and its tanh

  DPA_HOST_DEVICE LltmCell(A input, A output, A raw_candidate, A old_cell) {
    input_gate = sigmoid(input);
    output_gate = sigmoid(output);
    const bool linear = raw_candidate > A(0);
    const A bent = linear ? A(0) : raw_candidate;
    candidate = linear ? raw_candidate : exponential_minus_1(bent);
    slope = linear ? A(1) : exponential(bent);
    cell = old_cell + candidate * input_gate;
    squashed = hyperbolic_tangent(cell);
  }
  DPA_HOST_DEVICE A h() const { return squashed * output_gate; }

  struct Gradient {
    A input, output, candidate, old_cell;
  };
  DPA_HOST_DEVICE Gradient gradient(A grad_h, A grad_cell) const {
    const A to_cell = grad_cell + grad_h * output_gate * (A(1) - squashed * squashed);
    return {to_cell * candidate * input_gate * (A(1) - input_gate),
            grad_h * squashed * output_gate * (A(1) - output_gate), to_cell * input_gate * slope, to_cell};
  }
};

}  // namespace dpa::math
