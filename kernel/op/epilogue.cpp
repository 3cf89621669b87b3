#include "op/epilogue.h"

#include <string>

#include "error.h"

namespace fxsparse {
namespace {

constexpr const char* kNames[] = {
#define FXSPARSE_ACTIVATION(name) #name,
#include "isa/activations.inc"
#undef FXSPARSE_ACTIVATION
};

int find_activation(const std::string& name) {
  for (int i = 0; i < kActivations; ++i)
    if (name == kNames[i]) return i;
  return -1;
}

Epilogue::Join find_join(const std::string& name) {
  if (name == "add") return Epilogue::Join::kAdd;
  if (name == "mul") return Epilogue::Join::kMultiply;
  return Epilogue::Join::kNone;
}

[[noreturn]] void refuse(const char* what, const char* forms, const char* text) {
  std::string names;
  for (const char* name : kNames) names += std::string(names.empty() ? "" : ", ") + name;
  fail("%s: expected an activation (%s)%s, got \"%s\"", what, names.c_str(), forms, text);
}

}  // namespace

std::vector<const char*> activation_names() { return {std::begin(kNames), std::end(kNames)}; }

Epilogue parse_activation(const char* text) {
  const Epilogue epilogue{find_activation(text), Epilogue::Join::kNone};
  if (epilogue.activation < 0) refuse("activation", "", text);
  return epilogue;
}

Epilogue parse_epilogue(const char* text) {
  const std::string words = text;
  const size_t space = words.find(' ');
  const std::string first = words.substr(0, space);
  const std::string last = space == words.npos ? first : words.substr(space + 1);
  const Epilogue epilogue{find_activation(first), find_join(last)};
  const bool joins = epilogue.join != Epilogue::Join::kNone;
  const bool known =
      space == words.npos ? joins || epilogue.activation >= 0 : joins && epilogue.activation >= 0;
  if (!known) refuse("epilogue", ", \"add\" or \"mul\", or one and the other", text);
  return epilogue;
}

void apply(const VectorOps& ops, const Epilogue& epilogue, void* y, const void* other, int64_t n) {
  if (epilogue.activation >= 0) ops.activate[epilogue.activation](y, n);
  if (epilogue.join == Epilogue::Join::kAdd) ops.add(y, other, n);
  if (epilogue.join == Epilogue::Join::kMultiply) ops.multiply(y, other, n);
}

}  // namespace fxsparse
