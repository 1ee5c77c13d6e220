// A group of threads that runs parallel jobs with barriers. Starting a job is cheap enough to do it many times a
// millisecond, and an idle group sleeps. Besides its own threads it may use some on cores of other processes, which it
// borrows while their owners have nothing to compute.
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

// Between two polls of a value that another thread will change.
inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The shared state of one core, for all processes of a machine. `pdserve/worker/load/core_leases.py` lays it out in a
// file.
struct alignas(64) CoreLease {
  // Not 0: the owner has work. Only the owner writes it.
  std::atomic<uint32_t> busy;
  // The process that computes here while the owner sleeps; 0: none.
  std::atomic<uint32_t> borrower;
};
static_assert(sizeof(CoreLease) == 64 && std::atomic<uint32_t>::is_always_lock_free);

struct Borrowing {
  // One for each CPU of the machine.
  CoreLease* leases = nullptr;
  // The number of this process.
  uint32_t borrower = 0;
  // Cores of other processes, in order of preference.
  std::vector<int> cpus;
  // How long to avoid a core that other programs turned out to use: waiting for a thread there costs more than it gives.
  std::chrono::nanoseconds stay_away{};
};

// A number whose changes threads wait for: they poll for a while, then sleep.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void change();
  // `lease`: the lease of the caller's core if it is borrowed, else null. The caller stops polling, and sleeps, as soon
  // as the core's owner has work.
  void wait_while(uint32_t old, const CoreLease* lease);

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

class ThreadGroup {
 public:
  // `cpus`: one for each own thread, or empty: not pinned. Thread 0 is the caller of `run`.
  ThreadGroup(int size, std::vector<int> cpus, Borrowing borrowing = {});
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  // Threads of the current job, or of the next one between jobs: own threads, then those on borrowed cores.
  int size() const { return int(active_.size()); }
  int max_size() const { return max_size_; }

  // Between jobs: returns cores whose owners have work or that other programs use, and borrows idle ones, at most as many
  // as there are own threads.
  void update_borrowed_cores();
  // Between jobs: returns all borrowed cores.
  void return_borrowed_cores();
  // Updated when cores are returned.
  double borrowed_seconds() const { return 1e-9 * double(borrowed_ns_.load(std::memory_order_relaxed)); }

  // Every thread calls job(thread); returns when all have.
  template <class Job>
  void run(Job&& job) {
    start([](void* context, int thread) { (*static_cast<std::remove_reference_t<Job>*>(context))(thread); }, &job);
  }

  // Inside a job: waits until all threads have called it.
  void barrier(int thread);
  // Inside a job: whether the owner of this thread's core has work. The thread then takes no more work if it can.
  bool is_wanted_back(int thread) const { return active_[thread]->is_wanted_back(); }

 private:
  using Call = void (*)(void*, int);
  using Clock = std::chrono::steady_clock;

  struct Slot {
    // Index of the thread in the current job.
    int thread = 0;
    // The lease of a core of another process; null: an own thread.
    CoreLease* lease = nullptr;
    bool borrowed = false;
    // When `measure` was last called.
    Clock::time_point measured_at;
    // The core must not be borrowed before.
    Clock::time_point avoid_until;
    // How long the core has been borrowed in the current window, and how long the thread ran of that.
    std::chrono::nanoseconds held{}, ran{};
    // Processor time of the thread since it was created.
    std::chrono::nanoseconds cpu_time{};
    // Starts a job on a borrowed core. Own threads share `calls_`.
    Signal calls;
    std::thread handle;

    bool is_wanted_back() const { return lease != nullptr && lease->busy.load(std::memory_order_relaxed) != 0; }
  };

  void start(Call call, void* context);
  void work(Slot& slot, Signal& calls);
  bool arrive();
  bool borrow(Slot& slot, Clock::time_point now);
  bool is_contended(Slot& slot, Clock::time_point now);
  void measure(Slot& slot, Clock::time_point now);
  void give_back(Slot& slot);
  void stop();

  const int num_own_, max_size_;
  const uint32_t borrower_;
  const std::chrono::nanoseconds stay_away_;
  // Own threads, then one for each core that may be borrowed.
  std::vector<Slot> slots_;
  // The threads of the current job, by index.
  std::vector<Slot*> active_;
  Call call_ = nullptr;
  void* context_ = nullptr;
  bool stopping_ = false;
  std::atomic<int64_t> borrowed_ns_{0};
  Signal calls_, barriers_;
  alignas(64) std::atomic<uint32_t> arrived_{0};
};

}  // namespace pdserve
