// What the launchers of groups and blocks in eight bits take: plain structs, as those of launch.h.
#pragma once

#include "jitquant/group_scale.cuh"
#include "jitquant/launch.h"

namespace jitquant {

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
