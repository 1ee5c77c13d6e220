// Decodes weights of 12 bits between memory and multiplication: see `Codes` in kernels.h.
#pragma once

#include "vec.h"

namespace pdserve::PD_ISA {

#if defined(__AVX512BW__)
constexpr bool kReadsCodes = true;

// Decodes a panel's groups, one after the other.
class CodedPanel {
 public:
  static constexpr long kFields = 2 * 3 * kLanes;

  CodedPanel(const Matrix& matrix, long panel)
      : codes_(*matrix.codes),
        patterns_(_mm512_load_si512(codes_.patterns)),
        fields_(codes_.fields + panel * (matrix.depth / kCodeGroup) * kFields),
        plain_(codes_.first_plain[panel]),
        end_(codes_.first_plain[panel + 1]) {}

  // The next group, number `group`, as units [depth][half of the panel]. `ahead`: how many bytes ahead to prefetch; 0: none.
  // Where much is computed with a group, the hardware prefetcher falls behind.
  PD_INLINE void next(long group, vu (&units)[kCodeGroup][2], long ahead) {
    const uint32_t* from = fields_ + group * kFields;
    if (ahead != 0) {
#pragma GCC unroll 6
      for (int line = 0; line < kFields / kLanes; ++line)
        __builtin_prefetch(reinterpret_cast<const char*>(from + line * kLanes) + ahead, 0, 2);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i a = field(from, half, 0), b = field(from, half, 1), c = field(from, half, 2);
      // The upper four bits of the three fields make up a fourth one. 0xf8: x | (y & z).
      __m512i d = _mm512_srli_epi16(a, 12);
      d = _mm512_ternarylogic_epi32(d, _mm512_srli_epi16(b, 8), _mm512_set1_epi16(0x0f0), 0xf8);
      d = _mm512_ternarylogic_epi32(d, _mm512_srli_epi16(c, 4), _mm512_set1_epi16(0xf00), 0xf8);
      units[0][half] = decode(a);
      units[1][half] = decode(b);
      units[2][half] = decode(c);
      units[3][half] = decode(d);
    }
    if (plain_ < end_ && codes_.plain[plain_] < (group + 1) * kCodeGroup) [[unlikely]] {
#pragma GCC unroll 4
      for (int k = 0; k < kCodeGroup; ++k) {
        if (plain_ == end_ || codes_.plain[plain_] != group * kCodeGroup + k) continue;
        const uint32_t* plain = codes_.plain_units + plain_++ * kPanelColumns;
        units[k][0] = load_units(plain), units[k][1] = load_units(plain + kLanes);
      }
    }
  }

 private:
  static PD_INLINE __m512i field(const uint32_t* from, int half, int i) {
    return _mm512_loadu_si512(from + (half * 3 + i) * kLanes);
  }

  // The permutation uses only five bits of each field.
  PD_INLINE vu decode(__m512i field) const {
    return (vu)_mm512_ternarylogic_epi32(_mm512_permutexvar_epi16(field, patterns_), _mm512_srli_epi16(field, 5),
                                         _mm512_set1_epi16(0x7f), 0xf8);
  }

  const Codes& codes_;
  const __m512i patterns_;
  const uint32_t* fields_;
  long plain_, end_;
};

static void expand(const Matrix& matrix, long panel, uint32_t* out) {
  CodedPanel coded(matrix, panel);
  const long panel_bytes = matrix.depth / kCodeGroup * CodedPanel::kFields * long(sizeof(uint32_t));
  for (long group = 0; group < matrix.depth / kCodeGroup; ++group) {
    vu units[kCodeGroup][2];
    coded.next(group, units, panel_bytes);
    for (int k = 0; k < kCodeGroup; ++k)
      for (int half = 0; half < 2; ++half) store_units(out + k * kPanelColumns + half * kLanes, units[k][half]);
    out += kCodeGroup * kPanelColumns;
  }
}
#else
// Matrices are packed as units.
constexpr bool kReadsCodes = false;
#endif

}  // namespace pdserve::PD_ISA
