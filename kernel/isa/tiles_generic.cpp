#define FXSPARSE_ISA_NAMESPACE generic
#include "isa/lanes_generic.h"
//
#include "isa/tiles_kernel.h"
