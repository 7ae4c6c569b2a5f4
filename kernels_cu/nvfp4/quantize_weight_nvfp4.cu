// NVFP4 of a weight with one scale per 1x16 elements or per 16x16 tile, packed along either
// dimension. A line is a row or column of the weight along the packed dimension.
#include "kernels.cuh"

namespace jitquant {

// Neighboring threads take neighboring lines of the same block column; 16 of them form a tile.
template <class T>
__global__ void __launch_bounds__(kThreads)
    weight_kernel(const T* w, WeightShape shape, GlobalScale scale, Nvfp4Recipe recipe,
                  Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  wait_for_previous();
  let_next_begin();
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
  const int64_t width = (out.rows + 15) / 16 * 16;  // whole tiles: all 16 lanes exist
  for (BlockWalk walk(width); walk.row < out.blocks; walk.next()) {
    const int64_t line = walk.block, block = walk.row;
    const bool inside = line < out.rows;
    Block<T> v;
    const int64_t count = inside ? shape.length - block * 16 : 0;
    const T* p = w + line * shape.line_stride + block * 16 * shape.element_stride;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      set_value(v, i, i < count ? to_float(p[i * shape.element_stride]) : 0.0f);
    }
    float b = block_amax(v);
    if (shape.tile) {
      // Width and step are multiples of 16, so 16 neighboring lanes stay together.
      const unsigned lanes = 0xffffu << (threadIdx.x & 16);
#pragma unroll
      for (int offset = 8; offset > 0; offset >>= 1) {
        b = amax_keep_nan(b, __shfl_xor_sync(lanes, b, offset));
      }
    }
    if (!inside) continue;
    const Nvfp4Codes codes = nvfp4_quantize_block(v, b, encoding);
    if (shape.columns) {
      out.scales[block * out.rows + line] = codes.scale;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t word = i < 4 ? codes.low : codes.high;
        out.codes[(block * 8 + i) * out.rows + line] = static_cast<uint8_t>(word >> (8 * (i & 3)));
      }
    } else {
      OutputRow(out, line).store(block, scale_place(out, block), codes);
    }
  }
  zero_padding(out);
}

#ifndef __CUDACC_RTC__
int weight_amax_partials(const Matrix& w) {
  return amax_grid(w.rows, w.cols);
}

cudaError_t launch_weight_amax_partials(const Matrix& w, float* partials, int count,
                                        cudaStream_t stream) {
  return dispatch(w.dtype, [&](auto element) {
    return launch_amax_plain<decltype(element)>(w, partials, count, stream);
  });
}

cudaError_t launch_quantize_weight_nvfp4(const Matrix& w, const WeightShape& shape,
                                         const GlobalScale& scale, Nvfp4Recipe recipe,
                                         const Nvfp4Output& out, cudaStream_t stream) {
  const int64_t lines = (out.rows + 15) / 16 * 16;
  const int64_t grid = persistent_grid((lines * out.blocks + kThreads - 1) / kThreads, 8);
  return dispatch(w.dtype, [&](auto element) {
    using T = decltype(element);
    return launch<&weight_kernel<T>>({grid, kThreads, Start::kOverlapped}, stream,
                                     static_cast<const T*>(w.data), shape, scale, recipe, out);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
