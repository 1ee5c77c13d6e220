// The table of functions that each instruction set implements: plain functions on plain memory.
//
// Every matrix product reads its right-hand side as panels of 32 columns, [depth][32] units of 32 bits. A unit holds two
// bfloat16, one float or four int8 of one column, adjacent in depth; the left-hand side's rows are read in the same units.
// One output element is one chain of sums over depth, in order, whatever else is computed at the same time. So every row
// is independent of its neighbours, bit for bit.
#pragma once

#include <cstdint>

namespace pdserve {

constexpr int kLanes = 16;
constexpr int kPanelColumns = 32;
// Keys attended at once; tiles are aligned to absolute positions.
constexpr int kKeyTile = 64;
// The secret of a digest, and what XXH3 calls a long message: shorter ones have other rules.
constexpr long kSecretBytes = 192;
constexpr long kLeastDigestedBytes = 241;

enum class Format : int { bf16 = 0, f32 = 1, int8 = 2 };
enum class KvType : int { bf16 = 0, f32 = 1, f16 = 2 };

inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

// Lossless compression of a bfloat16 matrix to three quarters of its bytes. Few patterns of sign and exponent occur, so a
// weight's code is the index of its pattern (5 bits) and the 7 bits of its mantissa. Each group of four units of depth has
// the codes of its 4 x 32 units in 12-bit fields. Where one of 32 units has a pattern that is not in the table, the 32 are
// stored uncompressed as well.
struct Codes {
  // Sign and exponent; the upper half is the lower half with the sign set.
  alignas(64) uint16_t patterns[32];
  // [columns / 32][depth / 4][2 halves of a panel][3][16]
  const uint32_t* fields;
  // [columns / 32 + 1]: first entry of each panel in the two arrays below.
  const long* first_plain;
  // Depths of the uncompressed units within their panel, ascending.
  const int32_t* plain;
  // The uncompressed units, [...][32]
  const uint32_t* plain_units;
};
constexpr int kCodeGroup = 4;

// A weight matrix [columns (out features), depth (in features)] as panels; padding is zero.
struct Matrix {
  Format format;
  // Rounded up to whole panels.
  long columns;
  // In units.
  long depth;
  // [columns / 32][depth][32]; null where there are codes.
  const uint32_t* units;
  // bfloat16 only; null: units.
  const Codes* codes;
  // [columns], or null.
  const float* bias;
  // int8 only: [columns]
  const float* scale;
  // int8 only: [columns], the sum of each column.
  const int32_t* sums;
};

// The left-hand side of a product. For int8, values are 16-bit integers: `units` holds the high bytes (offset by 128) and
// `low` the low bytes, so that x = scale * (256 * (high - 128) + low).
struct Rows {
  const uint32_t* units;
  // int8 only.
  const uint32_t* low;
  // int8 only: [rows]
  const float* scale;
  // In units.
  long stride;
};

// Rows [begin, end) of a step belong to one sequence, at positions that end at context - 1.
struct Span {
  long begin, end, context;
  const int64_t* blocks;
};

struct KvCache {
  char* memory;
  KvType type;
  // In elements; `kv_stride` is from K to V. A head of a block is [block_size][head_dim].
  long block_stride, layer_stride, kv_stride, head_stride;
  long block_size;
};

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim;
  float scale;
};

// The result of a norm or of SwiGLU: rows ready to be multiplied.
struct Activations {
  Format format;
  uint32_t* units;
  uint32_t* low;
  float* scale;
  long stride;
};

struct SampleRequest;
struct SampleResult;
struct SampleScratch;

struct Kernels {
  const char* name;
  bool (*supported)();
  bool reads_codes;
  // out[row][column] = rows x matrix + bias for panels [first, last); column 0 of `out` is the first of these. Float32, rows
  // `stride` floats apart. add: out += that. scratch: one panel of units, for matrices of codes.
  void (*multiply)(const Rows& rows, long num_rows, const Matrix& matrix, long first, long last, float* out, long stride,
                   bool add, void* scratch);
  // Each panel holds 16 columns of gate and the same 16 of up: out = silu(gate) * up, float32, 16 columns per panel. `add` is
  // ignored.
  void (*multiply_silu)(const Rows& rows, long num_rows, const Matrix& matrix, long first, long last, float* out,
                        long stride, bool add, void* scratch);
  // out = rms_norm(x) * weight as a row to multiply.
  void (*norm)(const float* x, const float* weight, float eps, long width, const Activations& out, long row);
  // Rounds one row of floats to the format that is multiplied.
  void (*to_rows)(const float* x, long width, const Activations& out, long row);
  // One head of one row: optional norm (weight may be null), rotation by angles [2][head_dim] (null: none), rounded to `type`.
  void (*rotate)(const float* x, const float* norm, float eps, const float* angles, int head_dim, KvType type, void* out);
  // Attention of the query vectors that share a KV head: rows [first, last) of the span, `queries_per_kv` vectors each.
  // q: [last - first][queries_per_kv][head_dim] of the cache's type; out: float32 [queries_per_kv * head_dim] per row,
  // `stride` apart.
  void (*attend)(const AttentionShape& shape, const KvCache& cache, const Span& span, long layer, int kv_head, long first,
                 long last, long window, const void* q, float* out, long stride, void* scratch);
  long (*attend_scratch_bytes)(const AttentionShape& shape);
  // The token of one row. `logits`: edited, or the same as `raw`.
  void (*sample_row)(const float* raw, const float* logits, long vocab_size, const SampleRequest& request,
                     const SampleScratch& scratch, SampleResult& result);
  // XXH3 of `num_bytes` from `source`, at least `kLeastDigestedBytes`, as 16 bytes; copies them to `target` unless that is null.
  void (*digest)(const char* source, char* target, long num_bytes, const uint8_t* secret, uint8_t* digest);
};

// Query vectors of one KV head that are attended together, about.
constexpr long kQueryTile = 96;

}  // namespace pdserve
