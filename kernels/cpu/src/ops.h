#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

// Single ops on given memory, for tests and benchmarks. `kernels/cpu/ops.py` checks the arguments.
void bind_ops(nanobind::module_& module);

}  // namespace pdserve
