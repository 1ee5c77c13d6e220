#include "threads.h"

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

void wait_while(std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < kLooks; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  value.wait(old, std::memory_order_acquire);
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

Team::Team(int size, std::vector<int> cpus) : size_(size), cpus_(std::move(cpus)) {
  try {
    for (int member = 1; member < size_; ++member) {
      threads_.emplace_back([this, member] { work(member); });
      if (!cpus_.empty()) bind(threads_.back(), cpus_[member % cpus_.size()]);
    }
  } catch (...) {  // The system gives no more threads.
    stop();
    throw;
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  stopping_ = true;
  jobs_.fetch_add(1, std::memory_order_release);
  jobs_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::start(Call call, void* context) {
  call_ = call;
  context_ = context;
  if (size_ > 1) {
    jobs_.fetch_add(1, std::memory_order_release);
    jobs_.notify_all();
  }
  call(context, 0);
  meet();
}

void Team::work(int member) {
  uint32_t seen = 0;
  for (;;) {
    wait_while(jobs_, seen);
    ++seen;
    if (stopping_) return;
    call_(context_, member);
    meet();
  }
}

void Team::meet() {
  if (size_ == 1) return;
  const uint32_t meeting = meetings_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(size_)) {
    arrived_.store(0, std::memory_order_relaxed);
    meetings_.fetch_add(1, std::memory_order_release);
    meetings_.notify_all();
  } else {
    wait_while(meetings_, meeting);
  }
}

}  // namespace pdserve
