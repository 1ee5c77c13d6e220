#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

// The single ops on given memory, for tests and benchmarks: `kernels/cpu/ops.py` is their checked face.
void bind_ops(nanobind::module_& module);

}  // namespace pdserve
