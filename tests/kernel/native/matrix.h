#pragma once

// Rows of activations, and what a product must be.

#include <vector>

#include "memory.h"
#include "weights.h"

namespace native {

// Rows of stored values, `stride` apart; gaps, which must not be read or written, are NaN.
struct Matrix {
  const Type* type;
  int64_t rows, cols, stride;
  Memory memory;

  uint8_t* row(int64_t i) const { return memory.data() + i * stride * type->bytes; }
  bool gaps_intact() const;
};
Matrix make_matrix(const Type& type, int64_t rows, int64_t cols, int64_t gap);
Matrix random_matrix(const Type& type, int64_t rows, int64_t cols, int64_t gap, Random& random);

// In double: the product, the sum of the absolute values of its terms, and how many these are.
struct Product {
  std::vector<double> value;
  std::vector<double> magnitude;
  std::vector<int> terms;
};

// x W^T + bias (null: none). All zeros of W are multiplied, too, where x is not finite.
Product forward(const Weight& weight, const Matrix& x, const Matrix* bias);
// g W
Product backward(const Weight& weight, const Matrix& g);

// `got` is `expected` up to what rounding explains. A sum of n products, in any order and with or
// without fused multiply-adds, is within (n + 2) u sum(|x w|) (Higham, Accuracy and Stability,
// 3.1), u half a unit in the last place of the type that is computed in; storing adds one u of the
// type that is stored. The oracle's own error doubles the bound for float64. The magnitude of an
// entry without terms is zero: the result is then exact.
bool check_product(const char* what, const Matrix& got, const Product& expected);

}  // namespace native
