// The row-by-row FP8 kernel, one thread block or cluster or some lanes per row, in one launch: for
// a computed scale per row, the amax of each row, and norms.
#pragma once

#include "../nvfp4/rows.cuh"
#include "kernels.cuh"

namespace jitquant {

// The width of a row in blocks, and the factor that turns a row's sum into its mean.
struct RowWidth {
  int blocks;
  float over_cols;
  int split = 0;  // thread blocks of a row with kCluster; log2 of its lanes with kLanes
  int ahead = 0;  // rows from a cluster's to that of the one that replaces it

  explicit RowWidth(int64_t cols)
      : blocks(static_cast<int>(blocks_of(cols))), over_cols(1.0f / static_cast<float>(cols)) {}
};

constexpr int kHeldBlocks = 2;  // per thread, of one row
constexpr int kFewRowThreads = 1024;

// How rows are distributed.
//   kBlockPerRow one thread block per row, without per-launch state. Has no loop, before which all
//                constants would be fetched.
//   kFew         the same for at most one row per SM, with one block of values per thread
//   kCluster     one cluster of thread blocks per row, for rows that are too long for one
//   kLanes       some lanes of a warp per row, for many rows of at most 1024 columns
//   kLoose       as kBlockPerRow, for rows of two-byte values that are unaligned or not whole
//   kReread      any number of thread blocks, any rows
enum class Rows : int { kBlockPerRow, kFew, kCluster, kLanes, kLoose, kReread };
template <Rows kRows>
constexpr bool kIsOneRow = kRows != Rows::kReread;
template <Rows kRows>
constexpr int kHeldOf = kRows == Rows::kReread ? 0 : (kRows == Rows::kFew ? 1 : kHeldBlocks);
constexpr int kLaneRowThreads = 128;
constexpr int kLooseRowThreads = 512;

// There are fewer than 2^31 held rows, so that a row plus a grid step fits.
template <bool kHolds>
using RowIndex = std::conditional_t<kHolds, uint32_t, int64_t>;

// A row in two passes over its blocks of values; each block has the same thread in both. If a
// thread holds kHeld > 0 blocks, all blocks are whole (but with kLoose), the whole row is loaded
// before any of it is used, and the held blocks stay in registers. With kHeld = 0 the row is read
// again.
template <class Source, bool kNorm, Rows kRows>
struct RowPasses {
  static constexpr int kHeld = kHeldOf<kRows>;
  using Element = typename Source::Element;
  using Value = typename RowValue<Source, kNorm>::Value;
  using Fetched = typename Source::Fetched;
  static constexpr int kBlocks = kHeld > 0 ? kHeld : 1;  // blocks in registers at the same time
  static constexpr bool kLanes = kRows == Rows::kLanes, kLoose = kRows == Rows::kLoose;
  using Team = std::conditional_t<kRows == Rows::kCluster, ClusterTeam,
                                  std::conditional_t<kLanes, LaneTeam, BlockTeam>>;
  using Reduce =
      std::conditional_t<kLanes, LaneReduce,
                         std::conditional_t<kNorm, TeamRowReduce<Team>, TeamReduce<Team>>>;
  // Blocks that are loaded together.
  static constexpr int kAtOnce = sizeof(Fetched) <= 80 ? kBlocks : 1;
  static constexpr bool kPairs = kHeld == 2 && kInPairs<Source>;
  static_assert(!kPairs || (kAtOnce == 2 && !kNorm));
  // Whether a block past the end loads the last block instead and drops it: this takes fewer
  // instructions than zero-filling every block.
  static constexpr bool kClamps =
      kIsOneRow<kRows> && !kLanes && std::is_same<Fetched, typename Source::Value>::value;

  const Source& source;
  const Normalize<Element>& norm;
  Team team;
  int width;  // in blocks; 0 for a row that does not exist
  int ahead;
  float over_cols;
  Value held[kBlocks];
  float squares[kBlocks];  // sums of squares, for a norm

  __device__ __forceinline__ RowPasses(const Source& source, const Normalize<Element>& norm,
                                       const RowWidth& row)
      : source(source),
        norm(norm),
        team(team_of(row)),
        width(row.blocks),
        ahead(row.ahead),
        over_cols(row.over_cols) {}

  __device__ __forceinline__ Reduce reduce(typename Reduce::Scratch& scratch) const {
    if constexpr (kLanes) {
      return Reduce(team);
    } else if constexpr (kNorm) {
      return Reduce::template of<kHeld>(scratch, team);
    } else {
      return Reduce(scratch, team);
    }
  }

  // The first row of this thread. With kLanes it may be past the last; then it has no blocks.
  __device__ __forceinline__ RowIndex<(kHeld > 0)> first_row() {
    if constexpr (kLanes) {
      const uint32_t r = team.template index<kLaneRowThreads>();
      if (r < source.rows) return r;
      width = 0;
      return static_cast<uint32_t>(source.rows - 1);
    } else {
      return team.index();
    }
  }
  // Whether this thread writes the results of its row that are one per row.
  __device__ __forceinline__ bool leads() const {
    return team.thread() == 0 && (!kLanes || width > 0);
  }

  // Prefetches row r, the first one, if there are enough registers.
  static constexpr bool kPrefetches =
      kRows == Rows::kFew || (kIsOneRow<kRows> && !kNorm && sizeof(Fetched) <= 32);
  __device__ __forceinline__ void begin(int64_t r) const {
    if constexpr (kPrefetches) {
      if (!is_first() || r >= source.rows) return;
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        if (at(k) < width) source.prefetch(source.row(r), at(k));
      }
    }
  }

  // The index of this thread's k-th block in the row.
  __device__ __forceinline__ int at(int k) const {
    if constexpr (kPairs) return source.pair_block(team.thread(), k);
    return team.thread() + k * team.threads();
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
  // After first(): prefetches what will be read next where this row was.
  __device__ __forceinline__ void prefetch_next(int64_t r) const {
    if constexpr (Team::kCluster) {
      team.template prefetch<kHeldBlocks>(source, static_cast<uint32_t>(r) + ahead, width);
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

  // Calls f(b, values) for the blocks b, those held or one after the other. All threads of a warp
  // call it together, even those without a block.
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
      f(team.thread(), held);
    }
  }

  // Whether this thread stores block b, perhaps of nothing.
  __device__ __forceinline__ bool stores(int b) const { return kLoose || b < width; }

  // Stores the codes of block b of the row at `to`; `vector`: it is aligned. With kLoose all lanes
  // of a warp store together.
  __device__ __forceinline__ void store(uint8_t* to, int b, const uint4& codes, bool vector) const {
    if constexpr (kLoose) {
      const int lane = threadIdx.x & 31;
      const int64_t at = b * int64_t{16}, left = source.cols - at;
      if (left + 16 * lane >= 16 * 32) {
        store_line(to + at, lane, codes);
      } else if (left > 0) {
        store_bytes(to + at, left, false, codes);
      }
    } else if constexpr (kHeld > 0) {
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
        if (width < kBlocks * team.threads()) {
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
      if constexpr (kPairs) {
        const int64_t blocks[2] = {at(0), at(1)};
        source.template values<2>(fetched, blocks, held);
      } else {
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
  }

  static __device__ __forceinline__ Team team_of(const RowWidth& row) {
    if constexpr (kLanes) {
      return {row.split};
    } else if constexpr (Team::kCluster) {
      return Team(row.split);
    } else {
      return {};
    }
  }
  template <class W>
  __device__ __forceinline__ Block<W> weights(int b) const {
    const W* const p = static_cast<const W*>(norm.weight.data) + b * 16;
    if constexpr (kLoose) return load_block<false>(p, source.cols - b * 16, norm.weight.vector);
    return load_block<true>(p, 16, true);
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
  if (held == 1) return kFewRowThreads;
  if (wants_registers<Source>(0)) return 640;
  return sizeof(typename Source::Fetched) <= 32 ? 576 : 768;
}
// Whether a thread block can hold a row.
template <class Source>
bool held_in_block(int64_t cols) {
  return blocks_of(cols) <= kHeldBlocks * most_threads<Source>(kHeldBlocks);
}
template <class Source>
constexpr int rows_per_sm(int held) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 1;  // nvcc needs more registers for this architecture
#endif
  return held == kHeldBlocks && sizeof(typename Source::Fetched) <= 32 ? 2 : 1;
}
// The same for each way to distribute rows: 64 or 80 registers if a row has a cluster or some
// lanes.
template <class Source, Rows kRows>
constexpr int row_threads_most() {
  if (kRows == Rows::kCluster) return kClusterRowThreads;
  if (kRows == Rows::kLanes) return kLaneRowThreads;
  if (kRows == Rows::kLoose) return kLooseRowThreads;
  return most_threads<Source>(kHeldOf<kRows>);
}
template <class Source, Rows kRows>
constexpr int row_blocks_per_sm() {
  constexpr int kOfRows = rows_per_sm<Source>(kHeldOf<kRows>);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1000
  constexpr int kMore = wants_registers<Source>(0) ? 1 : 2;
  if (kRows == Rows::kCluster) return kOfRows + kMore;
  if (kRows == Rows::kLanes) return 2 * (kOfRows + kMore);
#endif
  return kOfRows;
}

// kFew is compiled for two cases alone: E4M3 of evenly strided rows, with a computed scale per row
// (M = 1 on an H200: 0.2 to 0.3 us less than with code for everything), or with one given scale and
// no amax.
enum class Fp8Case : int { kAny, kComputed, kGiven };

// Sources that kFew takes. assume_usual() makes the compiler drop the code for other rows.
template <class Source>
constexpr bool kHasFew = false;
template <class T>
constexpr bool kHasFew<PlainSource<T>> = sizeof(T) == 2;
template <class T>
constexpr bool kHasFew<ResidualSource<T>> = sizeof(T) == 2;
template <class T>
constexpr bool kHasFew<DeinterleaveSource<T>> = sizeof(T) == 2;
template <class Source>
bool is_usual(const Source& source) {
  return source.row.even;
}
template <class T>
bool is_usual(const ResidualSource<T>& source) {
  return source.x_row.even && source.residual_row.even;
}
template <class T>
bool is_usual(const DeinterleaveSource<T>& source) {
  return source.row.even && source.activate;
}
template <class T>
__device__ __forceinline__ void assume_usual(PlainSource<T>& source) {
  source.row.even = true;
}
template <class T>
__device__ __forceinline__ void assume_usual(ResidualSource<T>& source) {
  source.x_row.even = source.residual_row.even = true;
}
template <class T>
__device__ __forceinline__ void assume_usual(DeinterleaveSource<T>& source) {
  source.row.even = source.activate = true;
}

template <class Source, bool kNorm, Rows kRows, Fp8Case kCase = Fp8Case::kAny>
__global__ void __launch_bounds__(row_threads_most<Source, kRows>(),
                                  row_blocks_per_sm<Source, kRows>())
    fp8_row_kernel(Source source, Normalize<typename Source::Element> norm, RowWidth width,
                   Fp8Scale scale, RowPointer<uint8_t> out, bool vector, EightBit format) {
  if constexpr (kCase != Fp8Case::kAny) {
    assume_usual(source);
    out.even = true, format = EightBit::kE4m3;
    scale.by_row = kCase == Fp8Case::kComputed;
    scale.kind = scale.by_row ? Fp8Scale::kAmax : Fp8Scale::kTensor;
    if (kCase == Fp8Case::kGiven) scale.amax = nullptr;
  }
  constexpr int kHeld = kHeldOf<kRows>;
  using Passes = RowPasses<Source, kNorm, kRows>;
  Passes passes(source, norm, width);
  __shared__ typename Passes::Reduce::Scratch scratch;
  typename Passes::Reduce reduce = passes.reduce(scratch);
  const bool wants_amax = scale.kind == Fp8Scale::kAmax || scale.amax != nullptr;
  float factor = 1.0f, known = -1.0f;

  RowIndex<(kHeld > 0)> r = passes.first_row();
  passes.begin(r);
  if (kCase == Fp8Case::kGiven && threadIdx.x == 0) prefetch(scale.given);
  wait_for_previous();
  let_next_begin();
#pragma unroll 1
  while (kIsOneRow<kRows> || r < source.rows) {
    const bool writes = passes.leads();
    if (scale.kind != Fp8Scale::kAmax) {
      factor = scale.kind == Fp8Scale::kValue ? scale.value : scale.given[scale.by_row ? r : 0];
    }
    const typename Source::Row row = source.row(r);
    // One per block, so that they do not wait for each other.
    Amax<typename RowValue<Source, kNorm>::Value::Element, true> mine[passes.kBlocks];
    float norm_amax = 0.0f;
    passes.first(row, reduce, [&](int k, const auto& held) {
      if constexpr (kNorm) {
        if (wants_amax) norm_amax = larger_magnitude(norm_amax, block_amax(held));
      } else {
        if (wants_amax) mine[k].add(held);
      }
    });
    passes.prefetch_next(r);
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
      if (writes && scale.amax != nullptr) {
        if (source.rows == 1) {
          *scale.amax = amax;
        } else {
          raise_tensor_amax(amax, scale);
        }
      }
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
        const int b = kHeld > 0 ? passes.at(k) : begin;
        const uint4 codes = cast_block(values[k], f, format);
        if (!passes.stores(b)) break;
        passes.store(to, b, codes, vector);
      }
    });
    if (kIsOneRow<kRows>) return;
    r += gridDim.x;
  }
  if constexpr (!kIsOneRow<kRows>) {
    if (source.rows == 0 && !scale.by_row) given_scale(scale, 0, threadIdx.x, format);
  }
}

#ifndef __CUDACC_RTC__
// Up to this many rows per SM, short rows have a thread block each too.
constexpr int kFewShortRows = 8;

// The rows of a launch, and whether they can be held.
struct RowWork {
  int64_t rows, cols;
  int most_threads;
  bool whole;
  int least_lanes_log2;  // with kLanes; 6: not with kLanes

  // Threads that hold a row.
  int64_t threads() const { return (blocks_of(cols) + kHeldBlocks - 1) / kHeldBlocks; }
  // Whether kLoose takes them.
  bool loose() const {
    return !whole && rows > 0 && cols > 0 && threads() <= kLooseRowThreads &&
           rows < (threads() > 32 ? int64_t{1} << 31 : kFewShortRows * sm_count());
  }
  LaunchShape block_per_row() const {
    return {rows, static_cast<int>((threads() + 31) / 32 * 32), Start::kOverlapped};
  }

  // Whether kFew takes them.
  bool few() const {
    return whole && rows > 0 && rows <= sm_count() && blocks_of(cols) <= kFewRowThreads;
  }
  LaunchShape few_shape() const {
    return {rows, static_cast<int>((blocks_of(cols) + 31) / 32 * 32), Start::kOverlapped};
  }

  template <class Source>
  static RowWork of(const Source& source, const ColumnVector& weight, const Matrix& out) {
    int least = 1;
    while ((1 << least) < lanes_together(source)) ++least;
    return {source.rows, source.cols, jitquant::most_threads<Source>(kHeldBlocks),
            source.whole() && weight.vector && out.vector && source.rows < (int64_t{1} << 31),
            least};
  }
};

// `width` is also one of the arguments.
template <auto kBlockPerRow, auto kCluster, auto kLanes, auto kReread, class... Args>
cudaError_t launch_by_rows(const RowWork& work, RowWidth& width, cudaStream_t stream,
                           const Args&... args) {
  const int64_t wanted = work.threads();
  const bool held = work.whole && work.rows > 0 && wanted <= work.most_threads;
  if constexpr (kTakesLong) {
    if (work.whole && !held && cluster_holds(work.rows, wanted)) {
      const ClusterRows made = clusters_of<kCluster>(work.rows, wanted);
      width.split = made.shape.cluster, width.ahead = made.at_once;
      return launch<kCluster>(made.shape, stream, args...);
    }
  } else if (!held) {
    return kLacksKernels;
  }
  if (held && wanted <= 32 && work.least_lanes_log2 < 6 && work.rows > kFewShortRows * sm_count()) {
    width.split = work.least_lanes_log2;
    while ((1 << width.split) < wanted) ++width.split;
    const int rows = kLaneRowThreads >> width.split;
    return launch<kLanes>({(work.rows + rows - 1) / rows, kLaneRowThreads, Start::kOverlapped},
                          stream, args...);
  }
  LaunchShape shape = work.block_per_row();
  if constexpr (kTakesLong) {
    if (!held) {
      if (shape.block > kRereadThreads) shape.block = kRereadThreads;
      shape.grid = persistent_grid(work.rows, blocks_per_sm<kReread>(shape.block, 0));
      return launch<kReread>(shape, stream, args...);
    }
  }
  return launch<kBlockPerRow>(shape, stream, args...);
}

template <bool kNorm, class Source>
cudaError_t launch_fp8_rows(const Source& source, const Normalize<typename Source::Element>& norm,
                            const Fp8Scale& scale, const ElementRows& out, cudaStream_t stream) {
  const RowWork work = RowWork::of(source, norm.weight, out.rows);
  const RowPointer<uint8_t> to(out.rows);
  RowWidth width(source.cols);
  if (watches_tensor(scale) && source.rows != 1) {
    const cudaError_t error = launch_zero_amax(scale, stream);
    if (error != cudaSuccess) return error;
  }
  if constexpr (kHasFew<Source>) {
    const auto few = [&](auto kind) {
      return launch<&fp8_row_kernel<Source, kNorm, Rows::kFew, kind>>(
          work.few_shape(), stream, source, norm, width, scale, to, out.rows.vector, out.format);
    };
    if (work.few() && is_usual(source) && to.even && out.format == EightBit::kE4m3) {
      if (scale.by_row && scale.kind == Fp8Scale::kAmax) {
        return few(std::integral_constant<Fp8Case, Fp8Case::kComputed>());
      }
      if constexpr (kNorm) {
        // A row alone has one scale, whatever it is called.
        const bool one =
            scale.kind == Fp8Scale::kTensor || (scale.kind == Fp8Scale::kRows && source.rows == 1);
        if (one && scale.amax == nullptr) {
          return few(std::integral_constant<Fp8Case, Fp8Case::kGiven>());
        }
      }
    }
  }
  if constexpr (kTakesLong && kHasLoose<Source>) {
    using Loose = LooseSource<typename Source::Element>;
    if (work.loose()) {
      return launch<&fp8_row_kernel<Loose, kNorm, Rows::kLoose>>(work.block_per_row(), stream,
                                                                 Loose(source), norm, width, scale,
                                                                 to, out.rows.vector, out.format);
    }
  }
  return launch_by_rows<&fp8_row_kernel<Source, kNorm, Rows::kBlockPerRow>,
                        &fp8_row_kernel<Source, kNorm, Rows::kCluster>,
                        &fp8_row_kernel<Source, kNorm, Rows::kLanes>,
                        &fp8_row_kernel<Source, kNorm, Rows::kReread>>(
      work, width, stream, source, norm, width, scale, to, out.rows.vector, out.format);
}

// For a source that is quantized without a norm.
template <class Source>
cudaError_t launch_fp8_rows(const Source& source, const Fp8Scale& scale, const ElementRows& out,
                            cudaStream_t stream) {
  const Normalize<typename Source::Element> none = {{nullptr, false, true}, 0.0f, nullptr};
  return launch_fp8_rows<false>(source, none, scale, out, stream);
}

// With a scale per row, or with one of the tensor that is given.
template <class Source>
cudaError_t launch_fp8(const Source& source, const Fp8Scale& scale, const ElementRows& out,
                       cudaStream_t stream) {
  if (!needs_amax(scale)) return launch_cast(source, scale, 0, out, stream);
  if (scale.by_row) return launch_fp8_rows(source, scale, out, stream);
  const AmaxPlan plan = amax_plan(source.rows, source.cols);
  return plan.cluster > 0 ? launch_cluster_cast(source, plan.cluster, scale, out, stream)
                          : launch_cast(source, scale, 0, out, stream);
}

// Calls f(source, norm) with the source of the rows and their norm.
template <class F>
cudaError_t normalized(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                       float eps, float* inv_rms, F&& f) {
  return with_residual(x, residual, [&](const auto& source) {
    using T = typename std::decay_t<decltype(source)>::Element;
    return f(source, Normalize<T>{weight, eps, inv_rms});
  });
}
#endif

}  // namespace jitquant
