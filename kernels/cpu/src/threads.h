// A team of threads that meets at barriers: cheap to call many times a millisecond, asleep when nothing is asked of it. Beside
// its own members it may have some on cores of other processes, borrowed while those have nothing to compute.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pdserve {

// Between two looks at what another thread is to change.
inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What the processes of a machine tell each other about a core. `pdserve/worker/load/core_leases.py` lays it out in a file.
struct alignas(64) CoreLease {
  std::atomic<uint32_t> busy;      // Not 0: its owner has work. Only the owner writes it.
  std::atomic<uint32_t> borrower;  // Who computes here while the owner sleeps; 0: nobody.
};
static_assert(sizeof(CoreLease) == 64 && std::atomic<uint32_t>::is_always_lock_free);

struct Borrowing {
  CoreLease* leases = nullptr;  // One for each CPU of the machine.
  uint32_t borrower = 0;        // Us.
  std::vector<int> cpus;        // Of others, the preferred first.
  // How long a core is left alone that turned out to be crowded: what waits for a member there is slower than without it.
  std::chrono::nanoseconds stay_away{};
};

// A number that threads wait to see changed: they look for a while, then sleep.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void change();
  // `lease`: of the core that the caller borrows, which it does not keep from an owner by looking; or null.
  void wait_while(uint32_t old, const CoreLease* lease);

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

class Team {
 public:
  // `cpus`: one for each member, or empty: not bound. Member 0 is the caller of `run`.
  Team(int size, std::vector<int> cpus, Borrowing borrowing = {});
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Members of the present job, or between jobs of the next: own ones, then those on borrowed cores.
  int size() const { return int(group_.size()); }
  int most() const { return most_; }

  // Between jobs: gives back cores whose owners have work or that are crowded, and borrows idle ones, at most as many as
  // there are own ones.
  void regroup();
  // Between jobs: gives all borrowed cores back.
  void disband();
  // Counted when cores are given back.
  double borrowed_seconds() const { return 1e-9 * double(borrowed_ns_.load(std::memory_order_relaxed)); }

  // Every member calls job(member); returns when all have.
  template <class Job>
  void run(Job&& job) {
    start([](void* context, int member) { (*static_cast<std::remove_reference_t<Job>*>(context))(member); }, &job);
  }

  // Inside a job: waits until all members are here.
  void meet(int member);
  // Inside a job: the owner of this member's core has woken up. Who has a choice takes no more work.
  bool is_wanted_back(int member) const { return group_[member]->is_wanted_back(); }

 private:
  using Call = void (*)(void*, int);
  using Clock = std::chrono::steady_clock;

  struct Seat {
    int member = 0;
    CoreLease* lease = nullptr;  // Of a core of others; null: an own one.
    bool borrowed = false;
    Clock::time_point seen, free_from;        // Last measured; not to be borrowed before.
    std::chrono::nanoseconds ran{}, held{}, cpu_time{};  // Of `held` the thread ran so long; all it ever ran.
    Signal calls;  // Own members share one of the team's.
    std::thread thread;

    bool is_wanted_back() const { return lease != nullptr && lease->busy.load(std::memory_order_relaxed) != 0; }
  };

  void start(Call call, void* context);
  void work(Seat& seat, Signal& calls);
  bool arrive();
  bool borrow(Seat& seat, Clock::time_point now);
  bool is_crowded(Seat& seat, Clock::time_point now);
  void measure(Seat& seat, Clock::time_point now);
  void give_back(Seat& seat);
  void stop();

  const int own_, most_;
  const uint32_t borrower_;
  const std::chrono::nanoseconds stay_away_;
  std::vector<Seat> seats_;   // Own members, then all that may be borrowed.
  std::vector<Seat*> group_;  // By member.
  Call call_ = nullptr;
  void* context_ = nullptr;
  bool stopping_ = false;
  std::atomic<int64_t> borrowed_ns_{0};
  Signal calls_, meetings_;
  alignas(64) std::atomic<uint32_t> arrived_{0};
};

}  // namespace pdserve
