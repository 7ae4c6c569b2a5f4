// Checks that each element a call writes has its own memory, which nothing else in the call reads
// or writes. jitquant/ops/_checks_memory.py makes the same checks with the same messages.
#pragma once

#include <string>
#include <vector>

#include "view.h"

namespace [[gnu::visibility("hidden")]] jitquant {

void check_own_elements(const View& t, const char* name);

// A named argument of a call: a tensor or nothing, and whether it is written.
struct Reached {
  const View* tensor;
  bool written;
};

// `names` has one entry per argument.
void check_own_memory(const Reached* all, const std::vector<std::string>& names);

}  // namespace jitquant
