// Which instruction set the CPU kernels use: the best that this machine has, or a lower one that DPA_CPU_LEVEL names.
#pragma once
#include <string>

#if defined(__x86_64__) && defined(__GNUC__)
#define DPA_X86
#endif

namespace dpa::kernels::cpu {

enum class Level { kPortable, kAvx2, kAvx512, kAvx512Bf16 };
constexpr int kLevels = 4;

/// Its name, as DPA_CPU_LEVEL spells it: portable, avx2, avx512, avx512_bf16.
const char* level_name(Level level);

/// Whether this machine, and this build, has it.
bool level_supported(Level level);

/// The level of the environment variable, which is read at every call; without one, the best. Where the variable names
/// no level, or one that is not here, `error` says so.
Level choose_level(std::string& error);

}  // namespace dpa::kernels::cpu
