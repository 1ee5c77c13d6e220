// exp and log in double precision as fixed sequences of additions, multiplications and divisions, each rounded once. So
// they have the same bits with every instruction set and in numpy: `pdserve/engine/elementary.py` is their definition.
#pragma once

#include "vec.h"

namespace pdserve::PD_ISA {

constexpr int kDoubles = kSingles / 2;

typedef double vd __attribute__((vector_size(8 * kDoubles)));
typedef int64_t vl __attribute__((vector_size(8 * kDoubles)));
typedef uint64_t vul __attribute__((vector_size(8 * kDoubles)));
typedef float vs_half __attribute__((vector_size(2 * kSingles)));

// Lanes `[half * kDoubles, (half + 1) * kDoubles)`.
static PD_INLINE vd to_doubles(vs x, int half) {
  union { vs whole; vs_half halves[2]; } u{x};
  return __builtin_convertvector(u.halves[half], vd);
}

// Bit i: lane i is true.
static PD_INLINE uint32_t bits_of(vsi mask) {
#if defined(__AVX512F__)
  return uint32_t(_mm512_movepi32_mask((__m512i)mask));
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps((__m256)mask));
#elif defined(__SSE2__)
  return uint32_t(__builtin_ia32_movmskps((vs)mask));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kSingles; ++i) bits |= uint32_t(mask[i] & 1) << i;
  return bits;
#endif
}

// sum + x in lanes where a >= b
static PD_INLINE vd add_where_at_least(vd sum, vd x, vd a, vd b) {
#if defined(__AVX512F__)
  return (vd)_mm512_mask_add_pd((__m512d)sum, _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_GE_OQ), (__m512d)sum,
                                (__m512d)x);
#else
  return sum + (vd)((vl)x & (a >= b));
#endif
}

static PD_INLINE vd splat_double(double x) { return vd{} + x; }

static PD_INLINE double sum(vd x) {
  double total = 0;
  for (int i = 0; i < kDoubles; ++i) total += x[i];
  return total;
}

// The largest integer up to x, for x between 0 and 2^51.
static PD_INLINE vd floor_of(vd x) {
#if defined(__AVX512F__)
  return (vd)_mm512_roundscale_pd((__m512d)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vd)_mm256_floor_pd((__m256d)x);
#else
  const vd rounded = (x + splat_double(0x1p52)) - splat_double(0x1p52);
  return rounded > x ? rounded - splat_double(1.0) : rounded;
#endif
}

// exp for x <= 0; exactly 1 at 0 and exactly 0 below -700.
static PD_INLINE vd exp_of_negative(vd x) {
  const vd shift = splat_double(0x1.8p52);
  const vd shifted = x * splat_double(0x1.71547652b82fep+0) + shift;
  const vd n = shifted - shift;
  const vd f = (x - n * splat_double(0x1.62e42fee00000p-1)) - n * splat_double(0x1.a39ef35793c76p-33);
  vd q = splat_double(0x1.af38a9b0ec855p-26);
  q = q * f + splat_double(0x1.289185613a3d6p-22);
  q = q * f + splat_double(0x1.71de0dae63bb3p-19);
  q = q * f + splat_double(0x1.a019b90d2ae7ap-16);
  q = q * f + splat_double(0x1.a01a01a7c41d5p-13);
  q = q * f + splat_double(0x1.6c16c1788bd90p-10);
  q = q * f + splat_double(0x1.11111111109b3p-7);
  q = q * f + splat_double(0x1.5555555553d63p-5);
  q = q * f + splat_double(0x1.5555555555556p-3);
  q = q * f + splat_double(0x1.0000000000001p-1);
  const vd p = (f * f * q + f) + splat_double(1.0);
  const vl power = ((vl)shifted + 1023) << 52;
  return x < splat_double(-700.0) ? vd{} : p * (vd)power;
}

// exp for x <= 0, to about 1e-6: for selecting the tokens that need the exact one.
static PD_INLINE vs rough_exp(vs x) {
  const vs limited = x > splat_single(-87.0f) ? x : splat_single(-87.0f);
  const vs scaled = limited * splat_single(1.44269504f);
  const vs shift = splat_single(0x1.8p23f);
  const vs shifted = scaled + shift;
  const vs f = scaled - (shifted - shift);
  vs p = splat_single(1.33336e-3f);
  p = p * f + splat_single(9.61813e-3f);
  p = p * f + splat_single(5.55041e-2f);
  p = p * f + splat_single(2.40227e-1f);
  p = p * f + splat_single(6.93147e-1f);
  p = p * f + splat_single(1.0f);
  return p * (vs)(((vsi)shifted + 127) << 23);
}

// log of a positive normal number.
static inline double log_of(double x) {
  // x = 2^k * m with m between sqrt(1/2) and sqrt(2), about.
  const uint64_t bits = __builtin_bit_cast(uint64_t, x);
  const uint64_t offset = bits - 0x3fe6a09e00000000u;
  const double k = double(int64_t(offset) >> 52);
  const double m = __builtin_bit_cast(double, bits - (offset & 0xfff0000000000000u));
  const double z = (m - 1.0) / (m + 1.0), square = z * z;
  double q = 1.0 / 21;
  for (const double term : {1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3})
    q = q * square + term;
  const double tail = 2.0 * z * square * q + k * 0x1.a39ef35793c76p-33;
  return (tail + 2.0 * z) + k * 0x1.62e42fee00000p-1;
}

}  // namespace pdserve::PD_ISA
