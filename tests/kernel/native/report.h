#pragma once

// Counts what does not hold, and says where.

namespace native {

// What is being tested, for the messages; nests.
class Scope {
 public:
  explicit Scope(const char* format, ...) __attribute__((format(printf, 2, 3)));
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

// For the main thread. Returns `holds`.
bool expect(bool holds, const char* format, ...) __attribute__((format(printf, 2, 3)));

int failures();

// A crash says where, too.
void report_crashes();

}  // namespace native
