// Two members go through phases together. One of them is stopped between making a unit and settling it until the other is
// phases further: its unit has been made again, and what it made itself must be lost. Prints what went wrong.
#include "ledger.h"

#include <array>
#include <condition_variable>
#include <cstdio>
#include <mutex>

namespace {

constexpr long kUnits = 8, kPhases = 400, kStopEvery = 20, kAhead = 3;

pdserve::Ledger ledger(kUnits);
// Each phase reads what the one before wrote, in turns, as the buffers of a forward pass.
std::array<std::array<std::atomic<uint64_t>, kUnits>, 2> values{};
std::array<std::atomic<int>, kPhases * kUnits> times_settled{};
std::mutex mutex;
std::condition_variable changed;
long reached = 0;     // Phases that the swift member has ended.
long stopped = -1;    // The phase in which the slow member has made a unit last that it does not settle yet.

uint64_t next(long phase, long unit, const std::array<uint64_t, kUnits>& before) {
  uint64_t value = uint64_t(phase * kUnits + unit) * 0x9e3779b97f4a7c15;
  for (uint64_t each : before) value = (value ^ each) * 0xff51afd7ed558ccd + 1;
  return value;
}

void go(bool is_slow) {
  uint64_t made = 0, end = 0;
  for (long phase = 0; phase < kPhases; ++phase) {
    const auto& from = values[phase % 2];
    auto& to = values[(phase + 1) % 2];
    end += kUnits;
    // The last phases without a stop: nobody would be ahead.
    const bool stops = phase % kStopEvery == kStopEvery / 2 && phase + kAhead < kPhases;
    bool has_stopped = false;
    if (stops && !is_slow) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return stopped == phase; });
    }
    ledger.share(
        end, is_slow ? kUnits / 2 : 0, kUnits,
        [&](long unit) {
          std::array<uint64_t, kUnits> before;
          for (long i = 0; i < kUnits; ++i) before[i] = from[i].load(std::memory_order_relaxed);
          made = next(phase, unit, before);
          if (!stops || !is_slow || has_stopped) return;
          has_stopped = true;
          std::unique_lock lock(mutex);
          stopped = phase;
          changed.notify_all();
          changed.wait(lock, [&] { return reached >= phase + kAhead; });
          made = ~made;  // It would show.
        },
        [&](long unit) {
          to[unit].store(made, std::memory_order_relaxed);
          times_settled[phase * kUnits + unit].fetch_add(1);
        },
        [] { return false; });
    if (is_slow) continue;
    const std::lock_guard lock(mutex);
    reached = phase + 1;
    changed.notify_all();
  }
}

}  // namespace

int main() {
  std::thread slow(go, true);
  go(false);
  slow.join();
  std::array<uint64_t, kUnits> expected{};
  for (long phase = 0; phase < kPhases; ++phase) {
    std::array<uint64_t, kUnits> after;
    for (long unit = 0; unit < kUnits; ++unit) after[unit] = next(phase, unit, expected);
    expected = after;
  }
  int wrong = 0;
  for (long unit = 0; unit < kUnits; ++unit) {
    if (values[kPhases % 2][unit] == expected[unit]) continue;
    std::printf("unit %ld has a wrong result\n", unit);
    ++wrong;
  }
  for (long i = 0; i < kPhases * kUnits; ++i) {
    if (times_settled[i] == 1) continue;
    std::printf("unit %ld of phase %ld was settled %d times\n", i % kUnits, i / kUnits, times_settled[i].load());
    ++wrong;
  }
  const uint64_t num_stops = kPhases / kStopEvery;
  if (ledger.settled() != kPhases * kUnits || ledger.redone() < num_stops) {
    std::printf("settled %lu, made again %lu\n", (unsigned long)ledger.settled(), (unsigned long)ledger.redone());
    ++wrong;
  }
  return wrong == 0 ? 0 : 1;
}
