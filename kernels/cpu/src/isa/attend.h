// Attention over block tables with an online softmax. A query vector walks the keys in tiles of 64 at absolute positions,
// with a running maximum m_i, a running sum l_i and a weighted sum of values acc. A tile whose keys it must not see leaves
// this state unchanged, bit for bit. So a row's result depends neither on the rows it is attended with, nor on how a prompt
// was chunked, nor on whether the row is part of a prompt or was decoded.
//
// Source: FlashAttention-2 (Dao 2023).
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "tile.h"

namespace pdserve::PD_ISA {

// Reading and multiplying keys and values of each type.
struct Bf16Kv {
  using Unit = Bf16Pairs;
  using Element = uint16_t;
  static constexpr int per_unit = 2;
  static PD_INLINE uint32_t unit(const Element* p) { return p[0] | uint32_t(p[1]) << 16; }
  static PD_INLINE uint32_t unit_of(Element first, Element second) { return first | uint32_t(second) << 16; }
};

struct F32Kv {
  using Unit = Floats;
  using Element = float;
  static constexpr int per_unit = 1;
  static PD_INLINE uint32_t unit(const Element* p) { return __builtin_bit_cast(uint32_t, *p); }
  static PD_INLINE uint32_t unit_of(Element first, Element) { return __builtin_bit_cast(uint32_t, first); }
};

struct F16Kv {
  using Unit = Floats;
  using Element = uint16_t;
  static constexpr int per_unit = 1;
  static PD_INLINE uint32_t unit(const Element* p) { return __builtin_bit_cast(uint32_t, from_f16(*p)); }
  static PD_INLINE uint32_t unit_of(Element first, Element) { return unit(&first); }
};

constexpr int kKeyPanels = kKeyTile / kPanelColumns;
// Where registers are few, chains of several vectors share the units of a key, a piece of a row at a time.
constexpr int kMaxVectors = std::max(kMaxSums / (2 * kKeyPanels), 4);

struct Scratch {
  // [2 panels][head_dim / per_unit][32]
  uint32_t* keys;
  // [panels of head_dim][64 / per_unit][32]
  uint32_t* values;
  // [kQueryTile + queries_per_kv][padded head_dim]
  float* acc;
  // [kQueryTile + queries_per_kv]
  float* m_i;
  // [kQueryTile + queries_per_kv]
  float* l_i;
  // One row of zeros.
  uint32_t* zeros;
};

static long padded(long head_dim) { return ceil_div(head_dim, kPanelColumns) * kPanelColumns; }

static long max_vectors(const AttentionShape& shape) { return kQueryTile + shape.num_heads / shape.num_kv_heads; }

static long attend_scratch_bytes(const AttentionShape& shape) {
  const long dim = padded(shape.head_dim);
  return 4 * (kKeyTile * dim * 2 + max_vectors(shape) * (dim + 2) + dim) + 64;
}

static Scratch carve(const AttentionShape& shape, void* memory) {
  const long dim = padded(shape.head_dim), vectors = max_vectors(shape);
  auto* at = static_cast<uint32_t*>(memory);
  Scratch scratch;
  scratch.keys = at, at += kKeyTile * dim;
  scratch.values = at, at += kKeyTile * dim;
  scratch.acc = reinterpret_cast<float*>(at), at += vectors * dim;
  scratch.m_i = reinterpret_cast<float*>(at), at += vectors;
  scratch.l_i = reinterpret_cast<float*>(at), at += vectors;
  scratch.zeros = at;
  return scratch;
}

#if defined(__AVX512F__)
// Transposes 16 rows of 16 units; out[i] receives unit i of every row.
static PD_INLINE void transpose(const void* const* rows, long offset, uint32_t* out, long stride) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(static_cast<const uint32_t*>(rows[i]) + offset);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i low = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), high = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    const __m512i low2 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd), high2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    _mm512_storeu_si512(out + i * stride, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_storeu_si512(out + (i + 8) * stride, _mm512_shuffle_i32x4(low, high, 0xdd));
    _mm512_storeu_si512(out + (i + 4) * stride, _mm512_shuffle_i32x4(low2, high2, 0x88));
    _mm512_storeu_si512(out + (i + 12) * stride, _mm512_shuffle_i32x4(low2, high2, 0xdd));
  }
}
#endif

#if defined(__AVX512BW__)
constexpr bool kHasPairs = true;

// Interleaves two rows of 32 values of 16 bits into the units of 32 columns.
static PD_INLINE void pair_up(vu first, vu second, vu* units) {
  typedef uint16_t Indices __attribute__((vector_size(64)));
  constexpr Indices low{0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  units[0] = (vu)_mm512_permutex2var_epi16((__m512i)first, (__m512i)low, (__m512i)second);
  units[1] = (vu)_mm512_permutex2var_epi16((__m512i)first, (__m512i)(low + 16), (__m512i)second);
}
#else
constexpr bool kHasPairs = false;

[[maybe_unused]] static void pair_up(vu, vu, vu*) {}
#endif

template <class Kv>
struct Attention {
  using Element = typename Kv::Element;
  using Unit = typename Kv::Unit;
  static constexpr int per_unit = Kv::per_unit;

  const AttentionShape& shape;
  const KvCache& cache;
  const Span& span;
  long layer;
  int kv_head;
  // 0: none.
  long window;
  Scratch scratch;

  long queries_per_kv() const { return shape.num_heads / shape.num_kv_heads; }
  long dim() const { return shape.head_dim; }

  // Addresses of the keys (`kv` 0) or values (1) of a tile that begins at `begin`; keys from `end` on are zeros.
  void gather(long kv, long begin, long end, const void** rows) const {
    const long head = layer * cache.layer_stride + kv * cache.kv_stride + kv_head * cache.head_stride;
    const auto* memory = reinterpret_cast<const Element*>(cache.memory) + head;
    long index = begin / cache.block_size, offset = begin % cache.block_size;
    for (long key = begin; key < begin + kKeyTile; ++key) {
      rows[key - begin] = key < end ? static_cast<const void*>(memory + span.blocks[index] * cache.block_stride + offset * dim())
                                    : scratch.zeros;
      if (++offset == cache.block_size) offset = 0, ++index;
    }
  }

  // Blocks are scattered in memory, so the hardware prefetcher cannot predict the next row.
  void prefetch(const void* const* rows) const {
    const long bytes = dim() * sizeof(Element);
    for (int key = 0; key < kKeyTile; ++key)
      for (long at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(rows[key]) + at);
  }

  void pack_keys(const void* const* rows) const {
    const long units = dim() / per_unit, panel_units = units * kPanelColumns;
    for (int first = 0; first < kKeyTile; first += kLanes) {
      uint32_t* out = scratch.keys + first / kPanelColumns * panel_units + first % kPanelColumns;
      long unit = 0;
#if defined(__AVX512F__)
      if constexpr (sizeof(Element) * per_unit == 4)
        for (; unit + kLanes <= units; unit += kLanes)
          transpose(rows + first, unit, out + unit * kPanelColumns, kPanelColumns);
#endif
      for (; unit < units; ++unit)
        for (int key = 0; key < kLanes; ++key)
          out[unit * kPanelColumns + key] = Kv::unit(static_cast<const Element*>(rows[first + key]) + unit * per_unit);
    }
  }

  void pack_values(const void* const* rows) const {
    const long panel_units = kKeyTile / per_unit * kPanelColumns;
    for (int key = 0; key < kKeyTile; key += per_unit) {
      const auto* first = static_cast<const Element*>(rows[key]);
      const auto* second = static_cast<const Element*>(rows[key + per_unit - 1]);
      for (long column = 0; column < dim(); column += kPanelColumns) {
        uint32_t* out = scratch.values + column / kPanelColumns * panel_units + key / per_unit * kPanelColumns;
        const long count = dim() - column < kPanelColumns ? dim() - column : kPanelColumns;
        if (count == kPanelColumns) {
          for (int i = 0; i < kPanelColumns; ++i) out[i] = Kv::unit_of(first[column + i], second[column + i]);
        } else {
          for (int i = 0; i < kPanelColumns; ++i)
            out[i] = i < count ? Kv::unit_of(first[column + i], second[column + i]) : 0;
        }
      }
    }
  }

  // Scales the scores of one query to powers of two and masks invisible keys with -infinity; returns the largest score.
  PD_INLINE float mask(vf (&scores)[2 * kKeyPanels], long position, long begin) const {
    const vf minus_infinity = splat(-std::numeric_limits<float>::infinity());
    const vf scale = splat(shape.scale * 1.44269504088896341f);
    for (vf& chunk : scores) chunk *= scale;
    if (begin + kKeyTile - 1 > position || (window != 0 && begin <= position - window)) {
      const vi last = vi{} + int32_t(position), first = vi{} + int32_t(window == 0 ? 0 : position - window + 1);
      vi key = vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + int32_t(begin);
      for (vf& chunk : scores) {
        chunk = ((key <= last) & (key >= first)) ? chunk : minus_infinity;
        key += kLanes;
      }
    }
    vf top = scores[0];
    for (const vf chunk : scores) top = max(top, chunk);
    return largest(top);
  }

  // Turns scores into weights relative to the maximum `m_i`; returns their sum.
  PD_INLINE float exponentiate(const vf (&scores)[2 * kKeyPanels], float m_i, uint32_t* weights) const {
    vf total{};
    for (int v = 0; v < 2 * kKeyPanels; ++v) {
      const vf p = exp2_of_negative(scores[v] - splat(m_i));
      total += p;
      if constexpr (per_unit == 2)
        store_bf16(reinterpret_cast<uint16_t*>(weights) + v * kLanes, p);
      else
        store(reinterpret_cast<float*>(weights) + v * kLanes, p);
    }
    return sum(total);
  }

  // Multiplies weights with values in place, in the cache. Used where few vectors meet the values, since packing them would
  // then cost more than it saves.
  static constexpr bool kReadsRows = kHasPairs && std::is_same_v<Unit, Bf16Pairs>;

  template <int R, int P>
  PD_INLINE void multiply_rows([[maybe_unused]] const uint32_t* weights, [[maybe_unused]] const void* const* rows,
                               [[maybe_unused]] long column, [[maybe_unused]] vf (&sums)[R][2 * P]) const {
    if constexpr (kReadsRows) {
      for (int key = 0; key < kKeyTile; key += 2) {
        const auto* first = static_cast<const Element*>(rows[key]) + column;
        const auto* second = static_cast<const Element*>(rows[key + 1]) + column;
        vu pairs[2 * P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
          pair_up(load_units(first + p * kPanelColumns), load_units(second + p * kPanelColumns), pairs + 2 * p);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const vu weight = splat_units(weights[r * (kKeyTile / 2) + key / 2]);
#pragma GCC unroll 4
          for (int v = 0; v < 2 * P; ++v) sums[r][v] = Unit::dot(sums[r][v], weight, pairs[v]);
        }
      }
    }
  }

  // `rows`: values in the cache; null: packed values.
  template <int R, int P>
  PD_INLINE void add_values(const uint32_t* weights, vf alpha, const void* const* rows, long vector, long panel) const {
    const long stride = padded(dim()), panel_units = kKeyTile / per_unit * kPanelColumns;
    float* at = scratch.acc + vector * stride + panel * kPanelColumns;
    vf sums[R][2 * P];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2 * P; ++v) sums[r][v] = load(at + r * stride + v * kLanes) * splat(alpha[r]);
    if (rows != nullptr)
      multiply_rows<R, P>(weights, rows, panel * kPanelColumns, sums);
    else
      multiply_tile<Unit, R, P>(weights, kKeyTile / per_unit, scratch.values + panel * panel_units, panel_units,
                                kKeyTile / per_unit, sums);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2 * P; ++v) store(at + r * stride + v * kLanes, sums[r][v]);
  }

  // Updates the state of vectors [vector, vector + R) with the tile of keys that begins at `begin`.
  template <int R>
  void attend_tile(const uint32_t* q, const void* const* rows, long vector, long first_position, long begin) const {
    const long units = dim() / per_unit;
    vf scores[R][2 * kKeyPanels]{};
    multiply_tile<Unit, R, kKeyPanels>(q + vector * units, units, scratch.keys, units * kPanelColumns, units, scores);
    alignas(64) uint32_t weights[R][kKeyTile / per_unit];
    float base[R];
    vf difference{};
    for (int r = 0; r < R; ++r) {
      float* m_i = scratch.m_i + vector + r;
      const float m_ij = std::fmax(*m_i, mask(scores[r], first_position + (vector + r) / queries_per_kv(), begin));
      // A query that has seen no key yet keeps -infinity, but its scores are compared with a finite number.
      base[r] = std::fmax(m_ij, std::numeric_limits<float>::lowest());
      difference[r] = *m_i - base[r];
      *m_i = m_ij;
    }
    const vf alpha = exp2_of_negative(difference);
    for (int r = 0; r < R; ++r) {
      float* l_i = scratch.l_i + vector + r;
      *l_i = *l_i * alpha[r] + exponentiate(scores[r], base[r], weights[r]);
    }
    const long panels = padded(dim()) / kPanelColumns;
    long panel = 0;
    for (; panel + 2 <= panels; panel += 2) add_values<R, 2>(weights[0], alpha, rows, vector, panel);
    if (panel < panels) add_values<R, 1>(weights[0], alpha, rows, vector, panel);
  }

  template <int R = kMaxVectors>
  void attend_some(long count, const uint32_t* q, const void* const* rows, long vector, long first_position,
                 long begin) const {
    if constexpr (R > 1)
      if (count < R) return attend_some<R - 1>(count, q, rows, vector, first_position, begin);
    attend_tile<R>(q, rows, vector, first_position, begin);
  }

  void run(long first, long last, const uint32_t* q, float* out, long stride) const {
    const long vectors = (last - first) * queries_per_kv(), row_floats = padded(dim());
    const long first_position = span.context - (span.end - first), end_key = first_position + (last - first);
    const long begin_key = window == 0 || first_position < window ? 0 : first_position - window + 1;
    std::memset(scratch.acc, 0, vectors * row_floats * sizeof(float));
    std::memset(scratch.l_i, 0, vectors * sizeof(float));
    std::memset(scratch.zeros, 0, row_floats * sizeof(float));
    for (long i = 0; i < vectors; ++i) scratch.m_i[i] = -std::numeric_limits<float>::infinity();
    const bool in_place = kReadsRows && vectors <= kMaxVectors && dim() % kPanelColumns == 0;
    // Two tiles of values: those read in place are needed until after the next tile is prefetched.
    const void *keys[kKeyTile], *values[2][kKeyTile];
    const auto prefetch_tile = [&](long begin) {
      gather(0, begin, end_key, keys);
      prefetch(keys);
      gather(1, begin, end_key, values[begin / kKeyTile % 2]);
      prefetch(values[begin / kKeyTile % 2]);
    };
    const long start = begin_key / kKeyTile * kKeyTile;
    prefetch_tile(start);
    for (long begin = start; begin < end_key; begin += kKeyTile) {
      const void* const* rows = values[begin / kKeyTile % 2];
      pack_keys(keys);
      if (!in_place) pack_values(rows);
      if (begin + kKeyTile < end_key) prefetch_tile(begin + kKeyTile);
      for (long vector = 0; vector < vectors; vector += kMaxVectors) {
        const long count = vectors - vector < kMaxVectors ? vectors - vector : kMaxVectors;
        const long last_position = first_position + (vector + count - 1) / queries_per_kv();
        if (begin <= last_position) attend_some(count, q, in_place ? rows : nullptr, vector, first_position, begin);
      }
    }
    for (long vector = 0; vector < vectors; ++vector) {
      float* to = out + vector / queries_per_kv() * stride + vector % queries_per_kv() * dim();
      const float factor = 1.0f / scratch.l_i[vector];
      for (long i = 0; i < dim(); ++i) to[i] = scratch.acc[vector * row_floats + i] * factor;
    }
  }
};

static void attend(const AttentionShape& shape, const KvCache& cache, const Span& span, long layer, int kv_head,
                   long first, long last, long window, const void* q, float* out, long stride, void* memory) {
  const auto* units = static_cast<const uint32_t*>(q);
  const Scratch scratch = carve(shape, memory);
  switch (cache.type) {
    case KvType::bf16:
      return Attention<Bf16Kv>{shape, cache, span, layer, kv_head, window, scratch}.run(first, last, units, out, stride);
    case KvType::f32:
      return Attention<F32Kv>{shape, cache, span, layer, kv_head, window, scratch}.run(first, last, units, out, stride);
    case KvType::f16:
      return Attention<F16Kv>{shape, cache, span, layer, kv_head, window, scratch}.run(first, last, units, out, stride);
  }
}

}  // namespace pdserve::PD_ISA
