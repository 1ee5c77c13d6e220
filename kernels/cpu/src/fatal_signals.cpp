#include "fatal_signals.h"

#include <Python.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>

namespace pdserve {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr int kCount = sizeof(kSignals) / sizeof(kSignals[0]);

struct sigaction previous[kCount];
bool installed = false;
std::atomic<int> report_to{-1}, answer_from{-1}, wait_for_ms{0};
std::atomic<bool> reported{false};

void restore(int number) {
  for (int i = 0; i < kCount; ++i)
    if (kSignals[i] == number) sigaction(number, &previous[i], nullptr);
}

// The kernel and this process itself are the causes that count; kill(1) is not.
bool is_own(const siginfo_t* info) { return info->si_code > 0 || info->si_pid == getpid(); }

// Only calls that are safe in a handler, except for the release of the interpreter's lock: whoever answers may need it.
// Should that hang, SIGALRM ends the process.
void handle(int number, siginfo_t* info, void*) {
  const int saved = errno;
  const int fd = report_to.load();
  if (is_own(info) && fd >= 0) {
    struct sigaction end {};
    end.sa_handler = SIG_DFL;
    sigaction(SIGALRM, &end, nullptr);
    alarm(unsigned(wait_for_ms.load() / 1000 + 2));
    if (!reported.exchange(true)) {
      const unsigned char byte = (unsigned char)number;
      if (write(fd, &byte, 1) == 1) {
        if (PyGILState_Check()) PyEval_SaveThread();
        pollfd answer{answer_from.load(), POLLIN, 0};
        while (poll(&answer, 1, wait_for_ms.load()) < 0 && errno == EINTR) {
        }
      }
    } else {
      poll(nullptr, 0, wait_for_ms.load());
    }
  }
  restore(number);
  // A fault occurs again when the handler returns. Signals that were sent have to be sent again.
  if (info->si_code <= 0) raise(number);
  errno = saved;
}

}  // namespace

void report_fatal_signals(int report_fd, int answer_fd, int wait_ms) {
  answer_from = answer_fd;
  wait_for_ms = wait_ms;
  reported = false;
  report_to = report_fd;
  if (report_fd < 0 || installed) return;
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < kCount; ++i)
    if (sigaction(kSignals[i], &action, &previous[i]) != 0)
      throw std::system_error(errno, std::generic_category(), "sigaction");
  installed = true;
}

}  // namespace pdserve
