// What the host launchers of the 8-bit kernels take, in addition to launch.h.
#pragma once

#include "jitquant/fp8.cuh"
#include "jitquant/launch.h"

namespace jitquant {

// One-byte elements; rows may be strided. The matrix's dtype is ignored.
struct ElementRows {
  Matrix rows;
  EightBit format;
};

// The scale of a tensor or of each row, and where the computed scale and amax go.
struct Fp8Scale {
  enum Kind : int {
    kValue,   // `value`
    kTensor,  // given[0]
    kRows,    // given[row]
    kAmax,    // from the amax
    kMaxima   // from given[0] or given[row], which is the amax
  };
  Kind kind;
  bool by_row;  // scale_inv and amax are per row
  float value;
  const float* given;
  float least, bound;  // the amax that determines a scale is raised to one, and at most the other
  float* scale_inv;
  float* amax;      // null if not requested
  float* partials;  // kMaxPartials floats of workspace, if a call needs them

  Fp8Scale with(float* workspace) const {
    Fp8Scale own = *this;
    own.partials = workspace;
    return own;
  }
};

// Stored scales of 8-bit elements.
struct StoredScales {
  enum Type : int {
    kFloat,
    kE8m0,   // bytes
    kPacked  // exponents, four to an int32
  };
  const void* data;
  Type type;
  ScaleGrid grid;           // swizzled: indexes the scales of one matrix by stored columns
  bool swizzled;            // E8M0 in tiles of 128x4
  bool per_matrix;          // otherwise all rows are consecutive
  int64_t matrix_rows;      // rows of each matrix in the stack
  int64_t block_rows;       // rows that share a scale; 0: all elements share one
  uint32_t halves_per_col;  // columns that share a scale, divided by 8; 0: all columns share one
};

}  // namespace jitquant
