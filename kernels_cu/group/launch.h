// What the launchers of 8-bit groups and blocks take: plain structs, as in launch.h.
#pragma once

#include "jitquant/group_scale.cuh"
#include "jitquant/launch.h"

namespace jitquant {

// The scales of `batches` matrices of `rows` rows of `groups` groups. Padding is zero: columns and
// rows of the grid without a group, and unused bytes of a packed element.
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

// The valid rows of each batch: the first counts[batch]. The others are not read. Their results are
// zeroed or left unchanged.
struct RowCounts {
  const void* counts;  // null: all rows are valid
  bool wide;           // int64; otherwise int32
  bool zero_padding;
};

}  // namespace jitquant
