// What the host launchers of the 8-bit kernels take, beside launch.h.
#pragma once

#include "jitquant/fp8.cuh"
#include "jitquant/launch.h"

namespace jitquant {

// Elements of one byte; the rows may lie apart. The matrix's dtype means nothing.
struct ElementRows {
  Matrix rows;
  EightBit format;
};

// The scale of a tensor, or of each of its rows, and where what is learned of it goes.
struct Fp8Scale {
  enum Kind : int {
    kValue,   // `value`
    kTensor,  // given[0]
    kRows,    // given[row]
    kAmax,    // from the amax
    kMaxima   // from given[0], or given[row], which is the amax
  };
  Kind kind;
  bool by_row;  // scale_inv and amax have one for each row
  float value;
  const float* given;
  float bound;  // of the amax that a scale is made from; infinity where there is none
  float* scale_inv;
  float* amax;      // null where nobody asks
  float* partials;  // kMaxPartials floats of workspace, where fp8_partials says so
};

// Scales of eight-bit elements as they are stored.
struct StoredScales {
  enum Type : int {
    kFloat,
    kE8m0,   // bytes
    kPacked  // exponents, four to an int32
  };
  const void* data;
  Type type;
  ScaleGrid grid;           // swizzled: the scales of a matrix by the stored columns
  bool swizzled;            // E8M0 in tiles of 128x4
  bool per_matrix;          // else all rows follow each other
  int64_t matrix_rows;      // rows of a matrix of the stack
  int64_t block_rows;       // rows that share a scale; 0: all elements do
  uint32_t halves_per_col;  // columns that share a scale, in eights; 0: all columns
};

}  // namespace jitquant
