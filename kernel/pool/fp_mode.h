#pragma once

// The floating-point modes that a caller may have changed and its workers must share, or a result
// would depend on the thread that computed it: flush-to-zero, denormals-are-zero
// (torch.set_flush_denormal) and the rounding mode.

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fxsparse {

#if defined(__x86_64__)
inline uint64_t fp_mode() { return _mm_getcsr() & ~0x3fu; }  // without the sticky exception flags
inline void set_fp_mode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
inline uint64_t fp_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_fp_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
inline uint64_t fp_mode() { return 0; }
inline void set_fp_mode(uint64_t) {}
#endif

}  // namespace fxsparse
