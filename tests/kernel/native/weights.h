#pragma once

// Random and adversarial weights.

#include <string>
#include <vector>

#include "memory.h"
#include "values.h"

namespace native {

struct Shape {
  int64_t rows;
  int64_t cols;
};

// The nonzeros row by row, columns increasing, as bits and as what they mean.
struct Weight {
  const Type* type = nullptr;
  Shape shape = {};
  std::vector<int64_t> offsets = {0};
  std::vector<int64_t> columns;
  std::vector<uint8_t> bits;
  std::vector<double> values;

  int64_t nonzeros() const { return static_cast<int64_t>(columns.size()); }
  int64_t dense_bytes() const { return shape.rows * shape.cols * type->bytes; }
  bool finite() const;
};

// A dense matrix in memory of its own.
struct Dense {
  Memory memory;
  fxsparse::DenseView view;
};

enum class Order { kRows, kColumns, kStrided };
constexpr Order kOrders[] = {Order::kRows, Order::kColumns, Order::kStrided};

// Room for a matrix, filled with bits that are no zero. kStrided leaves gaps in both directions.
Dense make_dense(const Type& type, Shape shape, Order order);

// Some zeros are -0.0 if asked for.
Dense to_dense(const Weight& weight, Order order, bool negative_zeros);
Weight from_dense(const Type& type, const fxsparse::DenseView& dense);

// One of the cases of the tests; the same number is always the same weight, whatever the type, but
// for its values.
struct Case {
  std::string name;
  int64_t number;
  Shape shape;
  int kind;
};
Case make_case(int64_t number);
Weight make_weight(const Case& c, const Type& type);

// The cases before this one take every kind and every awkward shape once.
extern const int64_t kBasicCases;

}  // namespace native
