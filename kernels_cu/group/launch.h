// What the launchers of groups and blocks in eight bits take: plain structs, as those of launch.h.
#pragma once

#include "jitquant/fp8.cuh"
#include "jitquant/launch.h"

namespace jitquant {

// fp32; fp32 that hold powers of two; their exponents, four to an int32; E8M0 bytes of MXFP8, whose
// arithmetic comes with them.
enum class ScaleFormat : int { kFloat32 = 0, kPowerOfTwo = 1, kPacked = 2, kE8m0 = 3 };

struct GroupNumerics {
  EightBit format;
  GroupRecipe recipe;
  ScaleFormat scale_format;
  float eps;
};

// Scales of `batches` matrices with `rows` rows of `groups` groups. Padding is zero: columns and
// rows of the grid that no group has, and bytes of a packed element.
struct GroupScales {
  void* data;
  ScaleFormat format;
  ScaleGrid grid;
  bool swizzled;  // instead of the grid: E8M0 in tiles of 128x4
  int64_t batches, rows, groups;
};

struct GroupOutput {
  Matrix data;
  GroupScales scales;
};

// Rows of each batch that are there: the first counts[batch]. The others are not read; their
// results are zeroed or left alone.
struct RowCounts {
  const void* counts;  // null: all are there
  bool wide;           // int64, else int32
  bool zero_rest;
};

}  // namespace jitquant
