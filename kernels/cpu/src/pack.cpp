#include "pack.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

#define PD_ISA packing
#include "isa/vec.h"
#undef PD_ISA

namespace pdserve {
namespace {

long per_unit(Format format) { return format == Format::int8 ? 4 : format == Format::bf16 ? 2 : 1; }

}  // namespace

float read_weight(const void* source, long index, WeightType type) {
  switch (type) {
    case WeightType::bf16:
      return __builtin_bit_cast(float, uint32_t(static_cast<const uint16_t*>(source)[index]) << 16);
    case WeightType::f32: return static_cast<const float*>(source)[index];
    case WeightType::f16: return packing::from_f16(static_cast<const uint16_t*>(source)[index]);
  }
  return 0;
}

Memory::Memory(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(at, bytes, MADV_HUGEPAGE);
#endif
  at_ = at;
}

Memory::~Memory() {
  if (at_ != nullptr) munmap(at_, bytes_);
}

std::vector<float> to_floats(const void* source, long count, WeightType type) {
  std::vector<float> values(source == nullptr ? 0 : count);
  for (long i = 0; i < long(values.size()); ++i) values[i] = read_weight(source, i, type);
  return values;
}

Packed::Packed(const std::vector<Source>& sources, WeightType type, Format format, bool interleave) {
  const long depth = sources[0].depth, group = per_unit(format), units = ceil_div(depth, group);
  long rows = 0;
  bool has_bias = false;
  for (const Source& source : sources) rows += source.rows, has_bias |= source.bias != nullptr;
  // Interleaved halves are padded each for itself, so that every panel has 16 columns of both.
  const long half = ceil_div(sources[0].rows, kLanes) * kLanes;
  const long columns = interleave ? 2 * half : ceil_div(rows, kPanelColumns) * kPanelColumns;
  units_ = Memory(columns * units * sizeof(uint32_t));
  if (has_bias) bias_.resize(columns);
  if (format == Format::int8) scale_.resize(columns), sums_.resize(columns);

  auto put = [&](const Source& source, long row, long column) {
    uint32_t* out = units_.as<uint32_t>() + column / kPanelColumns * units * kPanelColumns + column % kPanelColumns;
    const long begin = row * depth;
    if (source.bias != nullptr) bias_[column] = read_weight(source.bias, row, type);
    if (format == Format::bf16 && depth % 2 == 0) {  // The common case: whole units are moved as they are.
      const auto* line = static_cast<const uint16_t*>(source.weight) + begin;
      for (long unit = 0; unit < units; ++unit) std::memcpy(out + unit * kPanelColumns, line + 2 * unit, 4);
      return;
    }
    float scale = 0;
    if (format == Format::int8) {
      for (long i = 0; i < depth; ++i) {
        const float size = std::fabs(read_weight(source.weight, begin + i, type));
        if (!std::isfinite(size)) throw std::invalid_argument("a weight is not finite");
        scale = std::max(scale, size);
      }
      scale_[column] = scale /= 127.0f;
    }
    for (long i = 0; i < depth; ++i) {
      uint32_t* unit = out + i / group * kPanelColumns;
      const float value = read_weight(source.weight, begin + i, type);
      if (format == Format::f32) {
        *unit = __builtin_bit_cast(uint32_t, value);
      } else if (format == Format::bf16) {
        *unit |= packing::bf16_bits(value) << (i % 2 * 16);
      } else {
        const int rounded = scale > 0 ? int(std::nearbyint(value / scale)) : 0;
        sums_[column] += rounded;
        *unit |= uint32_t(uint8_t(int8_t(rounded))) << (i % 4 * 8);
      }
    }
  };

  // Columns of one panel one after the other, so that its memory is written while it is in the cache.
  long column = 0;
  if (interleave) {
    for (long row = 0; row < sources[0].rows; ++row)
      for (long side = 0; side < 2; ++side)
        put(sources[side], row, row / kLanes * kPanelColumns + side * kLanes + row % kLanes);
  } else {
    for (const Source& source : sources)
      for (long row = 0; row < source.rows; ++row) put(source, row, column++);
  }
  matrix_ = {format,       columns,
             units,        units_.as<uint32_t>(),
             has_bias ? bias_.data() : nullptr, scale_.empty() ? nullptr : scale_.data(),
             sums_.empty() ? nullptr : sums_.data()};
}

}  // namespace pdserve
