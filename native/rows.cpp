#include "rows.h"

#include <cstdlib>
#include <cstring>

namespace everstep {

static const RowKernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const char* asked = std::getenv("EVERSTEP_ISA");
  const bool base_only = asked && !std::strcmp(asked, "base");
  const bool no_avx512 = asked && !std::strcmp(asked, "avx2");
  if (base_only) return kRowsBase;
  if (avx512 && !no_avx512) return kRowsAvx512;
  if (avx2) return kRowsAvx2;
#endif
  return kRowsBase;
}

const RowKernels& row_kernels() {
  static const RowKernels& chosen = choose();
  return chosen;
}

}  // namespace everstep
