#include "matrix.h"

#include <cmath>
#include <cstring>

#include "report.h"

namespace native {
namespace {

std::vector<double> loaded(const Matrix& m) {
  std::vector<double> values(m.rows * m.cols);
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t k = 0; k < m.cols; ++k) values[i * m.cols + k] = load(*m.type, m.row(i), k);
  return values;
}

bool all_finite(const double* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (!std::isfinite(values[i])) return false;
  return true;
}

// Nonzeros times x, or their transpose; with dropped zeros where x is not finite.
Product multiply(const Weight& w, const std::vector<double>& x, int64_t batch, bool transposed) {
  const int64_t rows = w.shape.rows, cols = w.shape.cols;
  const int64_t in = transposed ? rows : cols, out = transposed ? cols : rows;
  Product p{std::vector<double>(batch * out), std::vector<double>(batch * out),
            std::vector<int>(batch * out)};
  for (int64_t b = 0; b < batch; ++b) {
    const double* from = x.data() + b * in;
    double* value = p.value.data() + b * out;
    double* magnitude = p.magnitude.data() + b * out;
    int* terms = p.terms.data() + b * out;
    const bool finite = all_finite(from, in);
    for (int64_t row = 0; row < rows; ++row) {
      const auto add = [&](int64_t k, double weight) {
        const double term = weight * from[transposed ? row : k];
        const int64_t to = transposed ? k : row;
        value[to] += term;
        magnitude[to] += std::fabs(term);
        ++terms[to];
      };
      int64_t next = 0;  // the first column whose zero was not multiplied
      for (int64_t i = w.offsets[row]; i < w.offsets[row + 1]; ++i) {
        if (!finite)
          for (; next < w.columns[i]; ++next) add(next, 0);
        next = w.columns[i] + 1;
        add(w.columns[i], w.values[i]);
      }
      if (!finite)
        for (; next < cols; ++next) add(next, 0);
    }
  }
  return p;
}

}  // namespace

Matrix make_matrix(const Type& type, int64_t rows, int64_t cols, int64_t gap) {
  const int64_t stride = cols + gap;
  const int64_t values = rows == 0 ? 0 : (rows - 1) * stride + cols;
  return {&type, rows, cols, stride, Memory(values * type.bytes)};
}

Matrix random_matrix(const Type& type, int64_t rows, int64_t cols, int64_t gap, Random& random) {
  Matrix m = make_matrix(type, rows, cols, gap);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < cols; ++k) store(type, plain(random), m.row(i), k);
  return m;
}

bool Matrix::gaps_intact() const {
  if (!memory.intact()) return false;
  for (int64_t i = 0; i + 1 < rows; ++i)
    for (const uint8_t* p = row(i) + cols * type->bytes; p != row(i + 1); ++p)
      if (*p != 0xff) return false;
  return true;
}

Product forward(const Weight& weight, const Matrix& x, const Matrix* bias) {
  Product p = multiply(weight, loaded(x), x.rows, false);
  if (bias == nullptr) return p;
  const std::vector<double> biases = loaded(*bias);
  for (size_t i = 0; i < p.value.size(); ++i) {
    p.value[i] += biases[i % weight.shape.rows];
    p.magnitude[i] += std::fabs(biases[i % weight.shape.rows]);
  }
  return p;
}

Product backward(const Weight& weight, const Matrix& g) {
  return multiply(weight, loaded(g), g.rows, true);
}

bool check_product(const char* what, const Matrix& got, const Product& expected) {
  const Type& type = *got.type;
  for (int64_t b = 0; b < got.rows; ++b)
    for (int64_t n = 0; n < got.cols; ++n) {
      const double value = load(type, got.row(b), n);
      const double right = expected.value[b * got.cols + n];
      const double magnitude = expected.magnitude[b * got.cols + n];
      bool close;
      if (std::isfinite(right)) {
        const int terms = expected.terms[b * got.cols + n] + 2;
        const double sum = terms * type.compute_eps * magnitude;
        // Products below the normal range lose bits.
        const double stored = type.half_ulp * std::fabs(right) + (magnitude == 0 ? 0 : type.tiny);
        close = std::fabs(value - right) <= sum + stored;
      } else {
        close = std::isnan(right) ? std::isnan(value) : value == right;
      }
      if (!expect(close, "%s [%lld, %lld]: expected %.17g, got %.17g", what,
                  static_cast<long long>(b), static_cast<long long>(n), right, value))
        return false;
    }
  return expect(got.gaps_intact(), "%s: wrote between or beside the rows of y", what);
}

}  // namespace native
