// Philox4x32-10: the random words of tokens, as `pdserve/engine/philox.py` has them.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include "elementary.h"

namespace pdserve::PD_ISA {

// Words per counter: those of adjacent tokens.
constexpr int kWords = 4;

// Products of the lower halves.
static PD_INLINE vul multiply_lower(vul a, vul b) {
#if defined(__AVX512F__)
  return (vul)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vul)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vul)__builtin_ia32_pmuludq128((__attribute__((vector_size(16))) int)a, (__attribute__((vector_size(16))) int)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

struct Philox {
  uint64_t seed, choice, position;

  // The words of `kDoubles` counters: words 0 and 1 of each, the first one in the lower half, then words 2 and 3.
  PD_INLINE void words(vul counters, vul& first, vul& second) const {
    vul c0 = counters, c1 = vul{} + position, c2 = vul{} + choice, c3{};
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      // The upper halves are undefined.
      const vul a = multiply_lower(c0, vul{} + 0xD2511F53u), b = multiply_lower(c2, vul{} + 0xCD9E8D57u);
      c0 = (b >> 32) ^ c1 ^ key0;
      c1 = b;
      c2 = (a >> 32) ^ c3 ^ key1;
      c3 = a;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    first = (c0 & 0xffffffffu) | (c1 << 32);
    second = (c2 & 0xffffffffu) | (c3 << 32);
  }

  // The words of `kWords * kDoubles` tokens from the first one of a counter on.
  PD_INLINE void words_of_range(uint64_t counter, uint32_t* out) const {
    vul lanes, first, second;
    for (int i = 0; i < kDoubles; ++i) lanes[i] = i;
    words(lanes + counter, first, second);
    for (int i = 0; i < kDoubles; ++i) {
      const uint64_t pair[2] = {first[i], second[i]};
      std::memcpy(out + kWords * i, pair, sizeof(pair));
    }
  }

  // The words of `kDoubles` tokens.
  PD_INLINE void words_of_ids(const int32_t* ids, uint32_t* out) const {
    typedef uint32_t half __attribute__((vector_size(4 * kDoubles)));
    half narrow;
    std::memcpy(&narrow, ids, sizeof(narrow));
    const vul wide = __builtin_convertvector(narrow, vul);
    vul first, second;
    words(wide / kWords, first, second);
    const vul pair = (wide & 2) != 0 ? second : first;
    narrow = __builtin_convertvector((wide & 1) != 0 ? pair >> 32 : pair, half);
    std::memcpy(out, &narrow, sizeof(narrow));
  }
};

}  // namespace pdserve::PD_ISA
