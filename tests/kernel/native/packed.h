#pragma once

// A weight in a packed format, in memory of exactly its size.

#include "format/format.h"
#include "memory.h"
#include "weights.h"

namespace native {

struct Blob {
  Memory memory;
  fxsparse::Packed packed;
};

// describe, pack, open_packed. `shift`: off a 64-byte boundary.
Blob pack(const fxsparse::Format& format, const Dense& dense, uint32_t flags = 0, int shift = 0);

}  // namespace native
