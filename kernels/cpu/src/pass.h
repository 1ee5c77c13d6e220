// One thread's way through a forward pass, or through one layer of it: a sequence of phases. Each phase starts when all
// units of the one before are done.
#pragma once

#include <algorithm>
#include <cstring>

#include "decoder.h"

namespace pdserve {

inline long ceil_to(long value, long step) { return ceil_div(value, step) * step; }
inline int element_bytes(KvType type) { return type == KvType::f32 ? 4 : 2; }

struct Decoder::Pass {
  // Up to this many rows a pass waits for memory, and a phase is shorter than the system may keep a thread off its core.
  static constexpr long kMaxSpeculativeRows = 32;
  // Up to this many rows each thread prepares its own copy of a product's left-hand side: cheaper than a phase.
  static constexpr long kMaxPrivateRows = 2;
  // Rows normed or rounded as one unit, in passes of more rows.
  static constexpr long kRowsPerUnit = 8;
  // Panels that a unit of a speculative product has at most,
  static constexpr long kMaxPanelsPerUnit = 4;
  // and about how many units of weights.
  static constexpr long kWeightsPerUnit = 1 << 15;
  // Rows multiplied with a panel at a time, at most.
  static constexpr long kMaxBlockRows = 1536;
  static constexpr int kPhasesPerLayer = 10;
  static constexpr int kOtherPhases = 3;

  Decoder& decoder;
  const Step& step;
  const KvCache& cache;
  int thread = 0;
  const AttentionShape attention_shape{decoder.shape_.num_heads, decoder.shape_.num_kv_heads, decoder.shape_.head_dim,
                                       decoder.shape_.scale};
  // Threads claim units and compute again those of stragglers (`PhaseScheduler`). Otherwise units are handed out, and
  // threads meet at a barrier.
  const bool is_speculative = std::max(step.num_tokens, step.num_logits) <= kMaxSpeculativeRows;
  uint64_t phase_end = decoder.scheduler_->num_committed();
  // The thread has left a speculative pass, because the owner of its core has work.
  bool has_left = false;
  std::atomic<long>* counter = decoder.counters_.get();
  float* hidden = decoder.work_.hidden.as<float>();
  long num_rows = step.num_tokens;
  // The rows of `hidden` that are still computed; null: all. In the end only those whose logits are wanted.
  const int64_t* row_indices = nullptr;

  const ModelShape& shape() const { return decoder.shape_; }
  const Kernels& kernels() const { return decoder.kernels_; }
  int queries_per_kv() const { return shape().num_heads / shape().num_kv_heads; }

  void embed() {
    parallel_for_rows(num_rows, [&](long row) { embed(row); });
  }

  void layer(size_t index) {
    const Layer& layer = decoder.layers_[index];
    attention(layer, long(index), index + 1 == decoder.layers_.size());
    mlp(layer);
  }

  void head(float* out, long stride) {
    keep_logits_rows();
    if (!step.hidden_only) return product(norm(decoder.norm_), *decoder.lm_head_, {out, stride});
    const Activations normed{Format::f32, reinterpret_cast<uint32_t*>(out), nullptr, nullptr, stride};
    parallel_for_rows(num_rows, [&](long row) { norm(decoder.norm_, normed, row); });
  }

  // hidden += output(attention(norm(hidden)))
  void attention(const Layer& layer, long index, bool is_last) {
    const long width = long(shape().num_heads) * shape().head_dim;
    float* qkv = decoder.work_.qkv.as<float>();
    float* attended = decoder.work_.attended.as<float>();
    product(norm(layer.input_norm), layer.qkv, {qkv, layer.qkv.matrix().columns});
    store_qkv(layer, index);
    // After the last layer's K and V are stored, only rows whose logits are wanted are needed.
    const bool is_narrow = is_last && decoder.last_is_narrow_;
    const auto& items = is_narrow ? decoder.last_items_ : decoder.items_;
    const auto tile_of = [&](long i) {
      const AttentionItem& item = items[i];
      return Tile{item.out, item.last - item.first, group_offset(item.kv_head), group_offset(1)};
    };
    compute_tiles(long(items.size()), {attended, width}, tile_of, [&](long i, float* out, long stride, bool) {
      const AttentionItem& item = items[i];
      kernels().attend(attention_shape, cache, item.span, index, item.kv_head, item.first, item.last, layer.window,
                       query(item.first, item.kv_head), out, stride, scratch());
    });
    if (is_narrow) keep_logits_rows();
    product(rows_of(attended, width), layer.output, hidden_rows());
  }

  // hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
  void mlp(const Layer& layer) {
    float* gated = decoder.work_.gated.as<float>();
    const long stride = layer.gate_up.matrix().columns / 2;
    product(norm(layer.post_attention_norm), layer.gate_up, {gated, stride}, true);
    product(rows_of(gated, shape().intermediate_size, stride), layer.down, hidden_rows());
  }

  void keep_logits_rows() {
    num_rows = step.num_logits;
    row_indices = step.logits_rows;
  }

  // The steps of these, for single rows.

  void embed(long row) {
    const long width = shape().hidden_size;
    const long start = step.token_ids[row] * width;
    float* out = hidden + row * hidden_stride();
    switch (decoder.type_) {
      case WeightType::f32:
        std::memcpy(out, static_cast<const float*>(decoder.embedding_) + start, width * sizeof(float));
        break;
      case WeightType::bf16: {
        const auto* from = static_cast<const uint16_t*>(decoder.embedding_) + start;
        for (long i = 0; i < width; ++i) out[i] = __builtin_bit_cast(float, uint32_t(from[i]) << 16);
        break;
      }
      case WeightType::f16: {
        const auto* from = static_cast<const uint16_t*>(decoder.embedding_) + start;
        for (long i = 0; i < width; ++i) out[i] = read_weight(from, i, WeightType::f16);
        break;
      }
    }
  }

  Rows norm(const std::vector<float>& weight) {
    return make_rows([&](const Activations& out, long row) { norm(weight, out, row); });
  }

  void norm(const std::vector<float>& weight, const Activations& out, long row) {
    const float* x = hidden + (row_indices == nullptr ? row : row_indices[row]) * hidden_stride();
    kernels().norm(x, weight.data(), shape().eps, shape().hidden_size, out, row);
  }

  Rows rows_of(const float* x, long width, long stride = 0) {
    return make_rows([&](const Activations& out, long row) {
      kernels().to_rows(x + row * (stride == 0 ? width : stride), width, out, row);
    });
  }

  // Query, key and value of each row: normed, rotated, rounded, and stored where attention reads them.
  void store_qkv(const Layer& layer, long index) {
    const int heads = shape().num_kv_heads;
    if (is_speculative)
      return parallel_for(num_rows * heads,
                          [&](long i) { store_qkv(layer, index, i / heads, decoder.span_of(i / heads), int(i % heads)); });
    parallel_for_rows(num_rows, [&](long row) {
      for (int head = 0; head < heads; ++head) store_qkv(layer, index, row, decoder.span_of(row), head);
    });
  }

  void store_qkv(const Layer& layer, long index, long row, const Span& span, int kv_head) {
    const int dim = shape().head_dim;
    const float* q = decoder.work_.qkv.as<float>() + row * layer.qkv.matrix().columns + group_offset(kv_head);
    const float* k = q + long(shape().num_heads) * dim - group_offset(kv_head) + long(kv_head) * dim;
    const float* v = k + long(shape().num_kv_heads) * dim;
    const float* angles = decoder.angles_ + step.positions[row] * 2 * dim;
    const auto norm = [](const std::vector<float>& weight) { return weight.empty() ? nullptr : weight.data(); };
    char* to = static_cast<char*>(query(row, kv_head));
    for (int head = 0; head < queries_per_kv(); ++head)
      kernels().rotate(q + long(head) * dim, norm(layer.q_norm), shape().eps, angles, dim, query_type(),
                       to + long(head) * dim * element_bytes(query_type()));
    char* key = slot(index, 0, kv_head, step.slots[row]);
    char* value = slot(index, 1, kv_head, step.slots[row]);
    kernels().rotate(k, norm(layer.k_norm), shape().eps, angles, dim, cache.type, key);
    kernels().rotate(v, nullptr, 0, nullptr, dim, cache.type, value);
    if (step.slots[row] % cache.block_size == 0) {
      // The row opens a block. It clears the slots that no row of this step writes, so that a block's bytes are a function
      // of its tokens.
      const long num_written = std::min(span.end - row, cache.block_size);
      const long bytes = dim * element_bytes(cache.type);
      std::memset(key + num_written * bytes, 0, (cache.block_size - num_written) * bytes);
      std::memset(value + num_written * bytes, 0, (cache.block_size - num_written) * bytes);
    }
  }

  KvType query_type() const { return cache.type == KvType::bf16 ? KvType::bf16 : KvType::f32; }

  long group_offset(int kv_head) const { return long(kv_head) * queries_per_kv() * shape().head_dim; }

  long hidden_stride() const { return ceil_to(shape().hidden_size, kPanelColumns); }

  void* scratch() const { return decoder.work_.scratch[thread].as<void>(); }

  // [kv_head][row][queries_per_kv][head_dim]: vectors that meet the same keys are adjacent.
  void* query(long row, int kv_head) const {
    const long vectors = (kv_head * step.num_tokens + row) * queries_per_kv();
    return decoder.work_.q.as<char>() + vectors * shape().head_dim * element_bytes(query_type());
  }

  // `kv`: 0 for K, 1 for V.
  char* slot(long layer, long kv, long kv_head, long slot) const {
    const long element = slot / cache.block_size * cache.block_stride + layer * cache.layer_stride + kv * cache.kv_stride +
                         kv_head * cache.head_stride + slot % cache.block_size * shape().head_dim;
    return cache.memory + element * element_bytes(cache.type);
  }

  // How work is shared.

  // work(i) once for each i, by the threads as they become free. In a speculative pass it is all commit: it may write what
  // others read.
  template <class Work>
  void parallel_for(long count, Work&& work) {
    parallel_for(count, [](long) {}, work);
  }

  // compute(i) leaves its result in the thread's own memory, commit(i) stores it where others read it.
  template <class Compute, class Commit>
  void parallel_for(long count, Compute&& compute, Commit&& commit) {
    if (has_left) return;
    ThreadGroup& threads = decoder.threads_;
    if (is_speculative) {
      phase_end += count;
      return decoder.scheduler_->run(phase_end, count * thread / threads.size(), count, compute, commit,
                                     [&] { return has_left = threads.is_wanted_back(thread); });
    }
    std::atomic<long>& next = *counter++;
    // On a core that its owner needs, a thread leaves the rest to the others.
    while (!threads.is_wanted_back(thread)) {
      const long i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) break;
      compute(i);
      commit(i);
    }
    threads.barrier(thread);
  }

  template <class Work>
  void parallel_for_rows(long count, Work&& work) {
    const long rows_per_unit = is_speculative ? 1 : kRowsPerUnit;
    parallel_for(ceil_div(count, rows_per_unit), [&](long i) {
      for (long row = i * rows_per_unit; row < std::min(count, (i + 1) * rows_per_unit); ++row) work(row);
    });
  }

  // Rows that all threads can multiply. A private copy is made under the rules for `compute` of `PhaseScheduler::run`.
  template <class Make>
  Rows make_rows(Make&& make) {
    const bool is_private = is_speculative && num_rows <= kMaxPrivateRows;
    const Activations& out = decoder.work_.areas[is_private ? 1 + thread : 0].rows;
    if (is_private)
      for (long row = 0; row < num_rows && !has_left; ++row) make(out, row);
    else
      parallel_for_rows(num_rows, [&](long row) { make(out, row); });
    return {out.units, out.low, out.scale, out.stride};
  }

  // Rows of floats that a phase writes.
  struct Target {
    float* memory;
    long stride;
    // Index of each row in `memory`; null: in order.
    const int64_t* row_indices = nullptr;
    // Results are added to what is there.
    bool is_sum = false;
  };
  // The section of a target that one unit computes.
  struct Tile {
    long row, num_rows;
    long column, num_columns;
  };

  Target hidden_rows() const { return {hidden, hidden_stride(), row_indices, true}; }

  // compute(i, out, stride, add) writes the floats of tile_of(i), or adds them.
  template <class TileOf, class Compute>
  void compute_tiles(long count, const Target& target, TileOf&& tile_of, Compute&& compute) {
    if (!is_speculative && target.row_indices == nullptr)
      return parallel_for(count, [&](long i) {
        const Tile tile = tile_of(i);
        compute(i, target.memory + tile.row * target.stride + tile.column, target.stride, target.is_sum);
      });
    float* result = decoder.work_.results[thread].as<float>();
    parallel_for(count, [&](long i) { compute(i, result, tile_of(i).num_columns, false); },
                 [&](long i) { store_tile(result, tile_of(i), target); });
  }

  static void store_tile(const float* from, const Tile& tile, const Target& target) {
    for (long row = tile.row; row < tile.row + tile.num_rows; ++row, from += tile.num_columns) {
      const long index = target.row_indices == nullptr ? row : target.row_indices[row];
      float* to = target.memory + index * target.stride + tile.column;
      if (target.is_sum)
        for (long i = 0; i < tile.num_columns; ++i) to[i] += from[i];
      else
        std::memcpy(to, from, tile.num_columns * sizeof(float));
    }
  }

  void product(const Rows& rows, const Packed& packed, const Target& target, bool silu = false) {
    const Matrix& matrix = packed.matrix();
    const auto kernel = silu ? kernels().multiply_silu : kernels().multiply;
    const long columns = silu ? kPanelColumns / 2 : kPanelColumns;
    const long num_panels = matrix.columns / kPanelColumns;
    const long num_threads = decoder.threads_.size();
    long tile_panels = 1;
    long tile_rows = num_rows;
    if (is_speculative) {
      const long max_panels = std::min(kMaxPanelsPerUnit, kWeightsPerUnit / (matrix.depth * kPanelColumns));
      tile_panels = std::clamp(num_panels / (4 * num_threads), 1L, std::max(1L, max_panels));
    } else {
      // As many rows as can pass over a panel without leaving the caches, unless some threads would have nothing to do.
      const long max_rows = std::clamp(384L * 1024 / matrix.depth, 48L, kMaxBlockRows);
      tile_rows = ceil_div(num_rows, std::max(ceil_div(num_rows, max_rows), ceil_div(4 * num_threads, num_panels)));
    }
    const long tiles_across = ceil_div(num_panels, tile_panels);
    const long tiles_down = num_rows == 0 ? 0 : ceil_div(num_rows, tile_rows);
    const auto tile_of = [&](long i) {
      const long row = i / tiles_across * tile_rows;
      const long panel = i % tiles_across * tile_panels;
      return Tile{row, std::min(tile_rows, num_rows - row), panel * columns,
                  std::min(tile_panels, num_panels - panel) * columns};
    };
    compute_tiles(tiles_down * tiles_across, target, tile_of, [&](long i, float* out, long stride, bool add) {
      const Tile tile = tile_of(i);
      const Rows tile_of_rows{rows.units + tile.row * rows.stride, rows.low + tile.row * rows.stride,
                              rows.scale + tile.row, rows.stride};
      const long panel = tile.column / columns;
      kernel(tile_of_rows, tile.num_rows, matrix, panel, panel + tile.num_columns / columns, out, stride, add, scratch());
    });
  }
};

}  // namespace pdserve
