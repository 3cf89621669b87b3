#include "weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace native {
namespace {

using fxsparse::DenseView;

// What kinds of weights there are: whether the entry at (row, column) is a nonzero.
struct Place {
  int64_t row, column;
  Shape shape;
  Random& random;
};
struct Kind {
  const char* name;
  bool (*keeps)(const Place&);
};

bool at_random(const Place& p, double density) { return chance(p.random, density); }

const Kind kKinds[] = {
    {"density .1", [](const Place& p) { return at_random(p, .1); }},
    {"density .5", [](const Place& p) { return at_random(p, .5); }},
    {"zero", [](const Place&) { return false; }},
    {"dense", [](const Place&) { return true; }},
    {"density .02", [](const Place& p) { return at_random(p, .02); }},
    {"one dense row",
     [](const Place& p) { return p.row == p.shape.rows / 2 || at_random(p, .03); }},
    {"nothing but a dense row", [](const Place& p) { return p.row == p.shape.rows - 1; }},
    {"skewed rows",
     [](const Place& p) {
       return at_random(p, static_cast<double>(p.row) / static_cast<double>(p.shape.rows));
     }},
    {"single column", [](const Place& p) { return p.column == p.shape.cols - 1; }},
    {"first and last column",
     [](const Place& p) { return p.column == 0 || p.column == p.shape.cols - 1; }},
    {"last entry",
     [](const Place& p) { return p.column == p.shape.cols - 1 && p.row == p.shape.rows - 1; }},
    {"equal rows", [](const Place& p) { return (p.column * 7 + p.column / 5) % 3 == 0; }},
    {"disjoint rows", [](const Place& p) { return (p.column + p.row) % 2 == 0; }},
    {"diagonal", [](const Place& p) { return p.column == p.row % p.shape.cols; }},
    {"dense and empty blocks",
     [](const Place& p) { return (p.row / 16 + p.column / 32) % 3 == 0 && at_random(p, .9); }},
    {"empty groups", [](const Place& p) { return p.row / 16 % 2 == 1 && at_random(p, .3); }},
    {"far apart", [](const Place& p) { return (p.column + p.row * 31) % 523 == 522; }},
    {"every other row", [](const Place& p) { return p.row % 2 == 0 && at_random(p, .3); }},
    {"density .97", [](const Place& p) { return at_random(p, .97); }},
    {"special values", [](const Place& p) { return at_random(p, .3); }},
    {"infinite and NaN", [](const Place& p) { return at_random(p, .3); }},
};
constexpr int kKindCount = sizeof kKinds / sizeof *kKinds;
constexpr int kSpecial = kKindCount - 2, kNonfinite = kKindCount - 1;

// Around everything that is a power of two to somebody.
constexpr int64_t kSizes[] = {1,  2,  15, 16,  17,  31,  32,  33,  40,  47,  48,  63,
                              64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 300, 513};
constexpr int kSizeCount = sizeof kSizes / sizeof *kSizes;

// Pairs that the sizes do not make: nothing at all, tall, wide. The dear ones come last.
constexpr Shape kShapes[] = {{0, 5},     {5, 0},     {700, 33},  {1, 65537}, {1030, 40},
                             {33, 4097}, {2, 65536}, {403, 900}, {3, 65543}, {17, 70000}};
constexpr int kShapeCount = sizeof kShapes / sizeof *kShapes;

double value_of(const Case& c, const Type& type, Random& random) {
  const double value = plain(random);
  if (c.kind == kSpecial && chance(random, .3)) return value * type.tiny / 8;  // denormal
  if (c.kind != kNonfinite || chance(random, .9)) return value;
  if (chance(random, .3)) return std::numeric_limits<double>::quiet_NaN();
  return std::copysign(HUGE_VAL, value);
}

void append(Weight& weight, int64_t column, const uint8_t* bits) {
  weight.columns.push_back(column);
  weight.bits.insert(weight.bits.end(), bits, bits + weight.type->bytes);
  weight.values.push_back(load(*weight.type, bits, 0));
}

template <class F>
void for_each_place(const DenseView& view, int bytes, F&& f) {
  for (int64_t row = 0; row < view.rows; ++row)
    for (int64_t k = 0; k < view.cols; ++k) {
      const int64_t at = row * view.row_stride + k * view.col_stride;
      f(row, k, static_cast<uint8_t*>(const_cast<void*>(view.data)) + at * bytes);
    }
}

bool is_zero(const uint8_t* stored, int bytes) {
  for (int i = 0; i < bytes - 1; ++i)
    if (stored[i] != 0) return false;
  return (stored[bytes - 1] & 0x7f) == 0;
}

}  // namespace

const int64_t kBasicCases = 3 * std::max(kKindCount, kShapeCount);

bool Weight::finite() const {
  return std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
}

Dense make_dense(const Type& type, Shape shape, Order order) {
  const int64_t gap = order == Order::kStrided ? 2 : 1;
  const int64_t major = order == Order::kColumns ? shape.rows : shape.cols;
  const int64_t minor_stride = gap, major_stride = major * gap + (gap - 1);
  int64_t row_stride = major_stride, col_stride = minor_stride;
  if (order == Order::kColumns) std::swap(row_stride, col_stride);
  const int64_t values = shape.rows * shape.cols == 0
                             ? 0
                             : (shape.rows - 1) * row_stride + (shape.cols - 1) * col_stride + 1;
  Dense dense{Memory(values * type.bytes), {}};
  dense.view = {dense.memory.data(), shape.rows, shape.cols, row_stride, col_stride, type.value};
  return dense;
}

Dense to_dense(const Weight& weight, Order order, bool negative_zeros) {
  const int bytes = weight.type->bytes;
  Dense dense = make_dense(*weight.type, weight.shape, order);
  int64_t next = 0;
  for_each_place(dense.view, bytes, [&](int64_t row, int64_t k, uint8_t* at) {
    if (next < weight.offsets[row + 1] && weight.columns[next] == k) {
      std::memcpy(at, weight.bits.data() + next * bytes, bytes);
      ++next;
    } else {
      std::memset(at, 0, bytes);
      if (negative_zeros && (row + k) % 3 == 0) at[bytes - 1] = 0x80;
    }
  });
  return dense;
}

Weight from_dense(const Type& type, const DenseView& dense) {
  Weight weight;
  weight.type = &type;
  weight.shape = {dense.rows, dense.cols};
  weight.offsets.assign(dense.rows + 1, 0);
  for_each_place(dense, type.bytes, [&](int64_t row, int64_t k, const uint8_t* at) {
    if (!is_zero(at, type.bytes)) append(weight, k, at);
    weight.offsets[row + 1] = weight.nonzeros();
  });
  for (int64_t row = 0; row < dense.rows; ++row)
    weight.offsets[row + 1] = std::max(weight.offsets[row + 1], weight.offsets[row]);
  return weight;
}

Case make_case(int64_t number) {
  Random random(number);
  Case c;
  c.number = number;
  int64_t n = number;
  const auto any_kind = [&] { return static_cast<int>(below(random, kKindCount)); };
  const auto any_size = [&] { return kSizes[below(random, kSizeCount)]; };
  // Kinds, sizes and shapes in turn first, so that any beginning has some of each.
  const int64_t turn = n % 3;
  n /= 3;
  if (turn == 0 && n < kKindCount) {
    c.kind = static_cast<int>(n);
    c.shape = {kSizes[(n * 5 + 9) % kSizeCount], kSizes[(n * 7 + 13) % kSizeCount]};
  } else if (turn == 1 && n < kShapeCount) {
    c.kind = static_cast<int>(n) % 6;
    c.shape = kShapes[n];
  } else if (chance(random, .9)) {
    c.kind = any_kind();
    c.shape = {any_size(), any_size()};
  } else {
    c.kind = any_kind();
    c.shape = kShapes[below(random, kShapeCount)];
  }
  const int64_t elements = c.shape.rows * c.shape.cols;
  if (elements > 400'000) c.kind = 4;  // the others would take most of the time
  c.name = "case " + std::to_string(number) + ": " + std::to_string(c.shape.rows) + " x " +
           std::to_string(c.shape.cols) + ", " + kKinds[c.kind].name;
  return c;
}

Weight make_weight(const Case& c, const Type& type) {
  Random places(c.number), values(c.number + 1);
  Weight weight;
  weight.type = &type;
  weight.shape = c.shape;
  for (int64_t row = 0; row < c.shape.rows; ++row) {
    for (int64_t column = 0; column < c.shape.cols; ++column) {
      if (!kKinds[c.kind].keeps({row, column, c.shape, places})) continue;
      uint8_t bits[8];
      store(type, value_of(c, type, values), bits, 0);
      if (!is_zero(bits, type.bytes)) append(weight, column, bits);
    }
    weight.offsets.push_back(weight.nonzeros());
  }
  return weight;
}

}  // namespace native
