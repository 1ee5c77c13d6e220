// Tokens from rows of logits, by a group of threads.
#pragma once

#include <vector>

#include "kernels.h"
#include "pack.h"
#include "sample_row.h"
#include "threads.h"

namespace pdserve {

class RowSampler {
 public:
  RowSampler(const Kernels& kernels, ThreadGroup& threads) : kernels_(kernels), threads_(threads) {}

  // results[i] is the token of requests[i]. Rows of `logits` are `stride` floats apart. Each row is a unit of work.
  void sample(const SampleRequest* requests, long count, const float* logits, long stride, long vocab_size,
              SampleResult* results);

 private:
  void reserve(long vocab_size);

  const Kernels& kernels_;
  ThreadGroup& threads_;
  // For each possible thread.
  std::vector<Memory> memory_;
  std::vector<SampleScratch> scratch_;
  long capacity_ = 0;
};

}  // namespace pdserve
