#define FXSPARSE_ISA_NAMESPACE avx2
#include "isa/vector_avx2.h"
//
#include "isa/pair_x86.h"
//
#include "isa/pairs_kernel.h"
