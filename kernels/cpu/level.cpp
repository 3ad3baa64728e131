#include "kernels/cpu/level.h"

#include <algorithm>
#include <cstdlib>

#include "kernels/cpu/kernels.h"

#ifdef DPA_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#ifdef DPA_ARM
#include <sys/auxv.h>
#endif

namespace dpa::kernels::cpu {
namespace {

#ifdef DPA_X86
/// Whether the bits are set in edx of leaf 7.
bool has_features(unsigned bits) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bits) == bits;
}
/// Arithmetic on vectors of float16, where AVX-512 itself is supported.
bool has_avx512_fp16() { return has_features(1U << 23); }
/// Tiles of bfloat16, which Linux gives to a process that asks: threads then have 8 KB more to save.
bool has_amx() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return has_features(1U << 22 | 1U << 24) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

std::vector<Level> find_levels() {
  std::vector<Level> found = {{"portable", true, &portable::kKernels}};
#ifdef DPA_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  found.push_back({"avx2", avx2, &avx2::kKernels});
  found.push_back({"avx512", avx512, &avx512::kKernels});
  const bool dot = avx512 && __builtin_cpu_supports("avx512bf16");
  found.push_back({"avx512_bf16", dot, &avx512_bf16::kKernels});
  // Intel's dot products of bfloat16 run at half the rate of its float32, others' at twice the rate.
  const bool slow_dot = dot && __builtin_cpu_is("intel");
  found.push_back({"avx512_fp16", slow_dot && has_avx512_fp16(), &avx512_fp16::kKernels});
  found.push_back({"amx", dot && has_amx(), &amx::kKernels});
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
  // Their inputs, one block of depth, stay in L1; or in L2, where more rows repay the conversion of a block of weights.
  const bool tiles = gemm.kind == Weights::kBFloat16Tiles;
  const int rows = tiles ? row_tiles(gemm).count() : gemm.batch * gemm.times;
  const int most = tiles ? rows : gemm.kind == Weights::kBFloat16AsFloat16 ? 256 : 64, least = tiles ? 8 : 64;
  Tasks tasks;
  tasks.panels = tiles || rows <= 4 ? kernels.max_panels : (kernels.max_panels + 1) / 2;
  while (tasks.panels > 1 && gemm.panels < tasks.panels * team) tasks.panels /= 2;
  const int groups = (gemm.panels + tasks.panels - 1) / tasks.panels;
  for (tasks.rows = std::min(rows, most);; tasks.rows = std::max(tasks.rows / 2, least)) {
    tasks.count = int64_t{1} * groups * ((rows + tasks.rows - 1) / tasks.rows);
    if (tasks.rows <= least || tasks.count >= 4 * team) break;
  }
  return tasks;
}

}  // namespace dpa::kernels::cpu
