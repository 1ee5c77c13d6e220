// The instruction sets that were built, and those of them that this machine has.
#include <cstring>

#include "dispatch.h"

namespace pdserve {

#define PD_DECLARE(isa) \
  namespace isa {       \
  extern const Kernels kernels; \
  }
#if defined(__x86_64__)
PD_DECLARE(avx512_bf16)
PD_DECLARE(avx512)
PD_DECLARE(avx2)
#endif
PD_DECLARE(portable)

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  for (const Kernels* kernels : {&avx512_bf16::kernels, &avx512::kernels, &avx2::kernels})
    if (kernels->supported()) found.push_back(kernels);
#endif
  found.push_back(&portable::kernels);
  return found;
}

const Kernels* find_kernels(const char* name) {
  for (const Kernels* kernels : supported_kernels())
    if (std::strcmp(kernels->name, name) == 0) return kernels;
  return nullptr;
}

}  // namespace pdserve
