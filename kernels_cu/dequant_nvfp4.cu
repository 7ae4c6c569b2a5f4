// Values from NVFP4: e2m1 * block scale * gsa in fp32, rounded once to the output's type.
#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

template <class T>
__global__ void __launch_bounds__(kThreads)
    dequant_kernel(Nvfp4Input in, T* out, int64_t cols, bool vector) {
  for (BlockWalk walk(in.blocks); walk.row < in.rows; walk.next()) {
    const float gsa = in.gsa[walk.row * in.gsa_stride];
    const float scale = float_from_e4m3(
        in.scales[in.swizzled ? swizzle_128x4(walk.row, walk.block, (in.blocks + 3) & ~int64_t{3})
                              : walk.row * in.scale_stride + walk.block]);
    const uint2 codes =
        *reinterpret_cast<const uint2*>(in.codes + walk.row * in.code_stride + walk.block * 8);
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t word = i < 8 ? codes.x : codes.y;
      v[i] = nvfp4_dequantize(word >> (4 * (i & 7)), scale, gsa);
    }
    store16(out + walk.row * cols + walk.block * 16, cols - walk.block * 16, vector, v);
  }
}

// Packed along the rows: neighbouring threads take neighbouring columns.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dequant_columns_kernel(Nvfp4Input in, T* out, int64_t out_rows, int64_t cols) {
  const float gsa = *in.gsa;
  for (BlockWalk walk(cols); walk.row < in.blocks; walk.next()) {
    const int64_t column = walk.block;
    const float scale = float_from_e4m3(in.scales[walk.row * in.scale_stride + column]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t pair = in.codes[(walk.row * 8 + i) * in.code_stride + column];
      const int64_t k = walk.row * 16 + 2 * i;
      if (k < out_rows) {
        out[k * cols + column] = from_float<T>(nvfp4_dequantize(pair, scale, gsa));
      }
      if (k + 1 < out_rows) {
        out[(k + 1) * cols + column] = from_float<T>(nvfp4_dequantize(pair >> 4, scale, gsa));
      }
    }
  }
}

cudaError_t launch_dequant_nvfp4(const Nvfp4Input& in, void* out, DType dtype, int64_t cols,
                                 cudaStream_t stream) {
  const int64_t grid = persistent_grid((in.rows * in.blocks + kThreads - 1) / kThreads, 8);
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const bool vector = reinterpret_cast<uintptr_t>(out) % 16 == 0 && cols * sizeof(T) % 16 == 0;
    return launch<&dequant_kernel<T>>({grid, kThreads}, stream, in, static_cast<T*>(out), cols,
                                      vector);
  });
}

cudaError_t launch_dequant_nvfp4_columns(const Nvfp4Input& in, void* out, DType dtype,
                                         int64_t out_rows, int64_t cols, cudaStream_t stream) {
  const int64_t grid = persistent_grid((in.blocks * cols + kThreads - 1) / kThreads, 8);
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    return launch<&dequant_columns_kernel<T>>({grid, kThreads}, stream, in, static_cast<T*>(out),
                                              out_rows, cols);
  });
}

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
