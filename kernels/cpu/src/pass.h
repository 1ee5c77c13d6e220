// One member's way through a forward pass, or through a layer of it: a sequence of phases, each begun when all units of the
// one before are done.
#pragma once

#include <algorithm>
#include <cstring>

#include "decoder.h"

namespace pdserve {

inline long ceil_to(long value, long step) { return ceil_div(value, step) * step; }
inline int element_bytes(KvType type) { return type == KvType::f32 ? 4 : 2; }

struct Decoder::Pass {
  // Up to so many rows a pass waits for memory, and a phase is shorter than what the system may keep a member from its core.
  static constexpr long kRacingRows = 32;
  // Up to so many rows each member makes what it multiplies for itself: cheaper than a phase.
  static constexpr long kOwnRows = 2;
  static constexpr long kRowsAtOnce = 8;     // Of more, to be normed or rounded.
  static constexpr long kPanelsAtOnce = 4;   // Most that a racing member multiplies at once,
  static constexpr long kUnitWeights = 1 << 15;  // and about so many units of weights.
  static constexpr long kMostRows = 1536;    // Most that pass over a panel in one go.
  static constexpr int kPhasesPerLayer = 10, kOtherPhases = 3;

  Decoder& decoder;
  const Step& step;
  const KvCache& cache;
  int member = 0;
  const AttentionShape attention_shape{decoder.shape_.num_heads, decoder.shape_.num_kv_heads, decoder.shape_.head_dim,
                                       decoder.shape_.scale};
  // Members race for the units of a phase, and none is waited for; else units are handed out and members meet.
  const bool is_racing = std::max(step.num_tokens, step.num_logits) <= kRacingRows;
  uint64_t phase_end = decoder.ledger_->settled();
  bool has_left = false;  // A race, because the owner of this member's core has work.
  std::atomic<long>* counter = decoder.counters_.get();
  float* hidden = decoder.work_.hidden.as<float>();
  long num_rows = step.num_tokens;
  // Which rows of `hidden` are left, once only those are whose logits are wanted; null: all.
  const int64_t* places = nullptr;

  const ModelShape& shape() const { return decoder.shape_; }
  const Kernels& kernels() const { return decoder.kernels_; }

  void embed() {
    share_rows(num_rows, [&](long row) { embed(row); });
  }

  void layer(size_t index) {
    const Layer& layer = decoder.layers_[index];
    attention(layer, long(index), index + 1 == decoder.layers_.size());
    mlp(layer);
  }

  void head(float* logits, long stride) {
    num_rows = step.num_logits, places = step.logits_rows;
    product(norm(decoder.norm_), *decoder.lm_head_, {logits, stride});
  }

  // hidden += output(attention(norm(hidden)))
  void attention(const Layer& layer, long index, bool last) {
    const long width = long(shape().num_heads) * shape().head_dim;
    float* qkv = decoder.work_.qkv.as<float>();
    float* attended = decoder.work_.attended.as<float>();
    product(norm(layer.input_norm), layer.qkv, {qkv, layer.qkv.matrix().columns});
    place(layer, index);
    // Of the last layer's rows only those go on whose logits are wanted; the others leave their K and V.
    const bool is_narrow = last && decoder.last_is_narrow_;
    const auto& items = is_narrow ? decoder.last_items_ : decoder.items_;
    const auto part_of = [&](long i) {
      const AttentionItem& item = items[i];
      return Part{item.out, item.last - item.first, group_offset(item.kv_head), group_offset(1)};
    };
    share_results(long(items.size()), {attended, width}, part_of, [&](long i, float* out, long stride, bool) {
      const AttentionItem& item = items[i];
      kernels().attend(attention_shape, cache, item.span, index, item.kv_head, item.first, item.last, layer.window,
                       query(item.first, item.kv_head), out, stride, scratch());
    });
    if (is_narrow) num_rows = step.num_logits, places = step.logits_rows;
    product(rows_of(attended, width), layer.output, hidden_rows());
  }

  // hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
  void mlp(const Layer& layer) {
    float* gated = decoder.work_.gated.as<float>();
    const long stride = layer.gate_up.matrix().columns / 2;
    product(norm(layer.post_attention_norm), layer.gate_up, {gated, stride}, true);
    product(rows_of(gated, shape().intermediate_size, stride), layer.down, hidden_rows());
  }

  // The parts of these, for single rows.

  void embed(long row) {
    const long width = shape().hidden_size, at = step.token_ids[row] * width;
    float* out = hidden + row * hidden_stride();
    switch (decoder.type_) {
      case WeightType::f32:
        std::memcpy(out, static_cast<const float*>(decoder.embedding_) + at, width * sizeof(float));
        break;
      case WeightType::bf16: {
        const auto* from = static_cast<const uint16_t*>(decoder.embedding_) + at;
        for (long i = 0; i < width; ++i) out[i] = __builtin_bit_cast(float, uint32_t(from[i]) << 16);
        break;
      }
      case WeightType::f16: {
        const auto* from = static_cast<const uint16_t*>(decoder.embedding_) + at;
        for (long i = 0; i < width; ++i) out[i] = read_weight(from, i, WeightType::f16);
        break;
      }
    }
  }

  Rows norm(const std::vector<float>& weight) {
    const long width = shape().hidden_size;
    return make_rows([&](const Activations& out, long row) {
      kernels().norm(hidden + (places == nullptr ? row : places[row]) * hidden_stride(), weight.data(), shape().eps, width,
                     out, row);
    });
  }

  Rows rows_of(const float* x, long width, long stride = 0) {
    return make_rows([&](const Activations& out, long row) {
      kernels().to_rows(x + row * (stride == 0 ? width : stride), width, out, row);
    });
  }

  void place(const Layer& layer, long index) {
    const int heads = shape().num_kv_heads;
    if (is_racing)
      return share(num_rows * heads, [&](long i) { place(layer, index, i / heads, decoder.span_of(i / heads), int(i % heads)); });
    share_rows(num_rows, [&](long row) {
      for (int head = 0; head < heads; ++head) place(layer, index, row, decoder.span_of(row), head);
    });
  }

  // Query, key and value of one row and KV head: normed, rotated, rounded, and put where they are read.
  void place(const Layer& layer, long index, long row, const Span& span, int kv_head) {
    const int dim = shape().head_dim, share = shape().num_heads / shape().num_kv_heads;
    const float* q = decoder.work_.qkv.as<float>() + row * layer.qkv.matrix().columns + group_offset(kv_head);
    const float* k = q + long(shape().num_heads) * dim - group_offset(kv_head) + long(kv_head) * dim;
    const float* v = k + long(shape().num_kv_heads) * dim;
    const float* angles = decoder.angles_ + step.positions[row] * 2 * dim;
    const auto norm = [](const std::vector<float>& weight) { return weight.empty() ? nullptr : weight.data(); };
    char* to = static_cast<char*>(query(row, kv_head));
    for (int head = 0; head < share; ++head)
      kernels().rotate(q + long(head) * dim, norm(layer.q_norm), shape().eps, angles, dim, query_type(),
                       to + long(head) * dim * element_bytes(query_type()));
    char* key = slot(index, 0, kv_head, step.slots[row]);
    char* value = slot(index, 1, kv_head, step.slots[row]);
    kernels().rotate(k, norm(layer.k_norm), shape().eps, angles, dim, cache.type, key);
    kernels().rotate(v, nullptr, 0, nullptr, dim, cache.type, value);
    if (const long offset = step.slots[row] % cache.block_size; offset == 0) {
      // Whoever opens a block clears what no row of this step writes: a block's bytes are a function of its tokens.
      const long written = std::min(span.end - row, cache.block_size), bytes = dim * element_bytes(cache.type);
      std::memset(key + written * bytes, 0, (cache.block_size - written) * bytes);
      std::memset(value + written * bytes, 0, (cache.block_size - written) * bytes);
    }
  }

  KvType query_type() const { return cache.type == KvType::bf16 ? KvType::bf16 : KvType::f32; }

  long group_offset(int kv_head) const {
    return long(kv_head) * (shape().num_heads / shape().num_kv_heads) * shape().head_dim;
  }

  long hidden_stride() const { return ceil_to(shape().hidden_size, kPanelColumns); }

  void* scratch() const { return decoder.work_.scratch[member].as<void>(); }

  // [kv_head][row][share][head_dim]: the vectors that meet the same keys lie side by side.
  void* query(long row, int kv_head) const {
    const long vectors = (kv_head * step.num_tokens + row) * (shape().num_heads / shape().num_kv_heads);
    return decoder.work_.q.as<char>() + vectors * shape().head_dim * element_bytes(query_type());
  }

  char* slot(long layer, long side, long kv_head, long slot) const {
    const long at = slot / cache.block_size * cache.block_stride + layer * cache.layer_stride + side * cache.side_stride +
                    kv_head * cache.head_stride + slot % cache.block_size * shape().head_dim;
    return cache.memory + at * element_bytes(cache.type);
  }

  // How work is shared.

  // work(i) for each i, by whoever comes for it.
  template <class Work>
  void share(long count, Work&& work) {
    share(count, [](long) {}, work);
  }

  // make(i) leaves its result with the member, settle(i) puts it where others read it.
  template <class Make, class Settle>
  void share(long count, Make&& make, Settle&& settle) {
    if (has_left) return;
    Team& team = decoder.team_;
    if (is_racing) {
      phase_end += count;
      return decoder.ledger_->share(phase_end, count * member / team.size(), count, make, settle,
                                    [&] { return has_left = team.is_wanted_back(member); });
    }
    std::atomic<long>& next = *counter++;
    // On a core that its owner needs a member leaves what is left to the others.
    while (!team.is_wanted_back(member)) {
      const long i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) break;
      make(i);
      settle(i);
    }
    team.meet(member);
  }

  template <class Work>
  void share_rows(long count, Work&& work) {
    const long at_once = is_racing ? 1 : kRowsAtOnce;
    share(ceil_div(count, at_once), [&](long i) {
      for (long row = i * at_once; row < std::min(count, (i + 1) * at_once); ++row) work(row);
    });
  }

  // Rows that all members can multiply. Own ones are made under the rule of `Ledger::share`.
  template <class Make>
  Rows make_rows(Make&& make) {
    const bool own = is_racing && num_rows <= kOwnRows;
    const Activations& out = decoder.work_.areas[own ? 1 + member : 0].rows;
    if (own)
      for (long row = 0; row < num_rows && !has_left; ++row) make(out, row);
    else
      share_rows(num_rows, [&](long row) { make(out, row); });
    return {out.units, out.low, out.scale, out.stride};
  }

  // Rows of floats, and what of them one unit of work makes.
  struct Target {
    float* at;
    long stride;
    const int64_t* places = nullptr;  // Of the rows; null: one after the other.
    bool is_sum = false;              // Results are added to what is there.
  };
  struct Part {
    long row, rows, column, columns;
  };

  Target hidden_rows() const { return {hidden, hidden_stride(), places, true}; }

  // make(i, out, stride, add) gives the floats of part_of(i), or adds them.
  template <class PartOf, class Make>
  void share_results(long count, const Target& target, PartOf&& part_of, Make&& make) {
    if (!is_racing && target.places == nullptr)
      return share(count, [&](long i) {
        const Part part = part_of(i);
        make(i, target.at + part.row * target.stride + part.column, target.stride, target.is_sum);
      });
    float* result = decoder.work_.results[member].as<float>();
    share(count, [&](long i) { make(i, result, part_of(i).columns, false); },
          [&](long i) { put(result, part_of(i), target); });
  }

  static void put(const float* from, const Part& part, const Target& target) {
    for (long row = part.row; row < part.row + part.rows; ++row, from += part.columns) {
      float* to = target.at + (target.places == nullptr ? row : target.places[row]) * target.stride + part.column;
      if (target.is_sum)
        for (long i = 0; i < part.columns; ++i) to[i] += from[i];
      else
        std::memcpy(to, from, part.columns * sizeof(float));
    }
  }

  void product(const Rows& rows, const Packed& packed, const Target& target, bool silu = false) {
    const Matrix& matrix = packed.matrix();
    const auto kernel = silu ? kernels().multiply_silu : kernels().multiply;
    const long columns = silu ? kPanelColumns / 2 : kPanelColumns, panels = matrix.columns / kPanelColumns;
    const long size = decoder.team_.size();
    long at_once = 1, block = num_rows;
    if (is_racing) {
      const long most = std::min(kPanelsAtOnce, kUnitWeights / (matrix.depth * kPanelColumns));
      at_once = std::clamp(panels / (4 * size), 1L, std::max(1L, most));
    } else {
      // As many rows at once as pass over a panel without leaving the caches, unless some members would have nothing to do.
      const long most = std::clamp(384L * 1024 / matrix.depth, 48L, kMostRows);
      block = ceil_div(num_rows, std::max(ceil_div(num_rows, most), ceil_div(4 * size, panels)));
    }
    const long groups = ceil_div(panels, at_once), blocks = num_rows == 0 ? 0 : ceil_div(num_rows, block);
    const auto part_of = [&](long i) {
      const long row = i / groups * block, panel = i % groups * at_once;
      return Part{row, std::min(block, num_rows - row), panel * columns, std::min(at_once, panels - panel) * columns};
    };
    share_results(blocks * groups, target, part_of, [&](long i, float* out, long stride, bool add) {
      const Part part = part_of(i);
      const Rows some{rows.units + part.row * rows.stride, rows.low + part.row * rows.stride, rows.scale + part.row,
                      rows.stride};
      const long panel = part.column / columns;
      kernel(some, part.rows, matrix, panel, panel + part.columns / columns, out, stride, add, scratch());
    });
  }
};

}  // namespace pdserve
