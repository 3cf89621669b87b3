#define FXSPARSE_ISA_NAMESPACE generic
#include "isa/vector_generic.h"
//
#include "isa/vector_ops_kernel.h"
