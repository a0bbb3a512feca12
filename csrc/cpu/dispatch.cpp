// Chooses the kernel table once, from what the processor says it has.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "kernels.h"

namespace z3ext::cpu {

namespace plain {
const Kernels& table();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels& table();
}
namespace avx512 {
const Kernels& table();
}
#endif

const Kernels* kernels_by_name(const char* name) {
  if (std::strcmp(name, "plain") == 0) {
    return &plain::table();
  }
#if defined(__x86_64__)
  if (std::strcmp(name, "avx2") == 0 && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("f16c")) {
    return &avx2::table();
  }
  if (std::strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return &avx512::table();
  }
#endif
  return nullptr;
}

namespace {

const Kernels& best() {
  for (const char* name : {"avx512", "avx2"}) {
    if (const Kernels* table = kernels_by_name(name)) {
      return *table;
    }
  }
  return plain::table();
}

bool is_first_rank() {
  const char* rank = std::getenv("RANK");
  return rank == nullptr || std::strcmp(rank, "0") == 0;
}

const Kernels& choose() {
  const char* asked = std::getenv("Z3EXT_CPU_CAPABILITY");
  if (asked == nullptr || *asked == '\0') {
    return best();
  }
  if (const Kernels* table = kernels_by_name(asked)) {
    return *table;
  }
  if (is_first_rank()) {
    std::fprintf(
        stderr,
        "z3ext: Z3EXT_CPU_CAPABILITY is '%s'; expected plain, or avx2 or "
        "avx512 where the processor has it; the %s kernels are used\n",
        asked,
        best().name);
  }
  return best();
}

} // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

} // namespace z3ext::cpu
