#include "threads.h"

#include <algorithm>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pdserve {
namespace {

// About 100 us of looking before a member sleeps: longer than anything inside a step, shorter than an idle server notices.
constexpr int kLooks = 4000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void bind([[maybe_unused]] std::thread& thread, [[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  // A CPU that is not to be had leaves the thread where the system puts it; the caller has checked.
  (void)pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
#endif
}

}  // namespace

void Signal::change() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) value_.notify_all();
}

void Signal::wait_while(uint32_t old, const CoreLease* lease) {
  for (int i = 0; i < kLooks && (lease == nullptr || lease->busy.load(std::memory_order_relaxed) == 0); ++i) {
    if (value() != old) return;
    relax();
  }
  // Either `change` sees a sleeper here, or the sleeper sees the change.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  value_.wait(old, std::memory_order_seq_cst);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

Team::Team(int size, std::vector<int> cpus, Borrowing borrowing)
    : own_(size),
      most_(size + std::min(size, int(borrowing.cpus.size()))),
      borrower_(borrowing.borrower),
      seats_(size + borrowing.cpus.size()) {
  group_.reserve(most_);
  try {
    for (int i = 0; i < int(seats_.size()); ++i) {
      Seat& seat = seats_[i];
      const bool own = i < own_;
      if (own) {
        seat.member = i;
        group_.push_back(&seat);
      } else {
        seat.lease = &borrowing.leases[borrowing.cpus[i - own_]];
      }
      if (i == 0) continue;
      seat.thread = std::thread([this, &seat, own] { work(seat, own ? calls_ : seat.calls); });
      if (!own || !cpus.empty()) bind(seat.thread, own ? cpus[i % cpus.size()] : borrowing.cpus[i - own_]);
    }
  } catch (...) {  // The system gives no more threads.
    stop();
    throw;
  }
}

Team::~Team() {
  disband();
  stop();
}

void Team::stop() {
  stopping_ = true;
  calls_.change();
  for (Seat& seat : seats_) seat.calls.change();
  for (Seat& seat : seats_)
    if (seat.thread.joinable()) seat.thread.join();
}

void Team::regroup() {
  std::erase_if(group_, [this](Seat* seat) {
    const bool leaves = seat->is_wanted_back();
    if (leaves) give_back(*seat);
    return leaves;
  });
  for (size_t i = own_; i < seats_.size() && size() < most_; ++i) {
    if (!seats_[i].borrowed && borrow(seats_[i])) group_.push_back(&seats_[i]);
  }
}

void Team::disband() {
  for (int member = own_; member < size(); ++member) give_back(*group_[member]);
  group_.resize(own_);
}

bool Team::borrow(Seat& seat) {
  uint32_t nobody = 0;
  if (seat.is_wanted_back() || !seat.lease->borrower.compare_exchange_strong(nobody, borrower_)) return false;
  seat.borrowed = true;
  seat.since = Clock::now();
  return true;
}

void Team::give_back(Seat& seat) {
  seat.borrowed = false;
  seat.lease->borrower.store(0, std::memory_order_release);
  const auto held = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - seat.since);
  borrowed_ns_.fetch_add(held.count(), std::memory_order_relaxed);
}

void Team::start(Call call, void* context) {
  call_ = call;
  context_ = context;
  if (own_ > 1) calls_.change();
  for (int member = own_; member < size(); ++member) {
    group_[member]->member = member;
    group_[member]->calls.change();
  }
  call(context, 0);
  meet(0);
}

void Team::work(Seat& seat, Signal& calls) {
  for (uint32_t seen = 0;; ++seen) {
    calls.wait_while(seen, seat.lease);
    if (stopping_) return;
    call_(context_, seat.member);
    arrive();
  }
}

void Team::meet(int member) {
  if (size() == 1) return;
  const uint32_t meeting = meetings_.value();
  if (!arrive()) meetings_.wait_while(meeting, group_[member]->lease);
}

// Whether all are here now. Of who is not last, the caller of `run` may change the group at once.
bool Team::arrive() {
  const uint32_t all = uint32_t(size());
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < all) return false;
  arrived_.store(0, std::memory_order_relaxed);
  meetings_.change();
  return true;
}

}  // namespace pdserve
