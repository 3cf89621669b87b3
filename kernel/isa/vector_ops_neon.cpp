#define FXSPARSE_ISA_NAMESPACE neon
#include "isa/vector_neon.h"
//
#include "isa/vector_ops_kernel.h"
