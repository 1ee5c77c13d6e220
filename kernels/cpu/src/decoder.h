// A whole decoder of the llama family: packed weights, the working memory of a step, and the forward pass.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pack.h"
#include "phase_scheduler.h"
#include "sampling.h"
#include "threads.h"

namespace pdserve {

struct ModelShape {
  long hidden_size, intermediate_size, vocab_size;
  int num_heads, num_kv_heads, head_dim;
  float scale, eps;
};

struct LayerSource {
  Source q, k, v, output, gate, up, down;
  const void *input_norm, *post_attention_norm;
  // Null: the model has none.
  const void *q_norm, *k_norm;
  // 0: none.
  long window;
};

// One step's rows, as `kernels.ops.KvRows` describes them.
struct Step {
  long num_tokens, num_sequences, num_logits, table_stride;
  const int64_t *token_ids, *positions, *slots, *starts, *contexts, *tables, *logits_rows;
  // Of `logits_rows`, the hidden states after the final norm are wanted instead of logits.
  bool hidden_only;
};

class Decoder {
 public:
  Decoder(const ModelShape& shape, WeightType type, Format format, const Kernels& kernels, int num_threads,
          std::vector<int> cpus, Borrowing borrowing = {});

  void add_layer(const LayerSource& source);
  // `embedding` [vocab, hidden] and `angles` [positions][2][head_dim] are read in place and must outlive the decoder.
  void finish(const void* embedding, const void* norm, const Source& lm_head, const float* angles);

  // Writes K and V of all rows to their slots and float32 logits, or hidden states, of the wanted rows, `stride` floats
  // apart.
  // False: it has ended between two layers, because `interrupt`, which any thread may set, was not 0. A pass of few rows
  // does not look at it.
  bool forward(const Step& step, const KvCache& cache, float* out, long stride, const int32_t* interrupt);

  // Samples with the threads of the forward pass.
  RowSampler& sampler() { return sampler_; }

  long logits_stride() const { return lm_head_->matrix().columns; }
  size_t weight_bytes() const;
  int num_threads() const { return threads_.size(); }
  double borrowed_core_seconds() const { return threads_.borrowed_seconds(); }
  uint64_t redone_units() const { return scheduler_->num_redone(); }

 private:
  struct Layer {
    Packed qkv, output, gate_up, down;
    std::vector<float> input_norm, post_attention_norm, q_norm, k_norm;
    long window;
  };
  struct AttentionItem {
    Span span;
    int kv_head;
    long first, last;
    // First row of the result.
    long out;
  };
  // Memory for the left-hand side of a product.
  struct RowArea {
    Memory memory;
    Activations rows;
  };
  struct Workspace {
    long capacity = 0;
    Memory hidden, qkv, q, attended, gated;
    // One that all threads share, then a small one for each possible thread.
    std::vector<RowArea> areas;
    // For each possible thread.
    std::vector<Memory> scratch, results;
  };
  struct Pass;

  void reserve(long num_tokens);
  RowArea make_area(long num_rows) const;
  void plan(const Step& step);
  const Span& span_of(long row) const;
  size_t num_counters() const;

  const ModelShape shape_;
  const WeightType type_;
  const Format format_;
  const Kernels& kernels_;
  ThreadGroup threads_;
  RowSampler sampler_{kernels_, threads_};
  std::shared_ptr<Arena> weights_ = std::make_shared<Arena>();
  std::vector<Layer> layers_;
  std::unique_ptr<Packed> lm_head_;
  std::vector<float> norm_;
  const void* embedding_ = nullptr;
  const float* angles_ = nullptr;

  Workspace work_;
  std::vector<Span> spans_;
  std::vector<AttentionItem> items_, last_items_;
  // The last layer attends only rows whose logits are wanted: `last_items_`.
  bool last_is_narrow_ = false;
  // For each phase, the next unit to hand out.
  std::unique_ptr<std::atomic<long>[]> counters_;
  std::unique_ptr<PhaseScheduler> scheduler_;
};

}  // namespace pdserve
