#define FXSPARSE_ISA_NAMESPACE avx512
#include "isa/vector_avx512.h"
//
#include "isa/pair_x86.h"
//
#include "isa/pairs_kernel.h"
