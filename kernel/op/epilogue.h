#pragma once

// What a multiply may do to its result before it leaves the cache: an activation, then a sum or a
// product with another tensor.

#include <vector>

#include "export.h"
#include "isa/kernel.h"

namespace fxsparse {

struct Epilogue {
  enum class Join : uint8_t { kNone, kAdd, kMultiply };

  int activation = -1;  // place in activations.inc; -1: none
  Join join = Join::kNone;

  bool empty() const { return activation < 0 && join == Join::kNone; }
};

// In the order of activations.inc.
FXSPARSE_EXPORT std::vector<const char*> activation_names();

// "<activation>", "add", "mul", "<activation> add" or "<activation> mul"; throws Error if it is
// none of these.
FXSPARSE_EXPORT Epilogue parse_epilogue(const char* text);
FXSPARSE_EXPORT Epilogue parse_activation(const char* text);

// n values of y in place; `other` as many, or null where nothing joins.
void apply(const VectorOps& ops, const Epilogue& epilogue, void* y, const void* other, int64_t n);

}  // namespace fxsparse
