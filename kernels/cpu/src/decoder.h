// A whole decoder of the llama family: packed weights, the working memory of a step, and the forward pass.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "ledger.h"
#include "pack.h"
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
  const void *q_norm, *k_norm;  // Null: the model has none.
  long window;                  // 0: none.
};

// One step's rows, as `kernels.ops.KvRows` describes them.
struct Step {
  long num_tokens, num_sequences, num_logits, table_stride;
  const int64_t *token_ids, *positions, *slots, *starts, *contexts, *tables, *logits_rows;
};

class Decoder {
 public:
  Decoder(const ModelShape& shape, WeightType type, Format format, const Kernels& kernels, int num_threads,
          std::vector<int> cpus, Borrowing borrowing = {});

  void add_layer(const LayerSource& source);
  // `embedding` [vocab, hidden] and `angles` [positions][2][head_dim] are read in place and must outlive the decoder.
  void finish(const void* embedding, const void* norm, const Source& lm_head, const float* angles);

  // Writes K and V of all rows to their slots and float32 logits of the wanted rows, `stride` floats apart.
  void forward(const Step& step, const KvCache& cache, float* logits, long stride);

  long logits_stride() const { return lm_head_->matrix().columns; }
  size_t weight_bytes() const;
  int num_threads() const { return team_.size(); }
  double borrowed_core_seconds() const { return team_.borrowed_seconds(); }
  uint64_t redone_units() const { return ledger_->redone(); }

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
    long out;  // Row of the result.
  };
  // Rows of floats on their way to a product: one area for all members, and a small one of each member's own.
  struct RowArea {
    Memory memory;
    Activations rows;
  };
  struct Workspace {
    long capacity = 0;
    Memory hidden, qkv, q, attended, gated;
    std::vector<RowArea> areas;  // The shared one, then one for each member that there may be.
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
  Team team_;
  std::shared_ptr<Arena> weights_ = std::make_shared<Arena>();
  std::vector<Layer> layers_;
  std::unique_ptr<Packed> lm_head_;
  std::vector<float> norm_;
  const void* embedding_ = nullptr;
  const float* angles_ = nullptr;

  Workspace work_;
  std::vector<Span> spans_;
  std::vector<AttentionItem> items_, last_items_;
  bool last_is_narrow_ = false;  // The last layer goes on with the rows whose logits are wanted: `last_items_`.
  std::unique_ptr<std::atomic<long>[]> counters_;  // What is handed out unit by unit, of each phase.
  std::unique_ptr<Ledger> ledger_;                 // What members race for.
};

}  // namespace pdserve
