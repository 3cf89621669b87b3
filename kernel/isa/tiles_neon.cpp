#define FXSPARSE_ISA_NAMESPACE neon
#include "isa/lanes_neon.h"
//
#include "isa/tiles_kernel.h"
