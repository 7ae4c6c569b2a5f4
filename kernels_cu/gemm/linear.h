// Arguments of the launcher of NVFP4 products.
#pragma once

#include "jitquant/launch.h"

namespace jitquant {

// W (rows, cols): codes (rows, cols / 2) and E4M3 scales (rows, cols / 16), both contiguous, and
// one gsa. cols is a multiple of 16, and codes are aligned to 8 bytes.
struct Nvfp4Weight {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* gsa;
  int rows, cols;
};

// x (rows, cols). cols is at most the weight's; missing columns are zero. Either bf16 or fp16 with
// rows `stride` elements apart, or, if `scales` is set, contiguous NVFP4 in blocks of 16.
struct LinearOperand {
  const void* data;
  const uint8_t* scales;
  DType dtype;
  int64_t stride;
  int64_t rows;
  int cols;
};

// y (rows, cols) = product * gsa [* x_gsa[row]] [+ bias] [+ residual]. y and the residual are
// contiguous and have `dtype`.
struct LinearEpilogue {
  void* out;
  DType dtype;
  int64_t cols;
  const float* x_gsa;
  int64_t x_gsa_stride;
  const void* bias;
  DType bias_dtype;
  const void* residual;
};

}  // namespace jitquant
