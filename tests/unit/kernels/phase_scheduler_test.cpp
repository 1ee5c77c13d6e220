// Two threads go through phases together. One of them is stopped after it has computed a unit and before it commits it, until
// the other is several phases ahead. Its unit must have been computed again, and its own result dropped. Prints failures.
#include "phase_scheduler.h"

#include <array>
#include <condition_variable>
#include <cstdio>
#include <mutex>

namespace {

constexpr long kUnits = 8;
constexpr long kPhases = 400;
constexpr long kPhasesPerStop = 20;
// How many phases the fast thread gets ahead.
constexpr long kLead = 3;

pdserve::PhaseScheduler scheduler(kUnits);
// Each phase reads what the one before it wrote, in two alternating buffers, as a forward pass does.
std::array<std::array<std::atomic<uint64_t>, kUnits>, 2> values{};
std::array<std::atomic<int>, kPhases * kUnits> num_commits{};
std::mutex mutex;
std::condition_variable changed;
// Phases that the fast thread has finished.
long num_finished = 0;
// The phase in which the slow thread has last stopped.
long stopped_in = -1;

uint64_t next(long phase, long unit, const std::array<uint64_t, kUnits>& before) {
  uint64_t value = uint64_t(phase * kUnits + unit) * 0x9e3779b97f4a7c15;
  for (uint64_t each : before) value = (value ^ each) * 0xff51afd7ed558ccd + 1;
  return value;
}

void run_phases(bool is_slow) {
  uint64_t result = 0, end = 0;
  for (long phase = 0; phase < kPhases; ++phase) {
    const auto& from = values[phase % 2];
    auto& to = values[(phase + 1) % 2];
    end += kUnits;
    // Not in the last phases: the fast thread could not get ahead.
    const bool stops = phase % kPhasesPerStop == kPhasesPerStop / 2 && phase + kLead < kPhases;
    bool has_stopped = false;
    if (stops && !is_slow) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return stopped_in == phase; });
    }
    scheduler.run(
        end, is_slow ? kUnits / 2 : 0, kUnits,
        [&](long unit) {
          std::array<uint64_t, kUnits> before;
          for (long i = 0; i < kUnits; ++i) before[i] = from[i].load(std::memory_order_relaxed);
          result = next(phase, unit, before);
          if (!stops || !is_slow || has_stopped) return;
          has_stopped = true;
          std::unique_lock lock(mutex);
          stopped_in = phase;
          changed.notify_all();
          changed.wait(lock, [&] { return num_finished >= phase + kLead; });
          // A wrong result, which would show if it were committed.
          result = ~result;
        },
        [&](long unit) {
          to[unit].store(result, std::memory_order_relaxed);
          num_commits[phase * kUnits + unit].fetch_add(1);
        },
        [] { return false; });
    if (is_slow) continue;
    const std::lock_guard lock(mutex);
    num_finished = phase + 1;
    changed.notify_all();
  }
}

}  // namespace

int main() {
  std::thread slow(run_phases, true);
  run_phases(false);
  slow.join();
  std::array<uint64_t, kUnits> expected{};
  for (long phase = 0; phase < kPhases; ++phase) {
    std::array<uint64_t, kUnits> after;
    for (long unit = 0; unit < kUnits; ++unit) after[unit] = next(phase, unit, expected);
    expected = after;
  }
  int num_failures = 0;
  for (long unit = 0; unit < kUnits; ++unit) {
    if (values[kPhases % 2][unit] == expected[unit]) continue;
    std::printf("unit %ld has a wrong result\n", unit);
    ++num_failures;
  }
  for (long i = 0; i < kPhases * kUnits; ++i) {
    if (num_commits[i] == 1) continue;
    std::printf("unit %ld of phase %ld was committed %d times\n", i % kUnits, i / kUnits, num_commits[i].load());
    ++num_failures;
  }
  const uint64_t num_stops = kPhases / kPhasesPerStop;
  if (scheduler.num_committed() != kPhases * kUnits || scheduler.num_redone() < num_stops) {
    std::printf("committed: %lu, redone: %lu\n", (unsigned long)scheduler.num_committed(),
                (unsigned long)scheduler.num_redone());
    ++num_failures;
  }
  return num_failures == 0 ? 0 : 1;
}
