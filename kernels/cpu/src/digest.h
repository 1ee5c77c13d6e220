// Digests of blocks of memory, found while they are copied.
#pragma once

#include <nanobind/nanobind.h>

namespace pdserve {

void bind_digests(nanobind::module_& module);

}  // namespace pdserve
