// A team of threads that meets at barriers: cheap to call many times a millisecond, asleep when nothing is asked of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace pdserve {

class Team {
 public:
  // `cpus`: one for each member, or empty: not bound. Member 0 is the caller of `run`.
  Team(int size, std::vector<int> cpus);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Every member calls job(member); returns when all have.
  template <class Job>
  void run(Job&& job) {
    start([](void* context, int member) { (*static_cast<std::remove_reference_t<Job>*>(context))(member); }, &job);
  }

  // Inside a job: waits until all members are here.
  void meet();

 private:
  using Call = void (*)(void*, int);
  void start(Call call, void* context);
  void work(int member);
  void stop();

  const int size_;
  const std::vector<int> cpus_;
  Call call_ = nullptr;
  void* context_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> jobs_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> meetings_{0};
  std::vector<std::thread> threads_;
};

}  // namespace pdserve
