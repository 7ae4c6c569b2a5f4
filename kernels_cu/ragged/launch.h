// What the host launchers of many tensors in one buffer take, beside launch.h.
#pragma once

#include "jitquant/activation.cuh"
#include "jitquant/fp8.cuh"
#include "jitquant/launch.h"

namespace jitquant {

// Where the segments are: offsets (count + 1,), sizes (count,) or null, in elements of data.
struct RaggedInput {
  const void* data;
  DType dtype;
  const int64_t* offsets;
  const int64_t* sizes;
  int64_t count, numel;
};

// Of each segment: the scale that is given, what is told of it.
struct RaggedScales {
  const float* given;  // null where scales are computed
  float* amax;
  float* inverse;   // scale_inv, or gsa
  float* partials;  // kMaxPartials floats of workspace
};

// What a gradient takes beside its scales.
struct RaggedGradient {
  const void* act_input;  // null where there is no activation
  Activation activation;
  int64_t cols;  // of a row; segments are whole rows
  float* dbias;  // (count, cols), or null
  float* sums;   // workspace: segment_cut(...).ranges rows of `cols` floats, where there is a dbias
};

// The rows of a gradient as ranges of neighbours. A block of threads has `phases` ranges.
struct RowCut {
  int64_t range_rows, ranges;
  int phases;
};

// Elements of one byte without gaps.
struct RaggedElements {
  uint8_t* data;
  EightBit format;
  bool vector;  // aligned to 16 bytes
};

}  // namespace jitquant
