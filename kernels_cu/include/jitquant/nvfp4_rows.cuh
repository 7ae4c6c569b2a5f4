// The kernels that go row by row: row granularity, and the norms, in one launch; or, for a norm
// with tensor granularity, launch 1 of two.
//   short_rows_kernel  many rows of at most 2048 columns, for row granularity (nvfp4_short.cuh)
//   held_kernel        what fits in registers of rows of whole, aligned blocks (nvfp4_held.cuh)
//   row_kernel         all others
#pragma once

#include "jitquant/nvfp4_held.cuh"
#include "jitquant/nvfp4_short.cuh"

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

template <bool kNorm, class Value>
__device__ __forceinline__ Nvfp4Codes quantize_held(const Value& held, float block_max,
                                                    const RowEncoding& e) {
  if constexpr (kNorm) {
    return nvfp4_quantize_scaled_block(held, block_max, e.inverse, e.encoding);
  } else {
    return nvfp4_quantize_block(held, block_max, e.encoding);
  }
}

// Blocks of the largest size that a multiprocessor has to hold, which bounds their registers; 0
// leaves it to the compiler.
constexpr int row_blocks_per_sm(bool stored) {
  return stored ? 0 : 1;
}

// A block of threads a row, in two passes over its blocks of values, which have the same owners in
// both. With kStored, what is held of a row, and each block's amax, are in shared memory between
// the passes, all blocks are whole, and the loads of several are in flight together. Otherwise, for
// what is not aligned or does not fit there, the row is read again.
template <class Source, bool kNorm, bool kStored>
__global__ void __launch_bounds__(kStored ? kRowThreads : kRereadThreads,
                                  row_blocks_per_sm(kStored))
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
  __shared__ RowFacts facts;
  if (mine == 0) facts = row_facts(scale, recipe, source.cols);
  __syncthreads();

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
    const RowEncoding e = finish_row<kNorm>(sums, norm, scale, recipe, r, threadIdx.x == 0, facts);
    if (!quantizes) continue;
    const OutputRow to(out, r);
#pragma unroll 1
    for (int b = mine; b < width; b += threads) {
      const Value held = held_at(b);
      const float block_max = kStored ? stored_max[b] : block_amax(held);
      to.store(b, scale_place(out, b), quantize_held<kNorm>(held, block_max, e));
    }
  }
  if (quantizes) {
    zero_padding(out);
  } else if (threadIdx.x == 0) {
    scale.partials[blockIdx.x] = facts.tensor_amax;
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

// How the rows of a source are quantized, from its shape, its alignment and the device alone.
struct RowPlan {
  enum Kernel { kReread, kStored, kHeld1, kHeldShare, kShort };  // kHeld1: kShare of 1
  LaunchShape shape;
  Kernel kernel;
  int partials;  // that are written with kTensorAmax; 0: there is no such plan
};

template <auto kValue>
struct Constant {
  static constexpr auto value = kValue;
};

template <class Source, bool kNorm, int kShare>
RowPlan held_plan(const Source& source) {
  constexpr int kMost = 65536 / held_registers<Source, kNorm, kShare>() / 32 * 32;
  const int width = static_cast<int>(blocks_of(source.cols));
  const int threads = ((width + kShare - 1) / kShare + 31) / 32 * 32;
  if (threads > kMost || threads > 1024) return {};
  RowPlan plan = {{}, kShare == 1 ? RowPlan::kHeld1 : RowPlan::kHeldShare, 0};
  plan.shape.block = threads;
  plan.shape.block_y = kShare == 1 && threads <= 128 && source.rows > 32 * sm_count()
                           ? kRowsAtOnce * 32 / threads
                           : 1;
  plan.shape.start = Start::kOverlapped;
  plan.shape.shared = kNorm ? HeldWeights::bytes(width) : 0;
  const int per_sm = blocks_per_sm<&held_kernel<Source, kNorm, kShare>>(
      threads * plan.shape.block_y, plan.shape.shared);
  if (per_sm == 0) return {};
  const int64_t blocks = (source.rows + plan.shape.block_y - 1) / plan.shape.block_y;
  plan.shape.grid = persistent_grid(blocks, per_sm);
  const int most = kMaxPartials / plan.shape.block_y;
  if (plan.shape.grid > most) plan.shape.grid = most;
  plan.partials = static_cast<int>(plan.shape.grid) * plan.shape.block_y;
  return plan;
}

// row_kernel, with what is held of a row in shared memory, or read again.
template <class Source, bool kNorm, bool kStored>
RowPlan passes_plan(const Source& source) {
  const int threads = row_threads(source.rows, source.cols, Source::kShare);
  RowPlan plan = {{}, kStored ? RowPlan::kStored : RowPlan::kReread, 0};
  plan.shape.block = kStored || threads < kRereadThreads ? threads : kRereadThreads;
  plan.shape.start = Start::kOverlapped;
  plan.shape.shared = kStored ? blocks_of(source.cols) *
                                    (sizeof(typename Held<Source, kNorm>::Value) + sizeof(float))
                              : 0;
  const int per_sm =
      blocks_per_sm<&row_kernel<Source, kNorm, kStored>>(plan.shape.block, plan.shape.shared);
  if (per_sm == 0) return {};
  plan.shape.grid = persistent_grid(source.rows, per_sm);
  if (plan.shape.grid > kMaxPartials) plan.shape.grid = kMaxPartials;
  plan.partials = static_cast<int>(plan.shape.grid);
  return plan;
}

template <class Source>
constexpr bool kHasShort = false;
template <class T>
constexpr bool kHasShort<PlainSource<T>> = true;

template <class T>
RowPlan short_plan(const PlainSource<T>& source) {
  const int rows = kShortThreads >> short_row_lanes_log2<T>(blocks_of(source.cols));  // of a block
  RowPlan plan = {{}, RowPlan::kShort, 1};
  plan.shape.block = kShortThreads;
  plan.shape.start = Start::kOverlapped;
  plan.shape.grid = persistent_grid((source.rows + rows - 1) / rows,
                                    blocks_per_sm<&short_rows_kernel<T>>(kShortThreads, 0));
  return plan;
}

template <bool kNorm, class Source>
RowPlan row_plan(const Source& source, const ColumnVector& weight) {
  RowPlan plan = {};
  if (source.whole() && weight.vector) {
    if constexpr (Source::kHeldShare == 0) {
      plan = passes_plan<Source, kNorm, true>(source);
    } else if (source.rows < (int64_t{1} << 30)) {
      // With fewer rows a lane that has four blocks in turn takes longer than the barriers.
      if constexpr (!kNorm && kHasShort<Source>) {
        if (source.rows > 32 * sm_count() &&
            blocks_of(source.cols) <= 32 * kShortBlocks<typename Source::Element>) {
          return short_plan(source);
        }
      }
      // A thread for each block of values where rows are few, and leave most of the device idle, or
      // short, and for a norm, which holds more of each.
      if (kNorm || Source::kHeldShare == 1 || source.rows <= sm_count() || source.cols <= 32 * 16) {
        plan = held_plan<Source, kNorm, 1>(source);
      }
      if (Source::kHeldShare > 1 && plan.partials == 0) {
        plan = held_plan<Source, kNorm, Source::kHeldShare>(source);
      }
    }
  }
  return plan.partials > 0 ? plan : passes_plan<Source, kNorm, false>(source);
}

template <bool kNorm, class Source>
cudaError_t launch_rows(const Source& source, const Normalize<typename Source::Element>& norm,
                        const RowScale& scale, Nvfp4Recipe recipe, const Nvfp4Output& out,
                        cudaStream_t stream) {
  const RowPlan plan = row_plan<kNorm>(source, norm.weight);
  if constexpr (!kNorm && kHasShort<Source>) {
    using T = typename Source::Element;
    if (plan.kernel == RowPlan::kShort) {
      return launch<&short_rows_kernel<T>>(plan.shape, stream, source, scale.divisor, scale.gsa_out,
                                           recipe, out, short_row_lanes_log2<T>(out.blocks));
    }
  }
  auto start = [&](auto kernel) {
    return launch<decltype(kernel)::value>(plan.shape, stream, source, norm, scale, recipe, out);
  };
  if (plan.kernel == RowPlan::kReread) return start(Constant<&row_kernel<Source, kNorm, false>>{});
  if constexpr (Source::kHeldShare == 0) {
    return start(Constant<&row_kernel<Source, kNorm, true>>{});
  } else if (plan.kernel == RowPlan::kHeld1) {
    return start(Constant<&held_kernel<Source, kNorm, 1>>{});
  } else {
    return start(Constant<&held_kernel<Source, kNorm, Source::kHeldShare>>{});
  }
}

// How many partials launch_rows writes for a norm with kTensorAmax.
template <class Source>
int64_t row_partials(const Source& source, const ColumnVector& weight) {
  return row_plan<true>(source, weight).partials;
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
