// The kernel that goes row by row: row granularity, and the norms, in one launch; or, for a norm
// with tensor granularity, launch 1 of two.
//   row_kernel   a block of threads a row
#pragma once

#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

// Most threads of a row, and where the row is not stored, whose kernels take more registers.
constexpr int kRowThreads = 512;
constexpr int kRereadThreads = 256;

// What is held of a row between its passes, given the values of a source: these, or for a norm
// these times the weight, as fp32; the factor inv_rms, which is known only when the row has been
// read, goes to the encoding.
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
  float amax = 0.0f;     // of what is held; NaN if there is one in it
};

// What is held of a block; its squares are added to the sum.
template <bool kNorm, bool kWhole, class Source>
__device__ __forceinline__ auto take_block(const Source& source,
                                           const Normalize<typename Source::Element>& norm,
                                           const typename Source::Fetched& fetched,
                                           const typename Source::Row& row, int64_t block,
                                           float& squares) {
  const typename Source::Value x = source.template value<kWhole>(fetched, row, block);
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < 16; ++i) squares = fma_rn(value_of(x, i), value_of(x, i), squares);
    return norm.template weighted<kWhole>(x, block, source.cols);
  } else {
    return x;
  }
}

// How the blocks of a row are encoded, once its sums are known.
struct RowEncoding {
  Nvfp4Encoding encoding;
  float inverse;  // inv_rms, for a norm
};

template <bool kNorm, class T>
__device__ __forceinline__ RowEncoding finish_row(const RowSums& sums, const Normalize<T>& norm,
                                                  const RowScale& scale, Nvfp4Recipe recipe,
                                                  int64_t cols, int64_t row,
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
    e.encoding = nvfp4_encoding_from_amax(amax, scale.divisor, recipe);
  } else if (scale.given.kind == GlobalScale::kRows) {
    e.encoding = nvfp4_encoding_from_gsa(scale.given.gsa[row * scale.given.stride], recipe);
  }
  return e;
}

template <bool kNorm, class Value>
__device__ __forceinline__ Nvfp4Codes quantize_held(const Value& held, float block_max,
                                                    const RowEncoding& e) {
  if constexpr (kNorm) {
    return nvfp4_quantize_scaled_block(held, block_max, e.inverse, e.encoding);
  } else {
    return nvfp4_quantize_block(held, block_max, e.encoding);
  }
}

// Blocks of the largest size that a multiprocessor has to hold: bounds the registers of the norm of
// a plain tensor, which is faster with more rows at once. 0 leaves it to the compiler.
template <class Source, bool kNorm>
constexpr int row_blocks_per_sm(bool stored) {
  if (!stored) return 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 1;  // its compiler wants more registers
#endif
  return kNorm && sizeof(typename Source::Fetched) <= 32 ? 2 : 0;
}

// A block of threads a row, in two passes over its blocks of values, which have the same owners in
// both. With kStored, what is held of a row, and each block's amax, are in shared memory between
// the passes, all blocks are whole, and the loads of several are in flight together. Otherwise, for
// what is not aligned or does not fit there, the row is read again.
template <class Source, bool kNorm, bool kStored>
__global__ void __launch_bounds__(kStored ? kRowThreads : kRereadThreads,
                                  row_blocks_per_sm<Source, kNorm>(kStored))
    row_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
               Nvfp4Recipe recipe, Nvfp4Output out) {
  using Value = typename Held<Source, kNorm>::Value;
  constexpr int kParts = Value::kWords / 4;
  constexpr int kFetched = sizeof(typename Source::Fetched);
  constexpr int kAtOnce = kStored && kFetched < 128 ? (kNorm ? 72 : 108) / kFetched : 1;
  extern __shared__ uint4 row_storage[];
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const int width = static_cast<int>(blocks_of(source.cols));
  const int threads = blockDim.x, mine = threadIdx.x;
  float* const stored_max = reinterpret_cast<float*>(row_storage + kParts * width);
  const bool quantizes = scale.mode != RowMode::kTensorAmax;
  if (quantizes) let_next_begin();
  wait_for_previous();
  if (!quantizes) let_next_begin();
  Nvfp4Encoding given = {};
  if (scale.mode == RowMode::kGiven && scale.given.kind != GlobalScale::kRows) {
    given = tensor_encoding(scale.given, recipe, reduce);
  }
  float tensor_amax = 0.0f;

#pragma unroll 1
  for (int64_t r = blockIdx.x; r < source.rows; r += gridDim.x) {
    const typename Source::Row row = source.row(r);
    RowSums sums;
#pragma unroll 1
    for (int first = mine; first < width; first += kAtOnce * threads) {
      typename Source::Fetched fetched[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int b = first + k * threads;
        if (b < width) fetched[k] = source.template fetch<kStored>(row, b);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int b = first + k * threads;
        if (b >= width) break;
        const Value held =
            take_block<kNorm, kStored>(source, norm, fetched[k], row, b, sums.squares);
        const float block_max = block_amax(held);
        sums.amax = amax_keep_nan(sums.amax, block_max);
        if constexpr (kStored) {
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            store_words<4>(row_storage + i * width + b, held.words + 4 * i);
          }
          stored_max[b] = block_max;
        }
      }
    }
    auto held_at = [&](int b) {
      if constexpr (kStored) {
        Value held;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          load_words<4>(row_storage + i * width + b, held.words + 4 * i);
        }
        return held;
      } else {
        float squares;
        return take_block<kNorm, false>(source, norm, source.template refetch<false>(row, b), row,
                                        b, squares);
      }
    };
    float2 total = reduce.sum_and_max(sums.squares, sums.amax);
    if (is_nan(total.y)) {
      // Once more without it: the rest of the row is as if it were not there.
      Amax<typename Value::Element> numbers;
#pragma unroll 1
      for (int b = mine; b < width; b += threads) numbers.add(held_at(b));
      total.y = reduce.max(numbers.result());
    }
    sums = {total.x, total.y};
    const RowEncoding e =
        finish_row<kNorm>(sums, norm, scale, recipe, source.cols, r, given, tensor_amax);
    if (!quantizes) continue;
    const OutputRow to(out, r);
#pragma unroll 1
    for (int b = mine; b < width; b += threads) {
      const Value held = held_at(b);
      const float block_max = kStored ? stored_max[b] : block_amax(held);
      to.store(b, quantize_held<kNorm>(held, block_max, e));
    }
  }
  if (quantizes) {
    zero_padding(out);
  } else if (threadIdx.x == 0) {
    scale.partials[blockIdx.x] = tensor_amax;
    for (int i = gridDim.x + blockIdx.x; i < scale.maxima; i += gridDim.x) scale.partials[i] = 0.0f;
  }
}

// Threads of a row, from the number of rows and their length alone: with few rows, which leave most
// of the device idle, one for each block of values; otherwise one for `share` blocks, which
// computes less that is the same for all threads of a row.
inline int row_threads(int64_t rows, int64_t cols, int share) {
  const int64_t width = blocks_of(cols);
  const int64_t wanted = rows <= sm_count() ? width : (width + share - 1) / share;
  return static_cast<int>(wanted >= kRowThreads ? kRowThreads : (wanted + 31) / 32 * 32);
}

// Calls f(shape, stored) with the launch's shape, whose blocks are also the partials that are
// written with kTensorAmax, and kStored as a constant.
template <bool kNorm, class Source, class F>
auto with_row_shape(const Source& source, const ColumnVector& weight, F&& f) {
  int threads = row_threads(source.rows, source.cols, Source::kShare);
  const size_t bytes =
      blocks_of(source.cols) * (sizeof(typename Held<Source, kNorm>::Value) + sizeof(float));
  auto shape = [&](int per_sm, size_t shared) {
    LaunchShape s = {persistent_grid(source.rows, per_sm), threads, Start::kOverlapped};
    if (s.grid > kMaxPartials) s.grid = kMaxPartials;
    s.shared = shared;
    return s;
  };
  if (source.whole() && weight.vector) {
    const int per_sm = blocks_per_sm<&row_kernel<Source, kNorm, true>>(threads, bytes);
    if (per_sm > 0) return f(shape(per_sm, bytes), std::true_type{});
  }
  threads = threads < kRereadThreads ? threads : kRereadThreads;
  const int per_sm = blocks_per_sm<&row_kernel<Source, kNorm, false>>(threads, 0);
  return f(shape(per_sm, 0), std::false_type{});
}

template <bool kNorm, class Source>
cudaError_t launch_rows(const Source& source, const Normalize<typename Source::Element>& norm,
                        const RowScale& scale, Nvfp4Recipe recipe, const Nvfp4Output& out,
                        cudaStream_t stream) {
  return with_row_shape<kNorm>(source, norm.weight, [&](const LaunchShape& shape, auto stored) {
    return launch<&row_kernel<Source, kNorm, stored>>(shape, stream, source, norm, scale, recipe,
                                                      out);
  });
}

// How many partials launch_rows writes for a norm with kTensorAmax.
template <class Source>
int64_t row_partials(const Source& source, const ColumnVector& weight) {
  return with_row_shape<true>(source, weight,
                              [](const LaunchShape& shape, auto) { return shape.grid; });
}

// Row granularity of a source that is quantized as it is.
template <class Source>
cudaError_t launch_row_amax(const Source& source, float divisor, float* gsa, Nvfp4Recipe recipe,
                            const Nvfp4Output& out, cudaStream_t stream) {
  const RowScale scale = {RowMode::kRowAmax, divisor, gsa, nullptr, {}};
  const Normalize<typename Source::Element> none = {{nullptr, false, true}, 0.0f, nullptr};
  return launch_rows<false>(source, none, scale, recipe, out, stream);
}

}  // namespace jitquant
