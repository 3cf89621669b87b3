#define FXSPARSE_ISA_NAMESPACE generic
#include "isa/vector_generic.h"
//
#include "isa/csr_kernel.h"
