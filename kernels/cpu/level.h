// Which instruction set the CPU kernels use: the best that this machine has, or a lower one that DPA_CPU_LEVEL names.
#pragma once
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define DPA_X86
#elif defined(__aarch64__) && defined(__GNUC__) && defined(__linux__)
#define DPA_ARM
#endif

namespace dpa::kernels::cpu {

struct Kernels;

struct Level {
  const char* name;  // as DPA_CPU_LEVEL spells it
  bool supported;    // by this machine
  const Kernels* kernels;
};

/// The levels of this build, from the least to the best; the first runs on every machine.
const std::vector<Level>& levels();

/// The kernels of the level that the environment variable names, which is read at every call; without one, of the best.
/// Where it names no level, or one that is not here, `error` says so.
const Kernels& choose_kernels(std::string& error);

}  // namespace dpa::kernels::cpu
