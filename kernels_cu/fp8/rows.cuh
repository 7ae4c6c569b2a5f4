// The row-by-row FP8 kernel, one thread block per row, in one launch: for a computed scale per row,
// the amax of each row, and norms.
#pragma once

#include "../nvfp4/rows.cuh"
#include "kernels.cuh"

namespace jitquant {

// The value of a whole block from its fetched data. Zeros if nothing was fetched; then nothing is
// stored either.
template <class Source>
__device__ __forceinline__ typename Source::Value whole_value(
    const Source& source, const typename Source::Fetched& fetched, const typename Source::Row& row,
    int block, bool) {
  return source.template value<true>(fetched, row, block);
}
template <class T>
__device__ __forceinline__ Block<T> whole_value(const ResidualSource<T>& source,
                                                const typename ResidualSource<T>::Fetched& fetched,
                                                const typename ResidualSource<T>::Row& row,
                                                int block, bool there) {
  const Block<T> sum = source.sum(fetched);
  if (there) store_block<true>(row.residual + block * 16, 16, true, sum);
  return sum;
}

// The width of a row in blocks, and the factor that turns a row's sum into its mean.
struct RowWidth {
  int blocks;
  float over_cols;

  explicit RowWidth(int64_t cols)
      : blocks(static_cast<int>(blocks_of(cols))), over_cols(1.0f / static_cast<float>(cols)) {}
};

constexpr int kHeldBlocks = 2;  // per thread, of one row
constexpr uint32_t kRehearsedRows = 8;

// How rows are distributed.
//   kOnce    one thread block per row, for more rows than SMs, without per-launch state. Has
//            no loop, before which all constants would be fetched.
//   kFew     the same in a loop
//   kReread  any number of thread blocks, any rows
enum class Rows : int { kOnce, kFew, kReread };
template <Rows kRows>
constexpr int kHeldOf = kRows == Rows::kReread ? 0 : kHeldBlocks;

// A row in two passes over its blocks of values; each block has the same thread in both. If a
// thread holds kHeld > 0 blocks, all blocks are whole, the whole row is loaded before any of it is
// used, and the held blocks stay in registers. With kHeld = 0 the row is read again.
template <class Source, bool kNorm, Rows kRows>
struct RowPasses {
  static constexpr int kHeld = kHeldOf<kRows>;
  using Element = typename Source::Element;
  using Value = typename Held<Source, kNorm>::Value;
  using Fetched = typename Source::Fetched;
  static constexpr int kBlocks = kHeld > 0 ? kHeld : 1;  // blocks in registers at the same time
  using Reduce = std::conditional_t<kNorm, RowReduce, BlockReduce>;
  // Blocks that are loaded together.
  static constexpr int kAtOnce = sizeof(Fetched) <= 80 ? kBlocks : 1;
  // Whether a block past the end loads the last block instead and drops it: this takes fewer
  // instructions than zero-filling every block. Only where rows are never rehearsed.
  static constexpr bool kClamps =
      kRows == Rows::kOnce && std::is_same<Fetched, typename Source::Value>::value;

  const Source& source;
  const Normalize<Element>& norm;
  int width;  // in blocks; 0 in a rehearsal
  float over_cols;
  Value held[kBlocks];
  float squares[kBlocks];  // sums of squares, for a norm

  __device__ __forceinline__ RowPasses(const Source& source, const Normalize<Element>& norm,
                                       const RowWidth& row)
      : source(source), norm(norm), width(row.blocks), over_cols(row.over_cols) {}

  __device__ __forceinline__ Reduce reduce(typename Reduce::Scratch& scratch) const {
    if constexpr (kNorm) {
      return RowReduce::of<kHeld>(scratch);
    } else {
      return Reduce(scratch);
    }
  }

  // What precedes the first row, number r, and does not wait for an earlier kernel. Prefetches the
  // row if there are enough registers. The next kernel may start early if both rehearse; with more
  // thread blocks, several waiting kernels would share the SMs.
  static constexpr bool kPrefetches =
      kRows == Rows::kFew || (kRows == Rows::kOnce && !kNorm && sizeof(Fetched) <= 32);
  __device__ __forceinline__ void begin(int64_t r) const {
    if (kRows == Rows::kFew && gridDim.x <= kRehearsedRows) let_next_begin();
    if constexpr (kPrefetches) {
      if (!is_first() || r >= source.rows) return;
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        if (at(k) < width) source.prefetch(source.row(r), at(k));
      }
    }
  }

  // Calls f(k, held) for the k-th block held, before it is multiplied by inv_rms. For a norm, the
  // squares before the weight go to sum() or sum_and_max() of the same row.
  template <class F>
  __device__ __forceinline__ void first(const typename Source::Row& row, Reduce& reduce, F&& f) {
    if constexpr (kHeld == 0) {
      if constexpr (kNorm) reduce.begin();
#pragma unroll 1
      for (int b = threadIdx.x; (b & ~31) < width; b += blockDim.x) {
        float sum = 0.0f;
        if (b < width) {
          f(0, take_block<kNorm, false>(source, norm, source.template fetch<false>(row, b), row, b,
                                        sum));
        }
        if constexpr (kNorm) reduce.add(b, sum);
      }
    } else {
      // The weights are loaded together with the values, whatever their type.
      kNorm&& norm.weight.fp32 ? take<float>(row) : take<Element>(row);
#pragma unroll
      for (int k = 0; k < kHeld; ++k) f(k, held[k]);
    }
  }
  __device__ __forceinline__ float sum(Reduce& reduce) const {
    if constexpr (kHeld == 0) {
      return reduce.sum();
    } else {
      return reduce.sum(squares);
    }
  }
  __device__ __forceinline__ float2 sum_and_max(Reduce& reduce, float max) const {
    if constexpr (kHeld == 0) {
      return reduce.sum_and_max(max);
    } else {
      return reduce.sum_and_max(squares, max);
    }
  }

  // Calls f(b, values) for the blocks b, b + blockDim.x, and so on. All threads of a warp call it
  // together, even those without a block.
  template <class F>
  __device__ __forceinline__ void second(const typename Source::Row& row, F&& f) {
    if constexpr (kHeld == 0) {
#pragma unroll 1
      for (int b = threadIdx.x; (b & ~31) < width; b += blockDim.x) {
        float ignored = 0.0f;
        held[0] = {};
        if (b < width) {
          held[0] = take_block<kNorm, false>(source, norm, source.template refetch<false>(row, b),
                                             row, b, ignored);
        }
        f(b, held);
      }
    } else {
      f(static_cast<int>(threadIdx.x), held);
    }
  }

  // Stores the codes of block b, which exists, of the row at `to`; `vector`: it is aligned.
  __device__ __forceinline__ void store(uint8_t* to, int b, const uint4& codes, bool vector) const {
    if constexpr (kHeld > 0) {
      reinterpret_cast<uint4*>(to)[b] = codes;
    } else {
      store_bytes(to + b * int64_t{16}, source.cols - b * int64_t{16}, vector, codes);
    }
  }

  // inv_rms of a row whose squares sum to `sum`.
  __device__ __forceinline__ float inverse(float sum) const {
    return inverse_rms(sum, over_cols, norm.eps);
  }

 private:
  // Blocks past the end of the row are zero-filled.
  template <class W>
  __device__ __forceinline__ void take(const typename Source::Row& row) {
    constexpr bool kBeside = kNorm && sizeof(W) == 2 && sizeof(Fetched) <= 32;
#pragma unroll
    for (int begin = 0; begin < kBlocks; begin += kAtOnce) {
      Fetched fetched[kAtOnce];
      Block<W> weight[kAtOnce];
      if constexpr (kClamps) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int b = at(begin + k) < width ? at(begin + k) : width - 1;
          fetched[k] = source.template fetch<true>(row, b);
          if constexpr (kBeside) weight[k] = weights<W>(b);
        }
        if (width < kBlocks * static_cast<int>(blockDim.x)) {
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            if (at(begin + k) >= width) fetched[k] = {}, weight[k] = {};
          }
        }
      } else {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          fetched[k] = {};
          if (at(begin + k) < width) fetched[k] = source.template fetch<true>(row, at(begin + k));
        }
        if constexpr (kBeside) {
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            weight[k] = {};
            if (at(begin + k) < width) weight[k] = weights<W>(at(begin + k));
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int b = at(begin + k);
        const typename Source::Value x = whole_value(source, fetched[k], row, b, b < width);
        Value& to = held[begin + k];
        if constexpr (kNorm) {
          if constexpr (!kBeside) {
            weight[k] = {};
            if (b < width) weight[k] = weights<W>(b);
          }
          BlockSquares<Element> sum;
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            sum.add(i, value_of(x, i));
            set_value(to, i, mul_rz(value_of(x, i), value_of(weight[k], i)));
          }
          squares[begin + k] = sum.sum();
        } else {
          to = x;
        }
      }
    }
  }

  // The index of this thread's k-th block in the row.
  __device__ __forceinline__ int at(int k) const {
    return static_cast<int>(threadIdx.x + k * blockDim.x);
  }
  template <class W>
  __device__ __forceinline__ Block<W> weights(int b) const {
    return load_block<true>(static_cast<const W*>(norm.weight.data) + b * 16, 16, true);
  }
};

// The factor of a norm's values before the cast: inv_rms times the scale, as one product. If the
// product is not a normal number, the values are multiplied by inv_rms first.
template <class Value>
__device__ __forceinline__ void multiply(Value& v, float inverse) {
#pragma unroll
  for (int i = 0; i < 16; ++i) set_value(v, i, mul_rn(value_of(v, i), inverse));
}

// The maximum threads per row, and the minimum thread blocks per SM, which limits the registers: 56
// for a plain 16-bit tensor, so that an SM has five rows of 7168 at a time, and 80 if two tensors
// are read.
template <class Source>
constexpr int most_threads(int held) {
  if (held == 0) return kRereadThreads;
  if (wants_registers<Source>(0)) return 640;
  return sizeof(typename Source::Fetched) <= 32 ? 576 : 768;
}
template <class Source>
constexpr int rows_per_sm(int held) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 1;  // nvcc needs more registers for this architecture
#endif
  return held > 0 && sizeof(typename Source::Fetched) <= 32 ? 2 : 1;
}

// There are fewer than 2^31 held rows, so that a row plus a grid step fits.
template <bool kHolds>
using RowIndex = std::conditional_t<kHolds, uint32_t, int64_t>;

// With up to kRehearsedRows rows, a kernel runs through its code for one row before it waits for
// the previous kernel, without loading or storing any block. This warms the instruction caches,
// which takes longer than all of the work. With more rows the kernel would start too late for that.
template <class Source, bool kNorm, Rows kRows>
__global__ void __launch_bounds__(most_threads<Source>(kHeldOf<kRows>),
                                  rows_per_sm<Source>(kHeldOf<kRows>))
    fp8_row_kernel(Source source, Normalize<typename Source::Element> norm, RowWidth width,
                   Fp8Scale scale, RowPointer<uint8_t> out, bool vector, EightBit format,
                   bool rehearses) {
  constexpr int kHeld = kHeldOf<kRows>;
  using Passes = RowPasses<Source, kNorm, kRows>;
  Passes passes(source, norm, width);
  __shared__ typename Passes::Reduce::Scratch scratch;
  typename Passes::Reduce reduce = passes.reduce(scratch);
  const bool wants_amax = scale.kind == Fp8Scale::kAmax || scale.amax != nullptr;
  bool rehearsal = kRows == Rows::kFew && rehearses;
  float factor = 1.0f, known = -1.0f;
  float tensor_amax = 0.0f;

  RowIndex<(kHeld > 0)> r = blockIdx.x;
  passes.begin(r);
#pragma unroll 1
  while (kRows == Rows::kOnce || r < source.rows) {
    if (kRows == Rows::kFew) passes.width = rehearsal ? 0 : width.blocks;
    if (!rehearsal) {
      wait_for_previous();
      let_next_begin();
    }
    const bool writes = !rehearsal && threadIdx.x == 0;
    if (!rehearsal && scale.kind != Fp8Scale::kAmax) {
      factor = scale.kind == Fp8Scale::kValue ? scale.value : scale.given[scale.by_row ? r : 0];
    }
    const typename Source::Row row = source.row(r);
    // One per block, so that they do not wait for each other.
    Amax<typename Held<Source, kNorm>::Value::Element, true> mine[passes.kBlocks];
    float norm_amax = 0.0f;
    passes.first(row, reduce, [&](int k, const auto& held) {
      if constexpr (kNorm) {
        if (wants_amax) norm_amax = larger_magnitude(norm_amax, block_amax(held));
      } else {
        if (wants_amax) mine[k].add(held);
      }
    });
    float amax, inverse = 1.0f;
    if constexpr (kNorm) {
      const float2 total = passes.sum_and_max(reduce, norm_amax);
      inverse = passes.inverse(total.x);
      if (writes) norm.inv_rms[r] = inverse;
      amax = amax_keep_nan(0.0f, mul_rn(total.y, inverse));
    } else {
      amax = reduce.max(larger_magnitude(mine[0].result(), mine[passes.kBlocks - 1].result()));
    }
    if (scale.kind == Fp8Scale::kAmax || scale.kind == Fp8Scale::kMaxima) {
      known = bound_amax(scale.kind == Fp8Scale::kAmax ? amax : factor, scale);
      factor = fp8_scale_from_amax(known, largest(format));
    }
    if (scale.by_row) {
      if (writes) {
        scale.scale_inv[r] = scale_inv_of(factor, known, format);
        if (scale.amax != nullptr) scale.amax[r] = amax;
      }
    } else {
      if (writes && r == 0) *scale.scale_inv = scale_inv_of(factor, known, format);
      tensor_amax = larger_magnitude(tensor_amax, amax);
    }
    uint8_t* const to = out(r);
    passes.second(row, [&](int begin, auto& values) {
      float f = factor;
      if constexpr (kNorm) {
        f = mul_rn(inverse, factor);
        if (!is_ordinary(f)) {
          f = factor;
#pragma unroll
          for (int k = 0; k < passes.kBlocks; ++k) multiply(values[k], inverse);
        }
      }
#pragma unroll
      for (int k = 0; k < passes.kBlocks; ++k) {
        const int b = begin + k * blockDim.x;
        const uint4 codes = cast_block(values[k], f, format);
        if (b >= passes.width) break;
        passes.store(to, b, codes, vector);
      }
    });
    if (kRows == Rows::kOnce) return;
    if (!rehearsal) r += gridDim.x;
    rehearsal = false;
  }
  if (source.rows == 0) {
    wait_for_previous();
    if (!scale.by_row) given_scale(scale, 0, threadIdx.x, format);
  }
  if (watches_tensor(scale)) finish_tensor_amax(tensor_amax, scale, reduce);
}

// The rows of a launch, and whether they can be held.
struct RowWork {
  int64_t rows, cols;
  int most_threads;
  bool whole, cooperative;

  template <class Source>
  static RowWork of(const Source& source, const ColumnVector& weight, const Matrix& out,
                    bool cooperative) {
    return {source.rows, source.cols, jitquant::most_threads<Source>(kHeldBlocks),
            source.whole() && weight.vector && out.vector && source.rows < (int64_t{1} << 31),
            cooperative};
  }
};

#ifndef __CUDACC_RTC__
// The kernels' last argument says whether they rehearse.
template <auto kOnce, auto kFew, auto kReread, class... Args>
cudaError_t launch_by_rows(const RowWork& work, cudaStream_t stream, const Args&... args) {
  const int64_t wanted = (blocks_of(work.cols) + kHeldBlocks - 1) / kHeldBlocks;
  const bool held = work.whole && wanted <= work.most_threads;
  LaunchShape shape = {work.rows > 0 ? work.rows : 1, static_cast<int>((wanted + 31) / 32 * 32),
                       Start::kOverlapped};
  if (!held) {
    if (shape.block > kRereadThreads) shape.block = kRereadThreads;
    shape.grid = persistent_grid(work.rows, blocks_per_sm<kReread>(shape.block, 0));
    if (work.cooperative) make_cooperative(shape);
    return launch<kReread>(shape, stream, args..., false);
  }
  if (work.cooperative) {
    shape.grid = persistent_grid(work.rows, blocks_per_sm<kFew>(shape.block, 0));
    make_cooperative(shape);
    return launch<kFew>(shape, stream, args..., shape.start == Start::kOverlapped);
  }
  if (work.rows > sm_count()) return launch<kOnce>(shape, stream, args..., false);
  return launch<kFew>(shape, stream, args..., work.rows <= kRehearsedRows);
}

template <bool kNorm, class Source>
cudaError_t launch_fp8_rows(const Source& source, const Normalize<typename Source::Element>& norm,
                            const Fp8Scale& scale, const ElementRows& out, cudaStream_t stream) {
  const RowWork work = RowWork::of(source, norm.weight, out.rows, watches_tensor(scale));
  return launch_by_rows<&fp8_row_kernel<Source, kNorm, Rows::kOnce>,
                        &fp8_row_kernel<Source, kNorm, Rows::kFew>,
                        &fp8_row_kernel<Source, kNorm, Rows::kReread>>(
      work, stream, source, norm, RowWidth(source.cols), scale, RowPointer<uint8_t>(out.rows),
      out.rows.vector, out.format);
}

// For a source that is quantized without a norm.
template <class Source>
cudaError_t launch_fp8_rows(const Source& source, const Fp8Scale& scale, const ElementRows& out,
                            cudaStream_t stream) {
  const Normalize<typename Source::Element> none = {{nullptr, false, true}, 0.0f, nullptr};
  return launch_fp8_rows<false>(source, none, scale, out, stream);
}

// Calls f(source, norm) with the source of the rows and their norm.
template <class F>
cudaError_t normalized(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                       float eps, float* inv_rms, F&& f) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    const Normalize<T> norm = {weight, eps, inv_rms};
    return residual != nullptr ? f(ResidualSource<T>(x, *residual), norm)
                               : f(PlainSource<T>(x), norm);
  });
}
#endif

}  // namespace jitquant
