// The kernels of one instruction set. Compiled once for each set, with PD_ISA as the namespace.

#include "attend.h"
#include "digest.h"
#include "multiply.h"
#include "rows.h"
#include "sample.h"

namespace pdserve::PD_ISA {

static bool supported() {
#if defined(__AVX512BF16__)
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return true;
#endif
}

#define PD_TEXT(x) #x
#define PD_NAME(x) PD_TEXT(x)

extern const Kernels kernels;
const Kernels kernels = {
    PD_NAME(PD_ISA), supported, kReadsCodes, product_of<StoreSums>, product_of<StoreSilu>, norm, to_rows, rotate,
    attend,          attend_scratch_bytes,   sample_row,  digest,
};

}  // namespace pdserve::PD_ISA
