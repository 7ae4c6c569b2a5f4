// The FP8 kernel that goes row by row, a block of threads a row: a computed scale for each row, the
// amax of each row, and the norms, in one launch.
#pragma once

#include "jitquant/fp8_kernels.cuh"
#include "jitquant/nvfp4_rows.cuh"

namespace jitquant {

// A row in two passes over its blocks of values, which have the same owners in both, as row_kernel
// in nvfp4_rows.cuh has it. With kStored what is held of them is in shared memory between the two,
// all are whole, and the loads of several are in flight together; otherwise the row is read again.
template <class Source, bool kNorm, bool kStored>
struct RowPasses {
  using Value = typename Held<Source, kNorm>::Value;
  static constexpr int kParts = Value::kWords / 4;
  static constexpr int kFetched = sizeof(typename Source::Fetched);
  static constexpr int kAtOnce = kStored && kFetched < 128 ? (kNorm ? 72 : 128) / kFetched : 1;

  const Source& source;
  const Normalize<typename Source::Element>& norm;
  uint4* storage;
  int width;

  // The sum of the squares before the weight, for a norm. f(held) is called for each block.
  template <class F>
  __device__ __forceinline__ float first(const typename Source::Row& row, F&& f) const {
    const int threads = blockDim.x;
    float squares = 0.0f;
#pragma unroll 1
    for (int begin = threadIdx.x; begin < width; begin += kAtOnce * threads) {
      typename Source::Fetched fetched[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int b = begin + k * threads;
        if (b < width) fetched[k] = source.template fetch<kStored>(row, b);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int b = begin + k * threads;
        if (b >= width) break;
        const Value held = take_block<kNorm, kStored>(source, norm, fetched[k], row, b, squares);
        f(held);
        if constexpr (kStored) {
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            store_words<4>(storage + i * width + b, held.words + 4 * i);
          }
        }
      }
    }
    return squares;
  }

  // Block b once more, times inv_rms for a norm.
  __device__ __forceinline__ Value second(const typename Source::Row& row, int b,
                                          float inverse) const {
    Value held;
    if constexpr (kStored) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) load_words<4>(storage + i * width + b, held.words + 4 * i);
    } else {
      float ignored = 0.0f;
      held = take_block<kNorm, false>(source, norm, source.template refetch<false>(row, b), row, b,
                                      ignored);
    }
    if constexpr (kNorm) {
#pragma unroll
      for (int i = 0; i < 16; ++i) set_value(held, i, mul_rn(value_of(held, i), inverse));
    }
    return held;
  }

  // inv_rms of a row whose squares add up to `squares`.
  __device__ __forceinline__ float inverse(float squares, int64_t row) const {
    const float mean = div_rn(squares, static_cast<float>(source.cols));
    const float inverse = reciprocal_rn(sqrt_rn(add_rn(mean, norm.eps)));
    if (threadIdx.x == 0) norm.inv_rms[row] = inverse;
    return inverse;
  }
};

// Blocks of the largest size that a multiprocessor has to hold: bounds the registers.
template <class Source>
constexpr int fp8_row_blocks_per_sm(bool stored) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 1;  // its compiler wants more registers
#endif
  return stored && sizeof(typename Source::Element) == 2 ? 2 : 1;
}

template <class Source, bool kNorm, bool kStored>
__global__ void __launch_bounds__(kStored ? kRowThreads : kRereadThreads,
                                  fp8_row_blocks_per_sm<Source>(kStored))
    fp8_row_kernel(Source source, Normalize<typename Source::Element> norm, Fp8Scale scale,
                   RowPointer<uint8_t> out, bool vector, EightBit format) {
  extern __shared__ uint4 row_storage[];
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const RowPasses<Source, kNorm, kStored> passes = {source, norm, row_storage,
                                                    static_cast<int>(blocks_of(source.cols))};
  let_next_begin();
  wait_for_previous();
  float factor = 1.0f;
  if (!scale.by_row) factor = tensor_scale(scale, 0, largest(format), reduce);
  float tensor_amax = 0.0f;

#pragma unroll 1
  for (int64_t r = blockIdx.x; r < source.rows; r += gridDim.x) {
    const typename Source::Row row = source.row(r);
    Amax<typename Held<Source, kNorm>::Value::Element, true> mine;
    const float squares = passes.first(row, [&](const auto& held) { mine.add(held); });
    const float2 total = reduce.sum_and_max(squares, mine.result());
    float amax = total.y, inverse = 1.0f;
    if constexpr (kNorm) {
      inverse = passes.inverse(total.x, r);
      amax = amax_keep_nan(0.0f, mul_rn(amax, inverse));
    }
    if (scale.by_row) {
      factor = scale.kind == Fp8Scale::kAmax
                   ? fp8_scale_from_amax(bound_amax(amax, scale.bound), largest(format))
                   : scale.given[r];
      if (threadIdx.x == 0) {
        scale.scale_inv[r] = fp8_scale_inv(factor);
        if (scale.amax != nullptr) scale.amax[r] = amax;
      }
    } else {
      tensor_amax = larger_magnitude(tensor_amax, amax);
    }
    uint8_t* const to = out(r);
#pragma unroll 1
    for (int b = threadIdx.x; b < passes.width; b += blockDim.x) {
      store_codes(to + b * int64_t{16}, source.cols - b * int64_t{16}, vector,
                  cast_block(passes.second(row, b, inverse), factor, format));
    }
  }
  if (watches_tensor(scale)) finish_tensor_amax(tensor_amax, scale, reduce);
}

constexpr int kLongRow = 1024;  // columns that are worth a block of threads of their own

// The rows of a launch, and what a block of threads stores of one.
struct RowWork {
  int64_t rows, cols;
  int share;
  size_t bytes;
  bool storable, cooperative;

  template <bool kNorm, class Source>
  static RowWork of(const Source& source, const ColumnVector& weight, bool cooperative) {
    return {source.rows,
            source.cols,
            Source::kShare,
            blocks_of(source.cols) * sizeof(typename Held<Source, kNorm>::Value),
            source.whole() && weight.vector,
            cooperative};
  }
};

template <auto kStored, auto kReread, class... Args>
cudaError_t launch_by_rows(const RowWork& work, cudaStream_t stream, const Args&... args) {
  LaunchShape shape = {0, row_threads(work.rows, work.cols, work.share), Start::kOverlapped};
  int per_sm = work.storable ? blocks_per_sm<kStored>(shape.block, work.bytes) : 0;
  const bool stored = per_sm > 0;
  if (stored) {
    shape.shared = work.bytes;
  } else {
    shape.block = shape.block < kRereadThreads ? shape.block : kRereadThreads;
    per_sm = blocks_per_sm<kReread>(shape.block, 0);
  }
  shape.grid = persistent_grid(work.rows, per_sm);
  if (work.cooperative) {
    make_cooperative(shape);
  } else if (work.cols >= kLongRow && work.rows > shape.grid && work.rows < (int64_t{1} << 31)) {
    shape.grid = work.rows;
  }
  return stored ? launch<kStored>(shape, stream, args...) : launch<kReread>(shape, stream, args...);
}

template <bool kNorm, class Source>
cudaError_t launch_fp8_rows(const Source& source, const Normalize<typename Source::Element>& norm,
                            const Fp8Scale& scale, const ElementRows& out, cudaStream_t stream) {
  const RowWork work = RowWork::of<kNorm>(source, norm.weight, watches_tensor(scale));
  return launch_by_rows<&fp8_row_kernel<Source, kNorm, true>,
                        &fp8_row_kernel<Source, kNorm, false>>(work, stream, source, norm, scale,
                                                               RowPointer<uint8_t>(out.rows),
                                                               out.rows.vector, out.format);
}

// Of a source that is quantized as it is.
template <class Source>
cudaError_t launch_fp8_rows(const Source& source, const Fp8Scale& scale, const ElementRows& out,
                            cudaStream_t stream) {
  const Normalize<typename Source::Element> none = {{nullptr, false, true}, 0.0f, nullptr};
  return launch_fp8_rows<false>(source, none, scale, out, stream);
}

}  // namespace jitquant
