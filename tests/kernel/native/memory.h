#pragma once

// Memory of exactly the size asked for: what reads or writes beyond it is caught.

#include <cstdint>
#include <utility>

namespace native {

// AddressSanitizer guards the end, or else a page that may not be touched. `shift` moves the start
// off a 64-byte boundary (what alignment the size itself leaves apart); the bytes of the gap are
// known and must not change.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t bytes, int shift = 0, uint8_t fill = 0xff);
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory();

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  bool intact() const;  // nothing was written beside it
  bool operator==(const Memory& other) const;

 private:
  void swap(Memory& other) {
    std::swap(base_, other.base_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
    std::swap(usable_, other.usable_);
  }

  uint8_t* base_ = nullptr;
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
  int64_t usable_ = 0;  // from base_
  int64_t mapped_ = 0;  // and what may not be touched
};

}  // namespace native
