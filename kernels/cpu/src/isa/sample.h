// The token of one row of logits. `pdserve/engine/sampler.py` defines it; here it is found in another way, with the same
// result. Scores and weights that decide are computed as there; floats only exclude tokens that need no score.
#pragma once

#include <algorithm>
#include <limits>

#include "../sample_row.h"
#include "random.h"

namespace pdserve::PD_ISA {

// As in `pdserve/engine/sampler.py`: beyond this distance from the largest scaled logit, no token can win.
constexpr double kMaxDistance = 26.2;
// Unit of weights: integers in proportion to probabilities, held in doubles. Their sums are exact in any order.
constexpr double kWeightUnits = 0x1p32;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Logits with ids; `ids` null: the index is the id. Ids ascend.
struct Tokens {
  const float* logits;
  const int32_t* ids;
  long count;
};

// A vector of logits; beyond the end, minus infinity.
static PD_INLINE vs block_of(const Tokens& tokens, long first) {
  vs x;
  if (first + kSingles <= tokens.count) {
    std::memcpy(&x, tokens.logits + first, sizeof(x));
    return x;
  }
  x = splat_single(-kInfinity);
  std::memcpy(&x, tokens.logits + first, (tokens.count - first) * sizeof(float));
  return x;
}

// (logit - largest logit) / temperature
struct Scale {
  double best, temperature;

  PD_INLINE vd operator()(vd logits) const {
    const vd distance = logits - splat_double(best);
    return temperature == 1.0 ? distance : distance / splat_double(temperature);
  }
  double operator()(float logit) const { return (double(logit) - best) / temperature; }
  // A finite float near the logit at this distance.
  float logit_at(double distance) const {
    return std::max(float(best - distance * temperature), std::numeric_limits<float>::lowest());
  }
};

// The largest of the logits; NaN if there is one.
static float largest_of(const Tokens& tokens) {
  vs greatest[2] = {splat_single(-kInfinity), splat_single(-kInfinity)};
  vsi invalid{};
  for (long i = 0; i < tokens.count; i += 2 * kSingles)
    for (int n = 0; n < 2 && i + n * kSingles < tokens.count; ++n) {
      const vs x = block_of(tokens, i + n * kSingles);
      greatest[n] = x > greatest[n] ? x : greatest[n];
      invalid |= x != x;
    }
  if (bits_of(invalid)) return std::numeric_limits<float>::quiet_NaN();
  float result = -kInfinity;
  for (const vs& some : greatest)
    for (int i = 0; i < kSingles; ++i) result = std::max(result, some[i]);
  return result;
}

static long first_index_of(const Tokens& tokens, float logit) {
  for (long i = 0;; i += kSingles)
    if (const uint32_t found = bits_of(block_of(tokens, i) == splat_single(logit))) return i + __builtin_ctz(found);
}

// Zones of distances from the largest logit, in each of which tokens have a mass.
struct Zones {
  static constexpr int kMax = 5;
  int count;
  // Lowest logit of each, descending. The last one is that of `kMaxDistance`.
  float limits[kMax];
  // Of all tokens down to the limit.
  double masses[kMax];
};

// The weight by which top_k takes tokens.
struct Count {
  PD_INLINE vd operator()(vd) const { return splat_double(1.0); }

  static Zones zones_of(const Tokens& tokens, const Scale& scale) {
    Zones zones{5, {}, {}};
    long counts[5]{};
    const double distances[] = {1.0, 3.0, 6.0, 11.0, kMaxDistance};
    for (int zone = 0; zone < 5; ++zone) zones.limits[zone] = scale.logit_at(distances[zone]);
    for (long i = 0; i < tokens.count; i += kSingles) {
      const vs x = block_of(tokens, i);
      for (int zone = 0; zone < 5; ++zone) counts[zone] += __builtin_popcount(bits_of(x >= splat_single(zones.limits[zone])));
    }
    for (int zone = 0; zone < 5; ++zone) zones.masses[zone] = double(counts[zone]);
    return zones;
  }
};

// The weight by which top_p takes tokens: an integer in proportion to the probability.
struct Probability {
  Scale scale;

  PD_INLINE vd operator()(vd logits) const {
    return floor_of(exp_of_negative(scale(logits)) * splat_double(kWeightUnits));
  }

  Zones zones_of(const Tokens& tokens, double top_p) const {
    const double end = guess_end(tokens, top_p);
    Zones zones{3, {}, {}};
    zones.limits[0] = scale.logit_at(std::max(end - kMargin, 0.0));
    zones.limits[1] = scale.logit_at(std::min(end + kMargin, kMaxDistance));
    zones.limits[2] = scale.logit_at(kMaxDistance);
    const vd near = splat_double(zones.limits[0]), far = splat_double(zones.limits[1]);
    const vs limit = splat_single(zones.limits[2]);
    vd sums[3]{};
    for (long i = 0; i < tokens.count; i += kSingles) {
      const vs x = block_of(tokens, i);
      if (bits_of(x >= limit) == 0) continue;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const vd logits = to_doubles(x, half), weights = (*this)(logits);
        sums[0] = add_where_at_least(sums[0], weights, logits, near);
        sums[1] = add_where_at_least(sums[1], weights, logits, far);
        sums[2] += weights;  // Beyond the limit they are 0.
      }
    }
    for (int zone = 0; zone < 3; ++zone) zones.masses[zone] = sum(sums[zone]);
    return zones;
  }

 private:
  // Around the guess, the zone that should have the end.
  static constexpr double kMargin = 0.6;

  // The distance at which the head of `top_p` ends among some of the tokens. A wrong guess only costs time.
  double guess_end(const Tokens& tokens, double top_p) const {
    constexpr long kStep = 64;
    constexpr int kBins = 128;
    constexpr double kPerUnit = kBins / kMaxDistance;
    double masses[kBins]{}, total = 0;
    for (long i = 0; i < tokens.count; i += kStep * kSingles) {
      const vs x = block_of(tokens, i);
      for (int half = 0; half < 2; ++half) {
        const vd logits = to_doubles(x, half), distances = scale(logits), weights = exp_of_negative(distances);
        for (int lane = 0; lane < kDoubles; ++lane) {
          if (!(distances[lane] > -kMaxDistance)) continue;
          masses[std::min(int(-distances[lane] * kPerUnit), kBins - 1)] += weights[lane];
          total += weights[lane];
        }
      }
    }
    int bin = 0;
    for (double mass = masses[0]; bin < kBins - 1 && mass < total * top_p; mass += masses[bin]) ++bin;
    return (bin + 0.5) / kPerUnit;
  }
};

// The end of a head of the descending order, in which equal logits are in the order of their indices.
struct Cut {
  // The last logit of the head, and the last index with this logit.
  float logit;
  long index;
};

// Tokens in descending order of their logits, roughly: the mass of each bin.
class Bins {
 public:
  Bins(float top, float low) : top_(top), factor_((kCount - 1) / (top - low)) {
    if (!(factor_ < kInfinity)) factor_ = 0;
  }

  int bin_of(float logit) const { return std::min(int((top_ - logit) * factor_), kCount - 1); }
  void add(float logit, double weight) { masses_[bin_of(logit)] += weight; }

  // The bin in which a mass of `wanted` is reached; `before` becomes the mass before it.
  int last_of_head(double& before, double wanted) const {
    int bin = 0;
    while (bin < kCount - 1 && before + masses_[bin] < wanted) before += masses_[bin++];
    return bin;
  }

 private:
  static constexpr int kCount = 1024;

  const float top_;
  float factor_;
  double masses_[kCount]{};
};

// The tokens of a zone, in which a head ends.
struct Border {
  float* logits;
  int32_t* indices;
  double* weights;
  long count;
  // Mass before the zone.
  double before;
  double wanted;

  Cut cut() {
    for (int attempt = 0; attempt < 3 && count > kFew; ++attempt) narrow();
    if (count > kFew) return cut_of_many();
    Token sorted[kFew];
    for (long i = 0; i < count; ++i) sorted[i] = {logits[i], indices[i], weights[i]};
    std::sort(sorted, sorted + count, [](const Token& a, const Token& b) { return a.is_before(b); });
    return end_of(sorted);
  }

 private:
  // Tokens that are sorted without more ado.
  static constexpr long kFew = 256;

  struct Token {
    float logit;
    int32_t index;
    double weight;
    bool is_before(const Token& other) const {
      return logit > other.logit || (logit == other.logit && index < other.index);
    }
  };

  Cut end_of(const Token* sorted) const {
    long last = 0;
    double mass = before;
    for (long i = 0; i < count && mass < wanted; ++i) {
      last = i;
      mass += sorted[i].weight;
    }
    return {sorted[last].logit, sorted[last].index};
  }

  // Of tokens that bins do not divide, almost all are equal: the largest logit is taken out, again and again.
  Cut cut_of_many() {
    float above = kInfinity;
    while (true) {
      float top = -kInfinity;
      for (long i = 0; i < count; ++i)
        if (logits[i] < above) top = std::max(top, logits[i]);
      Cut last{top, 0};
      for (long i = 0; i < count; ++i) {
        if (logits[i] != top) continue;
        last.index = indices[i];
        before += weights[i];
        if (!(before < wanted)) return last;
      }
      above = top;
    }
  }

  void narrow() {
    float top = logits[0], low = top;
    for (long i = 1; i < count; ++i) {
      top = logits[i] > top ? logits[i] : top;
      low = logits[i] < low ? logits[i] : low;
    }
    Bins bins(top, low);
    for (long i = 0; i < count; ++i) bins.add(logits[i], weights[i]);
    const int last = bins.last_of_head(before, wanted);
    long left = 0;
    for (long i = 0; i < count; ++i) {
      logits[left] = logits[i];
      indices[left] = indices[i];
      weights[left] = weights[i];
      left += bins.bin_of(logits[i]) == last;
    }
    count = left;
  }
};

static PD_INLINE vsi lane_indices() {
  vsi lanes;
  for (int i = 0; i < kSingles; ++i) lanes[i] = i;
  return lanes;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each set of lanes, its members, a byte each.
struct LaneLists {
  uint64_t of[256]{};
  constexpr LaneLists() {
    for (int set = 0; set < 256; ++set)
      for (int lane = 0, count = 0; lane < 8; ++lane)
        if (set >> lane & 1) of[set] |= uint64_t(lane) << (8 * count++);
  }
};
static constexpr LaneLists kLaneLists;
#endif

// Appends the lanes in `chosen` to `logits` and `ids`, and returns their number then. May overwrite a vector beyond.
static PD_INLINE long append(vs x, vsi ids, uint32_t chosen, float* logits, int32_t* to_ids, long count) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(logits + count, _mm512_maskz_compress_ps(__mmask16(chosen), (__m512)x));
  _mm512_storeu_si512(to_ids + count, _mm512_maskz_compress_epi32(__mmask16(chosen), (__m512i)ids));
  return count + __builtin_popcount(chosen);
#elif defined(__AVX2__)
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(kLaneLists.of[chosen])));
  _mm256_storeu_ps(logits + count, _mm256_permutevar8x32_ps((__m256)x, lanes));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to_ids + count), _mm256_permutevar8x32_epi32((__m256i)ids, lanes));
  return count + __builtin_popcount(chosen);
#else
  for (; chosen; chosen &= chosen - 1) {
    const int lane = __builtin_ctz(chosen);
    logits[count] = x[lane];
    to_ids[count++] = ids[lane];
  }
  return count;
#endif
}

// The tokens for which choose(x, first), called for each vector, sets a bit.
template <class Choose>
static Tokens keep(const Tokens& tokens, const SampleScratch& scratch, Choose&& choose) {
  const vsi lanes = lane_indices();
  long count = 0;
  for (long i = 0; i < tokens.count; i += kSingles) {
    const vs x = block_of(tokens, i);
    // Without a branch, which could not be predicted.
    vsi ids = lanes + int32_t(i);
    if (tokens.ids != nullptr) std::memcpy(&ids, tokens.ids + i, sizeof(ids));
    count = append(x, ids, choose(x, i), scratch.kept, scratch.kept_ids, count);
  }
  return {scratch.kept, scratch.kept_ids, count};
}

// The tokens of the head that ends at the cut.
static Tokens keep_up_to(const Tokens& tokens, const Cut& cut, const SampleScratch& scratch) {
  return keep(tokens, scratch, [&](vs x, long first) {
    uint32_t equal = bits_of(x == splat_single(cut.logit));
    if (equal != 0 && first + kSingles > cut.index) {
      const long num_inside = cut.index - first + 1;
      equal = num_inside <= 0 ? 0 : equal & ((2u << (num_inside - 1)) - 1);
    }
    return bits_of(x > splat_single(cut.logit)) | equal;
  });
}

// The smallest head with a mass of at least `wanted`; at least one token. The zones are those of `tokens`.
template <class Weight>
static Tokens keep_head(Tokens tokens, const Scale& scale, Weight weight, const Zones& zones, double wanted,
                        const SampleScratch& scratch) {
  if (!(wanted > 0)) {
    const float best = float(scale.best);
    return keep_up_to(tokens, {best, first_index_of(tokens, best)}, scratch);
  }
  int zone = 0;
  while (zone < zones.count && zones.masses[zone] < wanted) ++zone;
  const vs low = splat_single(zones.limits[std::min(zone, zones.count - 1)]);
  tokens = keep(tokens, scratch, [&](vs x, long) { return bits_of(x >= low); });
  if (zone == zones.count) return tokens;

  const vs above = splat_single(zone == 0 ? kInfinity : zones.limits[zone - 1]);
  const vsi lanes = lane_indices();
  long count = 0;
  for (long i = 0; i < tokens.count; i += kSingles) {
    const vs x = block_of(tokens, i);
    const uint32_t inside = bits_of((x >= low) & (x < above));
    count = append(x, lanes + int32_t(i), inside, scratch.zone, scratch.zone_indices, count);
  }
  for (long i = 0; i < count; i += kDoubles) {
    vs_half x;
    std::memcpy(&x, scratch.zone + i, sizeof(x));
    const vd weights = weight(__builtin_convertvector(x, vd));
    std::memcpy(scratch.zone_weights + i, &weights, sizeof(weights));
  }
  const double before = zone == 0 ? 0 : zones.masses[zone - 1];
  Border border{scratch.zone, scratch.zone_indices, scratch.zone_weights, count, before, wanted};
  return keep_up_to(tokens, border.cut(), scratch);
}

// The tokens that have at least `min_p` of the largest probability.
static Tokens keep_likely(const Tokens& tokens, const Scale& scale, double min_p, const SampleScratch& scratch) {
  const vd bound = splat_double(std::min(min_p, 1.0));
  // Those below are surely less likely.
  const double distance = std::min(-std::log(std::min(min_p, 1.0)) * 1.001 + 0.001, kMaxDistance);
  const vs limit = splat_single(scale.logit_at(distance));
  return keep(tokens, scratch, [&](vs x, long) {
    const uint32_t chosen = bits_of(x >= limit);
    if (chosen == 0) return chosen;
    uint32_t likely = 0;
    for (int half = 0; half < 2; ++half) {
      const vl mask = exp_of_negative(scale(to_doubles(x, half))) >= bound;
      for (int i = 0; i < kDoubles; ++i) likely |= uint32_t(mask[i] & 1) << (half * kDoubles + i);
    }
    return chosen & likely;
  });
}

// The token with the largest sum of scaled logit and noise; of equal sums the first.
class Draw {
 public:
  Draw(const Scale& scale, const Philox& random, const SampleScratch& scratch)
      : scale_(scale),
        random_(random),
        words_(scratch.words),
        limit_(scale.logit_at(kMaxDistance)),
        factor_(float(std::min(1 / scale.temperature, 1e30))) {}

  long from(const Tokens& tokens) {
    if (tokens.count == 0) return -1;
    if (tokens.ids == nullptr)
      from_all(tokens);
    else if (tokens.count > tokens.ids[tokens.count - 1] / kWords)
      from_many(tokens);
    else
      from_few(tokens);
    return token_;
  }

 private:
  // Tokens whose words are computed at a time.
  static constexpr int kRange = kWords * kDoubles;

  void from_all(const Tokens& tokens) {
    alignas(64) uint32_t words[kRange];
    for (long first = 0; first < tokens.count; first += kRange) {
      const long end = std::min(first + kRange, tokens.count);
      vsi possible{};
      for (long i = first; i < end; i += kSingles) possible |= block_of(tokens, i) >= splat_single(limit_);
      if (bits_of(possible) == 0) continue;
      random_.words_of_range(first / kWords, words);
      for (long i = first; i < end; i += kSingles) consider(tokens, i, words + (i - first));
    }
  }

  // Many of the vocabulary: the words of all are cheaper than those of each.
  void from_many(const Tokens& tokens) {
    const long end = tokens.ids[tokens.count - 1] + 1;
    for (long i = 0; i < end; i += kRange) random_.words_of_range(i / kWords, words_ + i);
    alignas(64) uint32_t words[kSingles];
    for (long i = 0; i < tokens.count; i += kSingles) {
      for (long lane = 0; lane < kSingles; ++lane) words[lane] = i + lane < tokens.count ? words_[tokens.ids[i + lane]] : 0;
      consider(tokens, i, words);
    }
  }

  void from_few(const Tokens& tokens) {
    alignas(64) uint32_t words[kSingles];
    for (long i = 0; i < tokens.count; i += kSingles) {
      for (int half = 0; half < kSingles; half += kDoubles) random_.words_of_ids(tokens.ids + i + half, words + half);
      consider(tokens, i, words);
    }
  }

  // With u the random number in (0, 1), a token wins only if -log(u) <= e^(scaled - best score), and 1 - u <= -log(u). The
  // margin is much more than the error of the floats.
  PD_INLINE void consider(const Tokens& tokens, long first, const uint32_t* words) {
    const vs x = block_of(tokens, first);
    const vs likelihood = rough_exp((x - splat_single(float(scale_.best))) * splat_single(factor_));
    vsi numbers;
    std::memcpy(&numbers, words, sizeof(numbers));
    const vsi complement = (~numbers >> 1) & 0x7fffffff;
    const vs needed = __builtin_convertvector(complement, vs) * splat_single(0x1p-31f);
    uint32_t found = bits_of((needed <= likelihood * splat_single(bound_)) & (x >= splat_single(limit_)));
    for (; found; found &= found - 1) {
      const int lane = __builtin_ctz(found);
      const double uniform = (double(words[lane]) + 0.5) * 0x1p-32;
      const double score = scale_(x[lane]) - log_of(-log_of(uniform));
      if (!(score > score_)) continue;
      score_ = score;
      token_ = tokens.ids == nullptr ? first + lane : tokens.ids[first + lane];
      bound_ = float(std::exp(-score)) * 1.0001f;
    }
  }

  const Scale scale_;
  const Philox random_;
  uint32_t* const words_;
  const float limit_, factor_;
  double score_ = -std::numeric_limits<double>::infinity();
  // e^(-score), and a little more.
  float bound_ = 1e30f;
  long token_ = -1;
};

// The token of logits whose maximum `best` is finite.
static long choose(Tokens tokens, float best, const SampleRequest& request, const SampleScratch& scratch) {
  if (!(request.temperature > 0)) return first_index_of(tokens, best);
  // Not accepted by the API, and not defined.
  if (!std::isfinite(request.temperature) || std::isnan(request.top_p) || std::isnan(request.min_p)) return -1;
  const Scale scale{best, request.temperature};
  if (request.min_p > 0) tokens = keep_likely(tokens, scale, request.min_p, scratch);
  if (request.top_k > 0 && request.top_k < tokens.count) {
    const Zones zones = Count::zones_of(tokens, scale);
    tokens = keep_head(tokens, scale, Count{}, zones, double(request.top_k), scratch);
  }
  if (request.top_p < 1) {
    const Probability weight{scale};
    const Zones zones = weight.zones_of(tokens, request.top_p);
    const double wanted = zones.masses[zones.count - 1] * request.top_p;
    tokens = keep_head(tokens, scale, weight, zones, wanted, scratch);
  }
  const Philox random{request.seed, uint64_t(request.choice), uint64_t(request.position)};
  return Draw(scale, random, scratch).from(tokens);
}

// The sum of e^(logit - best) in the order in which numpy adds: by halves of whole groups of eight, down to 128 numbers,
// which are eight interleaved sums.
static double sum_of_exp(const float* logits, long count, double best) {
  constexpr int kVectors = 8 / kDoubles;
  const auto exp_of = [&](float x) { return exp_of_negative(splat_double(double(x) - best))[0]; };
  if (count > 128) {
    const long half = count / 2 / 8 * 8;
    return sum_of_exp(logits, half, best) + sum_of_exp(logits + half, count - half, best);
  }
  double total = 0;
  long i = 0;
  if (count >= 8) {
    union { vd vectors[kVectors]; double of[8]; } sums{};
    for (; i + 8 <= count; i += 8)
      for (int n = 0; n < kVectors; ++n) {
        vs_half x;
        std::memcpy(&x, logits + i + n * kDoubles, sizeof(x));
        sums.vectors[n] += exp_of_negative(__builtin_convertvector(x, vd) - splat_double(best));
      }
    total = ((sums.of[0] + sums.of[1]) + (sums.of[2] + sums.of[3])) +
            ((sums.of[4] + sums.of[5]) + (sums.of[6] + sums.of[7]));
  }
  for (; i < count; ++i) total += exp_of(logits[i]);
  return total;
}

// The likeliest tokens in order, of equal ones the first: their ids, and their logits instead of log-probabilities.
static void find_top(const Tokens& tokens, long wanted, SampleResult& result) {
  int64_t& count = result.num_top;
  const auto insert = [&](float x, long id) {
    int64_t at = count < wanted ? count++ : wanted - 1;
    for (; at > 0 && result.top_logprobs[at - 1] < double(x); --at) {
      result.top_ids[at] = result.top_ids[at - 1];
      result.top_logprobs[at] = result.top_logprobs[at - 1];
    }
    result.top_ids[at] = id;
    result.top_logprobs[at] = x;
  };
  count = 0;
  long i = 0;
  for (; i < std::min(wanted, tokens.count); ++i) insert(tokens.logits[i], i);
  const Tokens rest{tokens.logits + i, nullptr, tokens.count - i};
  for (long first = 0; wanted > 0 && first < rest.count; first += kSingles) {
    const vs x = block_of(rest, first);
    for (uint32_t found = bits_of(x > splat_single(float(result.top_logprobs[wanted - 1]))); found; found &= found - 1) {
      const int lane = __builtin_ctz(found);
      if (double(x[lane]) > result.top_logprobs[wanted - 1]) insert(x[lane], i + first + lane);
    }
  }
}

// Log-probabilities by the raw logits.
static void describe(const Tokens& tokens, float best, long wanted, SampleResult& result) {
  const double log_total = double(best) + log_of(sum_of_exp(tokens.logits, tokens.count, best));
  const float chosen = tokens.logits[result.token];
  result.logprob = double(chosen) - log_total;
  result.log_total = log_total;
  result.rank = 1;
  for (long i = 0; i < tokens.count; i += kSingles) {
    const vs x = block_of(tokens, i);
    result.rank += __builtin_popcount(bits_of(x > splat_single(chosen)));
  }
  for (long i = 0; i < result.token; ++i) result.rank += tokens.logits[i] == chosen;
  find_top(tokens, std::min(wanted, tokens.count), result);
  for (long i = 0; i < result.num_top; ++i) result.top_logprobs[i] -= log_total;
}

static void sample_row(const float* raw, const float* logits, long vocab_size, const SampleRequest& request,
                       const SampleScratch& scratch, SampleResult& result) {
  result.token = -1;
  const Tokens all{raw, nullptr, vocab_size}, tokens{logits, nullptr, vocab_size};
  const float raw_best = largest_of(all);
  if (!std::isfinite(raw_best)) return;
  const float best = raw == logits ? raw_best : largest_of(tokens);
  if (!std::isfinite(best)) return;
  result.token = choose(tokens, best, request, scratch);
  if (result.token >= 0 && request.num_alternatives >= 0) describe(all, raw_best, request.num_alternatives, result);
}

}  // namespace pdserve::PD_ISA
