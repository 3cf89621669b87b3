#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace fxsparse {

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Error(text);
}

}  // namespace fxsparse
