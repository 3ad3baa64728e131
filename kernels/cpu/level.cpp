#include "kernels/cpu/level.h"

#include <cstdlib>

#include "kernels/cpu/kernels.h"

#ifdef DPA_ARM
#include <sys/auxv.h>
#endif

namespace dpa::kernels::cpu {
namespace {

std::vector<Level> find_levels() {
  std::vector<Level> found = {{"portable", true, &portable::kKernels}};
#ifdef DPA_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  found.push_back({"avx2", avx2, &avx2::kKernels});
  found.push_back({"avx512", avx512, &avx512::kKernels});
  found.push_back({"avx512_bf16", avx512 && __builtin_cpu_supports("avx512bf16"), &avx512_bf16::kKernels});
#endif
#ifdef DPA_ARM
  constexpr unsigned long kHasBf16 = 1UL << 14;  // HWCAP2_BF16 of the kernel's interface
  found.push_back({"neon", true, &neon::kKernels});
  found.push_back({"neon_bf16", (getauxval(AT_HWCAP2) & kHasBf16) != 0, &neon_bf16::kKernels});
#endif
  return found;
}

}  // namespace

const std::vector<Level>& levels() {
  static const std::vector<Level> found = find_levels();
  return found;
}

const Kernels& choose_kernels(std::string& error) {
  const char* wanted = std::getenv("DPA_CPU_LEVEL");
  const bool any = !wanted || !*wanted;
  std::string names;
  for (auto level = levels().rbegin(); level != levels().rend(); ++level) {
    if (!level->supported) continue;
    if (any || level->name == std::string(wanted)) return *level->kernels;
    names = level->name + (names.empty() ? "" : ", " + names);
  }
  error = "DPA_CPU_LEVEL must be one that the machine has (" + names + "), got " + wanted;
  return portable::kKernels;
}

Tasks gemm_tasks(const Kernels& kernels, const Gemm& gemm, int team) {
  constexpr int kRowsOfTask = 64;  // their inputs, one block of depth, stay in L1
  const int rows = gemm.batch * gemm.times;
  Tasks tasks;
  tasks.panels = rows <= 4 ? kernels.max_panels : (kernels.max_panels + 1) / 2;
  while (tasks.panels > 1 && gemm.panels < tasks.panels * team) tasks.panels /= 2;
  tasks.rows = rows < kRowsOfTask ? rows : kRowsOfTask;
  tasks.count = int64_t{1} * ((gemm.panels + tasks.panels - 1) / tasks.panels) * ((rows + tasks.rows - 1) / tasks.rows);
  return tasks;
}

}  // namespace dpa::kernels::cpu
