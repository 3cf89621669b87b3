#define FXSPARSE_ISA_NAMESPACE generic
#include "isa/vector_generic.h"
//
#include "isa/pair_portable.h"
//
#include "isa/pairs_kernel.h"
