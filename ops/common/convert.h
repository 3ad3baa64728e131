// 16-bit numbers to float and back, many at a time: in vectors, which element by element they would not be.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace dpa {

void widen(const c10::BFloat16* from, float* to, int64_t count);
void widen(const c10::Half* from, float* to, int64_t count);
/// To the nearest, ties to even.
void narrow(const float* from, c10::BFloat16* to, int64_t count);
void narrow(const float* from, c10::Half* to, int64_t count);

}  // namespace dpa
