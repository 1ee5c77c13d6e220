// Work stealing with speculative re-execution: how threads share phases that last less than the system may keep one of them
// off its core. No thread waits for such a straggler. A unit that it has claimed is computed again by a thread with nothing
// else to do. Each thread computes into memory of its own, and only the first result of a unit is committed. When the
// straggler runs again, it finds the unit committed, drops its result and follows the others.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#include "threads.h"

namespace pdserve {

class PhaseScheduler {
 public:
  // `max_units`: of any phase.
  explicit PhaseScheduler(long max_units) : units_(std::make_unique<std::atomic<uint64_t>[]>(max_units)) {}

  // Units committed in all phases so far. Between passes, the next phase begins there.
  uint64_t num_committed() const { return num_committed_.load(std::memory_order_acquire); }

  // Units computed again because the thread that had claimed them was late.
  uint64_t num_redone() const { return num_redone_.load(std::memory_order_relaxed); }

  // Returns when all units of the phase are committed, or earlier, when `is_leaving()`. `end`: `num_committed` at the end of
  // the phase, which also identifies it. The calling thread starts with unit `first` of the `count` units.
  //
  // commit(i) is called once for each unit, by one of the threads. compute(i) of a straggler may read floats that others,
  // already in a later phase, are writing. So it must not use them as addresses, and must write only to memory of its own;
  // its result is then not committed.
  template <class Compute, class Commit, class Leaving>
  void run(uint64_t end, long first, long count, Compute&& compute, Commit&& commit, Leaving&& is_leaving) {
    const auto attempt = [&](long i) {
      compute(i);
      if (!begin_commit(i, end)) return;
      commit(i);
      units_[i].store(tag(end, committed), std::memory_order_release);
      num_committed_.fetch_add(1, std::memory_order_acq_rel);
    };
    if (num_committed() >= end) return;
    const auto nth = [&](long n) { return first + n < count ? first + n : first + n - count; };
    const Clock::time_point started_at = Clock::now();
    long num_computed = 0;
    for (long n = 0; n < count; ++n) {
      if (is_leaving()) return;
      if (!claim(nth(n), end)) continue;
      attempt(nth(n));
      ++num_computed;
    }
    // Units of a phase take about the same time.
    const auto patience =
        num_computed == 0 ? kDefaultPatience : std::max(kMinPatience, 2 * (Clock::now() - started_at) / num_computed);
    while (!wait(end, patience)) {
      bool has_stragglers = false;
      for (long n = 0; n < count; ++n) {
        const long i = nth(n);
        if (is_leaving()) return;
        if (units_[i].load(std::memory_order_acquire) != tag(end, claimed)) continue;
        has_stragglers = true;
        num_redone_.fetch_add(1, std::memory_order_relaxed);
        attempt(i);
      }
      // What is missing is being committed: the only step that others wait for.
      if (!has_stragglers) std::this_thread::yield();
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  enum State : uint64_t { claimed = 1, committing, committed };

  // How long to wait for units that others have claimed: longer than a unit takes, shorter than the system keeps a thread
  // off its core. A thread that has computed no unit does not know how long one takes, and uses the default.
  static constexpr Clock::duration kMinPatience = std::chrono::microseconds(30);
  static constexpr Clock::duration kDefaultPatience = std::chrono::microseconds(300);
  // Polls between two readings of the clock.
  static constexpr int kPollsPerReading = 32;

  static uint64_t tag(uint64_t end, State state) { return 4 * end + state; }

  // True for the first of all threads that have computed the unit. The exchange also keeps the thread's reads before the
  // writes of later phases: without the release, these could become part of the result.
  bool begin_commit(long i, uint64_t end) {
    uint64_t expected = tag(end, claimed);
    return units_[i].compare_exchange_strong(expected, tag(end, committing), std::memory_order_acq_rel);
  }

  bool claim(long i, uint64_t end) {
    uint64_t now = units_[i].load(std::memory_order_acquire);
    return now < tag(end, claimed) && units_[i].compare_exchange_strong(now, tag(end, claimed), std::memory_order_acq_rel);
  }

  bool wait(uint64_t end, Clock::duration patience) const {
    const Clock::time_point started_at = Clock::now();
    do
      for (int i = 0; i < kPollsPerReading; ++i) {
        if (num_committed() >= end) return true;
        relax();
      }
    while (Clock::now() - started_at < patience);
    return false;
  }

  // For each index, the latest phase that had a unit with it, and the unit's state in that phase.
  std::unique_ptr<std::atomic<uint64_t>[]> units_;
  alignas(64) std::atomic<uint64_t> num_committed_{0};
  alignas(64) std::atomic<uint64_t> num_redone_{0};
};

}  // namespace pdserve
