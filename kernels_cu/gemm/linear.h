// What the launcher of NVFP4 products takes.
#pragma once

#include "jitquant/launch.h"

namespace jitquant {

// W (rows, cols): codes (rows, cols / 2), E4M3 scales (rows, cols / 16), both contiguous, one gsa.
// cols is a multiple of 16; codes are aligned to 8 bytes.
struct Nvfp4Weight {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* gsa;
  int rows, cols;
};

// x (rows, cols), cols at most the weight's, which what is missing is zero of: elements of bf16 or
// fp16 whose rows are `stride` apart; or with `scales` NVFP4, contiguous, in blocks of 16.
struct LinearOperand {
  const void* data;
  const uint8_t* scales;
  DType dtype;
  int64_t stride;
  int64_t rows;
  int cols;
};

// y (rows, cols) = product * gsa [* x_gsa[row]] [+ bias] [+ residual], contiguous, of `dtype`, as
// is the residual.
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

// Elements of bf16 that x in NVFP4 is decoded to by a first launch, on the current device; 0 if it
// is multiplied as it is.
int64_t nvfp4_linear_decoded(const Nvfp4Weight& w, const LinearOperand& x);

// `decoded` is memory for so many, aligned to 16 bytes, or null.
cudaError_t launch_nvfp4_linear(const Nvfp4Weight& w, const LinearOperand& x,
                                const LinearEpilogue& to, void* decoded, cudaStream_t stream);

}  // namespace jitquant
