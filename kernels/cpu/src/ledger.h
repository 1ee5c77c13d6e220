// Who has made what of a phase: how members of a team share work that lasts less than the system may keep one of them from its
// core. Nobody waits for such a member: what it has claimed is made again by whoever has nothing else to do. A result is
// made apart from where it belongs and put there once, by the first who has it; when the late member is back, it finds that
// its work has been done, throws its own away and follows the others.
#pragma once

#include <atomic>
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
  // also the phase's name. Begins at `first` of the `count` units. make(i) must do no harm if others, meanwhile in a later
  // phase, write to what it reads; settle(i) is called once for each unit by all members together.
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
    for (long n = 0; n < count; ++n) {
      if (is_leaving()) return;
      const long i = first + n < count ? first + n : first + n - count;
      if (claim(i, end)) attempt(i);
    }
    while (!wait(end)) {
      bool is_late = false;
      for (long i = 0; i < count; ++i) {
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
  enum State : uint64_t { free, claimed, settling, done };

  // How long to wait for what others have claimed: longer than a unit takes, shorter than the system keeps a thread waiting.
  static constexpr int kLooks = 800;

  static uint64_t at(uint64_t end, State state) { return 4 * end + state; }

  bool move(long i, uint64_t end, State from, State to) {
    uint64_t expected = at(end, from);
    return units_[i].compare_exchange_strong(expected, at(end, to), std::memory_order_acq_rel);
  }

  bool claim(long i, uint64_t end) {
    uint64_t now = units_[i].load(std::memory_order_acquire);
    return now < at(end, claimed) && units_[i].compare_exchange_strong(now, at(end, claimed), std::memory_order_acq_rel);
  }

  bool wait(uint64_t end) const {
    for (int i = 0; i < kLooks; ++i) {
      if (settled() >= end) return true;
      relax();
    }
    return false;
  }

  std::unique_ptr<std::atomic<uint64_t>[]> units_;  // The last phase that had a unit of this number, and its state there.
  alignas(64) std::atomic<uint64_t> settled_{0};
  alignas(64) std::atomic<uint64_t> redone_{0};
};

}  // namespace pdserve
