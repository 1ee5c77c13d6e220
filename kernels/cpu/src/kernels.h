// What the instruction sets implement and the rest of the module calls: plain functions on plain memory, in one table.
//
// Panels: every matrix product reads its right-hand side as panels of 32 columns, [depth][32] units of 32 bits. A unit holds
// two bfloat16, one float or four int8 of one column that follow each other in depth; the left-hand side's rows are read
// in the same units. One output element is one chain of sums over depth, in order, whatever else is computed beside it:
// that is what makes every row independent of its neighbours, bit for bit.
#pragma once

#include <cstdint>

namespace pdserve {

constexpr int kLanes = 16;
constexpr int kPanelColumns = 32;
constexpr int kKeyTile = 64;  // Keys attended at once; tiles are aligned to absolute positions.

enum class Format : int { bf16 = 0, f32 = 1, int8 = 2 };
enum class KvType : int { bf16 = 0, f32 = 1, f16 = 2 };

inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

// A bfloat16 matrix in three quarters of its bytes, and nothing lost. Sign and exponent of a weight are one of few patterns:
// its code is the pattern's place in `patterns` (5 bits) below the 7 bits of its mantissa. Groups of four units of depth have
// the codes of their 4 x 32 units in 12-bit fields; 32 units of which one has a pattern without a place are kept as they are,
// too.
struct Codes {
  alignas(64) uint16_t patterns[32];  // Sign and exponent; the upper half is the lower half with the sign set.
  const uint32_t* fields;             // [columns / 32][depth / 4][2 halves of a panel][3][16]
  const long* first_plain;            // [columns / 32 + 1]: where a panel's begin in the two below.
  const int32_t* plain;               // At which depths of the panel, ascending.
  const uint32_t* plain_units;        // [...][32]
};
constexpr int kCodeGroup = 4;

// A weight matrix [columns (out features), depth (in features)] as panels; padding is zero.
struct Matrix {
  Format format;
  long columns;           // Rounded up to whole panels.
  long depth;             // In units.
  const uint32_t* units;  // [columns / 32][depth][32]; null where there are codes.
  const Codes* codes;     // bfloat16 only; null: units.
  const float* bias;      // [columns], or null.
  const float* scale;     // int8 only: [columns]
  const int32_t* sums;    // int8 only: [columns], the sum of each column.
};

// The left-hand side of a product. For int8, values are 16-bit integers: `units` holds the high bytes (offset by 128) and
// `low` the low bytes, so that x = scale * (256 * (high - 128) + low).
struct Rows {
  const uint32_t* units;
  const uint32_t* low;  // int8 only.
  const float* scale;   // int8 only: [rows]
  long stride;          // In units.
};

// Rows of one sequence in a step: [begin, end) at positions that end at context - 1.
struct Span {
  long begin, end, context;
  const int64_t* blocks;
};

struct KvCache {
  char* memory;
  KvType type;
  long block_stride, layer_stride, side_stride, head_stride;  // In elements; a head is [block_size][head_dim].
  long block_size;
};

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim;
  float scale;
};

struct Activations {  // Where a norm or SwiGLU leaves its result: rows ready to be multiplied.
  Format format;
  uint32_t* units;
  uint32_t* low;
  float* scale;
  long stride;
};

struct Kernels {
  const char* name;
  bool (*supported)();
  bool reads_codes;
  // out[row][column] = rows x matrix + bias, for panels [first, last), of which `out` has the columns. Float32, `stride` floats
  // between rows. add: out += that. scratch: one panel of units, for matrices of codes.
  void (*multiply)(const Rows& rows, long num_rows, const Matrix& matrix, long first, long last, float* out, long stride,
                   bool add, void* scratch);
  // Panels hold 16 columns of gate and the 16 of up beside them: out = silu(gate) * up, float32, 16 columns per panel; `add`
  // is ignored.
  void (*multiply_silu)(const Rows& rows, long num_rows, const Matrix& matrix, long first, long last, float* out,
                        long stride, bool add, void* scratch);
  // out = rms_norm(x) * weight as a row to multiply.
  void (*norm)(const float* x, const float* weight, float eps, long width, const Activations& out, long row);
  // Rounds one float row to what is multiplied.
  void (*to_rows)(const float* x, long width, const Activations& out, long row);
  // One head of one row: optional norm (weight may be null), rotation by angles [2][head_dim] (null: none), rounded to `type`.
  void (*rotate)(const float* x, const float* norm, float eps, const float* angles, int head_dim, KvType type, void* out);
  // Attention of query vectors that share a KV head: rows [first, last) of the span, `share` vectors each.
  // q: [last - first][share][head_dim] of the cache's type; out: float32 [share * head_dim] per row, `stride` apart.
  void (*attend)(const AttentionShape& shape, const KvCache& cache, const Span& span, long layer, int kv_head, long first,
                 long last, long window, const void* q, float* out, long stride, void* scratch);
  long (*attend_scratch_bytes)(const AttentionShape& shape);
};

// Query vectors of one KV head that are attended together.
constexpr long kQueryTile = 96;

}  // namespace pdserve
