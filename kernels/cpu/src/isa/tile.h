// Products of a few rows with a few panels, in registers: what matrix products and attention are made of.
#pragma once

#include "vec.h"

namespace pdserve::PD_ISA {

// The contents of a unit, and how a chain of sums adds the product of two units: at once, or term by term.
struct Bf16Pairs {
#if defined(__AVX512F__)
  static PD_INLINE vf dot(vf sum, vu a, vu b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fma((vf)(a << 16), (vf)(b << 16), sum);
    return fma((vf)(a & 0xffff0000u), (vf)(b & 0xffff0000u), sum);
#endif
  }
#else
  // The even elements of the pairs, then the odd ones.
  static constexpr int kTerms = 2;
  static PD_INLINE vs term(vsu units, int term) { return (vs)(term == 0 ? units << 16 : units & 0xffff0000u); }
#endif
};

struct Floats {
#if defined(__AVX512F__)
  static PD_INLINE vf dot(vf sum, vu a, vu b) { return fma((vf)a, (vf)b, sum); }
#else
  static constexpr int kTerms = 1;
  static PD_INLINE vs term(vsu units, int) { return (vs)units; }
#endif
};

// Unsigned on the left, signed on the right.
struct BytesTimesInt8 {
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

#if defined(__AVX512F__)
// Sums that fit the registers: rows times vectors.
constexpr int kMaxSums = 24;

// sums[r][2p..2p+1] += rows r x panel p, in order of depth.
template <class Unit, int R, int P>
static PD_INLINE void multiply_tile(const uint32_t* a, long a_stride, const uint32_t* b, long panel_stride, long depth,
                                    vf (&sums)[R][2 * P]) {
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
#else
constexpr int kRegisters = 16;
// With AVX2, a third row of pairs would take a third of the speed.
constexpr int kMaxSums = 4;

static PD_INLINE vsu splat_vsu(const uint32_t* p) {
#if defined(__AVX2__)
  return (vsu)_mm256_broadcast_ss(reinterpret_cast<const float*>(p));  // Else it is shifted before it is a vector.
#else
  return vsu{} + *p;
#endif
}

// Pieces of a row of sums whose chains are in registers together: with the units of all rows and of one piece, and a mask for
// the second term.
constexpr int pieces_at_once(int rows, int pieces, int terms) {
  return pieces > 1 && rows * pieces + rows + terms > kRegisters ? pieces_at_once(rows, pieces / 2, terms) : pieces;
}

// The same sums, in the same order. Compilers keep vectors that are longer than a register in memory, so each chain is one
// register, and a term of all chains comes before the next one: units of two terms need no registers for both.
template <class Unit, int R, int P>
static PD_INLINE void multiply_tile(const uint32_t* a, long a_stride, const uint32_t* b, long panel_stride, long depth,
                                    vf (&sums)[R][2 * P]) {
  constexpr int panel_pieces = kPanelColumns / kSingles, all = P * panel_pieces, count = pieces_at_once(R, all, Unit::kTerms);
  float* const results = reinterpret_cast<float*>(sums);
#pragma GCC unroll 1
  for (int first = 0; first < all; first += count) {
    vs chains[R][count];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int i = 0; i < count; ++i) chains[r][i] = load_vs(results + (r * all + first + i) * kSingles);
    for (long k = 0; k < depth; ++k) {
#pragma GCC unroll 2
      for (int term = 0; term < Unit::kTerms; ++term) {
        asm volatile("" ::: "memory");  // Else the units of both terms are read, and kept, together.
        vs x[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) x[r] = Unit::term(splat_vsu(a + r * a_stride + k), term);
#pragma GCC unroll 16
        for (int i = 0; i < count; ++i) {
          const int piece = first + i;
          const uint32_t* const at = b + piece / panel_pieces * panel_stride + piece % panel_pieces * kSingles;
          const vs y = Unit::term(load_vsu(at + k * kPanelColumns), term);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) chains[r][i] = fma(x[r], y, chains[r][i]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int i = 0; i < count; ++i) store_vs(results + (r * all + first + i) * kSingles, chains[r][i]);
  }
}
#endif

}  // namespace pdserve::PD_ISA
