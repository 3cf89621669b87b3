#define FXSPARSE_ISA_NAMESPACE avx2
#include "isa/vector_avx2.h"
//
#include "isa/csr_kernel.h"
