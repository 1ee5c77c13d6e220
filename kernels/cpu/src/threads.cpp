#include "threads.h"

#include <algorithm>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <time.h>
#endif

namespace pdserve {
namespace {

// About 100 us of polling before a thread sleeps: longer than any wait inside a step, too short to matter when idle.
constexpr int kMaxPolls = 4000;
// A borrowed core is contended when its thread ran for less than two thirds of this time: at half of it, two cores are as
// fast as one. In a shorter window, every message that another process handles there would count.
constexpr std::chrono::milliseconds kWindow{4};

void bind([[maybe_unused]] std::thread& thread, [[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  // The caller has checked the CPU. If it is gone all the same, the thread stays where the system puts it.
  (void)pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
#endif
}

// Processor time of a thread; elapsed time where the system does not report it.
std::chrono::nanoseconds cpu_time([[maybe_unused]] std::thread& thread) {
#if defined(__linux__)
  clockid_t clock;
  timespec time;
  if (pthread_getcpuclockid(thread.native_handle(), &clock) == 0 && clock_gettime(clock, &time) == 0)
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
#endif
  return std::chrono::steady_clock::now().time_since_epoch();
}

}  // namespace

void Signal::change() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) value_.notify_all();
}

void Signal::wait_while(uint32_t old, const CoreLease* lease) {
  for (int i = 0; i < kMaxPolls && (lease == nullptr || lease->busy.load(std::memory_order_relaxed) == 0); ++i) {
    if (value() != old) return;
    relax();
  }
  // Either `change` sees a sleeper here, or the sleeper sees the change.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  value_.wait(old, std::memory_order_seq_cst);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

ThreadGroup::ThreadGroup(int size, std::vector<int> cpus, Borrowing borrowing)
    : num_own_(size),
      max_size_(size + std::min(size, int(borrowing.cpus.size()))),
      borrower_(borrowing.borrower),
      stay_away_(borrowing.stay_away),
      slots_(size + borrowing.cpus.size()) {
  active_.reserve(max_size_);
  try {
    for (int i = 0; i < int(slots_.size()); ++i) {
      Slot& slot = slots_[i];
      const bool own = i < num_own_;
      if (own) {
        slot.thread = i;
        active_.push_back(&slot);
      } else {
        slot.lease = &borrowing.leases[borrowing.cpus[i - num_own_]];
      }
      if (i == 0) continue;
      slot.handle = std::thread([this, &slot, own] { work(slot, own ? calls_ : slot.calls); });
      if (!own || !cpus.empty()) bind(slot.handle, own ? cpus[i % cpus.size()] : borrowing.cpus[i - num_own_]);
    }
  } catch (...) {  // The system refused another thread.
    stop();
    throw;
  }
}

ThreadGroup::~ThreadGroup() {
  return_borrowed_cores();
  stop();
}

void ThreadGroup::stop() {
  stopping_ = true;
  calls_.change();
  for (Slot& slot : slots_) slot.calls.change();
  for (Slot& slot : slots_)
    if (slot.handle.joinable()) slot.handle.join();
}

void ThreadGroup::update_borrowed_cores() {
  if (max_size_ == num_own_) return;
  const Clock::time_point now = Clock::now();
  std::erase_if(active_, [&](Slot* slot) {
    const bool leaves = slot->is_wanted_back() || (slot->borrowed && is_contended(*slot, now));
    if (leaves) give_back(*slot);
    return leaves;
  });
  for (size_t i = num_own_; i < slots_.size() && size() < max_size_; ++i)
    if (!slots_[i].borrowed && borrow(slots_[i], now)) active_.push_back(&slots_[i]);
}

void ThreadGroup::return_borrowed_cores() {
  for (int thread = num_own_; thread < size(); ++thread) give_back(*active_[thread]);
  active_.resize(num_own_);
}

bool ThreadGroup::borrow(Slot& slot, Clock::time_point now) {
  uint32_t none = 0;
  if (slot.is_wanted_back() || now < slot.avoid_until) return false;
  if (!slot.lease->borrower.compare_exchange_strong(none, borrower_)) return false;
  slot.borrowed = true;
  slot.measured_at = now;
  slot.cpu_time = cpu_time(slot.handle);
  return true;
}

bool ThreadGroup::is_contended(Slot& slot, Clock::time_point now) {
  if (slot.held + (now - slot.measured_at) >= kWindow) measure(slot, now);
  return now < slot.avoid_until;
}

void ThreadGroup::measure(Slot& slot, Clock::time_point now) {
  const std::chrono::nanoseconds held = now - slot.measured_at, before = slot.cpu_time;
  slot.measured_at = now;
  slot.cpu_time = cpu_time(slot.handle);
  borrowed_ns_.fetch_add((slot.cpu_time - before).count(), std::memory_order_relaxed);
  slot.held += held;
  slot.ran += slot.cpu_time - before;
  // A thread that has stopped for the owner, perhaps early in a pass, says nothing about other programs.
  if (slot.is_wanted_back()) slot.held = slot.ran = {};
  if (slot.held < kWindow) return;
  if (3 * slot.ran < 2 * slot.held) slot.avoid_until = now + stay_away_;
  slot.held = slot.ran = {};
}

void ThreadGroup::give_back(Slot& slot) {
  measure(slot, Clock::now());
  slot.borrowed = false;
  slot.lease->borrower.store(0, std::memory_order_release);
}

void ThreadGroup::start(Call call, void* context) {
  call_ = call;
  context_ = context;
  if (num_own_ > 1) calls_.change();
  for (int thread = num_own_; thread < size(); ++thread) {
    active_[thread]->thread = thread;
    active_[thread]->calls.change();
  }
  call(context, 0);
  barrier(0);
}

void ThreadGroup::work(Slot& slot, Signal& calls) {
  for (uint32_t seen = 0;; ++seen) {
    calls.wait_while(seen, slot.lease);
    if (stopping_) return;
    call_(context_, slot.thread);
    arrive();
  }
}

void ThreadGroup::barrier(int thread) {
  if (size() == 1) return;
  const uint32_t current = barriers_.value();
  if (!arrive()) barriers_.wait_while(current, active_[thread]->lease);
}

// Whether this was the last thread to arrive. Otherwise it must not touch the group any more: the caller of `run` may
// change it at once.
bool ThreadGroup::arrive() {
  const uint32_t all = uint32_t(size());
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < all) return false;
  arrived_.store(0, std::memory_order_relaxed);
  barriers_.change();
  return true;
}

}  // namespace pdserve
