// The kernel that goes row by row: row granularity, and the norms, in one launch; or, for a norm with
// tensor granularity, launch 1 of two.
//   row_kernel   a block of threads a row
#pragma once

#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

constexpr int kRowThreads = 512;  // most threads of a row

// What is held of a row between its passes, given the values of a source: these, or for a norm these
// times the weight, as fp32; the factor inv_rms, which is known only when the row has been read, goes
// to the encoding.
template <class Source, bool kNorm>
struct Held {
  using Value = typename Source::Value;
};
template <class Source>
struct Held<Source, true> {
  using Value = Block<float>;
};

// What one thread learns of a row, and after the reduction all do.
struct RowSums {
  float squares = 0.0f;  // of the values before the weight, for a norm
  float amax = 0.0f;     // of what is held
};

// Fetches a block and returns what is held of it; adds it to the sums, its amax in block_max.
template <bool kNorm, class Source>
__device__ __forceinline__ auto take_block(const Source& source,
                                           const Normalize<typename Source::Element>& norm,
                                           const typename Source::Fetched& fetched, int64_t row,
                                           int64_t block, RowSums& sums, float& block_max) {
  const typename Source::Value x = source.value(fetched, row, block);
  typename Held<Source, kNorm>::Value held;
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      sums.squares = fma_rn(value_of(x, i), value_of(x, i), sums.squares);
    }
    held = norm.weighted(x, block, source.cols);
  } else {
    held = x;
  }
  block_max = block_amax(held);
  float numbers = block_max;
  if (is_nan(block_max)) {
    Amax<typename Held<Source, kNorm>::Value::Element> amax;
    amax.add(held);
    numbers = amax.result();
  }
  sums.amax = fmaxf(sums.amax, numbers);
  return held;
}

// How the blocks of a row are encoded, once its sums are known.
struct RowEncoding {
  Nvfp4Encoding encoding;
  float inverse;  // inv_rms; 1 without a norm
};

template <bool kNorm, class T>
__device__ __forceinline__ RowEncoding finish_row(const RowSums& sums, const Normalize<T>& norm,
                                                  const RowScale& scale, int64_t cols, int64_t row,
                                                  const Nvfp4Encoding& given, float& tensor_amax) {
  RowEncoding e = {given, 1.0f};
  float amax = sums.amax;
  if constexpr (kNorm) {
    const float mean = div_rn(sums.squares, static_cast<float>(cols));
    e.inverse = reciprocal_rn(sqrt_rn(add_rn(mean, norm.eps)));
    if (threadIdx.x == 0) norm.inv_rms[row] = e.inverse;
    amax = amax_ignore_nan(0.0f, mul_rn(amax, e.inverse));
  }
  if (scale.mode == RowMode::kTensorAmax) {
    tensor_amax = fmaxf(tensor_amax, amax);
  } else if (scale.mode == RowMode::kRowAmax) {
    if (threadIdx.x == 0) scale.gsa_out[row] = div_rn(amax, scale.divisor);
    e.encoding = nvfp4_encoding_from_amax(amax, scale.divisor);
  } else if (scale.given.kind == GlobalScale::kRows) {
    e.encoding = nvfp4_encoding_from_gsa(scale.given.gsa[row * scale.given.stride]);
  }
  return e;
}

template <class Value>
__device__ __forceinline__ void store_row_block(const Nvfp4Output& out, int64_t row, int64_t block,
                                                const Value& held, float block_max,
                                                const RowEncoding& e, Nvfp4Recipe recipe) {
  const float b = mul_rn(block_max, e.inverse);
  store_codes(out, row, block, nvfp4_quantize_block(held, b, e.encoding, recipe, e.inverse));
}

// A block of threads a row, in two passes over its blocks of values. Between them what is held is in
// shared memory (`stored`), or read again where a row is too long for that. Threads own the same
// blocks in both passes. The next block, also of the next row, is loaded while one is computed.
template <class Source, bool kNorm>
__global__ void __launch_bounds__(kRowThreads, Source::kRowsPerSm)
    row_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
               Nvfp4Recipe recipe, Nvfp4Output out, bool stored) {
  using Value = typename Held<Source, kNorm>::Value;
  extern __shared__ uint4 row_storage[];
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const int width = static_cast<int>(blocks_of(source.cols));
  const int threads = blockDim.x;
  const bool quantizes = scale.mode != RowMode::kTensorAmax;
  if (quantizes) let_next_begin();
  wait_for_previous();
  if (!quantizes) let_next_begin();
  Nvfp4Encoding given = {};
  if (scale.mode == RowMode::kGiven && scale.given.kind != GlobalScale::kRows) {
    given = tensor_encoding(scale.given, reduce);
  }
  float tensor_amax = 0.0f;
  typename Source::Fetched next;
  const int first = threadIdx.x;
  if (blockIdx.x < source.rows && first < width) next = source.fetch(blockIdx.x, first);

#pragma unroll 1
  for (int64_t row = blockIdx.x; row < source.rows; row += gridDim.x) {
    RowSums sums;
    float block_max;
    if (!stored && first < width) next = source.fetch(row, first);
#pragma unroll 1
    for (int b = first; b < width; b += threads) {
      const typename Source::Fetched fetched = next;
      const bool last = b + threads >= width;
      const int64_t next_row = last ? row + gridDim.x : row;
      if (next_row < source.rows && (stored || !last)) {
        next = source.fetch(next_row, last ? first : b + threads);
      }
      const Value held = take_block<kNorm>(source, norm, fetched, row, b, sums, block_max);
      if (stored) {
#pragma unroll
        for (int i = 0; i < Value::kWords; i += 4) {
          store_words<4>(row_storage + i / 4 * width + b, held.words + i);
        }
      }
    }
    const float2 total = reduce.sum_and_max(sums.squares, sums.amax);
    sums.squares = total.x, sums.amax = total.y;
    const RowEncoding e =
        finish_row<kNorm>(sums, norm, scale, source.cols, row, given, tensor_amax);
    if (!quantizes) continue;
#pragma unroll 1
    for (int b = first; b < width; b += threads) {
      Value held;
      if (stored) {
#pragma unroll
        for (int i = 0; i < Value::kWords; i += 4) {
          load_words<4>(row_storage + i / 4 * width + b, held.words + i);
        }
      } else {
        held = take_block<kNorm>(source, norm, source.refetch(row, b), row, b, sums, block_max);
      }
      store_row_block(out, row, b, held, block_amax(held), e, recipe);
    }
  }
  if (quantizes) {
    zero_padding(out);
  } else if (threadIdx.x == 0) {
    scale.partials[blockIdx.x] = tensor_amax;
  }
}

// Threads of a row, from the number of rows and their length alone: with few rows, which leave most
// of the device idle, one for each block of values; otherwise one for four, which computes less that
// is the same for all threads of a row.
inline int row_threads(int64_t rows, int64_t cols) {
  const int64_t width = blocks_of(cols);
  const int64_t wanted = rows <= sm_count() ? width : (width + 3) / 4;
  return static_cast<int>(wanted >= kRowThreads ? kRowThreads : (wanted + 31) / 32 * 32);
}

// The grid's blocks are also the partials that are written with kTensorAmax.
template <class Source, bool kNorm>
LaunchShape row_shape(int64_t rows, int64_t cols) {
  LaunchShape shape = {1, row_threads(rows, cols), Start::kOverlapped};
  shape.shared = blocks_of(cols) * sizeof(typename Held<Source, kNorm>::Value);
  int per_sm = blocks_per_sm<&row_kernel<Source, kNorm>>(shape.block, shape.shared);
  if (per_sm == 0) {
    shape.shared = 0;
    per_sm = blocks_per_sm<&row_kernel<Source, kNorm>>(shape.block, 0);
  }
  shape.grid = persistent_grid(rows, per_sm);
  if (shape.grid > kMaxPartials) shape.grid = kMaxPartials;
  return shape;
}

template <class Source, bool kNorm>
cudaError_t launch_rows(const Source& source, const Normalize<typename Source::Element>& norm,
                        RowScale scale, Nvfp4Recipe recipe, const Nvfp4Output& out,
                        cudaStream_t stream) {
  const LaunchShape shape = row_shape<Source, kNorm>(source.rows, source.cols);
  return launch<&row_kernel<Source, kNorm>>(shape, stream, source, norm, scale, recipe, out,
                                            shape.shared > 0);
}

// Row granularity of a source that is quantized as it is.
template <class Source>
cudaError_t launch_row_amax(const Source& source, float divisor, float* gsa, Nvfp4Recipe recipe,
                            const Nvfp4Output& out, cudaStream_t stream) {
  const RowScale scale = {RowMode::kRowAmax, divisor, gsa, nullptr, {}};
  return launch_rows<Source, false>(source, {}, scale, recipe, out, stream);
}

}  // namespace jitquant
