// The row-by-row kernels: row granularity and norms in one launch, or launch 1 of a norm with
// tensor granularity. They differ in where a row is between its two passes, and in the walk:
//   lane_rows_kernel      registers of some lanes of a warp; many rows of at most 1536 columns (of
//                         fp32 1024)
//   lane_norm_kernel      the same for norms; 2048 columns (of fp32 512)
//   register_rows_kernel  registers of a thread block, which is persistent; whole, aligned blocks
//   norm_kernel           the same for norms; both also take other rows of a plain tensor of
//                         two-byte values
//   row_kernel            registers, with one thread block per row; norms of many rows with a
//                         residual, silu(gate) * up. With some lanes of a warp per row: the same of
//                         at most 768 columns. With one cluster per row: rows that are too long
//                         for the others
//   reread_rows_kernel    nowhere: every row is read twice; everything else
#pragma once

#include "lanes_norm.cuh"
#include "row.cuh"

namespace jitquant {

constexpr int kRereadThreads = 256;  // maximum per row

// What a thread holds of a row between its passes: the source's values or, for a norm, the values
// times the weight in fp32. The factor inv_rms, known only after the whole row, goes to the
// encoding.
template <class Source, bool kNorm>
struct RowValue {
  using Value = typename Source::Value;
};
template <class Source>
struct RowValue<Source, true> {
  using Value = Block<float>;
};

// What is held of a block and, for a norm, the sum of squares.
template <bool kNorm, bool kWhole, class Source>
__device__ __forceinline__ auto take_block(const Source& source,
                                           const Normalize<typename Source::Element>& norm,
                                           const typename Source::Fetched& fetched,
                                           const typename Source::Row& row, int64_t block,
                                           float& squares) {
  const typename Source::Value x = source.template value<kWhole>(fetched, row, block);
  if constexpr (kNorm) {
    BlockSquares<typename Source::Element> sum;
#pragma unroll
    for (int i = 0; i < 16; ++i) sum.add(i, value_of(x, i));
    squares = sum.sum();
    return norm.template weighted<kWhole>(x, block, source.cols);
  } else {
    return x;
  }
}

template <bool kNorm, class Value>
__device__ __forceinline__ Nvfp4Codes quantize_held(const Value& held, float block_max,
                                                    const RowEncoding& e) {
  if constexpr (kNorm) {
    return nvfp4_quantize_scaled_block<true>(held, block_max, e.inverse, e.encoding);
  } else {
    return nvfp4_quantize_block(held, block_max, e.encoding);
  }
}

// One thread block per row, in two passes over its blocks of values; each block has the same thread
// in both. The second pass reads the row again.
template <class Source, bool kNorm>
__global__ void __launch_bounds__(kRereadThreads, 1)
    reread_rows_kernel(Source source, Normalize<typename Source::Element> norm, RowScale scale,
                       Nvfp4Recipe recipe, Nvfp4Output out) {
  using Value = typename RowValue<Source, kNorm>::Value;
  __shared__ RowReduce::Scratch scratch;
  RowReduce reduce = RowReduce::of<0>(scratch);
  const int width = static_cast<int>(blocks_of(source.cols));
  const int threads = blockDim.x, mine = threadIdx.x;
  const bool quantizes = scale.mode != RowMode::kTensorAmax;
  if (blockIdx.x < source.rows && mine < width) source.prefetch(source.row(blockIdx.x), mine);
  wait_for_previous();
  let_next_begin();
  __shared__ RowFacts facts;
  if (mine == 0) facts = row_facts<kNorm>(scale, recipe, source.cols);
  __syncthreads();
  float tensor_amax = 0.0f;  // of the first thread

#pragma unroll 1
  for (int64_t r = blockIdx.x; r < source.rows; r += gridDim.x) {
    const typename Source::Row row = source.row(r);
    float amax = 0.0f;
    if (kNorm) reduce.begin();
#pragma unroll 1
    for (int b = mine; (b & ~31) < width; b += threads) {
      float squares = 0.0f;
      if (b < width) {
        const Value held = take_block<kNorm, false>(
            source, norm, source.template fetch<false>(row, b), row, b, squares);
        amax = amax_keep_nan(amax, block_amax(held));
      }
      if (kNorm) reduce.add(b, squares);
    }
    auto held_at = [&](int b) {
      float unused;
      return take_block<kNorm, false>(source, norm, source.template refetch<false>(row, b), row, b,
                                      unused);
    };
    float2 total = kNorm ? reduce.sum_and_max(amax) : float2{0.0f, reduce.max(amax)};
    if (is_nan(total.y)) {
      // Again with NaNs ignored.
      Amax<typename Value::Element> numbers;
#pragma unroll 1
      for (int b = mine; b < width; b += threads) numbers.add(held_at(b));
      total.y = reduce.max(numbers.result());
    }
    const RowEncoding e = finish_row<kNorm>(total.x, total.y, norm, scale, recipe, r, facts);
    if (threadIdx.x == 0) tell_row<kNorm>(e, norm, scale, r, tensor_amax);
    if (!quantizes) continue;
    const OutputRow to(out, r);
#pragma unroll 1
    for (int b = mine; b < width; b += threads) {
      const Value held = held_at(b);
      to.store(b, scale_place(out, b), quantize_held<kNorm>(held, block_amax(held), e));
    }
  }
  if (quantizes) {
    zero_padding(out);
  } else if (threadIdx.x == 0) {
    put_partial(scale, blockIdx.x, gridDim.x, tensor_amax);
  }
}

// How to quantize the rows of a source. Depends only on shape, alignment and device.
struct RowPlan {
  // kRegisters and kRegistersFew take Source::kHeldShare and kHeldFew blocks per thread; kLoose is
  // kRegisters of LooseSource.
  enum Kernel {
    kReread,
    kLanes,
    kRegistersFew,
    kRegisters,
    kLoose,
    kRow,
    kCluster,
    kLacking  // with JITQUANT_HELD: kReread or kCluster
  };
  Kernel kernel;
  LaunchShape shape;
  int partials;  // written with kTensorAmax; 0: no such plan
  // For the kernels that hold rows.
  RowSchedule rows;
  RowStart start;
  int lanes_log2 = 0;   // log2 of the lanes per row, with kLanes
  int lane_blocks = 0;  // the maximum of a lane
  int ahead = 0;        // with kCluster
};

template <auto kValue>
struct Constant {
  static constexpr auto value = kValue;
};

template <class Source, bool kNorm, int kShare>
constexpr auto register_kernel() {
  if constexpr (kNorm) {
    return &norm_kernel<Source, kShare>;
  } else {
    return &register_rows_kernel<Source, kShare>;
  }
}

// The cycles between the starts of two norms on an SM: two thirds of the time in which memory
// delivers what one loads. With 500 cycles for 7168 columns, 1024, 2048 and 4096 rows take 7.2,
// 11.8 and 21.3 us instead of 7.7, 12.3 and 21.8. With several tensors, only the first thread block
// of an SM copies before the weights are laid out: 18.8 and 64.2 us for four streams at 1024 and
// 4096 rows instead of 20.0 and 66.0.
constexpr int kBytesApart = 28;

// If a persistent thread block would have kAloneTurns rows or more, one row in kAloneRows gets a
// thread block of its own: 19.8 and 71.8 us at 4096 and 16384 rows of 7168 instead of 20.4 and
// 73.3.
constexpr int kAloneTurns = 3, kAloneRows = 16;

#ifndef __CUDACC_RTC__
// Assigns rows to the thread blocks of `plan`, a persistent grid, and decides when they start.
template <class Source, bool kNorm, int kShare>
void deal_rows(const Source& source, RowPlan& plan) {
  const int staying = static_cast<int>(plan.shape.grid), at_once = plan.shape.block_y;
  const int rows = static_cast<int>(source.rows);
  plan.rows = {staying, staying * at_once, rows};
  plan.start = {sm_count(), 0};
  if constexpr (kNorm) {
    if (kBeginsApart<Source, kShare> && rows > staying) {
      const int64_t bytes = source.cols * sizeof(typename Source::Element);
      plan.start.apart = static_cast<int>(bytes / kBytesApart);
    }
  } else if (at_once == 1 && rows >= kAloneTurns * staying) {
    const int alone = rows / kAloneRows;
    plan.rows.end -= alone;
    plan.shape.grid += alone;
  }
}

template <class Source, bool kNorm, int kShare>
RowPlan register_plan(const Source& source) {
  const int width = static_cast<int>(blocks_of(source.cols));
  const int threads = ((width + kShare - 1) / kShare + 31) / 32 * 32;
  RowPlan plan = {kShare == Source::kHeldFew ? RowPlan::kRegistersFew : RowPlan::kRegisters, {}, 0};
  plan.shape.block = threads;
  plan.shape.block_y = kShare == 1 && threads <= 128 && source.rows > 32 * sm_count()
                           ? kRowsAtOnce * 32 / threads
                           : 1;
  plan.shape.start = Start::kOverlapped;
  int registers;
  if constexpr (kNorm) {
    registers = norm_registers<Source>(kShare, device_traits().major >= 10);
    plan.shape.shared = HeldWeights<typename Source::Element>::bytes(threads, kShare) +
                        CopiedBlocks<typename Source::Element, kShare, Source::kLoose>::bytes(
                            threads * plan.shape.block_y, source.tensors());
  } else {
    registers = register_rows_registers<Source>();
  }
  if (threads > most_threads_with(registers)) return {};
  int per_sm = blocks_per_sm<register_kernel<Source, kNorm, kShare>()>(threads * plan.shape.block_y,
                                                                       plan.shape.shared);
  if (per_sm == 0) return {};
  // For norms with two warps per row, 14 rows are faster than 16: 45.9 us instead of 47.3 at 28672
  // x 2048.
  if (kNorm && kShare > 1 && threads <= 64 && per_sm > 14) per_sm = 14;
  const int64_t blocks = (source.rows + plan.shape.block_y - 1) / plan.shape.block_y;
  plan.shape.grid = persistent_grid(blocks, per_sm);
  const int most = kMaxPartials / plan.shape.block_y;
  if (plan.shape.grid > most) plan.shape.grid = most;
  plan.partials = static_cast<int>(plan.shape.grid) * plan.shape.block_y;
  deal_rows<Source, kNorm, kShare>(source, plan);
  return plan;
}

template <class Source, bool kNorm>
RowPlan reread_plan(const Source& source) {
  if constexpr (!kTakesLong) {
    return {RowPlan::kLacking, {}, 1};
  } else {
    // With few rows, which leave most of the device idle, one thread per block of values; otherwise
    // one per four, which repeats less work that is the same for all threads of a row.
    const int64_t share = source.rows <= sm_count() ? 1 : 4;
    const int64_t threads = (blocks_of(source.cols) + 32 * share - 1) / (32 * share) * 32;
    RowPlan plan = {RowPlan::kReread, {}, 0};
    plan.shape.block = threads < kRereadThreads ? static_cast<int>(threads) : kRereadThreads;
    plan.shape.start = Start::kOverlapped;
    const int per_sm = blocks_per_sm<&reread_rows_kernel<Source, kNorm>>(plan.shape.block, 0);
    plan.shape.grid = persistent_grid(source.rows, per_sm);
    if (plan.shape.grid > kMaxPartials) plan.shape.grid = kMaxPartials;
    plan.partials = static_cast<int>(plan.shape.grid);
    return plan;
  }
}

template <class Source>
constexpr bool kHasLoose = false;
template <class T>
constexpr bool kHasLoose<PlainSource<T>> = sizeof(T) == 2;

template <class Source>
constexpr bool kHasLanes = false;
template <class T>
constexpr bool kHasLanes<PlainSource<T>> = true;

// With a residual, or of silu(gate) * up, already 32768 x 1024 take 67 and 52 us in lanes, 56 and
// 44 in a thread block; 43648 x 768 take 59 and 42, and 61 and 65.
constexpr int kMostRowLaneCols = 768;

// The maximum blocks per lane of rows of `width` blocks; 0 if lanes do not hold them. Rows that
// fill all lanes with two blocks each have these: warps with fewer rows all end at nearly the same
// time. 65536 x 512 and 32768 x 1024 take 25.7 and 24.2 us with two blocks, 26.0 and 25.6 with
// four. Norms have three if rows then take fewer lanes. In wider rows a thread block is faster:
// 65536 x 2048 take 83 us in one, 87 in lanes; but 21760 x 1536 take 27.9 and 24.6, and norms of
// 16384 x 2048 33.4 and 28.7.
template <bool kNorm, class T>
int lane_blocks(int64_t width) {
  const auto lanes = [&](int blocks) { return int64_t{1} << row_lanes_log2(blocks, width); };
  if (sizeof(T) == 4) {
    constexpr int kBlocks = kNorm ? 1 : 2;
    return width <= 32 * kBlocks ? kBlocks : 0;
  }
  if (width > (kNorm ? 128 : 96)) return 0;
  if (!kNorm) return lanes(2) <= 32 && 2 * lanes(2) == width ? 2 : 4;
  if (width > 64) return width > 96 ? 4 : 3;
  return 3 * lanes(3) < 2 * lanes(2) ? 3 : 2;
}
// Calls f with the maximum blocks per lane as a compile-time constant.
template <bool kNorm, class T, class F>
auto with_lane_blocks(int blocks, F&& f) {
  if constexpr (sizeof(T) == 4) {
    return f(Constant<kNorm ? 1 : 2>());
  } else {
    if constexpr (kNorm) {
      if (blocks == 3) return f(Constant<3>());
    }
    return blocks == 4 ? f(Constant<4>()) : f(Constant<2>());
  }
}

template <bool kNorm, class T, int kBlocks>
constexpr auto lane_kernel() {
  if constexpr (kNorm) {
    return &lane_norm_kernel<T, kBlocks>;
  } else {
    return &lane_rows_kernel<T, kBlocks>;
  }
}

// No plan if lanes cannot hold a row.
template <bool kNorm, class T>
RowPlan lane_plan(const PlainSource<T>& source) {
  const int64_t width = blocks_of(source.cols);
  RowPlan plan = {RowPlan::kLanes};
  plan.lane_blocks = lane_blocks<kNorm, T>(width);
  if (plan.lane_blocks == 0) return {};
  plan.lanes_log2 = row_lanes_log2(plan.lane_blocks, width);
  plan.shape.block = kLaneThreads;
  plan.shape.start = Start::kOverlapped;
  plan.shape.shared = kNorm ? lane_norm_bytes<T>(width) : 0;
  const int rows = lane_rows(plan.lanes_log2);
  const int at_once = with_lane_blocks<kNorm, T>(plan.lane_blocks, [&](auto blocks) {
    return blocks_per_sm<lane_kernel<kNorm, T, blocks.value>()>(kLaneThreads, plan.shape.shared);
  });
  plan.shape.grid = persistent_grid((source.rows + rows - 1) / rows, at_once);
  if (plan.shape.grid > kMaxPartials) plan.shape.grid = kMaxPartials;
  plan.partials = static_cast<int>(plan.shape.grid);
  return plan;
}

// -DJITQUANT_ROW_SCALES=1 builds a library without the kernels that only a gsa of the whole tensor
// needs, =0 one without those that only a gsa per row needs.
#ifdef JITQUANT_ROW_SCALES
constexpr bool kTakesRows = JITQUANT_ROW_SCALES == 1, kTakesTensor = !kTakesRows;
#else
constexpr bool kTakesRows = true, kTakesTensor = true;
#endif

// Sources whose rows may have one thread block each, and those that may have a cluster.
template <class Source, bool kNorm>
constexpr bool kHasRow = false;
template <class T>
constexpr bool kHasRow<ResidualSource<T>, true> = true;
template <class T>
constexpr bool kHasRow<DeinterleaveSource<T>, false> = true;
template <class Source, bool kNorm>
constexpr bool kHasCluster = kHasRow<Source, kNorm>;
template <class T, bool kNorm>
constexpr bool kHasCluster<PlainSource<T>, kNorm> = true;

// 16384 x 1536 and 2048 of silu(gate) * up take 35 and 40 us, and 33 and 45 with a persistent grid.
constexpr int kLeastRowCols = 2048;

inline int64_t row_threads(int64_t cols) {
  return (blocks_of(cols) + kRowBlocks - 1) / kRowBlocks;
}

// No plan if a row does not fit, or if a thread block would leave no room for another one on an SM
// and a cluster does: silu(gate) * up of 4096 x 28672 takes 162 us, in one thread block 244.
template <bool kNorm, class Source>
RowPlan one_row_plan(const Source& source) {
  constexpr int kMostOfTwo = 384;
  const int64_t threads = (row_threads(source.cols) + 31) / 32 * 32;
  const int registers = row_registers<Source, kNorm, BlockTeam>(device_traits().major >= 10);
  if (threads > most_threads_with(registers)) return {};
  if (threads > kMostOfTwo && cluster_holds(source.rows, threads)) return {};
  return {RowPlan::kRow, {source.rows, static_cast<int>(threads), Start::kOverlapped}, 1, {}};
}
template <class Source>
RowPlan one_row_lane_plan(const Source& source) {
  RowPlan plan = {RowPlan::kLanes, {0, kLaneThreads, Start::kOverlapped}, 1};
  plan.lanes_log2 =
      row_lanes_log2(kLaneRowBlocks<typename Source::Element>, blocks_of(source.cols));
  const int rows = lane_rows(plan.lanes_log2);
  plan.shape.grid = (source.rows + rows - 1) / rows;
  return plan;
}
template <bool kNorm, class Source>
RowPlan cluster_plan(const Source& source) {
  const int64_t threads = row_threads(source.cols);
  if (!cluster_holds(source.rows, threads)) return {};
  if constexpr (kTakesLong) {
    const ClusterRows made =
        clusters_of<&row_kernel<Source, kNorm, ClusterTeam>>(source.rows, threads);
    return {RowPlan::kCluster, made.shape, 1, {}, {}, 0, made.at_once};
  } else {
    return {RowPlan::kLacking, {}, 1};
  }
}

// `shares`: the amax combines several rows, so warps cannot work independently.
template <bool kNorm, class Source>
RowPlan row_plan(const Source& source, const ColumnVector& weight, bool shares) {
  RowPlan plan = {};
  const bool few = source.rows < (int64_t{1} << 30);  // so that they can be counted in 32 bits
  if (source.whole() && weight.vector && few) {
    // With fewer rows, several blocks in turn per lane take longer than the barriers.
    if constexpr (kHasLanes<Source>) {
      if (source.rows > 32 * sm_count()) plan = lane_plan<kNorm>(source);
      if (plan.partials > 0) return plan;
    }
    if constexpr (kHasRow<Source, kNorm>) {
      // With fewer rows, the kernels that load the next row ahead are faster, and without a norm
      // also with rows that are too long for lanes, but short.
      if (!shares && source.rows > 8 * sm_count()) {
        if (source.cols <= kMostRowLaneCols) return one_row_lane_plan(source);
        if (kNorm || source.cols >= kLeastRowCols) {
          plan = one_row_plan<kNorm>(source);
          if (plan.partials == 0) plan = cluster_plan<kNorm>(source);
        }
      }
      if (plan.partials > 0) return plan;
    }
    // Fewer blocks of values per thread if rows are short, or so few that most of the device is
    // idle.
    if (source.rows <= sm_count() || source.cols <= 32 * 16) {
      plan = register_plan<Source, kNorm, Source::kHeldFew>(source);
    }
    if (plan.partials == 0) plan = register_plan<Source, kNorm, Source::kHeldShare>(source);
    if constexpr (kHasCluster<Source, kNorm>) {
      if (plan.partials == 0 && !shares) plan = cluster_plan<kNorm>(source);
    }
  } else if (few && source.cols > 0) {
    if constexpr (kTakesLong && kHasLoose<Source>) {
      using Loose = LooseSource<typename Source::Element>;
      plan = register_plan<Loose, kNorm, Loose::kHeldShare>(Loose(source));
      plan.kernel = RowPlan::kLoose;
    }
  }
  return plan.partials > 0 ? plan : reread_plan<Source, kNorm>(source);
}

template <bool kNorm, class Source>
cudaError_t launch_rows(const Source& source, const Normalize<typename Source::Element>& norm,
                        const RowScale& scale, Nvfp4Recipe recipe, const Nvfp4Output& out,
                        cudaStream_t stream, int* partials = nullptr) {
  const RowPlan plan = row_plan<kNorm>(source, norm.weight, scale.mode == RowMode::kTensorAmax);
  if (partials != nullptr) *partials = static_cast<int>(plan.partials);
  auto held = [&](auto kernel, const auto& source) {
    constexpr auto kKernel = decltype(kernel)::value;
    if constexpr (kNorm) {
      return launch<kKernel>(plan.shape, stream, source, norm, scale, recipe, out, plan.start);
    } else {
      return launch<kKernel>(plan.shape, stream, source, norm, scale, recipe, out, plan.rows);
    }
  };
  auto start = [&](auto kernel, auto... more) {
    return launch<decltype(kernel)::value>(plan.shape, stream, source, norm, scale, recipe, out,
                                           more...);
  };
  if constexpr (kHasLanes<Source>) {
    using T = typename Source::Element;
    if (plan.kernel == RowPlan::kLanes) {
      return with_lane_blocks<kNorm, T>(plan.lane_blocks, [&](auto blocks) {
        constexpr auto kKernel = lane_kernel<kNorm, T, blocks.value>();
        if constexpr (kNorm) {
          return start(Constant<kKernel>{}, plan.lanes_log2);
        } else {
          return launch<kKernel>(plan.shape, stream, source, scale.divisor, scale.gsa_out, recipe,
                                 out, plan.lanes_log2);
        }
      });
    }
  }
  if constexpr (kTakesLong && kHasLoose<Source>) {
    using Loose = LooseSource<typename Source::Element>;
    if (plan.kernel == RowPlan::kLoose) {
      return held(Constant<register_kernel<Loose, kNorm, Loose::kHeldShare>()>{}, Loose(source));
    }
  }
  const int cluster = plan.shape.cluster;
  if constexpr (kHasRow<Source, kNorm>) {
    if (plan.kernel == RowPlan::kLanes) {
      return start(Constant<&row_kernel<Source, kNorm, LaneTeam>>{}, plan.lanes_log2, 0);
    }
    if (plan.kernel == RowPlan::kRow) {
      return start(Constant<&row_kernel<Source, kNorm, BlockTeam>>{}, cluster, plan.ahead);
    }
  }
  if (plan.kernel == RowPlan::kLacking) return kLacksKernels;
  if constexpr (kTakesLong && kHasCluster<Source, kNorm>) {
    if (plan.kernel == RowPlan::kCluster) {
      return start(Constant<&row_kernel<Source, kNorm, ClusterTeam>>{}, cluster, plan.ahead);
    }
  }
  if constexpr (kTakesLong) {
    if (plan.kernel == RowPlan::kReread) {
      return start(Constant<&reread_rows_kernel<Source, kNorm>>{});
    }
  }
  if (plan.kernel == RowPlan::kRegistersFew) {
    return held(Constant<register_kernel<Source, kNorm, Source::kHeldFew>()>{}, source);
  }
  return held(Constant<register_kernel<Source, kNorm, Source::kHeldShare>()>{}, source);
}

// The number of partials that launch_rows writes for a norm with kTensorAmax.
template <class Source>
int64_t row_partials(const Source& source, const ColumnVector& weight) {
  return row_plan<true>(source, weight, true).partials;
}

// The scale of a norm, which takes two launches unless gsa is given or belongs to a row. The gsa of
// a single row is the tensor's.
inline bool needs_two(const ComputedScale& scale, int64_t rows) {
  return !scale.given && !scale.by_row && rows != 1;
}

inline RowScale given_scale(const GlobalScale& scale) {
  return {RowMode::kGiven, 1.0f, nullptr, nullptr, scale, 0};
}

inline RowScale first_scale(const ComputedScale& scale, int64_t rows, float* partials) {
  if (scale.given) return given_scale(value_scale(scale));
  if (needs_two(scale, rows)) {
    return {RowMode::kTensorAmax, scale.divisor, nullptr, partials, {}, 0};
  }
  return {RowMode::kRowAmax, scale.divisor, scale.gsa, nullptr, {}, 0};
}

// The first of two launches alone. Writes the largest possible number of maxima, with zeros after
// those that are used, so that results of different devices can be combined.
inline RowScale all_maxima(float* maxima) {
  return {RowMode::kTensorAmax, 0.0f, nullptr, maxima, {}, kMaxPartials};
}

// Row granularity for a source that is quantized without a norm.
template <class Source>
cudaError_t launch_row_amax(const Source& source, float divisor, float* gsa, Nvfp4Recipe recipe,
                            const Nvfp4Output& out, cudaStream_t stream) {
  const RowScale scale = {RowMode::kRowAmax, divisor, gsa, nullptr, {}};
  const Normalize<typename Source::Element> none = {{nullptr, false, true}, 0.0f, nullptr};
  return launch_rows<false>(source, none, scale, recipe, out, stream);
}
#endif

}  // namespace jitquant
