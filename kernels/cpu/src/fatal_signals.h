// A process that ends by a signal of its own, such as SIGSEGV, reports it before it ends.
#pragma once

#include <string>
#include <vector>

namespace pdserve {

// From now on the first such signal that this process causes itself writes one byte, its number, to `report_fd`. The
// thread then waits up to `wait_ms` for a byte from `answer_fd`, and the signal takes its course. Other threads that fail
// meanwhile wait with it. Signals from other processes take their course at once. Called with -1, nothing is reported any
// more. Throws std::system_error.
void report_fatal_signals(int report_fd, int answer_fd, int wait_ms);

}  // namespace pdserve
