#pragma once

// Everything is compiled with -fvisibility=hidden; what _C and C++ programs call in libfxsparse.so
// is marked by this.
#define FXSPARSE_EXPORT __attribute__((visibility("default")))
