#define FXSPARSE_ISA_NAMESPACE avx2
#include "isa/lanes_avx2.h"
//
#include "isa/bitmap_kernel.h"
