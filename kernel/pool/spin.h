#pragma once

#include <chrono>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fxsparse {

// Tells the CPU that this is a spin loop.
inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks for at most so long; returns whether it is done.
template <class Done>
bool spin_until(std::chrono::microseconds limit, Done&& done) {
  if (done()) return true;
  if (limit.count() == 0) return false;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace fxsparse
