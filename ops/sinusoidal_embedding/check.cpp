#include "ops/sinusoidal_embedding/sinusoidal_embedding.h"

namespace dpa {

void check_sinusoidal_embedding(const Tensor& timesteps, const c10::SymInt& dim, const OptionalDtype& dtype) {
  constexpr const char* op = "sinusoidal_embedding";
  DPA_CHECK(timesteps.defined(), op, "timesteps must be a tensor", "None");
  const auto type = timesteps.scalar_type();
  DPA_CHECK(at::isFloatingType(type) || at::isIntegralType(type, /*includeBool=*/false), op,
            "timesteps must be integers or floating numbers", type);
  DPA_CHECK(dim >= 4 && dim % 2 == 0, op, "dim must be even and at least 4", dim);
  DPA_CHECK(!dtype || at::isFloatingType(*dtype), op, "dtype must be a floating type", *dtype);
}

}  // namespace dpa
