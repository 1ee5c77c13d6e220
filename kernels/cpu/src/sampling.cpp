#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

namespace pdserve {
namespace {

// Logits that change before a token is chosen, as in `pdserve/engine/logits.py:edited_logits`. Ids beyond the vocabulary
// are ignored, since a worker must not die by them.
class Edit {
 public:
  Edit(const SampleRequest& request, long vocab_size, const SampleScratch& scratch)
      : request_(request), vocab_size_(vocab_size), logits_(scratch.edited), counts_(scratch.counts) {}

  const float* of(const float* raw) const {
    if (request_.bias == nullptr && request_.tokens == nullptr && request_.banned == nullptr &&
        request_.allowed == nullptr)
      return raw;
    if (request_.bias == nullptr && request_.tokens == nullptr && request_.banned == nullptr) {
      copy_allowed(raw);
      return logits_;
    }
    std::memcpy(logits_, raw, vocab_size_ * sizeof(float));
    for (int64_t i = 0; i < request_.num_bias; ++i)
      if (is_token(request_.bias_ids[i])) logits_[request_.bias_ids[i]] += request_.bias[i];
    if (request_.tokens != nullptr) penalize();
    for (int64_t i = 0; i < request_.num_banned; ++i)
      if (is_token(request_.banned[i])) logits_[request_.banned[i]] = -std::numeric_limits<float>::infinity();
    if (request_.allowed != nullptr) copy_allowed(logits_);
    return logits_;
  }

 private:
  bool is_token(int64_t id) const { return uint64_t(id) < uint64_t(vocab_size_); }

  // From `from`, which may be the edited logits themselves. Words of a mask are mostly all or nothing.
  void copy_allowed(const float* from) const {
    constexpr float kNever = -std::numeric_limits<float>::infinity();
    const long whole = vocab_size_ / 32 * 32;
    for (long first = 0; first < whole; first += 32) {
      const uint32_t bits = request_.allowed[first / 32];
      float* to = logits_ + first;
      if (bits == 0) {
        std::fill(to, to + 32, kNever);
      } else if (bits == ~uint32_t(0)) {
        if (to != from + first) std::memcpy(to, from + first, 32 * sizeof(float));
      } else {
        copy_word(from + first, to, bits);
      }
    }
    for (long id = whole; id < vocab_size_; ++id)
      logits_[id] = (request_.allowed[id / 32] >> (id % 32) & 1) != 0 ? from[id] : kNever;
  }

  // 32 logits without branches, four at a time.
  static void copy_word(const float* from, float* to, uint32_t bits) {
    constexpr uint32_t kNever = 0xFF800000;
    for (int first = 0; first < 32; first += 4) {
      const uint32_t* keep = kKeep[bits >> first & 15];
      uint32_t words[4];
      std::memcpy(words, from + first, sizeof words);
      for (int i = 0; i < 4; ++i) words[i] = (words[i] & keep[i]) | (kNever & ~keep[i]);
      std::memcpy(to + first, words, sizeof words);
    }
  }

  // visit(id) for all tokens from the first one on.
  template <class Visit>
  void for_tokens(int64_t first, Visit&& visit) const {
    for (int64_t i = first; i < request_.num_tokens; ++i)
      if (is_token(request_.tokens[i])) visit(request_.tokens[i]);
  }

  // The counts are 0 before and after.
  void penalize() const {
    if (request_.repetition != 1.0) {
      const float factor = float(request_.repetition);
      for_tokens(0, [&](int64_t id) {
        float& x = logits_[id];
        if (counts_[id]++ == 0) x = x > 0 ? x / factor : x * factor;
      });
      for_tokens(0, [&](int64_t id) { counts_[id] = 0; });
    }
    for_tokens(request_.num_prompt, [&](int64_t id) { ++counts_[id]; });
    for_tokens(request_.num_prompt, [&](int64_t id) {
      if (counts_[id] != 0) logits_[id] -= float(request_.frequency * double(counts_[id]) + request_.presence);
      counts_[id] = 0;
    });
  }

  // All bits of what bit i of the index keeps.
  static constexpr uint32_t kAll = 0xFFFFFFFF;
  static constexpr uint32_t kKeep[16][4] = {
      {0, 0, 0, 0},    {kAll, 0, 0, 0},    {0, kAll, 0, 0},    {kAll, kAll, 0, 0},
      {0, 0, kAll, 0}, {kAll, 0, kAll, 0}, {0, kAll, kAll, 0}, {kAll, kAll, kAll, 0},
      {0, 0, 0, kAll}, {kAll, 0, 0, kAll}, {0, kAll, 0, kAll}, {kAll, kAll, 0, kAll},
      {0, 0, kAll, kAll}, {kAll, 0, kAll, kAll}, {0, kAll, kAll, kAll}, {kAll, kAll, kAll, kAll}};

  const SampleRequest& request_;
  const long vocab_size_;
  float* const logits_;
  int32_t* const counts_;
};

}  // namespace

void RowSampler::reserve(long vocab_size) {
  if (vocab_size <= capacity_) return;
  const long count = (ceil_div(vocab_size, kLanes) + 4) * kLanes;
  std::vector<Memory> memory;
  std::vector<SampleScratch> scratch;
  for (int thread = 0; thread < threads_.max_size(); ++thread) {
    memory.emplace_back(count * (sizeof(double) + 7 * sizeof(float)));
    auto* weights = memory.back().as<double>();
    auto* floats = reinterpret_cast<float*>(weights + count);
    auto* integers = reinterpret_cast<int32_t*>(floats + 3 * count);
    auto* words = reinterpret_cast<uint32_t*>(integers + 3 * count);
    std::memset(integers + 2 * count, 0, count * sizeof(int32_t));
    scratch.push_back({floats, integers, floats + count, integers + count, weights, words, floats + 2 * count,
                       integers + 2 * count});
  }
  memory_ = std::move(memory);
  scratch_ = std::move(scratch);
  capacity_ = vocab_size;
}

void RowSampler::sample(const SampleRequest* requests, long count, const float* logits, long stride, long vocab_size,
                        SampleResult* results) {
  reserve(vocab_size);
  const auto sample_one = [&](long i, int thread) {
    const float* raw = logits + requests[i].row * stride;
    const float* edited = Edit(requests[i], vocab_size, scratch_[thread]).of(raw);
    kernels_.sample_row(raw, edited, vocab_size, requests[i], scratch_[thread], results[i]);
  };
  if (count == 1) return sample_one(0, 0);
  std::atomic<long> next{0};
  threads_.update_borrowed_cores();
  threads_.run([&](int thread) noexcept {
    // On a core that its owner needs, a thread leaves the rest to the others.
    while (!threads_.is_wanted_back(thread)) {
      const long i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) break;
      sample_one(i, thread);
    }
  });
  threads_.return_borrowed_cores();
}

}  // namespace pdserve
