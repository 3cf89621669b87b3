#pragma once

#include <cstdint>

namespace fxsparse {

// A buffer that a thread keeps from call to call, so that calls do not allocate. Grown when needed;
// freed with the thread.
class Scratch {
 public:
  constexpr Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  // At least `bytes`, 64-byte aligned. What was in it before is gone if it grew.
  void* reserve(int64_t bytes);

 private:
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace fxsparse
