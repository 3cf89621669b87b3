#define FXSPARSE_ISA_NAMESPACE neon
#include "isa/vector_neon.h"
//
#include "isa/pairs_kernel.h"
