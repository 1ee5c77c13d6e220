#include "decoder.h"

#include <algorithm>
#include <functional>

#include "pass.h"

namespace pdserve {

// Rows for which working memory is made at first: the default chunk of a prompt.
constexpr long kFirstRows = 512;

Decoder::Decoder(const ModelShape& shape, WeightType type, Format format, const Kernels& kernels, int num_threads,
                 std::vector<int> cpus, Borrowing borrowing)
    : shape_(shape),
      type_(type),
      format_(format),
      kernels_(kernels),
      threads_(num_threads, std::move(cpus), std::move(borrowing)) {}

void Decoder::add_layer(const LayerSource& source) {
  const auto pack = [&](std::vector<Source> sources, bool interleave = false) {
    return Packed(weights_, sources, type_, format_, interleave, kernels_.reads_codes);
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
  counters_ = std::make_unique<std::atomic<long>[]>(num_counters());
  long max_columns = lm_head_->matrix().columns;
  for (const Layer& layer : layers_)
    for (const Packed* packed : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      max_columns = std::max(max_columns, packed->matrix().columns);
  const long max_units = std::max(max_columns / kPanelColumns, Pass::kMaxSpeculativeRows * shape_.num_kv_heads);
  scheduler_ = std::make_unique<PhaseScheduler>(max_units);
}

size_t Decoder::num_counters() const { return layers_.size() * Pass::kPhasesPerLayer + Pass::kOtherPhases; }

size_t Decoder::weight_bytes() const {
  size_t bytes = lm_head_->bytes();
  for (const Layer& layer : layers_)
    bytes += layer.qkv.bytes() + layer.output.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  return bytes;
}

Decoder::RowArea Decoder::make_area(long num_rows) const {
  const long width = std::max({shape_.hidden_size, shape_.intermediate_size, long(shape_.num_heads) * shape_.head_dim});
  const long per_unit = format_ == Format::f32 ? 1 : format_ == Format::bf16 ? 2 : 4;
  // The stride is no multiple of a page, so that rows that are multiplied together fall into different cache sets.
  const long stride = ceil_to(ceil_div(width, per_unit), kLanes) + kLanes;
  const long units = num_rows * stride;
  RowArea area{Memory((2 * units + num_rows) * sizeof(uint32_t)), {}};
  auto* at = area.memory.as<uint32_t>();
  area.rows = {format_, at, at + units, reinterpret_cast<float*>(at + 2 * units), stride};
  return area;
}

void Decoder::reserve(long num_tokens) {
  if (num_tokens <= work_.capacity) return;
  // At first for a long prompt, so that none has to wait for memory. Later a little more than requested, since batches
  // grow slowly. Replaced as a whole, or not at all if memory is short.
  const long rows = std::max(ceil_to(num_tokens, 64), kFirstRows);
  const long width = long(shape_.num_heads) * shape_.head_dim;
  Workspace fresh;
  const auto floats = [&](long per_row) { return Memory(rows * ceil_to(per_row, kPanelColumns) * sizeof(float)); };
  fresh.hidden = floats(shape_.hidden_size);
  fresh.qkv = floats(width + 2L * shape_.num_kv_heads * shape_.head_dim);
  fresh.q = floats(width);
  fresh.attended = floats(width);
  fresh.gated = floats(shape_.intermediate_size);
  fresh.areas.push_back(make_area(rows));
  const AttentionShape attention{shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, shape_.scale};
  const long panel_bytes = fresh.areas[0].rows.stride * kPanelColumns * sizeof(uint32_t);
  const long vectors = std::max(kQueryTile, long(shape_.num_heads / shape_.num_kv_heads));
  const long tile_rows = std::max(Pass::kMaxSpeculativeRows * Pass::kMaxPanelsPerUnit, std::min(rows, Pass::kMaxBlockRows));
  const long panel_floats = kPanelColumns * tile_rows;
  for (int thread = 0; thread < threads_.max_size(); ++thread) {
    fresh.areas.push_back(make_area(Pass::kMaxPrivateRows));
    fresh.results.push_back(Memory(std::max(vectors * shape_.head_dim, panel_floats) * sizeof(float)));
    fresh.scratch.push_back(Memory(std::max(kernels_.attend_scratch_bytes(attention), panel_bytes)));
  }
  fresh.capacity = rows;
  // Faults on new pages would cost the first prompt a tenth of its time, and much more in a fresh virtual machine.
  for (const Memory* memory : {&fresh.hidden, &fresh.qkv, &fresh.q, &fresh.attended, &fresh.gated}) memory->populate();
  for (const RowArea& area : fresh.areas) area.memory.populate();
  for (const Memory& memory : fresh.results) memory.populate();
  for (const Memory& memory : fresh.scratch) memory.populate();
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
  const long rows_at_once = std::max(1L, kQueryTile * shape_.num_kv_heads / shape_.num_heads);
  for (long i = 0; i < step.num_sequences; ++i) {
    const Span span{step.starts[i], step.starts[i + 1], step.contexts[i], step.tables + i * step.table_stride};
    spans_.push_back(span);
    // Late rows first: they see the most keys, and the last units should be the short ones.
    for (long last = span.end; last > span.begin; last -= std::min(rows_at_once, last - span.begin))
      for (int head = 0; head < shape_.num_kv_heads; ++head)
        items_.push_back({span, head, std::max(span.begin, last - rows_at_once), last,
                          std::max(span.begin, last - rows_at_once)});
  }
  // Not if a row's logits are wanted twice: both results would be added to the same row.
  const int64_t* wanted = step.logits_rows;
  const bool are_distinct = std::is_sorted(wanted, wanted + step.num_logits, std::less_equal<>());
  last_is_narrow_ = step.num_logits < step.num_tokens && are_distinct;
  for (long i = 0; last_is_narrow_ && i < step.num_logits; ++i)
    for (int head = 0; head < shape_.num_kv_heads; ++head)
      last_items_.push_back({span_of(step.logits_rows[i]), head, step.logits_rows[i], step.logits_rows[i] + 1, i});
  for (size_t i = 0; i < num_counters(); ++i) counters_[i].store(0, std::memory_order_relaxed);
}

bool Decoder::forward(const Step& step, const KvCache& cache, float* out, long stride, const int32_t* interrupt) {
  reserve(std::max(step.num_tokens, step.num_logits));
  plan(step);
  // Nothing in a pass allocates or throws: threads that have thrown could not reach the next barrier.
  Pass ours{*this, step, cache};
  const auto run = [&](auto&& job) {
    threads_.update_borrowed_cores();
    // The state that all threads start from, including those that join only now.
    const Pass current = ours;
    threads_.run([&](int thread) noexcept {
      if (thread == 0) return job(ours);
      Pass pass = current;
      pass.thread = thread;
      job(pass);
    });
  };
  if (ours.is_speculative) {
    run([&](Pass& pass) {
      pass.embed();
      for (size_t index = 0; index < layers_.size() && !pass.has_left; ++index) pass.layer(index);
      pass.head(out, stride);
    });
  } else {
    // A job for each layer: between jobs, cores are borrowed and returned.
    run([](Pass& pass) { pass.embed(); });
    for (size_t index = 0; index < layers_.size(); ++index) {
      if (__atomic_load_n(interrupt, __ATOMIC_RELAXED) != 0) {
        threads_.return_borrowed_cores();
        return false;
      }
      run([=](Pass& pass) { pass.layer(index); });
    }
    run([=](Pass& pass) { pass.head(out, stride); });
  }
  threads_.return_borrowed_cores();
  return true;
}

}  // namespace pdserve
