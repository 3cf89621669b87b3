#pragma once

#include <stdexcept>

#include "export.h"

namespace fxsparse {

// What every check of the core throws; pybind11 turns it into ValueError.
class Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Throws Error with a printf-formatted text: "<what>: expected ..., got ...".
[[noreturn]] FXSPARSE_EXPORT void fail(const char* format, ...)
    __attribute__((format(printf, 1, 2)));

}  // namespace fxsparse
