#include "op/scratch.h"

#include <cstdlib>
#include <new>

namespace fxsparse {

Scratch::~Scratch() {
  std::free(data_);
  // Exit handlers may still call operators after the main thread's buffers are gone.
  data_ = nullptr;
  capacity_ = 0;
}

void* Scratch::reserve(int64_t bytes) {
  if (bytes <= capacity_) return data_;
  const int64_t rounded = (bytes + 4095) / 4096 * 4096;
  void* grown = std::aligned_alloc(4096, rounded);
  if (grown == nullptr) throw std::bad_alloc();
  std::free(data_);
  data_ = grown;
  capacity_ = rounded;
  return data_;
}

}  // namespace fxsparse
