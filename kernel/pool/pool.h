#pragma once

#include <cstdint>
#include <type_traits>

#include "export.h"

namespace fxsparse {

// Most threads of the pool, the caller included.
constexpr int kMaxThreads = 512;

// The size of the pool: what set_num_threads said, else FXSPARSE_NUM_THREADS, else usable_cpus().
// Throws Error while FXSPARSE_NUM_THREADS is not a number from 1 to kMaxThreads.
FXSPARSE_EXPORT int get_num_threads();

// Takes effect from the next call on; calls that run go on with what they have.
FXSPARSE_EXPORT void set_num_threads(int threads);

// Calls task(context, chunk) once for each chunk in [0, chunks), on at most `threads` threads, the
// caller's included, and returns when all are done. An exception of a task is thrown here after
// that. Chunk c is first offered to thread c * threads / chunks, so that the same part of the same
// weight tends to stay in the same core's cache.
//
// `more`: another job follows within microseconds, and no other library's threads want the CPUs
// before it. The workers then look out for it for a moment instead of parking at once.
using Task = void (*)(void* context, int chunk);
FXSPARSE_EXPORT void run_chunks(int threads, int chunks, bool more, Task task, void* context);

// Whether a job would find a worker that looks out for it. One that is parked comes later: after
// 12 us on a Zen 5, 25 to 50 in a virtual machine.
FXSPARSE_EXPORT bool workers_awake();

template <class F>
void parallel_for(int threads, int chunks, bool more, F&& f) {
  using Function = std::remove_reference_t<F>;
  run_chunks(
      threads, chunks, more,
      [](void* context, int chunk) { (*static_cast<Function*>(context))(chunk); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

template <class F>
void parallel_for(int threads, int chunks, F&& f) {
  parallel_for(threads, chunks, false, f);
}

}  // namespace fxsparse
