#define FXSPARSE_ISA_NAMESPACE avx512
#include "isa/lanes_avx512.h"
//
#include "isa/tiles_kernel.h"
