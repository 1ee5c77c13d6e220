#include "threads.h"

#include <algorithm>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <time.h>
#endif

namespace pdserve {
namespace {

// About 100 us of looking before a member sleeps: longer than anything inside a step, shorter than an idle server notices.
constexpr int kLooks = 4000;
// A borrowed core is crowded when a member there ran for less than two thirds of such a time: at half of it, two cores are as
// fast as one. Shorter, and every message that somebody handles there would count.
constexpr std::chrono::milliseconds kWindow{4};

void bind([[maybe_unused]] std::thread& thread, [[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  // A CPU that is not to be had leaves the thread where the system puts it; the caller has checked.
  (void)pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
#endif
}

// What a thread has computed so far; where the system does not tell, as long as there has been time.
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
      stay_away_(borrowing.stay_away),
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
  if (most_ == own_) return;
  const Clock::time_point now = Clock::now();
  std::erase_if(group_, [&](Seat* seat) {
    const bool leaves = seat->is_wanted_back() || (seat->borrowed && is_crowded(*seat, now));
    if (leaves) give_back(*seat);
    return leaves;
  });
  for (size_t i = own_; i < seats_.size() && size() < most_; ++i)
    if (!seats_[i].borrowed && borrow(seats_[i], now)) group_.push_back(&seats_[i]);
}

void Team::disband() {
  for (int member = own_; member < size(); ++member) give_back(*group_[member]);
  group_.resize(own_);
}

bool Team::borrow(Seat& seat, Clock::time_point now) {
  uint32_t nobody = 0;
  if (seat.is_wanted_back() || now < seat.free_from) return false;
  if (!seat.lease->borrower.compare_exchange_strong(nobody, borrower_)) return false;
  seat.borrowed = true;
  seat.seen = now;
  seat.cpu_time = cpu_time(seat.thread);
  return true;
}

bool Team::is_crowded(Seat& seat, Clock::time_point now) {
  if (seat.held + (now - seat.seen) >= kWindow) measure(seat, now);
  return now < seat.free_from;
}

void Team::measure(Seat& seat, Clock::time_point now) {
  const std::chrono::nanoseconds held = now - seat.seen, before = seat.cpu_time;
  seat.seen = now;
  seat.cpu_time = cpu_time(seat.thread);
  borrowed_ns_.fetch_add((seat.cpu_time - before).count(), std::memory_order_relaxed);
  seat.held += held;
  seat.ran += seat.cpu_time - before;
  // Who has left for the owner, who may have come early in a pass, says nothing about others.
  if (seat.is_wanted_back()) seat.held = seat.ran = {};
  if (seat.held < kWindow) return;
  if (3 * seat.ran < 2 * seat.held) seat.free_from = now + stay_away_;
  seat.held = seat.ran = {};
}

void Team::give_back(Seat& seat) {
  measure(seat, Clock::now());
  seat.borrowed = false;
  seat.lease->borrower.store(0, std::memory_order_release);
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
