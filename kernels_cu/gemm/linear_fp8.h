// What the launcher of FP8 products with a weight in NVFP4 takes.
#pragma once

#include "linear.h"

namespace jitquant {

// x (rows, cols) in E4M3, cols at most the weight's; rows are `stride` bytes apart, and they and
// the data are multiples of 16 bytes. Its scale_inv is the epilogue's x_gsa.
struct Fp8Operand {
  const void* data;
  int64_t stride;
  int64_t rows;
  int cols;
};

// The weight has a multiple of 64 columns, its codes are aligned to 16 bytes and its scales to 4.
// cudaErrorNotSupported if the current device, or the build, has no such products.
cudaError_t launch_nvfp4_linear_fp8(const Nvfp4Weight& w, const Fp8Operand& x,
                                    const LinearEpilogue& to, cudaStream_t stream);

}  // namespace jitquant
