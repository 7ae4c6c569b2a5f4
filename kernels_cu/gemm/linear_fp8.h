// Arguments of the launcher of FP8 products with an NVFP4 weight.
#pragma once

#include "linear.h"

namespace jitquant {

// x (rows, cols) in E4M3. cols is at most the weight's. Rows are `stride` bytes apart; `stride` and
// the address of `data` are multiples of 16. The epilogue's x_gsa is the scale_inv of x.
struct Fp8Operand {
  const void* data;
  int64_t stride;
  int64_t rows;
  int cols;
};

// Bytes of scratch memory that a product needs: the weight in E4M3, and a float per row.
int64_t nvfp4_linear_fp8_scratch(const Nvfp4Weight& w);

// The weight's cols is a multiple of 64, its codes are aligned to 16 bytes and its scales to 4.
// `scratch` has nvfp4_linear_fp8_scratch bytes, aligned to 16. Returns cudaErrorNotSupported if the
// current device or the build cannot run this product.
cudaError_t launch_nvfp4_linear_fp8(const Nvfp4Weight& w, const Fp8Operand& x,
                                    const LinearEpilogue& to, void* scratch, cudaStream_t stream);

}  // namespace jitquant
