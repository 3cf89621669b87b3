#pragma once

#include <vector>

#include "isa/dispatch.h"
#include "packed.h"
#include "weights.h"

namespace native {

// The kernels to test of a format and a value type.
struct Tested {
  fxsparse::Isa isa;
  const char* isa_name;
  const fxsparse::Kernel* kernel;
};
using Kernels = std::vector<Tested>;

// Packing and unpacking.
void test_format(const fxsparse::Format& format, const Weight& weight, Random& random);

// linear and linear_transposed with each kernel for batches that the case's number chooses.
void test_products(const Blob& blob, const Weight& weight, const Kernels& kernels, int64_t number);

// Each kernel by itself, in buffers of exactly its size: any cut gives the same bits.
void test_cuts_of_kernels(const Blob& blob, const Weight& weight, const Kernels& kernels,
                          Random& random);

// Epilogues, several weights in a call and feed-forward layers, with each kernel's instruction set:
// the same bits as step by step. `first` is a weight in several formats, `last` one that takes its
// results, in the same ones.
void test_fused(const std::vector<Blob>& first, const std::vector<Blob>& last, const Type& type,
                const Kernels& kernels, Random& random);

// Damaged blobs are refused, or work as what they unpack to.
void test_damage(const fxsparse::Format& format, const Weight& weight, const Kernels& kernels,
                 Random& random);

// The conversions and all_finite of one instruction set.
void test_vector_ops(const fxsparse::VectorOps& ops, const Type& type);

// Activations, sums and products of one instruction set.
void test_activations(const fxsparse::VectorOps& ops, const Type& type);

// Many callers at once, while the pool is resized.
void test_threads(double seconds);

}  // namespace native
