#include "pack.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>

#define PD_ISA packing
#include "isa/vec.h"
#undef PD_ISA

namespace pdserve {
namespace {

constexpr int kNoCode = 0xff;
constexpr long kFieldsPerGroup = 2 * 3 * kLanes;

long per_unit(Format format) { return format == Format::int8 ? 4 : format == Format::bf16 ? 2 : 1; }

// The codes of bfloat16 weights, or null where they would save too little: for each weight without a code, 64 may have to be
// stored uncompressed.
std::unique_ptr<Codes> codes_for(const std::vector<Source>& sources) {
  std::array<long, 256> counts{};
  long total = 0;
  for (const Source& source : sources) {
    const auto* weights = static_cast<const uint16_t*>(source.weight);
    const long size = source.rows * source.depth;
    for (long i = 0; i < size; ++i) ++counts[weights[i] >> 7 & 0xff];
    total += size;
  }
  std::array<int, 256> exponents;
  std::iota(exponents.begin(), exponents.end(), 0);
  std::partial_sort(exponents.begin(), exponents.begin() + 16, exponents.end(),
                    [&](int a, int b) { return counts[a] > counts[b]; });
  long coded = 0;
  auto codes = std::make_unique<Codes>();
  for (int i = 0; i < 16; ++i) {
    coded += counts[exponents[i]];
    codes->patterns[i] = uint16_t(exponents[i] << 7);
    codes->patterns[16 + i] = codes->patterns[i] | 0x8000;
  }
  // 64 weights take 128 bytes. All codes together save half a byte per weight, and half of that may be lost this way.
  return (total - coded) * 128 <= total / 4 ? std::move(codes) : nullptr;
}

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

void Memory::populate() const {
#if defined(__linux__)
  constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, which older headers do not name (Linux 5.14).
  if (bytes_ != 0) (void)madvise(at_, bytes_, populate_write);
#endif
}

Memory::~Memory() {
  if (at_ != nullptr) munmap(at_, bytes_);
}

void* Arena::take(size_t bytes) {
  constexpr size_t chunk = size_t(64) << 20;
  bytes = (bytes + 63) / 64 * 64;
  if (chunks_.empty() || used_ + bytes > chunks_.back().bytes()) {
    chunks_.push_back(Memory(std::max(bytes, chunk)));
    used_ = 0;
  }
  used_ += bytes;
  return chunks_.back().as<char>() + used_ - bytes;
}

std::vector<float> to_floats(const void* source, long count, WeightType type) {
  std::vector<float> values(source == nullptr ? 0 : count);
  for (long i = 0; i < long(values.size()); ++i) values[i] = read_weight(source, i, type);
  return values;
}

void Packed::encode(const uint32_t* units, long panel) {
  std::array<uint8_t, 512> code;
  code.fill(kNoCode);
  for (int i = 0; i < 32; ++i) code[codes_->patterns[i] >> 7] = uint8_t(i);
  const long groups = matrix_.depth / kCodeGroup;
  uint32_t* out = units_ + panel * groups * kFieldsPerGroup;
  first_plain_.push_back(long(plain_.size()));
  for (long group = 0; group < groups; ++group, units += kCodeGroup * kPanelColumns, out += kFieldsPerGroup) {
    // Has a bit of 0xe0 as soon as one weight has no code.
    int seen[kCodeGroup]{};
    for (int column = 0; column < kPanelColumns; ++column) {
      // Two fields each, since a unit has two weights.
      uint32_t fields[kCodeGroup];
      for (int k = 0; k < kCodeGroup; ++k) {
        const uint32_t unit = units[k * kPanelColumns + column];
        const int low = code[unit >> 7 & 0x1ff], high = code[unit >> 23];
        seen[k] |= low | high;
        fields[k] = uint32_t(low | high << 16) | (unit & 0x007f007f) << 5;
      }
      uint32_t* to = out + column / kLanes * 3 * kLanes + column % kLanes;
      for (int k = 0; k < 3; ++k) to[k * kLanes] = fields[k] | (fields[3] >> 4 * k & 0x000f000f) << 12;
    }
    for (int k = 0; k < kCodeGroup; ++k) {
      if ((seen[k] & 0xe0) == 0) continue;
      plain_.push_back(int32_t(group * kCodeGroup + k));
      plain_units_.insert(plain_units_.end(), units + k * kPanelColumns, units + (k + 1) * kPanelColumns);
    }
  }
}

Packed::Packed(std::shared_ptr<Arena> arena, const std::vector<Source>& sources, WeightType type, Format format,
               bool interleave, bool as_codes)
    : arena_(std::move(arena)) {
  const long depth = sources[0].depth, group = per_unit(format), units = ceil_div(depth, group);
  long rows = 0;
  bool has_bias = false;
  for (const Source& source : sources) rows += source.rows, has_bias |= source.bias != nullptr;
  // Interleaved halves are padded separately, so that every panel has 16 columns of each.
  const long half = ceil_div(sources[0].rows, kLanes) * kLanes;
  const long columns = interleave ? 2 * half : ceil_div(rows, kPanelColumns) * kPanelColumns;
  const long panel_units = units * kPanelColumns, num_panels = columns / kPanelColumns;
  if (as_codes && type == WeightType::bf16 && format == Format::bf16 && depth % (kCodeGroup * group) == 0)
    codes_ = codes_for(sources);
  // Codes are made from one panel of units at a time.
  std::vector<uint32_t> plain_panel(codes_ != nullptr ? panel_units : 0);
  bytes_ = num_panels * (codes_ != nullptr ? units / kCodeGroup * kFieldsPerGroup : panel_units) * sizeof(uint32_t);
  units_ = static_cast<uint32_t*>(arena_->take(bytes_));
  matrix_.depth = units;
  if (has_bias) bias_.resize(columns);
  if (format == Format::int8) scale_.resize(columns), sums_.resize(columns);

  auto put = [&](const Source& source, long row, long column) {
    uint32_t* panel = codes_ != nullptr ? plain_panel.data() : units_ + column / kPanelColumns * panel_units;
    uint32_t* out = panel + column % kPanelColumns;
    const long begin = row * depth;
    if (source.bias != nullptr) bias_[column] = read_weight(source.bias, row, type);
    // The common case: whole units are copied unchanged.
    if (format == Format::bf16 && depth % 2 == 0) {
      const auto* line = static_cast<const uint16_t*>(source.weight) + begin;
      for (long unit = 0; unit < units; ++unit) std::memcpy(out + unit * kPanelColumns, line + 2 * unit, 4);
      return;
    }
    float scale = 0;
    if (format == Format::int8) {
      for (long i = 0; i < depth; ++i) {
        const float size = std::fabs(read_weight(source.weight, begin + i, type));
        if (!std::isfinite(size)) throw std::invalid_argument("a weight is infinite or NaN, which int8 cannot represent");
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

  // The source and the row of it that become a column; a null source: padding.
  const auto origin = [&](long column) -> std::pair<const Source*, long> {
    if (interleave) {
      const long row = column / kPanelColumns * kLanes + column % kLanes;
      return {row < sources[0].rows ? &sources[column / kLanes % 2] : nullptr, row};
    }
    for (const Source& source : sources) {
      if (column < source.rows) return {&source, column};
      column -= source.rows;
    }
    return {nullptr, 0};
  };

  for (long panel = 0; panel < num_panels; ++panel) {
    for (long column = panel * kPanelColumns; column < (panel + 1) * kPanelColumns; ++column)
      if (const auto [source, row] = origin(column); source != nullptr) put(*source, row, column);
    if (codes_ != nullptr) {
      encode(plain_panel.data(), panel);
      std::fill(plain_panel.begin(), plain_panel.end(), 0);
    }
  }
  if (codes_ != nullptr) {
    first_plain_.push_back(long(plain_.size()));
    codes_->fields = units_;
    codes_->first_plain = first_plain_.data();
    codes_->plain = plain_.data();
    codes_->plain_units = plain_units_.data();
  }
  matrix_ = {format,
             columns,
             units,
             codes_ != nullptr ? nullptr : units_,
             codes_.get(),
             has_bias ? bias_.data() : nullptr,
             scale_.empty() ? nullptr : scale_.data(),
             sums_.empty() ? nullptr : sums_.data()};
}

}  // namespace pdserve
