#include "report.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace native {
namespace {

std::vector<std::string> scopes;
int failed = 0;
constexpr int kMostShown = 20;

std::string formatted(const char* format, va_list arguments) {
  char text[512];
  std::vsnprintf(text, sizeof text, format, arguments);
  return text;
}

void print_failed(const char* what) {
  std::printf("FAILED");
  for (const std::string& scope : scopes) std::printf(" %s,", scope.c_str());
  std::printf(" %s\n", what);
  std::fflush(stdout);
}

// Not what a handler may do by the book, but the process is lost.
[[maybe_unused]] void crashed(int signal) {
  print_failed(strsignal(signal));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

Scope::Scope(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  scopes.push_back(formatted(format, arguments));
  va_end(arguments);
}

Scope::~Scope() { scopes.pop_back(); }

bool expect(bool holds, const char* format, ...) {
  if (holds || ++failed > kMostShown) return holds;
  va_list arguments;
  va_start(arguments, format);
  const std::string text = formatted(format, arguments);
  va_end(arguments);
  print_failed(text.c_str());
  return false;
}

int failures() { return failed; }

void report_crashes() {
#ifndef __SANITIZE_ADDRESS__  // which tells more
  for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) std::signal(signal, crashed);
#endif
}

}  // namespace native
