#include "decoder.h"

#include <algorithm>
#include <cstring>

namespace pdserve {
namespace {

// Up to so many rows each member makes what it multiplies for itself: cheaper than meeting the others.
constexpr long kFewRows = 2;
// Up to so many rows a product waits for memory, and members share the panels evenly.
constexpr long kStreamedRows = 32;
constexpr int kCountersPerLayer = 6;

long ceil_to(long value, long step) { return ceil_div(value, step) * step; }

int element_bytes(KvType type) { return type == KvType::f32 ? 4 : 2; }

}  // namespace

Decoder::Decoder(const ModelShape& shape, WeightType type, Format format, const Kernels& kernels, int num_threads,
                 std::vector<int> cpus, Borrowing borrowing)
    : shape_(shape),
      type_(type),
      format_(format),
      kernels_(kernels),
      team_(num_threads, std::move(cpus), std::move(borrowing)) {}

void Decoder::add_layer(const LayerSource& source) {
  const auto pack = [&](std::vector<Source> parts, bool interleave = false) {
    return Packed(weights_, parts, type_, format_, interleave, kernels_.reads_codes);
  };
  layers_.push_back({
      pack({source.q, source.k, source.v}),
      pack({source.output}),
      pack({source.gate, source.up}, true),
      pack({source.down}),
      to_floats(source.input_norm, shape_.hidden_size, type_),
      to_floats(source.post_attention_norm, shape_.hidden_size, type_),
      to_floats(source.q_norm, shape_.head_dim, type_),
      to_floats(source.k_norm, shape_.head_dim, type_),
      source.window,
  });
}

void Decoder::finish(const void* embedding, const void* norm, const Source& lm_head, const float* angles) {
  embedding_ = embedding;
  angles_ = angles;
  norm_ = to_floats(norm, shape_.hidden_size, type_);
  lm_head_ = std::make_unique<Packed>(weights_, std::vector<Source>{lm_head}, type_, format_, false, kernels_.reads_codes);
  counters_ = std::make_unique<std::atomic<long>[]>(layers_.size() * kCountersPerLayer + 1);
}

size_t Decoder::weight_bytes() const {
  size_t bytes = lm_head_->bytes();
  for (const Layer& layer : layers_)
    bytes += layer.qkv.bytes() + layer.output.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  return bytes;
}

Decoder::RowArea Decoder::make_area(long num_rows) const {
  const long width = std::max({shape_.hidden_size, shape_.intermediate_size, long(shape_.num_heads) * shape_.head_dim});
  const long per_unit = format_ == Format::f32 ? 1 : format_ == Format::bf16 ? 2 : 4;
  // A stride that is no multiple of a page: rows that are multiplied together then fall into different cache sets.
  const long stride = ceil_to(ceil_div(width, per_unit), kLanes) + kLanes, units = num_rows * stride;
  RowArea area{Memory((2 * units + num_rows) * sizeof(uint32_t)), {}};
  auto* at = area.memory.as<uint32_t>();
  area.rows = {format_, at, at + units, reinterpret_cast<float*>(at + 2 * units), stride};
  return area;
}

void Decoder::reserve(long num_tokens) {
  if (num_tokens <= work_.capacity) return;
  // A little more than asked for: the sizes of batches creep upwards. Replaced as a whole, or, without memory, not at all.
  const long rows = ceil_to(num_tokens, 64), width = long(shape_.num_heads) * shape_.head_dim;
  Workspace fresh;
  const auto floats = [&](long per_row) { return Memory(rows * ceil_to(per_row, kPanelColumns) * sizeof(float)); };
  fresh.hidden[0] = floats(shape_.hidden_size);
  fresh.hidden[1] = floats(shape_.hidden_size);
  fresh.delta = floats(shape_.hidden_size);
  fresh.qkv = floats(width + 2L * shape_.num_kv_heads * shape_.head_dim);
  fresh.q = floats(width);
  fresh.attended = floats(width);
  fresh.gated = floats(shape_.intermediate_size);
  fresh.areas.push_back(make_area(rows));
  const AttentionShape attention{shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, shape_.scale};
  const long panel_bytes = fresh.areas[0].rows.stride * kPanelColumns * sizeof(uint32_t);
  for (int member = 0; member < team_.most(); ++member) {
    fresh.areas.push_back(make_area(kFewRows));
    fresh.scratch.push_back(Memory(std::max(kernels_.attend_scratch_bytes(attention), panel_bytes)));
  }
  fresh.capacity = rows;
  work_ = std::move(fresh);
}

const Span& Decoder::span_of(long row) const {
  const auto after = std::upper_bound(spans_.begin(), spans_.end(), row,
                                      [](long r, const Span& span) { return r < span.begin; });
  return *(after - 1);
}

void Decoder::plan(const Step& step) {
  spans_.clear();
  items_.clear();
  last_items_.clear();
  one_row_each_ = true;
  const long rows_at_once = std::max(1L, kQueryTile * shape_.num_kv_heads / shape_.num_heads);
  for (long i = 0; i < step.num_sequences; ++i) {
    const Span span{step.starts[i], step.starts[i + 1], step.contexts[i], step.tables + i * step.table_stride};
    spans_.push_back(span);
    one_row_each_ &= span.end - span.begin == 1;
    // Late rows first: they see the most keys, and what is handed out last should be small.
    for (long last = span.end; last > span.begin; last -= std::min(rows_at_once, last - span.begin))
      for (int head = 0; head < shape_.num_kv_heads; ++head)
        items_.push_back({span, head, std::max(span.begin, last - rows_at_once), last,
                          std::max(span.begin, last - rows_at_once)});
  }
  for (long i = 0; i < step.num_logits; ++i)
    for (int head = 0; head < shape_.num_kv_heads; ++head)
      last_items_.push_back({span_of(step.logits_rows[i]), head, step.logits_rows[i], step.logits_rows[i] + 1, i});
  for (size_t i = 0; i < layers_.size() * kCountersPerLayer + 1; ++i) counters_[i].store(0, std::memory_order_relaxed);
}

struct Decoder::Pass {
  Decoder& decoder;
  const Step& step;
  const KvCache& cache;
  int member = 0;
  const AttentionShape attention_shape{decoder.shape_.num_heads, decoder.shape_.num_kv_heads, decoder.shape_.head_dim,
                                       decoder.shape_.scale};
  std::atomic<long>* counter = decoder.counters_.get();
  float *hidden = decoder.work_.hidden[0].as<float>(), *next_hidden = decoder.work_.hidden[1].as<float>();
  const float* delta = nullptr;  // What the last block adds to `hidden`.
  long num_rows = step.num_tokens;
  // Where `hidden` has the rows, once only those are left whose logits are wanted; null: in their places.
  const int64_t* places = nullptr;

  const ModelShape& shape() const { return decoder.shape_; }
  const Kernels& kernels() const { return decoder.kernels_; }

  // The jobs of a pass, in order; all members end one before any begins the next.

  void embed() {
    share_rows([&](long row) { embed(row); });
  }

  void layer(size_t index) {
    const Layer& layer = decoder.layers_[index];
    attention(layer, long(index), index + 1 == decoder.layers_.size());
    if (num_rows > 0) mlp(layer);
  }

  void head(float* logits, long stride) {
    if (num_rows == 0) return;
    const Rows rows = make_rows(step.num_logits, [&](const Activations& out, long i) {
      const long row = num_rows == step.num_tokens ? step.logits_rows[i] : i;
      kernels().add_norm(hidden + row * shape().hidden_size, delta + row * delta_stride(), nullptr,
                         decoder.norm_.data(), shape().eps, shape().hidden_size, out, i);
    });
    product(rows, step.num_logits, *decoder.lm_head_, logits, stride, false);
  }

  // Their parts.

  // delta = output(attention(norm(hidden))), with `hidden` brought up to date first.
  void attention(const Layer& layer, long index, bool last) {
    const long width = long(shape().num_heads) * shape().head_dim;
    float* qkv = decoder.work_.qkv.as<float>();
    float* attended = decoder.work_.attended.as<float>();
    multiply(add_norm(layer.input_norm), layer.qkv, qkv, layer.qkv.matrix().columns);
    // Of the last layer's rows only those go on whose logits are wanted; the others leave their K and V.
    const bool narrow = last && step.num_logits < step.num_tokens, place_first = !decoder.one_row_each_ || narrow;
    if (place_first) {
      share_rows([&](long row) {
        for (int head = 0; head < shape().num_kv_heads; ++head) place(layer, index, row, decoder.span_of(row), head);
      });
      decoder.team_.meet(member);
    }
    const auto& items = narrow ? decoder.last_items_ : decoder.items_;
    if (narrow) num_rows = step.num_logits, places = step.logits_rows;
    hand_out(long(items.size()), [&](long i) {
      const AttentionItem& item = items[i];
      if (!place_first) place(layer, index, item.first, item.span, item.kv_head);
      kernels().attend(attention_shape, cache, item.span, index, item.kv_head, item.first, item.last, layer.window,
                       query(item.first, item.kv_head), attended + item.out * width + group_offset(item.kv_head), width,
                       decoder.work_.scratch[member].as<void>());
    });
    decoder.team_.meet(member);
    multiply(rows_of(attended, width), layer.output, decoder.work_.delta.as<float>(), delta_stride());
    delta = decoder.work_.delta.as<float>();
  }

  // delta = down(silu(gate(norm(hidden))) * up(norm(hidden)))
  void mlp(const Layer& layer) {
    float* gated = decoder.work_.gated.as<float>();
    const long stride = layer.gate_up.matrix().columns / 2;
    multiply(add_norm(layer.post_attention_norm), layer.gate_up, gated, stride, true);
    product(rows_of(gated, shape().intermediate_size, stride), num_rows, layer.down, decoder.work_.delta.as<float>(),
            delta_stride(), false);
  }

  void embed(long row) {
    const long width = shape().hidden_size, at = step.token_ids[row] * width;
    float* out = hidden + row * width;
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

  // Brings `hidden` up to date and gives its norm as rows to multiply.
  Rows add_norm(const std::vector<float>& weight) {
    const long width = shape().hidden_size;
    const bool few = num_rows <= kFewRows;
    const Rows rows = make_rows(num_rows, [&](const Activations& out, long row) {
      const float* before = hidden + (places == nullptr ? row : places[row]) * width;
      const float* added = delta == nullptr ? nullptr : delta + row * delta_stride();
      float* total = few && member != 0 ? nullptr : next_hidden + row * width;
      kernels().add_norm(before, added, total, weight.data(), shape().eps, width, out, row);
    });
    std::swap(hidden, next_hidden);
    places = nullptr;
    return rows;
  }

  Rows rows_of(const float* x, long width, long stride = 0) {
    return make_rows(num_rows, [&](const Activations& out, long row) {
      kernels().to_rows(x + row * (stride == 0 ? width : stride), width, out, row);
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

  long delta_stride() const { return ceil_to(shape().hidden_size, kPanelColumns); }

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

  template <class Work>
  void share_rows(Work&& work) const {
    const long size = decoder.team_.size();
    for (long row = step.num_tokens * member / size; row < step.num_tokens * (member + 1) / size; ++row) work(row);
  }

  template <class Work>
  void hand_out(long count, Work&& work) {
    std::atomic<long>& next = *counter++;
    // On a core that its owner needs a member leaves what is left to the others.
    while (!decoder.team_.is_wanted_back(member)) {
      const long i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) break;
      work(i);
    }
  }

  // Rows that all members can multiply: few are made by each for itself, many are shared.
  template <class Make>
  Rows make_rows(long count, Make&& make) const {
    const bool few = count <= kFewRows;
    const Activations& out = decoder.work_.areas[few ? 1 + member : 0].rows;
    const long size = few ? 1 : decoder.team_.size(), part = few ? 0 : member;
    for (long row = count * part / size; row < count * (part + 1) / size; ++row) make(out, row);
    if (!few) decoder.team_.meet(member);
    return {out.units, out.low, out.scale, out.stride};
  }

  void multiply(const Rows& rows, const Packed& packed, float* out, long stride, bool silu = false) {
    product(rows, num_rows, packed, out, stride, silu);
    decoder.team_.meet(member);
  }

  void product(const Rows& rows, long count, const Packed& packed, float* out, long stride, bool silu) {
    const Matrix& matrix = packed.matrix();
    const auto kernel = silu ? kernels().multiply_silu : kernels().multiply;
    const long panels = matrix.columns / kPanelColumns, size = decoder.team_.size();
    void* scratch = decoder.work_.scratch[member].as<void>();
    if (count <= kStreamedRows) {
      ++counter;
      return kernel(rows, count, matrix, panels * member / size, panels * (member + 1) / size, out, stride, scratch);
    }
    // As many rows at once as pass over a panel without leaving the caches, unless some members would have nothing to do.
    const long most = std::clamp(384L * 1024 / matrix.depth, 48L, 1536L);
    const long block = ceil_div(count, std::max(ceil_div(count, most), ceil_div(4 * size, panels)));
    hand_out(ceil_div(count, block) * panels, [&](long i) {
      const long row = i / panels * block, panel = i % panels;
      const Rows some{rows.units + row * rows.stride, rows.low + row * rows.stride, rows.scale + row, rows.stride};
      kernel(some, std::min(block, count - row), matrix, panel, panel + 1, out + row * stride, stride, scratch);
    });
  }
};

void Decoder::forward(const Step& step, const KvCache& cache, float* logits, long stride) {
  reserve(std::max(step.num_tokens, step.num_logits));
  plan(step);
  // Nothing in a pass allocates or throws: the members could not meet again.
  Pass ours{*this, step, cache};
  const auto together = [&](auto&& job) {
    team_.regroup();
    const Pass begun = ours;  // Where all stand, also who joins only now.
    team_.run([&](int member) noexcept {
      if (member == 0) return job(ours);
      Pass pass = begun;
      pass.member = member;
      job(pass);
    });
  };
  together([](Pass& pass) { pass.embed(); });
  for (size_t index = 0; index < layers_.size(); ++index) together([=](Pass& pass) { pass.layer(index); });
  together([=](Pass& pass) { pass.head(logits, stride); });
  team_.disband();
}

}  // namespace pdserve
