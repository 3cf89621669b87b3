#include "sabotage.h"

#include <cstring>

namespace native {
namespace {

constexpr const char* kNames[] = {"none", "sum", "threads", "gap", "beside", "bits", "read"};
const char* chosen = kNames[0];

bool is(const char* name) { return std::strcmp(chosen, name) == 0; }

volatile uint8_t sink;

}  // namespace

bool choose_sabotage(const char* name) {
  for (const char* known : kNames)
    if (std::strcmp(known, name) == 0) {
      chosen = known;
      return true;
    }
  return false;
}

void sabotage_product(const Blob& blob, const Matrix& y, int threads) {
  if (y.rows < 2 || y.cols < 2) return;
  if (is("sum")) {  // one sum, by little more than rounding
    const double value = load(*y.type, y.row(1), 1);
    const double error = y.type->bytes == 8 ? 1e-11 : y.type->bytes == 4 ? 1e-3 : .1;
    store(*y.type, value * (1 + error) + error, y.row(1), 1);
  }
  if (is("threads") && threads > 1) y.row(1)[0] ^= 1;
  if (is("gap") && y.stride > y.cols) y.row(0)[y.cols * y.type->bytes] = 0;
  if (is("beside")) y.row(0)[-1] = 0;
  if (is("read")) sink = blob.memory.data()[blob.memory.bytes() + 64];
}

void sabotage_blob(const Memory& blob) {
  if (is("bits")) blob.data()[blob.bytes() - 64 + 3] ^= 0x40;  // of a value
}

}  // namespace native
