#include "ops/common/convert.h"

#include "ops/common/vectorize.h"

namespace dpa {

DPA_VECTORIZE void widen(const c10::BFloat16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}
DPA_VECTORIZE void widen(const c10::Half* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}
DPA_VECTORIZE void narrow(const float* from, c10::BFloat16* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}
DPA_VECTORIZE void narrow(const float* from, c10::Half* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

}  // namespace dpa
