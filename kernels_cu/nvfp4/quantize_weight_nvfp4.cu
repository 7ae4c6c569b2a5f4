// NVFP4 of a weight with one scale per 1x16 elements or per 16x16 tile, packed along either
// dimension. A line is a row or column of the weight along the packed dimension.
#include "kernels.cuh"

namespace jitquant {

// Packed along the rows. A warp takes 16 rows of four blocks, and lane 4 * r + b of it block b of
// rows r and r + 8, so that a warp reads and writes whole sectors. One thread block per piece of
// work: the hardware starts them in order. `backwards`: from the end, which is still in the L2
// cache after an amax.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    weight_rows_kernel(PlainSource<T> source, bool tile, Divisor quads, bool backwards,
                       GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const uint32_t turn = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t item = turn * kWarps + threadIdx.x / 32, lane = threadIdx.x & 31;
  const uint32_t tile_row = quads.quotient_of(item);
  const int64_t block = (item - tile_row * quads.divisor) * 4 + (lane & 3);
  const int64_t first = int64_t{tile_row} * 16 + (lane >> 2);
  const auto inside = [&](int k) { return first + 8 * k < out.rows && block < out.blocks; };
  Block<T> x[2] = {};
  begin_overlapped(
      [&] {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (inside(k)) x[k] = source.template fetch<false>(source.row(first + 8 * k), block);
        }
      },
      [&] {
        if (!is_first()) return;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (inside(k)) source.prefetch(source.row(first + 8 * k), block);
        }
      });
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
  float b[2] = {block_amax(x[0]), block_amax(x[1])};
  if (tile) {
    float most = amax_keep_nan(b[0], b[1]);
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      most = amax_keep_nan(most, __shfl_xor_sync(0xffffffffu, most, offset));
    }
    b[0] = b[1] = most;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (!inside(k)) continue;
    OutputRow(out, first + 8 * k)
        .store(block, scale_place(out, block), nvfp4_quantize_block(x[k], b[k], encoding));
  }
  zero_padding(out);
}

// Packed along the columns: each thread has 16 rows of a column, and 16 neighbors form a tile.
template <class T>
__global__ void __launch_bounds__(kThreads)
    weight_columns_kernel(const T* w, int64_t row_count, int64_t row_stride, bool tile,
                          GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  wait_for_previous();
  let_next_begin();
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
  const int64_t width = (out.rows + 15) / 16 * 16;  // whole tiles: all 16 lanes exist
  for (BlockWalk walk(width); walk.row < out.blocks; walk.next()) {
    const int64_t column = walk.block, block = walk.row;
    const bool inside = column < out.rows;
    Block<T> v;
    const int64_t count = inside ? row_count - block * 16 : 0;
    const T* p = w + column + block * 16 * row_stride;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      set_value(v, i, i < count ? to_float(p[i * row_stride]) : 0.0f);
    }
    float b = block_amax(v);
    if (tile) {
      // Width and step are multiples of 16, so 16 neighboring lanes stay together.
      const unsigned lanes = 0xffffu << (threadIdx.x & 16);
#pragma unroll
      for (int offset = 8; offset > 0; offset >>= 1) {
        b = amax_keep_nan(b, __shfl_xor_sync(lanes, b, offset));
      }
    }
    if (!inside) continue;
    const Nvfp4Codes codes = nvfp4_quantize_block(v, b, encoding);
    out.scales[block * out.rows + column] = codes.scale;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = i < 4 ? codes.low : codes.high;
      out.codes[(block * 8 + i) * out.rows + column] = static_cast<uint8_t>(word >> (8 * (i & 3)));
    }
  }
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

cudaError_t launch_quantize_weight_nvfp4(const Matrix& w, bool columns, bool tile,
                                         const GlobalScale& scale, Nvfp4Recipe recipe,
                                         const Nvfp4Output& out, cudaStream_t stream) {
  const int64_t tiles = (out.rows + 15) / 16, quads = out.blocks > 0 ? (out.blocks + 3) / 4 : 1;
  const bool partials = scale.kind == GlobalScale::kPartials;
  return dispatch(w.dtype, [&](auto element) {
    using T = decltype(element);
    if (columns) {
      const int64_t pieces = (tiles * 16 * out.blocks + kThreads - 1) / kThreads;
      return launch<&weight_columns_kernel<T>>(
          {persistent_grid(pieces, 8), kThreads, Start::kOverlapped}, stream,
          static_cast<const T*>(w.data), w.rows, w.s2, tile, scale, recipe, out);
    }
    const int64_t pieces = (tiles * quads + kWarps - 1) / kWarps;
    return launch<&weight_rows_kernel<T>>(
        {pieces > 0 ? pieces : 1, kThreads, Start::kOverlapped}, stream, PlainSource<T>(w), tile,
        Divisor(static_cast<uint32_t>(quads)), partials, scale, recipe, out);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
