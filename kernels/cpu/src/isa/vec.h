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

// a * b + c, rounded once where the instruction set can. Contraction is off, so nothing else is ever fused.
static PD_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union { vf whole; __m256 half[2]; } x{a}, y{b}, z{c};
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return z.whole;
#else
  return a * b + c;
#endif
}

static PD_INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
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

static PD_INLINE vf round_to_integer(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf shift = splat(12582912.0f);  // 1.5 * 2^23: |x| is below 2^22 here.
  return (x + shift) - shift;
#endif
}

// exp, to about 1 ulp; exactly 1 at 0 and exactly 0 below -87.
static PD_INLINE vf exp(vf x) {
  const vf n = round_to_integer(x * splat(1.44269504088896341f));
  vf f = fma(n, splat(-0.693359375f), x);
  f = fma(n, splat(2.12194440e-4f), f);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, f, splat(1.3981999507e-3f));
  p = fma(p, f, splat(8.3334519073e-3f));
  p = fma(p, f, splat(4.1665795894e-2f));
  p = fma(p, f, splat(1.6666665459e-1f));
  p = fma(p, f, splat(5.0000001201e-1f));
  p = fma(p, f * f, f) + splat(1.0f);
  const vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  const vf result = p * (vf)power;
  return (x < splat(-87.0f)) ? vf{} : result;
}

// 2^x for x <= 0, to about 2 ulp; exactly 1 at 0 and exactly 0 below -126.
static PD_INLINE vf exp2_of_negative(vf x) {
  x = max(x, splat(-200.0f));
  const vf n = round_to_integer(x), f = x - n;
  vf p = splat(0.0013264714988230016f);
  p = fma(p, f, splat(0.009671513510715369f));
  p = fma(p, f, splat(0.055507337837735406f));
  p = fma(p, f, splat(0.2402224206638171f));
  p = fma(p, f, splat(0.6931469775710573f));
  p = fma(p, f, splat(1.0f));
  const vf whole = x < splat(-126.0f) ? vf{} : p;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)whole, (__m512)n);
#else
  const vi power = (__builtin_convertvector(max(n, splat(-126.0f)), vi) + 127) << 23;
  return whole * (vf)power;
#endif
}

static PD_INLINE vf silu(vf x) {
  const vf clamped = max(x, splat(-87.0f));
  const vf quotient = x / (splat(1.0f) + exp(-clamped));
  // There silu is below 2e-36, but the clamped quotient is not.
  return x < splat(-87.0f) ? vf{} : quotient;
}

// bfloat16 <-> float32, to nearest even; NaN stays NaN.
static PD_INLINE uint32_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static PD_INLINE vu bf16_bits(vf x) {
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (x == x) ? rounded : ((bits >> 16) | 0x40u);
}

typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint16_t vh_unaligned __attribute__((vector_size(32), aligned(2), may_alias));
static PD_INLINE void store_bf16(uint16_t* p, vf x) {
#if defined(__AVX512BF16__)
  *reinterpret_cast<vh_unaligned*>(p) = (vh)_mm512_cvtneps_pbh((__m512)x);
  return;
#endif
  *reinterpret_cast<vh_unaligned*>(p) = __builtin_convertvector(bf16_bits(x), vh);
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

// The contents of a unit, and how a chain of sums adds the product of two units.
struct Bf16Pairs {
  using Acc = vf;
  static PD_INLINE vf dot(vf sum, vu a, vu b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fma((vf)(a << 16), (vf)(b << 16), sum);
    return fma((vf)(a & 0xffff0000u), (vf)(b & 0xffff0000u), sum);
#endif
  }
};

struct Floats {
  using Acc = vf;
  static PD_INLINE vf dot(vf sum, vu a, vu b) { return fma((vf)a, (vf)b, sum); }
};

// Unsigned on the left, signed on the right.
struct BytesTimesInt8 {
  using Acc = vi;
  static PD_INLINE vi dot(vi sum, vu a, vu b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    for (int byte = 0; byte < 4; ++byte)
      sum += (vi)((a >> (8 * byte)) & 0xffu) * ((vi)(b << (24 - 8 * byte)) >> 24);
    return sum;
#endif
  }
};

// Sums that fit the registers: rows times vectors.
#if defined(__AVX512F__)
constexpr int kMaxSums = 24;
#elif defined(__AVX2__)
constexpr int kMaxSums = 6;
#else
constexpr int kMaxSums = 4;
#endif

// sums[r][2p..2p+1] += rows r x panel p, in order of depth.
template <class Unit, int R, int P>
static PD_INLINE void multiply_tile(const uint32_t* a, long a_stride, const uint32_t* b, long panel_stride, long depth,
                                    typename Unit::Acc (&sums)[R][2 * P]) {
  for (long k = 0; k < depth; ++k) {
    vu column[2 * P];
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; ++v) column[v] = load_units(b + (v / 2) * panel_stride + k * kPanelColumns + (v % 2) * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vu x = splat_units(a[r * a_stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; ++v) sums[r][v] = Unit::dot(sums[r][v], x, column[v]);
    }
  }
}

}  // namespace pdserve::PD_ISA
