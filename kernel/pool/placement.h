#pragma once

#include <pthread.h>
#include <sched.h>

namespace fxsparse {

// Where a worker may run: anywhere it was allowed to but on the CPU of the caller that wakes it.
//
// Linux likes to wake a thread where it was woken from, all the more where other threads keep the
// other CPUs busy, as torch's do for 15 ms after each of their jobs. There it is of no use. Without
// this, two threads brought nothing in a transformer block next to torch's (4 of them, 128 rows,
// two CPUs: 27 ms with one thread and with two, 18 with this).
class Placement {
 public:
  // Of a thread that is about to be woken. Two system calls if the caller has moved, else none.
  void keep_off_this_cpu(pthread_t thread) {
    const int cpu = sched_getcpu();
    if (cpu == cpu_ || cpu < 0 || cpu >= CPU_SETSIZE) return;
    cpu_set_t now;
    if (pthread_getaffinity_np(thread, sizeof now, &now) != 0) return;
    // What was not set here is what the thread began with, or somebody's wish.
    if (!CPU_EQUAL(&now, &set_)) allowed_ = now;
    set_ = allowed_;
    CPU_CLR(cpu, &set_);
    if (CPU_COUNT(&set_) == 0) set_ = allowed_;
    if (!CPU_EQUAL(&now, &set_)) pthread_setaffinity_np(thread, sizeof set_, &set_);
    cpu_ = cpu;
  }

 private:
  int cpu_ = -1;
  cpu_set_t set_{};
  cpu_set_t allowed_{};
};

}  // namespace fxsparse
