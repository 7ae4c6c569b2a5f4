// The host launchers of NVFP4.
#pragma once

#include "jitquant/launch.h"

namespace jitquant {

cudaError_t launch_deinterleave_quantize_nvfp4(const Matrix& fused, int64_t run, bool activate,
                                               const GlobalScale& scale, Nvfp4Recipe recipe,
                                               const Nvfp4Output& out, cudaStream_t stream);
int deinterleave_amax_partials(const Matrix& fused);
cudaError_t launch_deinterleave_amax_quantize_nvfp4(const Matrix& fused, int64_t run, bool activate,
                                                    float divisor, float* partials, float* gsa,
                                                    Nvfp4Recipe recipe, const Nvfp4Output& out,
                                                    cudaStream_t stream);
cudaError_t launch_deinterleave_quantize_nvfp4_rows(const Matrix& fused, int64_t run, bool activate,
                                                    float divisor, float* gsa, Nvfp4Recipe recipe,
                                                    const Nvfp4Output& out, cudaStream_t stream);

cudaError_t launch_dequant_nvfp4(const Nvfp4Input& in, void* out, DType dtype, int64_t cols,
                                 cudaStream_t stream);
cudaError_t launch_dequant_nvfp4_columns(const Nvfp4Input& in, void* out, DType dtype,
                                         int64_t out_rows, int64_t cols, cudaStream_t stream);

int amax_partials(const Matrix& x);
cudaError_t launch_amax_quantize_nvfp4(const Matrix& x, float divisor, float* partials, float* gsa,
                                       Nvfp4Recipe recipe, const Nvfp4Output& out,
                                       cudaStream_t stream);
cudaError_t launch_quantize_nvfp4_rows(const Matrix& x, float divisor, float* gsa,
                                       Nvfp4Recipe recipe, const Nvfp4Output& out,
                                       cudaStream_t stream);

int mhc_amax_partials(const HyperConnection& mix, const ColumnVector& weight);
cudaError_t launch_mhc_rows(const HyperConnection& mix, const ColumnVector& weight, float eps,
                            float* inv_rms, const RowScale& scale, Nvfp4Recipe recipe,
                            const Nvfp4Output& out, cudaStream_t stream);
cudaError_t launch_mhc_quantize(const HyperConnection& mix, const ColumnVector& weight,
                                float* inv_rms, const GlobalScale& scale, Nvfp4Recipe recipe,
                                const Nvfp4Output& out, cudaStream_t stream);

int rmsnorm_amax_partials(const Matrix& x, const Matrix* residual, const ColumnVector& weight);
cudaError_t launch_rmsnorm_rows(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                                float eps, float* inv_rms, const RowScale& scale,
                                Nvfp4Recipe recipe, const Nvfp4Output& out, cudaStream_t stream);
cudaError_t launch_rmsnorm_quantize(const Matrix& x, const ColumnVector& weight, float* inv_rms,
                                    const GlobalScale& scale, Nvfp4Recipe recipe,
                                    const Nvfp4Output& out, cudaStream_t stream);

cudaError_t launch_quantize_nvfp4(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream);

int weight_amax_partials(const Matrix& w, bool columns, bool tile);
cudaError_t launch_weight_in_cluster(const Matrix& w, float divisor, float* gsa, Nvfp4Recipe recipe,
                                     const Nvfp4Output& out, cudaStream_t stream);
cudaError_t launch_weight_amax_partials(const Matrix& w, float* partials, int count,
                                        cudaStream_t stream);
cudaError_t launch_quantize_weight_nvfp4(const Matrix& w, bool columns, bool tile,
                                         const GlobalScale& scale, Nvfp4Recipe recipe,
                                         const Nvfp4Output& out, cudaStream_t stream);

}  // namespace jitquant
