// Compares every function of an instruction set's kernels with the generic ones, without torch or
// Python, so that it can be built for another CPU and emulated. FXSPARSE_KERNELS names the table.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "isa/kernel.h"

namespace fxsparse {
extern const Kernel csr_generic[kValueTypes];
extern const Kernel FXSPARSE_KERNELS[kValueTypes];
}  // namespace fxsparse

using namespace fxsparse;

namespace {

const Kernel* const kTested = FXSPARSE_KERNELS;
int failures = 0;

// What the types lose: bits of the stored mantissa, and bytes.
struct Type {
  const char* name;
  int mantissa;
  int bytes;
};
const Type kTypes[kValueTypes] = {
    {"float32", 24, 4}, {"float64", 53, 8}, {"bfloat16", 8, 2}, {"float16", 11, 2}};

void expect(bool holds, const char* what, int type, int64_t detail) {
  if (holds) return;
  ++failures;
  if (failures < 20)
    std::printf("FAILED %s, %s, %lld\n", what, kTypes[type].name, static_cast<long long>(detail));
}

// Stored values <-> double, through the generic kernels' conversions.
std::vector<uint8_t> to_stored(int type, const std::vector<double>& values) {
  std::vector<uint8_t> stored(values.size() * kTypes[type].bytes + 64);
  const int64_t n = values.size();
  if (type == 1) {
    std::memcpy(stored.data(), values.data(), n * 8);
  } else {
    const std::vector<float> narrow(values.begin(), values.end());
    csr_generic[type].narrow(narrow.data(), n, stored.data());
  }
  return stored;
}

std::vector<double> from_stored(int type, const uint8_t* stored, int64_t n) {
  std::vector<double> values(n);
  if (type == 1) {
    std::memcpy(values.data(), stored, n * 8);
  } else {
    std::vector<float> wide(n);
    csr_generic[type].widen(stored, n, wide.data());
    values.assign(wide.begin(), wide.end());
  }
  return values;
}

struct Case {
  int type;
  int64_t rows, cols;
  double density;
};

struct Weight {
  std::vector<double> dense;
  std::vector<uint8_t> offsets, indices, values;
  PackedView view;
};

template <class T>
void append(std::vector<uint8_t>& bytes, T value) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(&value);
  bytes.insert(bytes.end(), p, p + sizeof value);
}

Weight make_weight(const Case& c, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform(0, 1);
  Weight w;
  w.dense.assign(c.rows * c.cols, 0);
  std::vector<double> values;
  const bool narrow = c.cols <= 256, medium = c.cols <= 65536;
  append<uint32_t>(w.offsets, 0);
  for (int64_t n = 0; n < c.rows; ++n) {
    for (int64_t k = 0; k < c.cols; ++k) {
      if (uniform(random) >= c.density) continue;
      // Exact in every type, so that the weight is the same for all.
      const double value = (1 + static_cast<int>(uniform(random) * 100)) / 64.0;
      w.dense[n * c.cols + k] = value;
      values.push_back(value);
      if (narrow)
        append<uint8_t>(w.indices, k);
      else if (medium)
        append<uint16_t>(w.indices, k);
      else
        append<uint32_t>(w.indices, k);
    }
    append<uint32_t>(w.offsets, values.size());
  }
  w.indices.resize(w.indices.size() + 64);
  w.values = to_stored(c.type, values);
  w.view = {c.rows,
            c.cols,
            static_cast<int64_t>(values.size()),
            static_cast<ValueType>(c.type + 1),
            narrow   ? Width::k8
            : medium ? Width::k16
                     : Width::k32,
            Width::k32,
            {w.offsets.data(), w.indices.data(), w.values.data(), nullptr}};
  return w;
}

std::vector<double> random_values(int64_t n, std::mt19937& random) {
  std::uniform_real_distribution<double> uniform(-1, 1);
  std::vector<double> values(n);
  for (double& value : values) value = std::round(uniform(random) * 128) / 128;
  return values;
}

// Sums of products of exact values: what is lost is in the sum and in storing it.
bool close(double got, double expected, double magnitude, int64_t terms, int type) {
  const double sum = magnitude * (terms + 2) * std::ldexp(1, type == 1 ? -52 : -23);
  const double store = std::abs(expected) * std::ldexp(1, -kTypes[type].mantissa);
  return std::abs(got - expected) <= sum + store;
}

void test_forward(const Case& c, int vectors, std::mt19937& random) {
  const Kernel& kernel = kTested[c.type];
  const Weight w = make_weight(c, random);
  const int64_t batch = vectors == 0 ? 1 : vectors * kernel.vector_lanes - 1;
  const std::vector<double> x = random_values(batch * c.cols, random);
  const std::vector<double> bias = random_values(c.rows, random);
  const std::vector<uint8_t> x_stored = to_stored(c.type, x), b_stored = to_stored(c.type, bias);
  std::vector<uint8_t> y(batch * c.rows * kTypes[c.type].bytes);
  std::vector<double> panel((c.cols + 1) * (vectors + 1) * kernel.vector_lanes);
  if (vectors == 0) {
    const void* input = x_stored.data();
    if (kernel.compute_bytes != kTypes[c.type].bytes) {
      kernel.widen(input, c.cols, panel.data());
      input = panel.data();
    }
    kernel.multiply_one(w.view, input, b_stored.data(), y.data(), 0, c.rows);
  } else {
    kernel.pack(x_stored.data(), c.cols, batch, c.cols, vectors, panel.data());
    kernel.multiply(w.view, panel.data(), batch, vectors, b_stored.data(), y.data(), c.rows, 0,
                    c.rows);
  }
  const std::vector<double> got = from_stored(c.type, y.data(), batch * c.rows);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t n = 0; n < c.rows; ++n) {
      double sum = bias[n], magnitude = std::abs(bias[n]);
      for (int64_t k = 0; k < c.cols; ++k) {
        sum += w.dense[n * c.cols + k] * x[b * c.cols + k];
        magnitude += std::abs(w.dense[n * c.cols + k] * x[b * c.cols + k]);
      }
      expect(close(got[b * c.rows + n], sum, magnitude, c.cols, c.type), "forward", c.type,
             vectors);
    }
}

void test_transposed(const Case& c, int vectors, std::mt19937& random) {
  const Kernel& kernel = kTested[c.type];
  const Weight w = make_weight(c, random);
  const int64_t lanes = vectors == 0 ? 1 : vectors * kernel.vector_lanes;
  const int64_t batch = vectors == 0 ? 1 : lanes - 1;
  const std::vector<double> g = random_values(batch * c.rows, random);
  const std::vector<uint8_t> g_stored = to_stored(c.type, g);
  std::vector<double> in((c.rows + 1) * lanes), out((c.cols + 1) * lanes);
  std::vector<uint8_t> y(batch * c.cols * kTypes[c.type].bytes);
  const int64_t half = c.cols / 2;
  const int64_t cuts[] = {0, half, c.cols};
  for (int part = 0; part < 2; ++part) {
    const int64_t begin = cuts[part], end = cuts[part + 1];
    uint8_t* to = y.data() + begin * kTypes[c.type].bytes;
    if (vectors == 0) {
      if (kernel.compute_bytes == kTypes[c.type].bytes)
        std::memcpy(in.data(), g_stored.data(), c.rows * kTypes[c.type].bytes);
      else
        kernel.widen(g_stored.data(), c.rows, in.data());
      kernel.multiply_transposed_one(w.view, in.data(), out.data(), begin, end);
      kernel.narrow(out.data(), end - begin, to);
    } else {
      kernel.pack(g_stored.data(), c.rows, batch, c.rows, vectors, in.data());
      kernel.multiply_transposed(w.view, in.data(), vectors, out.data(), begin, end);
      kernel.unpack(out.data(), batch, end - begin, vectors, to, c.cols);
    }
  }
  const std::vector<double> got = from_stored(c.type, y.data(), batch * c.cols);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t k = 0; k < c.cols; ++k) {
      double sum = 0, magnitude = 0;
      for (int64_t n = 0; n < c.rows; ++n) {
        sum += w.dense[n * c.cols + k] * g[b * c.rows + n];
        magnitude += std::abs(w.dense[n * c.cols + k] * g[b * c.rows + n]);
      }
      expect(close(got[b * c.cols + k], sum, magnitude, c.rows, c.type), "transposed", c.type,
             vectors);
    }
}

// Every 16-bit pattern must widen to the same bits, and every float near a rounding boundary must
// narrow to the same; NaNs may differ in payload.
void test_conversions(int type) {
  std::vector<uint16_t> all(65536);
  for (int i = 0; i < 65536; ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> expected(65536), got(65536);
  csr_generic[type].widen(all.data(), 65536, expected.data());
  kTested[type].widen(all.data(), 65536, got.data());
  for (int i = 0; i < 65536; ++i)
    expect(
        std::isnan(expected[i]) ? std::isnan(got[i]) : std::memcmp(&expected[i], &got[i], 4) == 0,
        "widen", type, i);

  std::vector<float> values;
  for (float value : expected)
    for (int step = -1; step <= 1; ++step) {
      // Half way to the next value, and its neighbours.
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      bits += (type == 2 ? 0x8000 : 0x1000) + step;
      float near;
      std::memcpy(&near, &bits, 4);
      values.push_back(near);
    }
  const int64_t n = values.size();
  std::vector<uint16_t> a(n), b(n);
  csr_generic[type].narrow(values.data(), n, a.data());
  kTested[type].narrow(values.data(), n, b.data());
  for (int64_t i = 0; i < n; ++i) expect(a[i] == b[i] || std::isnan(values[i]), "narrow", type, i);
}

void test_all_finite(int type, std::mt19937& random) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (int64_t n : {0, 1, 7, 16, 33, 100}) {
    std::vector<double> values = random_values(n, random);
    expect(kTested[type].all_finite(to_stored(type, values).data(), n), "all_finite", type, n);
    for (int64_t i = 0; i < n; ++i) {
      for (double bad : {infinity, -infinity, std::nan("")}) {
        std::vector<double> with = values;
        with[i] = bad;
        expect(!kTested[type].all_finite(to_stored(type, with).data(), n), "all_finite", type, i);
      }
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (int type = 0; type < kValueTypes; ++type) {
    for (int vectors = 0; vectors <= kMaxVectors; ++vectors) {
      for (Case c : {Case{type, 1, 1, 1}, Case{type, 19, 70, .3}, Case{type, 33, 300, .2},
                     Case{type, 3, 66000, .001}, Case{type, 16, 64, 0}, Case{type, 20, 48, 1}}) {
        if (c.cols > 65536 && vectors > 1) continue;  // slow to emulate, and no other code
        test_forward(c, vectors, random);
        test_transposed(c, vectors, random);
      }
    }
    test_all_finite(type, random);
    if (type >= 2) test_conversions(type);
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
