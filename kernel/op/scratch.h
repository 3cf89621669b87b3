#pragma once

#include <cstdint>

namespace fxsparse {

// A thread_local buffer that a thread keeps from call to call, so that calls do not allocate. Grown
// when needed.
//
// Without a destructor: exit handlers may call operators after the main thread's thread_local
// objects are destroyed. A pthread key frees the buffers of a thread that ends; it does nothing for
// the thread that ends the process.
class Scratch {
 public:
  constexpr Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `bytes`, 64-byte aligned. What was in it before is gone if it grew.
  void* reserve(int64_t bytes);

  // What the key calls: `first` of a thread's buffers, and those after it.
  static void free_all(void* first);

 private:
  void* data_ = nullptr;
  int64_t capacity_ = 0;
  Scratch* next_ = nullptr;  // of this thread, among those that have a buffer
};

}  // namespace fxsparse
