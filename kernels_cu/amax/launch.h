// The host launchers of amaxes.
#pragma once

#include "jitquant/launch.h"

namespace jitquant {

int amax_blocks(const Matrix& x, int64_t run);
cudaError_t launch_amax(const Matrix& x, int64_t run, bool activate, bool by_row, bool keep_nan,
                        float* partials, int blocks, float* out, cudaStream_t stream);

int amax_gsa_blocks(const Matrix& x);
cudaError_t launch_amax_gsa(const Matrix& x, float divisor, float* partials, int blocks, float* gsa,
                            cudaStream_t stream);

}  // namespace jitquant
