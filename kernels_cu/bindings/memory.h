// Checks that each element a call writes has its own memory, which nothing else in the call reads
// or writes. jitquant/ops/_checks_memory.py makes the same checks with the same messages.
#pragma once

#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "view.h"

namespace jitquant {

// Whether elements may share memory: some stride is within the reach of all smaller ones.
inline bool overlaps(const View& t) {
  if (t.numel() != 0 && t.is_contiguous()) return false;
  int64_t reach = 0;
  for (int64_t done = 0;;) {  // strides in ascending order
    int64_t next = std::numeric_limits<int64_t>::max();
    int64_t size = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < t.dim(); ++i) {
      if (t.size(i) <= 1 || t.stride(i) < done || t.stride(i) > next) continue;
      count = t.stride(i) == next ? count + 1 : 1;
      next = t.stride(i);
      size = t.size(i);
    }
    if (count == 0) return false;
    if (count > 1 || next <= reach) return true;
    reach += next * (size - 1);
    done = next + 1;
  }
}

inline void check_own_elements(const View& t, const char* name) {
  if (!overlaps(t)) return;
  fail(name, ": expected memory of its own for each element, as it is written, got strides ",
       strides_text(t), ". Pass ", name, ".contiguous() or a slice of a contiguous tensor");
}

inline int64_t bytes_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Long:
      return 8;
    case ScalarType::Int:
    case ScalarType::Float:
      return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    default:
      return 1;
  }
}

// The bytes that an argument covers: runs of `run` bytes, a multiple of `step` apart. Empty for an
// empty tensor and for anything that is not a tensor.
struct Region {
  int64_t start = 0, stop = 0, run = 0, step = 0;

  Region() = default;
  explicit Region(const View& t) {
    if (t.numel() == 0) return;
    const int64_t size = bytes_of(t.dtype), last = t.dim() - 1;
    start = reinterpret_cast<int64_t>(t.data);
    stop = start + size;
    run = size;
    for (int64_t i = 0; i <= last; ++i) {
      const int64_t reach = (t.size(i) - 1) * t.stride(i) * size;
      stop += reach;
      if (i == last) run += reach;
      if (i < last && t.size(i) > 1) step = std::gcd(step, t.stride(i) * size);
    }
  }

  // Whether two regions may share a byte. Disjoint columns of one matrix do not.
  bool meets(const Region& other) const {
    if (stop <= other.start || other.stop <= start) return false;
    const int64_t both = std::gcd(step, other.step);
    if (both == 0) return true;
    const int64_t apart = ((other.start - start) % both + both) % both;
    return apart < run || apart + other.run > both;
  }
};

// A named argument of a call: a tensor or nothing, and whether it is written.
struct Reached {
  const View* tensor;
  bool written;
};

// `names` has one entry per argument.
inline void check_own_memory(const Reached* all, const std::vector<std::string>& names) {
  std::vector<Region> regions(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    if (all[i].tensor != nullptr) regions[i] = Region(*all[i].tensor);
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (!all[i].written) continue;
    for (size_t j = 0; j < names.size(); ++j) {
      if (i == j || (all[j].written && j > i) || !regions[i].meets(regions[j])) continue;
      fail(names[i],
           ": expected memory of its own, as it is written, got memory that it shares with ",
           names[j], ". Pass a copy, such as ", names[i], ".clone()");
    }
  }
}

}  // namespace jitquant
