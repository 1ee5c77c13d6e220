// Vectors of sixteen lanes of 32 bits, for every instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "../kernels.h"

namespace pdserve::PD_ISA {

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef float vf_unaligned __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t vu_unaligned __attribute__((vector_size(64), aligned(2), may_alias));

#define PD_INLINE inline __attribute__((always_inline))

static PD_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
static PD_INLINE vu load_units(const void* p) { return *reinterpret_cast<const vu_unaligned*>(p); }
static PD_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }
static PD_INLINE void store_units(void* p, vu x) { *reinterpret_cast<vu_unaligned*>(p) = x; }
static PD_INLINE vf splat(float x) { return vf{} + x; }
static PD_INLINE vu splat_units(uint32_t x) { return vu{} + x; }

// Vectors as wide as the registers. Compilers keep wider ones in memory, and take their comparisons apart lane by lane.
#if defined(__AVX512F__)
constexpr int kSingles = 16;
#elif defined(__AVX2__)
constexpr int kSingles = 8;
#else
constexpr int kSingles = 4;
#endif
constexpr int kPieces = kLanes / kSingles;
typedef float vs __attribute__((vector_size(4 * kSingles)));
typedef int32_t vsi __attribute__((vector_size(4 * kSingles)));
typedef uint32_t vsu __attribute__((vector_size(4 * kSingles)));
typedef float vs_unaligned __attribute__((vector_size(4 * kSingles), aligned(4), may_alias));
typedef uint32_t vsu_unaligned __attribute__((vector_size(4 * kSingles), aligned(2), may_alias));

static PD_INLINE vs splat_single(float x) { return vs{} + x; }
static PD_INLINE vs load_vs(const float* p) { return *reinterpret_cast<const vs_unaligned*>(p); }
static PD_INLINE vsu load_vsu(const void* p) { return *reinterpret_cast<const vsu_unaligned*>(p); }
static PD_INLINE void store_vs(float* p, vs x) { *reinterpret_cast<vs_unaligned*>(p) = x; }

// a * b + c, rounded once where the instruction set can. Contraction is off, so nothing else is ever fused.
static PD_INLINE vs fma(vs a, vs b, vs c) {
#if defined(__AVX512F__)
  return (vs)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vs)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

static PD_INLINE vs max(vs a, vs b) {
#if defined(__AVX512F__)
  return (vs)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// Horizontal reductions, each in one fixed tree.
static PD_INLINE float sum(vf x) {
  typedef float v8 __attribute__((vector_size(32)));
  typedef float v4 __attribute__((vector_size(16)));
  union { vf whole; v8 half[2]; } a{x};
  union { v8 whole; v4 half[2]; } b{a.half[0] + a.half[1]};
  v4 c = b.half[0] + b.half[1];
  return (c[0] + c[2]) + (c[1] + c[3]);
}

static PD_INLINE float largest(vf x) {
  typedef float v8 __attribute__((vector_size(32)));
  typedef float v4 __attribute__((vector_size(16)));
  union { vf whole; v8 half[2]; } a{x};
  union { v8 whole; v4 half[2]; } b{a.half[0] > a.half[1] ? a.half[0] : a.half[1]};
  v4 c = b.half[0] > b.half[1] ? b.half[0] : b.half[1];
  float d = c[0] > c[2] ? c[0] : c[2], e = c[1] > c[3] ? c[1] : c[3];
  return d > e ? d : e;
}

static PD_INLINE vs round_to_integer(vs x) {
#if defined(__AVX512F__)
  return (vs)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vs shift = splat_single(12582912.0f);  // 1.5 * 2^23: |x| is below 2^22 here.
  return (x + shift) - shift;
#endif
}

// exp, to about 1 ulp; exactly 1 at 0 and exactly 0 below -87.
static PD_INLINE vs exp(vs x) {
  const vs n = round_to_integer(x * splat_single(1.44269504088896341f));
  vs f = fma(n, splat_single(-0.693359375f), x);
  f = fma(n, splat_single(2.12194440e-4f), f);
  vs p = splat_single(1.9875691500e-4f);
  p = fma(p, f, splat_single(1.3981999507e-3f));
  p = fma(p, f, splat_single(8.3334519073e-3f));
  p = fma(p, f, splat_single(4.1665795894e-2f));
  p = fma(p, f, splat_single(1.6666665459e-1f));
  p = fma(p, f, splat_single(5.0000001201e-1f));
  p = fma(p, f * f, f) + splat_single(1.0f);
  const vsi power = (__builtin_convertvector(n, vsi) + 127) << 23;
  const vs result = p * (vs)power;
  return (x < splat_single(-87.0f)) ? vs{} : result;
}

// 2^x for x <= 0, to about 2 ulp; exactly 1 at 0 and exactly 0 below -126.
static PD_INLINE vs exp2_of_negative(vs x) {
  x = max(x, splat_single(-200.0f));
  const vs n = round_to_integer(x), f = x - n;
  vs p = splat_single(0.0013264714988230016f);
  p = fma(p, f, splat_single(0.009671513510715369f));
  p = fma(p, f, splat_single(0.055507337837735406f));
  p = fma(p, f, splat_single(0.2402224206638171f));
  p = fma(p, f, splat_single(0.6931469775710573f));
  p = fma(p, f, splat_single(1.0f));
  const vs whole = x < splat_single(-126.0f) ? vs{} : p;
#if defined(__AVX512F__)
  return (vs)_mm512_scalef_ps((__m512)whole, (__m512)n);
#else
  const vsi power = (__builtin_convertvector(max(n, splat_single(-126.0f)), vsi) + 127) << 23;
  return whole * (vs)power;
#endif
}

static PD_INLINE vs silu(vs x) {
  const vs clamped = max(x, splat_single(-87.0f));
  const vs quotient = x / (splat_single(1.0f) + exp(-clamped));
  // There silu is below 2e-36, but the clamped quotient is not.
  return x < splat_single(-87.0f) ? vs{} : quotient;
}

// bfloat16 <-> float32, to nearest even; NaN stays NaN.
static PD_INLINE uint32_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static PD_INLINE vsu bf16_bits(vs x) {
  const vsu bits = (vsu)x;
  const vsu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (x == x) ? rounded : ((bits >> 16) | 0x40u);
}

#if !defined(__AVX512F__)
union Pieces {
  vf whole;
  vs piece[kPieces];
};

// What `function` gives for each piece of the vectors.
template <class Function, class... Vectors>
static PD_INLINE vf by_piece(Function function, Vectors... x) {
  Pieces result;
#pragma GCC unroll 4
  for (int i = 0; i < kPieces; ++i) result.piece[i] = function(Pieces{x}.piece[i]...);
  return result.whole;
}

static PD_INLINE vf fma(vf a, vf b, vf c) {
  return by_piece([](vs x, vs y, vs z) __attribute__((always_inline)) { return fma(x, y, z); }, a, b, c);
}
static PD_INLINE vf max(vf a, vf b) {
  return by_piece([](vs x, vs y) __attribute__((always_inline)) { return max(x, y); }, a, b);
}
static PD_INLINE vf round_to_integer(vf a) {
  return by_piece([](vs x) __attribute__((always_inline)) { return round_to_integer(x); }, a);
}
static PD_INLINE vf exp2_of_negative(vf a) {
  return by_piece([](vs x) __attribute__((always_inline)) { return exp2_of_negative(x); }, a);
}
static PD_INLINE vf silu(vf a) {
  return by_piece([](vs x) __attribute__((always_inline)) { return silu(x); }, a);
}
#endif

typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint16_t vh_unaligned __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t vsh __attribute__((vector_size(2 * kSingles)));
typedef uint16_t vsh_unaligned __attribute__((vector_size(2 * kSingles), aligned(2), may_alias));
static PD_INLINE void store_bf16(uint16_t* p, vf x) {
#if defined(__AVX512BF16__)
  *reinterpret_cast<vh_unaligned*>(p) = (vh)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__AVX512F__)
  *reinterpret_cast<vh_unaligned*>(p) = __builtin_convertvector(bf16_bits(x), vh);
#else
  for (int i = 0; i < kPieces; ++i)
    *reinterpret_cast<vsh_unaligned*>(p + i * kSingles) = __builtin_convertvector(bf16_bits(Pieces{x}.piece[i]), vsh);
#endif
}
static PD_INLINE vf load_bf16(const uint16_t* p) {
  return (vf)(__builtin_convertvector(*reinterpret_cast<const vh_unaligned*>(p), vu) << 16);
}

// float16, one at a time: IEEE half precision to nearest even, saturated.
static PD_INLINE float from_f16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  uint32_t wide;
  if (magnitude >= 0x7c00) {
    wide = 0x7f800000 | ((magnitude & 0x3ff) << 13);
  } else if (magnitude >= 0x400) {
    wide = (magnitude << 13) + (112u << 23);
  } else {
    const float value = float(magnitude) * 0x1p-24f;
    std::memcpy(&wide, &value, 4);
  }
  wide |= sign;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

static PD_INLINE uint16_t to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  // Values beyond the largest half saturate. An infinite value in the KV cache would meet a weight of 0 in rows that must not
  // see it, and give NaN.
  if (bits >= 0x477ff000) return sign | 0x7bff;
  if (bits < 0x38800000) {  // Below the normal range: adding 0.5 puts the rounding where it belongs.
    float value;
    std::memcpy(&value, &bits, 4);
    value += 0.5f;
    std::memcpy(&bits, &value, 4);
    return sign | uint16_t(bits - 0x3f000000);
  }
  return sign | uint16_t((bits + 0xfff + ((bits >> 13) & 1) - (112u << 23)) >> 13);
}

}  // namespace pdserve::PD_ISA
