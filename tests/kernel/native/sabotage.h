#pragma once

// Mistakes made on purpose: the tests must notice each of them. One is chosen on the command line.

#include "matrix.h"
#include "packed.h"

namespace native {

bool choose_sabotage(const char* name);  // false if there is none of that name

// After a product, and after packing.
void sabotage_product(const Blob& blob, const Matrix& y, int threads);
void sabotage_blob(const Memory& blob);

}  // namespace native
