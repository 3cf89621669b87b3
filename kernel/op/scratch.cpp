#include "op/scratch.h"

#include <pthread.h>

#include <cstdlib>
#include <new>

namespace fxsparse {
namespace {

// Made when the library is loaded, so that no fork can interrupt it.
pthread_key_t key;
const bool has_key = pthread_key_create(&key, Scratch::free_all) == 0;

}  // namespace

void Scratch::free_all(void* first) {
  for (auto* scratch = static_cast<Scratch*>(first); scratch != nullptr; scratch = scratch->next_) {
    std::free(scratch->data_);
    scratch->data_ = nullptr;
    scratch->capacity_ = 0;
  }
}

void* Scratch::reserve(int64_t bytes) {
  if (bytes <= capacity_) return data_;
  const int64_t rounded = (bytes + 4095) / 4096 * 4096;
  void* grown = std::aligned_alloc(4096, rounded);
  if (grown == nullptr) throw std::bad_alloc();
  if (data_ == nullptr && has_key) {
    next_ = static_cast<Scratch*>(pthread_getspecific(key));
    pthread_setspecific(key, this);
  }
  std::free(data_);
  data_ = grown;
  capacity_ = rounded;
  return data_;
}

}  // namespace fxsparse
