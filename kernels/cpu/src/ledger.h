// Who has made what of a phase: how members of a team share work that lasts less than the system may keep one of them from its
// core. Nobody waits for such a member: what it has claimed is made again by whoever has nothing else to do. A result is
// made apart from where it belongs and put there once, by the first who has it; when the late member is back, it finds that
// its work has been done, throws its own away and follows the others.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#include "threads.h"

namespace pdserve {

class Ledger {
 public:
  // `most_units`: of any phase.
  explicit Ledger(long most_units) : units_(std::make_unique<std::atomic<uint64_t>[]>(most_units)) {}

  // Of all phases so far; between passes, where the next phase begins.
  uint64_t settled() const { return settled_.load(std::memory_order_acquire); }

  // Units that were made again because somebody was late.
  uint64_t redone() const { return redone_.load(std::memory_order_relaxed); }

  // Returns when all units of the phase are settled, or, earlier, when `is_leaving()`. `end`: what `settled` is then; that is
  // also the phase's name. Begins at `first` of the `count` units. settle(i) is called once for each unit by all members
  // together. make(i) of a late member may read floats while others, already in a later phase, write them: it must find no
  // address in them, and keeps what it makes to itself, which `move` then throws away.
  template <class Make, class Settle, class Leaving>
  void share(uint64_t end, long first, long count, Make&& make, Settle&& settle, Leaving&& is_leaving) {
    const auto attempt = [&](long i) {
      make(i);
      if (!move(i, end, claimed, settling)) return;
      settle(i);
      units_[i].store(at(end, done), std::memory_order_release);
      settled_.fetch_add(1, std::memory_order_acq_rel);
    };
    if (settled() >= end) return;
    const auto nth = [&](long n) { return first + n < count ? first + n : first + n - count; };
    const Clock::time_point begun = Clock::now();
    long made = 0;
    for (long n = 0; n < count; ++n) {
      if (is_leaving()) return;
      if (!claim(nth(n), end)) continue;
      attempt(nth(n));
      ++made;
    }
    // Units of a phase are about equally long.
    const auto patience = made == 0 ? kBlindPatience : std::max(kLeastPatience, 2 * (Clock::now() - begun) / made);
    while (!wait(end, patience)) {
      bool is_late = false;
      for (long n = 0; n < count; ++n) {
        const long i = nth(n);
        if (is_leaving()) return;
        if (units_[i].load(std::memory_order_acquire) != at(end, claimed)) continue;
        is_late = true;
        redone_.fetch_add(1, std::memory_order_relaxed);
        attempt(i);
      }
      if (!is_late) std::this_thread::yield();  // Who puts a result in its place is the only one that is waited for.
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  enum State : uint64_t { claimed = 1, settling, done };

  // How long to wait for what others have claimed: longer than a unit takes, shorter than the system keeps a thread waiting.
  // Who has made no unit does not know how long one takes.
  static constexpr Clock::duration kLeastPatience = std::chrono::microseconds(30);
  static constexpr Clock::duration kBlindPatience = std::chrono::microseconds(300);
  static constexpr int kLooksAtOnce = 32;  // Between two looks at the clock.

  static uint64_t at(uint64_t end, State state) { return 4 * end + state; }

  // Of all that have made a unit one gets it from claimed to settling. Its exchange is also what keeps its reads before the
  // writes of later phases: without the release half a result could be made of these.
  bool move(long i, uint64_t end, State from, State to) {
    uint64_t expected = at(end, from);
    return units_[i].compare_exchange_strong(expected, at(end, to), std::memory_order_acq_rel);
  }

  bool claim(long i, uint64_t end) {
    uint64_t now = units_[i].load(std::memory_order_acquire);
    return now < at(end, claimed) && units_[i].compare_exchange_strong(now, at(end, claimed), std::memory_order_acq_rel);
  }

  bool wait(uint64_t end, Clock::duration patience) const {
    const Clock::time_point begun = Clock::now();
    do
      for (int i = 0; i < kLooksAtOnce; ++i) {
        if (settled() >= end) return true;
        relax();
      }
    while (Clock::now() - begun < patience);
    return false;
  }

  std::unique_ptr<std::atomic<uint64_t>[]> units_;  // The last phase that had a unit of this number, and its state there.
  alignas(64) std::atomic<uint64_t> settled_{0};
  alignas(64) std::atomic<uint64_t> redone_{0};
};

}  // namespace pdserve
