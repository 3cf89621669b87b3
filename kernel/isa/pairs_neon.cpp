#define FXSPARSE_ISA_NAMESPACE neon
#include "isa/vector_neon.h"
//
#include "isa/pair_portable.h"
//
#include "isa/pairs_kernel.h"
