#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace native {
namespace {

constexpr uint8_t kBeside = 0x5a;

bool all_beside(const uint8_t* begin, const uint8_t* end) {
  for (; begin != end; ++begin)
    if (*begin != kBeside) return false;
  return true;
}

}  // namespace

#ifdef __SANITIZE_ADDRESS__

Memory::Memory(int64_t bytes, int shift, uint8_t fill) : bytes_(bytes), usable_(shift + bytes) {
  base_ = static_cast<uint8_t*>(std::malloc(usable_));
  if (base_ == nullptr) throw std::bad_alloc();
  data_ = base_ + shift;
  std::memset(base_, kBeside, shift);
  std::memset(data_, fill, bytes);
}

Memory::~Memory() { std::free(base_); }

#else

Memory::Memory(int64_t bytes, int shift, uint8_t fill) : bytes_(bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  usable_ = (bytes + shift + page - 1) / page * page;
  mapped_ = usable_ + page;
  void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<uint8_t*>(base);
  if (mprotect(base_ + usable_, page, PROT_NONE) != 0) std::abort();
  data_ = base_ + usable_ - shift - bytes;
  std::memset(base_, kBeside, usable_);
  std::memset(data_, fill, bytes);
}

Memory::~Memory() {
  if (base_ != nullptr) munmap(base_, mapped_);
}

#endif

bool Memory::intact() const {
  return all_beside(base_, data_) && all_beside(data_ + bytes_, base_ + usable_);
}

bool Memory::operator==(const Memory& other) const {
  return bytes_ == other.bytes_ && std::memcmp(data_, other.data_, bytes_) == 0;
}

}  // namespace native
