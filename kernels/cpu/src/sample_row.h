// What sampling the token of one row takes and returns. `kernels/cpu/sampling.py` writes and reads this memory.
#pragma once

#include <cstdint>

namespace pdserve {

constexpr int kMaxAlternatives = 20;

// Fields of 8 bytes each. `pdserve/base/sampling.py:SamplingParams` has the meaning of the settings.
struct SampleRequest {
  // Index of the row of logits.
  int64_t row;
  // 0: the likeliest token.
  double temperature;
  double top_p, min_p;
  int64_t top_k;
  uint64_t seed;
  int64_t choice, position;
  // Alternatives to report; -1: no log-probabilities.
  int64_t num_alternatives;
  // Edits of the logits, in this order. Where the first field is null, there are none of the kind.
  // Added to the logits of `bias_ids`, which are distinct.
  const float* bias;
  const int64_t* bias_ids;
  int64_t num_bias;
  // Prompt and output so far, and their penalties.
  const int64_t* tokens;
  int64_t num_tokens, num_prompt;
  double repetition, presence, frequency;
  // Ids that must not be sampled.
  const int64_t* banned;
  int64_t num_banned;
  // Bit i % 32 of word i / 32: whether id i may be sampled.
  const uint32_t* allowed;
};

// Fields of 8 bytes each.
struct SampleResult {
  // -1: there is none, because the logits have no finite maximum. The other fields are then undefined.
  int64_t token;
  // The rest only with `num_alternatives`: of the token, by the raw logits,
  int64_t rank;
  double logprob;
  // the logarithm of the sum of all exponentials,
  double log_total;
  // and of the likeliest ones.
  int64_t num_top;
  int64_t top_ids[kMaxAlternatives];
  double top_logprobs[kMaxAlternatives];
};

// Memory of one thread. Arrays are some vectors longer than the vocabulary.
struct SampleScratch {
  // Tokens that truncation keeps: their logits and ids.
  float* kept;
  int32_t* kept_ids;
  // Tokens of a zone of logits: logits, indices and weights.
  float* zone;
  int32_t* zone_indices;
  double* zone_weights;
  // Random words of the whole vocabulary.
  uint32_t* words;
  // Edited logits.
  float* edited;
  // How often tokens occur; 0 between rows.
  int32_t* counts;
};

}  // namespace pdserve
