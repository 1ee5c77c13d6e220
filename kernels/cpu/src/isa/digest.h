// XXH3 of long messages, 128 bits, computed from the bytes in registers while they are copied: memory is read once.
//
// Follows the specification of XXH3 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md) for more than 240 bytes; constants and
// names are its own. `kernels/cpu/src/digest.cpp` makes the secret.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

namespace pdserve::PD_ISA {

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9,
                   kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5, kPrimeMx1 = 0x165667919E3779F9;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words of messages are read as they are");
constexpr long kStripe = 64;
// Stripes between two scrambles. Each uses the secret 8 bytes further on.
constexpr long kStripesPerBlock = (kSecretBytes - kStripe) / 8;

static PD_INLINE uint64_t word(const void* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

#if defined(__AVX512F__)
typedef __m512i Chunk;
static PD_INLINE Chunk load_chunk(const void* p) { return _mm512_loadu_si512(p); }
static PD_INLINE void keep_chunk(Chunk& x) { asm volatile("" : "+v"(x)); }
static PD_INLINE void stream_chunk(void* p, Chunk x) { _mm512_stream_si512((__m512i*)p, x); }
static PD_INLINE Chunk accumulate(Chunk sum, Chunk data, Chunk secret) {
  const Chunk key = _mm512_xor_si512(data, secret);
  const Chunk product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
  return _mm512_add_epi64(_mm512_add_epi64(sum, product), _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)0x4E));
}
static PD_INLINE Chunk scramble(Chunk sum, Chunk secret) {
  const Chunk mixed = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), secret);
  const Chunk prime = _mm512_set1_epi64(kPrime32_1);
  const Chunk high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
  return _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
}
#elif defined(__AVX2__)
typedef __m256i Chunk;
static PD_INLINE Chunk load_chunk(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static PD_INLINE void keep_chunk(Chunk& x) { asm volatile("" : "+x"(x)); }
static PD_INLINE void stream_chunk(void* p, Chunk x) { _mm256_stream_si256((__m256i*)p, x); }
static PD_INLINE Chunk accumulate(Chunk sum, Chunk data, Chunk secret) {
  const Chunk key = _mm256_xor_si256(data, secret);
  const Chunk product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
  return _mm256_add_epi64(_mm256_add_epi64(sum, product), _mm256_shuffle_epi32(data, 0x4E));
}
static PD_INLINE Chunk scramble(Chunk sum, Chunk secret) {
  const Chunk mixed = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), secret);
  const Chunk prime = _mm256_set1_epi64x(kPrime32_1);
  const Chunk high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}
#else
struct Chunk {
  uint64_t low, high;
};
static PD_INLINE Chunk load_chunk(const void* p) { return {word(p), word((const char*)p + 8)}; }
static PD_INLINE void keep_chunk(Chunk& x) { asm volatile("" : "+r"(x.low), "+r"(x.high)); }
static PD_INLINE void stream_chunk(void* p, Chunk x) { std::memcpy(p, &x, sizeof x); }
static PD_INLINE uint64_t product_of(uint64_t key) { return (key & 0xFFFFFFFF) * (key >> 32); }
static PD_INLINE Chunk accumulate(Chunk sum, Chunk data, Chunk secret) {
  return {sum.low + product_of(data.low ^ secret.low) + data.high,
          sum.high + product_of(data.high ^ secret.high) + data.low};
}
static PD_INLINE Chunk scramble(Chunk sum, Chunk secret) {
  return {(sum.low ^ (sum.low >> 47) ^ secret.low) * kPrime32_1, (sum.high ^ (sum.high >> 47) ^ secret.high) * kPrime32_1};
}
#endif

constexpr int kChunks = kStripe / sizeof(Chunk);

// Eight sums, as many registers as they take.
struct Sums {
  Chunk chunks[kChunks];

  PD_INLINE void start() {
    const uint64_t first[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                               kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    for (int i = 0; i < kChunks; ++i) chunks[i] = load_chunk((const char*)first + i * sizeof(Chunk));
  }

  template <bool copies>
  PD_INLINE void add(const char* source, char* target, const uint8_t* secret) {
    for (int i = 0; i < kChunks; ++i) {
      const long at = i * sizeof(Chunk);
      Chunk data = load_chunk(source + at);
      if (copies) {
        // Loaded once, and not again for the digest: another process may write to the source.
        keep_chunk(data);
        stream_chunk(target + at, data);
      }
      chunks[i] = accumulate(chunks[i], data, load_chunk(secret + at));
    }
  }

  PD_INLINE void mix(const uint8_t* secret) {
    for (int i = 0; i < kChunks; ++i) chunks[i] = scramble(chunks[i], load_chunk(secret + i * sizeof(Chunk)));
  }
};

static uint64_t merged(const Sums& sums, const uint8_t* secret, uint64_t start) {
  const char* bytes = (const char*)sums.chunks;
  for (int i = 0; i < 4; ++i) {
    const uint64_t left = word(bytes + 16 * i) ^ word(secret + 16 * i);
    const uint64_t right = word(bytes + 16 * i + 8) ^ word(secret + 16 * i + 8);
    const unsigned __int128 product = (unsigned __int128)left * right;
    start += (uint64_t)product ^ (uint64_t)(product >> 64);
  }
  start = (start ^ (start >> 37)) * kPrimeMx1;
  return start ^ (start >> 32);
}

template <bool copies>
static void digest_stripes(const char* source, char* target, long num_bytes, const uint8_t* secret, uint8_t* digest) {
  Sums sums;
  sums.start();
  // The last stripe is added apart, and overlaps the one before unless the length is a multiple.
  const long stripes = (num_bytes - 1) / kStripe;
  long stripe = 0;
  for (const long whole = stripes - stripes % kStripesPerBlock; stripe < whole; stripe += kStripesPerBlock) {
    for (long i = 0; i < kStripesPerBlock; ++i) {
      const long at = (stripe + i) * kStripe;
      sums.add<copies>(source + at, target + at, secret + 8 * i);
    }
    sums.mix(secret + kSecretBytes - kStripe);
  }
  for (long i = 0; stripe + i < stripes; ++i) {
    const long at = (stripe + i) * kStripe;
    sums.add<copies>(source + at, target + at, secret + 8 * i);
  }
  // What was copied counts: another process may write to the source.
  if (copies) std::memcpy(target + stripes * kStripe, source + stripes * kStripe, num_bytes - stripes * kStripe);
  sums.add<false>((copies ? target : source) + num_bytes - kStripe, nullptr, secret + kSecretBytes - kStripe - 7);
  const uint64_t length = num_bytes;
  const uint64_t low = merged(sums, secret + 11, length * kPrime64_1);
  const uint64_t high = merged(sums, secret + kSecretBytes - kStripe - 11, ~(length * kPrime64_2));
  // Big-endian, the high half first.
  for (int i = 0; i < 8; ++i) {
    digest[i] = high >> (56 - 8 * i);
    digest[8 + i] = low >> (56 - 8 * i);
  }
}

static void digest(const char* source, char* target, long num_bytes, const uint8_t* secret, uint8_t* digest) {
  if (target == nullptr) {
    digest_stripes<false>(source, nullptr, num_bytes, secret, digest);
  } else if (reinterpret_cast<uintptr_t>(target) % sizeof(Chunk) == 0) {
    // Past the caches, so that no line of the target is read first.
    digest_stripes<true>(source, target, num_bytes, secret, digest);
#if defined(__AVX2__)
    _mm_sfence();
#endif
  } else {
    std::memcpy(target, source, num_bytes);
    digest_stripes<false>(target, nullptr, num_bytes, secret, digest);
  }
}

}  // namespace pdserve::PD_ISA
