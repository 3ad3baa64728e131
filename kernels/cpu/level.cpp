#include "kernels/cpu/level.h"

#include <cstdlib>

#include "kernels/cpu/kernels.h"

namespace dpa::kernels::cpu {

const char* level_name(Level level) {
  constexpr const char* kNames[kLevels] = {"portable", "avx2", "avx512", "avx512_bf16"};
  return kNames[static_cast<int>(level)];
}

bool level_supported(Level level) {
#ifdef DPA_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  switch (level) {
    case Level::kPortable: return true;
    case Level::kAvx2: return avx2;
    case Level::kAvx512: return avx512;
    case Level::kAvx512Bf16: return avx512 && __builtin_cpu_supports("avx512bf16");
  }
  return false;
#else
  return level == Level::kPortable;
#endif
}

Level choose_level(std::string& error) {
  int level = kLevels - 1;
  if (const char* wanted = std::getenv("DPA_CPU_LEVEL"); wanted && *wanted) {
    while (level >= 0 && wanted != std::string(level_name(static_cast<Level>(level)))) level--;
    if (level < 0 || !level_supported(static_cast<Level>(level))) {
      error = std::string(
                  "DPA_CPU_LEVEL must be portable, avx2, avx512 or avx512_bf16, as far as the machine has it, "
                  "got ") +
              wanted;
      return Level::kPortable;
    }
    return static_cast<Level>(level);
  }
  while (!level_supported(static_cast<Level>(level))) level--;
  return static_cast<Level>(level);
}

const Kernels& kernels_of(Level level) {
#ifdef DPA_X86
  switch (level) {
    case Level::kPortable: return portable::kKernels;
    case Level::kAvx2: return avx2::kKernels;
    case Level::kAvx512: return avx512::kKernels;
    case Level::kAvx512Bf16: return avx512_bf16::kKernels;
  }
#endif
  return portable::kKernels;
}

Tasks product_tasks(const Kernels& kernels, const Product& product, int team) {
  constexpr int kRowsOfTask = 64;  // their inputs, one block of depth, stay in the first cache
  const int rows = product.batch * product.times;
  Tasks tasks;
  tasks.panels = rows <= 4 ? kernels.max_panels : (kernels.max_panels + 1) / 2;
  while (tasks.panels > 1 && product.panels < tasks.panels * team) tasks.panels /= 2;
  tasks.rows = rows < kRowsOfTask ? rows : kRowsOfTask;
  tasks.count =
      int64_t{1} * ((product.panels + tasks.panels - 1) / tasks.panels) * ((rows + tasks.rows - 1) / tasks.rows);
  return tasks;
}

}  // namespace dpa::kernels::cpu
