// What the host launchers of ragged tensors (many tensors in one buffer) take, in addition to
// launch.h.
#pragma once

#include "jitquant/activation.cuh"
#include "jitquant/fp8.cuh"
#include "jitquant/launch.h"

namespace jitquant {

struct GroupNumerics;

// The segments: offsets (count + 1,), sizes (count,) or null, in rows of `row` elements of data.
struct RaggedInput {
  const void* data;
  DType dtype;
  const int64_t* offsets;
  const int64_t* sizes;
  int64_t count, numel, row;
};

// Per segment: the given scale and the outputs.
struct RaggedScales {
  const float* given;  // null if scales are computed
  float* amax;
  float* inverse;   // scale_inv, or gsa
  float* partials;  // kMaxPartials floats of workspace

  RaggedScales with(float* workspace) const { return {given, amax, inverse, workspace}; }
};

// What a gradient takes in addition to its scales.
struct RaggedGradient {
  const void* act_input;  // null without an activation
  Activation activation;
  int64_t cols;  // per row; segments are whole rows
  float* dbias;  // (count, cols), or null
  float* sums;   // workspace for dbias: segment_cut(...).ranges rows of `cols` floats
};

// Divides the rows of a gradient into ranges of consecutive rows, `phases` ranges per thread block.
struct RowCut {
  int64_t range_rows, ranges;
  int phases;
};

// One-byte elements without gaps.
struct RaggedElements {
  uint8_t* data;
  EightBit format;
  bool vector;  // aligned to 16 bytes
};

}  // namespace jitquant
