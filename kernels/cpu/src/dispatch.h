#pragma once

#include <vector>

#include "kernels.h"

namespace pdserve {

// Best first; the last one runs everywhere.
std::vector<const Kernels*> supported_kernels();

// Null: not built, or not supported by this machine.
const Kernels* find_kernels(const char* name);

}  // namespace pdserve
