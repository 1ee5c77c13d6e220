// Products of rows with panels, and the steps between the sums and the stored result.
#pragma once

#include <algorithm>

#include "codes.h"
#include "tile.h"

namespace pdserve::PD_ISA {

constexpr int kMaxRows = kMaxSums / 2;
// Rows multiplied with a panel while it is in the cache.
constexpr long kRowBlock = 32 * kMaxRows;

// Panels computed together when there are few rows: enough chains of sums to hide the latency of one.
constexpr int panels_at_once(int rows, int max_sums) {
  return rows * 8 <= max_sums ? 4 : rows * 4 <= max_sums ? 2 : 1;
}

struct Task {
  const Rows& rows;
  const Matrix& matrix;
  // Result of the panel `first`.
  float* out;
  long stride, first;
  // Whether to add to what is in `out`.
  bool add;
  // The units of the only panel, where the matrix has codes.
  const uint32_t* expanded = nullptr;
};

// Float formats: the sums are the result.
template <class Unit>
struct FloatProduct {
  static constexpr int max_sums = kMaxSums;
  static constexpr int max_panels = 4;

  template <int R, int P>
  static PD_INLINE void tile(const Task& task, long row, long panel, vf (&result)[R][2 * P]) {
    for (auto& line : result)
      for (vf& x : line) x = vf{};
    const long panel_units = task.matrix.depth * kPanelColumns;
    const uint32_t* units = task.expanded != nullptr ? task.expanded : task.matrix.units + panel * panel_units;
    multiply_tile<Unit, R, P>(task.rows.units + row * task.rows.stride, task.rows.stride, units, panel_units,
                              task.matrix.depth, result);
  }
};

#if defined(__AVX512BW__)
// The same sums from codes, decoded between memory and multiplication, eight rows at a time. With more rows than this it is
// cheaper to decode a panel once.
constexpr long kFewRowsOfCodes = 48;

struct CodedProduct {
  static constexpr int max_sums = 16;
  static constexpr int max_panels = 1;

  template <int R, int P>
  static PD_INLINE void tile(const Task& task, long row, long panel, vf (&result)[R][2 * P]) {
    static_assert(P == 1);
    for (auto& line : result) line[0] = line[1] = vf{};
    const uint32_t* x = task.rows.units + row * task.rows.stride;
    CodedPanel coded(task.matrix, panel);
    for (long group = 0; group < task.matrix.depth / kCodeGroup; ++group) {
      vu units[kCodeGroup][2];
      coded.next(group, units, R > 2 ? 6144 : 0);
#pragma GCC unroll 4
      for (int k = 0; k < kCodeGroup; ++k)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const vu splat = splat_units(x[r * task.rows.stride + group * kCodeGroup + k]);
          result[r][0] = Bf16Pairs::dot(result[r][0], splat, units[k][0]);
          result[r][1] = Bf16Pairs::dot(result[r][1], splat, units[k][1]);
        }
    }
  }
};
#endif

// 16-bit rows times int8 columns, in exact integers, with separate sums for the high and the low bytes.
struct Int8Product {
  static constexpr int max_sums = kMaxSums / 2;
  static constexpr int max_panels = 4;

  template <int R, int P>
  static PD_INLINE void tile(const Task& task, long row, long panel, vf (&result)[R][2 * P]) {
    const Matrix& matrix = task.matrix;
    const long panel_units = matrix.depth * kPanelColumns, stride = task.rows.stride;
    const uint32_t* high = task.rows.units + row * stride;
    const uint32_t* low = task.rows.low + row * stride;
    const uint32_t* b = matrix.units + panel * panel_units;
    vi high_sums[R][2 * P]{}, low_sums[R][2 * P]{};
    for (long k = 0; k < matrix.depth; ++k) {
      vu column[2 * P];
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; ++v)
        column[v] = load_units(b + (v / 2) * panel_units + k * kPanelColumns + (v % 2) * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vu x = splat_units(high[r * stride + k]), y = splat_units(low[r * stride + k]);
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; ++v) {
          high_sums[r][v] = BytesTimesInt8::dot(high_sums[r][v], x, column[v]);
          low_sums[r][v] = BytesTimesInt8::dot(low_sums[r][v], y, column[v]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2 * P; ++v) {
        const long column = panel * kPanelColumns + v * kLanes;
        const vi offset = (vi)load_units(matrix.sums + column) * 128;
        const vf wide = fma(__builtin_convertvector(high_sums[r][v] - offset, vf), splat(256.0f),
                            __builtin_convertvector(low_sums[r][v], vf));
        result[r][v] = wide * (load(matrix.scale + column) * splat(task.rows.scale[row + r]));
      }
  }
};

template <int R, int P>
static PD_INLINE void add_bias(const Task& task, long panel, vf (&x)[R][2 * P]) {
  if (task.matrix.bias == nullptr) return;
  for (int v = 0; v < 2 * P; ++v) {
    const vf bias = load(task.matrix.bias + panel * kPanelColumns + v * kLanes);
    for (int r = 0; r < R; ++r) x[r][v] += bias;
  }
}

struct StoreSums {
  template <int R, int P>
  static PD_INLINE void finish(const Task& task, long row, long panel, vf (&x)[R][2 * P]) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2 * P; ++v) {
        float* to = task.out + (row + r) * task.stride + (panel - task.first) * kPanelColumns + v * kLanes;
        store(to, task.add ? load(to) + x[r][v] : x[r][v]);
      }
  }
};

// A panel is 16 columns of gate and the same 16 of up. `add` is ignored.
struct StoreSilu {
  template <int R, int P>
  static PD_INLINE void finish(const Task& task, long row, long panel, vf (&x)[R][2 * P]) {
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p)
        store(task.out + (row + r) * task.stride + (panel - task.first + p) * kLanes,
              silu(x[r][2 * p]) * x[r][2 * p + 1]);
  }
};

template <class Product, class Finish, int R, int P>
static void tiles(const Task& task, long row, long first, long last) {
  for (long panel = first; panel < last; panel += P) {
    vf sums[R][2 * P];
    Product::template tile<R, P>(task, row, panel, sums);
    add_bias<R, P>(task, panel, sums);
    Finish::template finish<R, P>(task, row, panel, sums);
  }
}

template <class Product, class Finish, int R>
static void row_group(const Task& task, long row, long first, long last) {
  constexpr int P = std::min(panels_at_once(R, Product::max_sums), Product::max_panels);
  const long whole = first + (last - first) / P * P;
  tiles<Product, Finish, R, P>(task, row, first, whole);
  if constexpr (P > 1) tiles<Product, Finish, R, 1>(task, row, whole, last);
}

template <class Product, class Finish, int R = Product::max_sums / 2>
static void rows_at_once(const Task& task, long count, long row, long first, long last) {
  if constexpr (R > 1)
    if (count < R) return rows_at_once<Product, Finish, R - 1>(task, count, row, first, last);
  row_group<Product, Finish, R>(task, row, first, last);
}

template <class Product, class Finish>
static void product(const Task& task, long num_rows, long first, long last) {
  constexpr long max_rows = Product::max_sums / 2;
  for (long block = 0; block < num_rows; block += kRowBlock) {
    const long end = block + kRowBlock < num_rows ? block + kRowBlock : num_rows;
    if (end - block <= max_rows) {
      rows_at_once<Product, Finish>(task, end - block, block, first, last);
      continue;
    }
    // Groups of nearly equal size: a last group of one row would be all latency.
    const long groups = ceil_div(end - block, max_rows), size = ceil_div(end - block, groups);
    for (long panel = first; panel < last; ++panel)
      for (long row = block; row < end; row += size)
        rows_at_once<Product, Finish>(task, row + size < end ? size : end - row, row, panel, panel + 1);
  }
}

template <class Finish>
static void coded_product([[maybe_unused]] Task task, [[maybe_unused]] long num_rows, [[maybe_unused]] long first,
                          [[maybe_unused]] long last, [[maybe_unused]] void* scratch) {
#if defined(__AVX512BW__)
  if (num_rows <= kFewRowsOfCodes) return product<CodedProduct, Finish>(task, num_rows, first, last);
  task.expanded = static_cast<uint32_t*>(scratch);
  for (long panel = first; panel < last; ++panel) {
    expand(task.matrix, panel, static_cast<uint32_t*>(scratch));
    product<FloatProduct<Bf16Pairs>, Finish>(task, num_rows, panel, panel + 1);
  }
#endif
}

template <class Finish>
static void product_of(const Rows& rows, long num_rows, const Matrix& matrix, long first, long last, float* out,
                       long stride, bool add, void* scratch) {
  const Task task{rows, matrix, out, stride, first, add};
  if (matrix.codes != nullptr) return coded_product<Finish>(task, num_rows, first, last, scratch);
  switch (matrix.format) {
    case Format::bf16: return product<FloatProduct<Bf16Pairs>, Finish>(task, num_rows, first, last);
    case Format::f32: return product<FloatProduct<Floats>, Finish>(task, num_rows, first, last);
    case Format::int8: return product<Int8Product, Finish>(task, num_rows, first, last);
  }
}

}  // namespace pdserve::PD_ISA
