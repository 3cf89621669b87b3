#define FXSPARSE_ISA_NAMESPACE neon
#include "isa/vector_neon.h"
//
#include "isa/csr_kernel.h"
