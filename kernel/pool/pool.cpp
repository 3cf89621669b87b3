#include "pool/pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "error.h"
#include "pool/cpus.h"
#include "pool/fp_mode.h"
#include "pool/placement.h"
#include "pool/spin.h"

namespace fxsparse {
namespace {

// How long a worker looks for the next job where the caller said that one follows: a linear, then
// an activation in Python, then a linear. Where it does not, the worker parks at once. Long
// spinning loses more than it gains next to torch's threads, which spin for 15 ms after each of
// their jobs: ours is then off its CPU when the job comes. linear, GELU, linear on two threads,
// with an OpenMP operator before, took 250-280 us without spinning and with 20 us of it, 320-345
// with 100 us.
constexpr auto kSpinForMore = std::chrono::microseconds(20);

// How long a caller looks for its last chunks. Longer than a chunk takes where two threads matter:
// a caller that parks is woken late (768 x 3072 with 8 rows: 140 us with 3 us of spinning, 92 with
// 50), and nothing else is to be done before they are there.
constexpr auto kSpinForChunks = std::chrono::microseconds(50);

// A thread pool made for calls of 15 microseconds and more.
//
// Lanes. Lane 0 is the caller's, lanes 1.. belong to workers, which are made when first needed and
// never end. A job is cut in chunks, and every lane of the job owns a *ticket* for a contiguous run
// of them. A thread takes its own chunks first (they are the ones it had in its cache last time),
// then those of the other lanes. The caller never waits for a worker to wake up: it starts at once
// and, if need be, does everything itself.
//
// Tickets. {generation, next chunk, end} in one 64-bit word, taken by compare-and-swap. A worker
// is told a generation and takes only tickets of that; a worker that wakes up late finds them used
// up or renewed, and never touches the job it was woken for. Whoever has taken a chunk may read the
// job's description: the caller does not leave, nor write another, before that chunk is done.
//
// One job at a time. A second caller, or a task that calls the pool, finds it busy and runs its
// own chunks in place: nobody waits for anybody, so nothing can deadlock.
//
// Fork. The child gets a new pool when it first needs one; the parent's, whose threads do not exist
// there, is left alone. Nothing is destroyed at exit: workers are parked or gone.
class Pool {
 public:
  void run(int threads, int chunks, bool more, Task task, void* context) {
    if (threads > 1 && !busy_.exchange(true, std::memory_order_acquire)) {
      const Release release{busy_};
      threads = with_workers(threads);
      if (threads > 1) return run_shared(threads, chunks, more, task, context);
    }
    for (int chunk = 0; chunk < chunks; ++chunk) task(context, chunk);
  }

  bool awake() const { return lanes_[1].go.load() != 0 && !lanes_[1].parked.load(); }

 private:
  struct Release {
    std::atomic<bool>& busy;
    ~Release() { busy.store(false, std::memory_order_release); }
  };

  // Two cache lines a lane, so that neither neighbours nor the prefetcher's pairs share one.
  struct alignas(128) Lane {
    std::atomic<uint64_t> ticket{0};
    std::atomic<uint64_t> go{0};  // {generation, lanes of the job, more}
    std::atomic<bool> parked{false};
    pthread_t thread{};
    Placement placement;
    std::mutex mutex;
    std::condition_variable wake;
  };

  static uint64_t make_ticket(uint32_t generation, int next, int end) {
    return static_cast<uint64_t>(generation) << 32 | static_cast<uint64_t>(end) << 16 |
           static_cast<uint64_t>(next);
  }

  // Makes workers up to threads - 1; returns how many threads there are if the system has no more.
  int with_workers(int threads) {
    for (; workers_ + 1 < threads; ++workers_) {
      // Signals are for the threads that the program knows of.
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        std::thread worker(&Pool::work, this, workers_ + 1);
        lanes_[workers_ + 1].thread = worker.native_handle();
        pthread_setname_np(worker.native_handle(), "fxsparse");
        worker.detach();
      } catch (const std::system_error&) {
        threads = workers_ + 1;
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      if (threads == workers_ + 1) break;
    }
    return threads;
  }

  void run_shared(int threads, int chunks, bool more, Task task, void* context) {
    task_ = task;
    context_ = context;
    fp_mode_ = fp_mode();
    failed_ = nullptr;
    remaining_.store(chunks, std::memory_order_relaxed);
    const uint32_t generation = ++generation_;
    for (int lane = 0; lane < threads; ++lane)
      lanes_[lane].ticket.store(
          make_ticket(generation, chunks * lane / threads, chunks * (lane + 1) / threads),
          std::memory_order_release);
    const uint64_t go = static_cast<uint64_t>(generation) << 32 |
                        static_cast<uint64_t>(threads) << 1 | static_cast<uint64_t>(more);
    for (int lane = 1; lane < threads; ++lane) wake(lanes_[lane], go);
    take_chunks(generation, threads, 0);
    wait_for_chunks();
    if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  }

  static void wake(Lane& lane, uint64_t go) {
    lane.go.store(go);
    if (!lane.parked.load()) return;
    lane.placement.keep_off_this_cpu(lane.thread);
    { std::lock_guard<std::mutex> lock(lane.mutex); }  // it waits, or has not looked yet
    lane.wake.notify_one();
  }

  void wait_for_chunks() {
    const auto done = [this] { return remaining_.load() == 0; };
    if (spin_until(kSpinForChunks, done)) return;
    std::unique_lock<std::mutex> lock(done_mutex_);
    caller_parked_.store(true);
    done_.wait(lock, done);
    caller_parked_.store(false);
  }

  void work(int id) {
    Lane& lane = lanes_[id];
    uint64_t seen = 0;
    for (;;) {
      const auto called = [&] { return lane.go.load() != seen; };
      if ((seen & 1) == 0 || !look_out(called)) {
        std::unique_lock<std::mutex> lock(lane.mutex);
        lane.parked.store(true);
        lane.wake.wait(lock, called);
        lane.parked.store(false);
      }
      seen = lane.go.load();
      take_chunks(static_cast<uint32_t>(seen >> 32), static_cast<int>((seen & 0xffffffff) >> 1),
                  id);
    }
  }

  // For the job that is to follow, once this one is over: others may have a chunk to finish.
  template <class Called>
  bool look_out(Called&& called) {
    spin_until(kSpinForChunks, [&] { return remaining_.load() == 0 || called(); });
    return spin_until(kSpinForMore, called);
  }

  // Own chunks first, then the other lanes'.
  void take_chunks(uint32_t generation, int threads, int id) {
    bool first = true;
    for (int i = 0; i < threads; ++i) {
      std::atomic<uint64_t>& ticket = lanes_[(id + i) % threads].ticket;
      int chunk;
      while ((chunk = take(ticket, generation)) >= 0) {
        if (first && id != 0) set_fp_mode(fp_mode_);
        first = false;
        run_chunk(chunk);
      }
    }
  }

  static int take(std::atomic<uint64_t>& ticket, uint32_t generation) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    for (;;) {
      const int next = static_cast<int>(seen & 0xffff), end = static_cast<int>(seen >> 16 & 0xffff);
      if (static_cast<uint32_t>(seen >> 32) != generation || next >= end) return -1;
      if (ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return next;
    }
  }

  void run_chunk(int chunk) {
    try {
      task_(context_, chunk);
    } catch (...) {
      std::lock_guard<std::mutex> lock(done_mutex_);
      if (!failed_) failed_ = std::current_exception();
    }
    if (remaining_.fetch_sub(1) == 1 && caller_parked_.load()) {
      { std::lock_guard<std::mutex> lock(done_mutex_); }
      done_.notify_one();
    }
  }

  std::array<Lane, kMaxThreads> lanes_;
  std::atomic<bool> busy_{false};
  // The job, and the workers there are: written by the caller that holds busy_.
  Task task_ = nullptr;
  void* context_ = nullptr;
  uint64_t fp_mode_ = 0;
  std::exception_ptr failed_;
  uint32_t generation_ = 0;
  int workers_ = 0;
  alignas(128) std::atomic<int> remaining_{0};
  std::atomic<bool> caller_parked_{false};
  std::mutex done_mutex_;
  std::condition_variable done_;
};

std::atomic<Pool*> the_pool{nullptr};

// While the library is loaded: a fork that has begun does not see handlers registered meanwhile.
[[maybe_unused]] const int forget_pool_in_child =
    pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });

Pool& pool() {
  Pool* found = the_pool.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  // No lock, which a child could inherit locked. The one that is kept is never deleted: workers
  // outlive main.
  auto made = std::make_unique<Pool>();
  if (the_pool.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel))
    return *made.release();
  return *found;
}

int default_threads() {
  const char* asked = std::getenv("FXSPARSE_NUM_THREADS");
  if (asked == nullptr) return std::min(usable_cpus(), kMaxThreads);
  char* end;
  const long value = std::strtol(asked, &end, 10);
  if (end == asked || *end != '\0' || value < 1 || value > kMaxThreads)
    fail("FXSPARSE_NUM_THREADS: expected a number from 1 to %d, got %s", kMaxThreads,
         *asked ? asked : "an empty string");
  return static_cast<int>(value);
}

std::atomic<int> num_threads{0};  // 0: not yet decided

}  // namespace

int get_num_threads() {
  int threads = num_threads.load(std::memory_order_relaxed);
  if (threads == 0) {
    int undecided = 0;
    threads = default_threads();
    // Another thread may have called set_num_threads meanwhile.
    if (!num_threads.compare_exchange_strong(undecided, threads)) threads = undecided;
  }
  return threads;
}

void set_num_threads(int threads) {
  if (threads < 1 || threads > kMaxThreads)
    fail("number of threads: expected 1 to %d, got %d", kMaxThreads, threads);
  num_threads.store(threads);
}

bool workers_awake() {
  const Pool* found = the_pool.load(std::memory_order_acquire);
  return found != nullptr && found->awake();
}

void run_chunks(int threads, int chunks, bool more, Task task, void* context) {
  constexpr int kMaxChunks = 0xffff;  // what a ticket holds
  if (chunks > kMaxChunks) fail("pool: expected at most %d chunks, got %d", kMaxChunks, chunks);
  threads = std::min({threads, chunks, get_num_threads()});
  if (threads <= 1) {
    for (int chunk = 0; chunk < chunks; ++chunk) task(context, chunk);
    return;
  }
  pool().run(threads, chunks, more, task, context);
}

}  // namespace fxsparse
