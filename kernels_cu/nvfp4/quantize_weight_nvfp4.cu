// NVFP4 of a weight with one scale per 1x16 elements or per 16x16 tile, packed along either
// dimension. A line is a row or column of the weight along the packed dimension.
#include "jitquant/transposed_tiles.cuh"
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
    b[0] = b[1] = spread_lanes_amax<4>(amax_keep_nan(b[0], b[1]));
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (!inside(k)) continue;
    OutputRow(out, first + 8 * k)
        .store(block, scale_place(out, block), nvfp4_quantize_block(x[k], b[k], encoding));
  }
  zero_padding(out);
}

// Byte i of each code's eight bytes, of two or four columns, in word i.
template <int kCount>
__device__ __forceinline__ void transpose_codes(const Nvfp4Codes (&codes)[kCount],
                                                uint32_t (&words)[8]) {
  static_assert(kCount == 2 || kCount == 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto pairs = [&](int k, uint32_t order) {
      return half == 0 ? byte_permute(codes[k].low, codes[k + 1].low, order)
                       : byte_permute(codes[k].high, codes[k + 1].high, order);
    };
    uint32_t* const to = words + 4 * half;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t first = pairs(0, i == 0 ? 0x5140 : 0x7362);
      const uint32_t second = kCount == 4 ? pairs(kCount - 2, i == 0 ? 0x5140 : 0x7362) : 0;
      to[i] = byte_permute(first, second, 0x5410);
      to[i + 1] = byte_permute(first, second, 0x7632);
    }
  }
}

// Packed along the columns: each thread has 16 rows of some neighboring columns, and as many
// neighbors as have 16 columns form a tile. One thread block per piece of work, as above.
template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    weight_columns_kernel(const T* w, int64_t row_count, int64_t row_stride, bool vector, bool tile,
                          Divisor threads, bool backwards, GlobalScale scale, Nvfp4Recipe recipe,
                          Nvfp4Output out) {
  constexpr int kCount = TileMemory<T>::kLines;
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const uint32_t turn = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t item = turn * kThreads + threadIdx.x, block = threads.quotient_of(item);
  const int64_t column = int64_t{item - block * threads.divisor} * kCount;
  const int64_t columns = out.rows - column;  // from this thread's first one on
  const int64_t rows = block < out.blocks && columns > 0 ? row_count - int64_t{block} * 16 : 0;
  const T* const p = w + column + int64_t{block} * 16 * row_stride;
  const bool whole = vector && columns >= kCount;
  uint2 raw[16];
  begin_overlapped(
      [&] {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          raw[i] = make_uint2(0, 0);
          if (i >= rows) continue;
          const T* const from = p + i * row_stride;
          raw[i] = whole ? load_columns<true>(from, columns) : load_columns<false>(from, columns);
        }
      },
      [&] {
        if (!is_first()) return;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (i < rows) prefetch(p + i * row_stride);
        }
      });
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
  Block<T> x[kCount];
  transpose_words(raw, x);
  float b[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) b[k] = block_amax(x[k]);
  if (tile) {
    float most = b[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) most = amax_keep_nan(most, b[k]);
    most = lanes_amax(most, 16 / kCount);
#pragma unroll
    for (int k = 0; k < kCount; ++k) b[k] = most;
  }
  if (rows <= 0) return;
  Nvfp4Codes codes[kCount];
  uint32_t words[8];
  uint32_t scales = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    codes[k] = nvfp4_quantize_block(x[k], b[k], encoding);
    scales |= uint32_t{codes[k].scale} << (8 * k);
  }
  transpose_codes(codes, words);
  const bool together = out.rows % kCount == 0;
  const auto store = [&](uint8_t* to, uint32_t bytes) {
    if (together) {
      using Bytes = std::conditional_t<kCount == 4, uint32_t, uint16_t>;
      *reinterpret_cast<Bytes*>(to) = static_cast<Bytes>(bytes);
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (k < columns) to[k] = static_cast<uint8_t>(bytes >> (8 * k));
      }
    }
  };
  store(out.scales + block * out.rows + column, scales);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    store(out.codes + (int64_t{block} * 8 + i) * out.rows + column, words[i]);
  }
}

#ifndef __CUDACC_RTC__
namespace {

cudaError_t launch_with(const Matrix& w, bool columns, bool tile, const GlobalScale& scale,
                        Nvfp4Recipe recipe, const Nvfp4Output& out, cudaStream_t stream) {
  const int64_t tiles = (out.rows + 15) / 16, quads = out.blocks > 0 ? (out.blocks + 3) / 4 : 1;
  const bool partials = scale.kind == GlobalScale::kPartials;
  return dispatch(w.dtype, [&](auto element) {
    using T = decltype(element);
    if (columns) {
      const int64_t threads = tiles > 0 ? tiles * 16 / TileMemory<T>::kLines : 1;
      const int64_t pieces = (threads * out.blocks + kThreads - 1) / kThreads;
      return launch<&weight_columns_kernel<T>>(
          {pieces > 0 ? pieces : 1, kThreads, Start::kOverlapped}, stream,
          static_cast<const T*>(w.data), w.rows, w.s2, w.vector, tile,
          Divisor(static_cast<uint32_t>(threads)), partials, scale, recipe, out);
    }
    const int64_t pieces = (tiles * quads + kWarps - 1) / kWarps;
    return launch<&weight_rows_kernel<T>>(
        {pieces > 0 ? pieces : 1, kThreads, Start::kOverlapped}, stream, PlainSource<T>(w), tile,
        Divisor(static_cast<uint32_t>(quads)), partials, scale, recipe, out);
  });
}

// The thread blocks of a cluster that holds the weight, or 0.
int cluster_of(const Matrix& w, bool columns, bool tile) {
  const bool by_rows = !columns && !tile && w.rows > 0 && w.cols > 0;
  return by_rows ? amax_plan(w.rows, w.cols).cluster : 0;
}

}  // namespace

int64_t quantize_weight_nvfp4_partials(const Matrix& w, bool columns, bool tile,
                                       const ComputedScale& scale) {
  return scale.given || cluster_of(w, columns, tile) > 0 ? 0 : amax_grid(w.rows, w.cols);
}

cudaError_t launch_quantize_weight_nvfp4(const Matrix& w, bool columns, bool tile,
                                         const ComputedScale& scale, float* partials,
                                         Nvfp4Recipe recipe, const Nvfp4Output& out,
                                         cudaStream_t stream) {
  if (scale.given) return launch_with(w, columns, tile, value_scale(scale), recipe, out, stream);
  if (const int cluster = cluster_of(w, columns, tile); cluster > 0) {
    return dispatch(w.dtype, [&](auto element) {
      return launch_cluster(PlainSource<decltype(element)>(w), cluster, scale.divisor, scale.gsa,
                            recipe, out, stream);
    });
  }
  const int count = amax_grid(w.rows, w.cols);
  const cudaError_t error = dispatch(w.dtype, [&](auto element) {
    return launch_amax_plain<decltype(element)>(w, partials, count, stream);
  });
  if (error != cudaSuccess) return error;
  return launch_with(w, columns, tile, partials_scale(partials, count, scale.divisor, scale.gsa),
                     recipe, out, stream);
}

// The scale is given, or its amax.
cudaError_t launch_quantize_weight_nvfp4_from(const Matrix& w, bool columns, bool tile,
                                              const GlobalScale& scale, Nvfp4Recipe recipe,
                                              const Nvfp4Output& out, cudaStream_t stream) {
  return launch_with(w, columns, tile, scale, recipe, out, stream);
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
