#define FXSPARSE_ISA_NAMESPACE neon
#include "isa/lanes_neon.h"
//
#include "isa/bitmap_kernel.h"
