// The kernels that quantize many tensors of one flat buffer, templates over where the values come
// from and over what is made of them:
//   grouped_walk_kernel   launch 1 of computed scales: the amaxes; launch 2: the elements. And the
//                         only launch where scales are given: both
//   grouped_tile_kernel   launch 2 where the elements take few instructions
// Launch 1 cuts the buffer into as many ranges as it has blocks of threads. An amax needs no
// launch that zeroes it: a group whose first element is in a block's range is that block's, which
// sets its amax to 0 before its warps add to it. The groups of the ranges before end in at most one
// piece a range, which goes to a workspace of a float for each range, however many groups there
// are; and a group's amax is the largest of its own and those of the ranges that it goes on in.
// It goes through each range from the end to the beginning, where launch 2 begins: the L2 cache has
// that still.
//
// A source has `numel` and
//   Value             the type of a block of its values
//   kTileSteps        steps of kStep elements that a warp of grouped_tile_kernel has
//   vector            the buffer is aligned to 16 bytes
//   Fetched fetch(i)  what has to be loaded for sixteen elements from i on, which are all there
//   Value value(x)    their values
//   Value load(i)     the same where some may not be there, or not aligned: zeros for those
#pragma once

#include <cooperative_groups.h>

#include "jitquant/grouped.cuh"
#include "jitquant/grouped_launch.h"
#include "jitquant/reduce.cuh"

namespace jitquant {

// Some ranges, one after another.
struct RangesOf {
  int first, last;
};

// The ranges of the blocks of launch 1, and what groups of earlier ranges have in each.
struct GroupRanges {
  int64_t span;  // elements
  float* partials;

  __device__ __forceinline__ int of(int64_t position) const {
    return static_cast<int>(quotient(position, span));
  }
  // That a group, which is not empty, goes on in.
  __device__ __forceinline__ RangesOf after(const GroupBounds& at) const {
    return {of(at.start) + 1, of(at.stop - 1)};
  }
};

template <class T>
struct BufferSource {
  using Element = T;
  using Value = Block<T>;
  using Fetched = Block<T>;
  static constexpr int kTileSteps = sizeof(T) == 2 ? 4 : 2;
  const T* data;
  int64_t numel;
  bool vector;

  explicit BufferSource(const GroupedInput& x)
      : data(static_cast<const T*>(x.data)),
        numel(x.numel),
        vector(reinterpret_cast<uintptr_t>(x.data) % 16 == 0) {}

  __device__ __forceinline__ Fetched fetch(int64_t i) const {
    return load_block<true>(data + i, 16, true);
  }
  __device__ __forceinline__ void prefetch(int64_t i) const { prefetch_block(data + i, 16); }
  __device__ __forceinline__ Value value(const Fetched& x) const { return x; }
  __device__ __forceinline__ Value load(int64_t i) const {
    return i < numel ? load_block(data + i, numel - i, vector) : Value{};
  }
};

template <class T>
__device__ __forceinline__ Block<T> masked(const Block<T>& x, const Part& part) {
  Block<T> y;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    y.words[i] =
        x.words[i] & ((part.has(2 * i) ? 0xffffu : 0u) | (part.has(2 * i + 1) ? 0xffff0000u : 0u));
  }
  return y;
}
__device__ __forceinline__ Block<float> masked(const Block<float>& x, const Part& part) {
  Block<float> y;
#pragma unroll
  for (int i = 0; i < 16; ++i) y.words[i] = part.has(i) ? x.words[i] : 0u;
  return y;
}

// The elements of the cursor's group among sixteen; of NVFP4 none where the group begins within
// them, which belong to another.
template <class Op>
__device__ __forceinline__ Part part_of(const GroupCursor& cursor, int position) {
  Part part(cursor, position);
  if (Op::kWholeBlocks && part.first > 0) part.behind = 0;
  return part;
}

// Calls `part` with the cursor on each group of `count` elements from `position` on that is not
// empty; `leave`, and `enter` with the bounds, where it goes on to the next one.
template <class Leave, class Enter, class F>
__device__ __forceinline__ void visit_groups(GroupCursor& cursor, const Groups& groups,
                                             int position, int count, Leave&& leave, Enter&& enter,
                                             F&& part) {
  if (position >= cursor.next) leave(), enter(cursor.seek(groups, position));
#pragma unroll 1
  for (;;) {
    part();
    if (cursor.next >= position + count) return;
    leave(), enter(cursor.seek(groups, cursor.next));
  }
}

enum class Walk {
  kAmax,     // launch 1: amaxes
  kGiven,    // the only launch: amaxes, and elements with given scales
  kComputed  // launch 2: elements
};

// Elements of a tile of grouped_tile_kernel.
template <class Source>
constexpr int kTile = kThreads / 32 * Source::kTileSteps * kStep;

// How the work is cut, by what a thread fetches for sixteen values.
template <class Source>
constexpr bool kSmall = sizeof(typename Source::Fetched) <= 32;
// Launch 1 loads as much at a time by half as many threads before tiles: what it leaves of the
// registers is enough for one of their blocks, which can begin before it has ended.
template <class Source, class Op, Walk kWalk>
constexpr bool kWide = kSmall<Source> && kWalk == Walk::kAmax;
// Steps of neighbouring elements that a warp has at once: a chunk.
template <class Source, class Op, Walk kWalk>
constexpr int kWalkSteps = kWide<Source, Op, kWalk> ? (Op::kByTile ? 4 : 2) : 1;
template <class Source, class Op, Walk kWalk>
constexpr int kWalkThreads = kWide<Source, Op, kWalk> && !Op::kByTile ? 2 * kThreads : kThreads;
// Blocks of threads on a multiprocessor: launch 1 leaves room for those of launch 2.
// From compute capability 10.0 on the compiler wants more registers for all in one launch.
template <class Source, Walk kWalk>
constexpr int walk_blocks(int major) {
  if (!kSmall<Source>) return kWalk == Walk::kGiven ? 2 : 3;
  if (kWalk == Walk::kGiven && major >= 10) return 3;
  return kWalk == Walk::kAmax ? 2 : 4;
}
#if defined(__CUDA_ARCH__)
constexpr int kCompiledFor = __CUDA_ARCH__ / 100;
#else
constexpr int kCompiledFor = 0;
#endif

// A thread's part of the amax of group i, which goes on in the ranges `in`, where `threads` share
// it.
__device__ __forceinline__ float amax_of_group(int64_t i, RangesOf in, const GroupedScales& scales,
                                               const GroupRanges& ranges, int thread, int threads) {
  uint32_t bits = thread == 0 ? float_bits(__ldcg(scales.amax + i)) : 0u;
#pragma unroll 4
  for (int range = in.first + thread; range <= in.last; range += threads) {
    bits = max(bits, float_bits(__ldcg(ranges.partials + range)));
  }
  return bits_float(bits);
}

// Of a range, where all pieces are there: the amax of the one group, if any, that begins in it and
// goes on in others. A warp.
__device__ __forceinline__ void finish_amax(int64_t base, int end, const Groups& groups,
                                            const GroupedScales& scales,
                                            const GroupRanges& ranges) {
  GroupCursor cursor = {base};
  const GroupBounds at = cursor.find(groups, end - 1);
  if (cursor.start < 0 || at.stop <= base + end) return;
  const int lane = threadIdx.x & 31;
  const float all =
      warp_max(amax_of_group(cursor.index, ranges.after(at), scales, ranges, lane, 32));
  if (lane == 0) scales.amax[cursor.index] = all;
}

template <class Source, class Op, Walk kWalk>
__global__ void __launch_bounds__(kWalkThreads<Source, Op, kWalk>,
                                  walk_blocks<Source, kWalk>(kCompiledFor))
    grouped_walk_kernel(Source source, Op op, Groups groups, GroupedScales scales,
                        GroupRanges ranges, int64_t span) {
  using Fetched = typename Source::Fetched;
  using Value = typename Source::Value;
  constexpr bool kCasts = kWalk != Walk::kAmax, kFindsAmax = kWalk != Walk::kComputed;
  constexpr bool kBackwards = kWalk == Walk::kAmax;
  // What is there of the registers is for more at a time instead, of which nothing is made.
  constexpr bool kAhead = !kWide<Source, Op, kWalk>;
  constexpr int kSteps = kWalkSteps<Source, Op, kWalk>;
  constexpr int kChunk = kSteps * kStep, kStride = kWalkThreads<Source, Op, kWalk> / 32 * kChunk;
  const int lane = threadIdx.x & 31;
  const int64_t base = blockIdx.x * span;
  const int64_t left = groups.numel - base;
  const int end = static_cast<int>(kept(static_cast<uint32_t>(left < span ? left : span)));
  // Of this lane. Kept, as otherwise both are worked out again for each chunk.
  const int64_t origin = kSmall<Source> ? kept(base + 16 * lane) : base + 16 * lane;
  int turn = (threadIdx.x >> 5) * kChunk;

  const auto chunk_of = [&](int turn) {
    return kBackwards ? (end - 1) / kChunk * kChunk - turn : turn;
  };
  const auto whole = [&](int turn) {
    return source.vector && (!kBackwards || turn < end) && chunk_of(turn) + kChunk <= end;
  };
  Fetched fetched[kSteps];
  const auto fetch = [&](int turn) {
    if (!whole(turn)) return;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      fetched[k] = source.fetch(origin + chunk_of(turn) + k * kStep);
    }
  };
  GroupCursor cursor = {base};
  if (kFindsAmax) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (whole(turn)) source.prefetch(origin + chunk_of(turn) + k * kStep);
    }
    // Launch 2 fetches before it waits, so what came before launch 1 has to be done when it begins.
    wait_for_previous();
    let_next_begin();
  }
  fetch(turn);
  const GroupBounds first = cursor.find(groups, kFindsAmax ? chunk_of(turn) : 0);
  if (!kFindsAmax) let_next_begin(), wait_for_previous();

  if constexpr (kFindsAmax) {
    // The groups that begin here: what only this block adds to.
    if (threadIdx.x < 32) {
      const bool is_last = blockIdx.x + 1 == gridDim.x;
      int64_t i = (blockIdx.x == 0 ? 0 : group_at(groups, base - 1) + 1) + lane;
      for (; i < groups.count && (is_last || groups.offsets[i] < base + end); i += 32) {
        typename Op::Encoding ignored;
        scales.amax[i] = 0.0f;
        scales.inverse[i] =
            kCasts ? op.of_scale(scales.given[i], ignored) : op.of_amax(0.0f, ignored);
      }
      if (lane == 0) ranges.partials[blockIdx.x] = 0.0f;
    }
    __syncthreads();
  }

  typename Op::Encoding encoding = {};
  Amax<typename Value::Element, Op::kKeepsNan> amax;
  const auto leave = [&] {
    if constexpr (kFindsAmax) {
      const uint32_t bits = __reduce_max_sync(0xffffffffu, float_bits(amax.result()));
      amax = {};
      if (lane != 0 || bits == 0u) return;
      float* const to =
          cursor.start >= 0 ? scales.amax + cursor.index : ranges.partials + blockIdx.x;
      atomicMax(reinterpret_cast<unsigned*>(to), bits);
    }
  };
  const auto encode = [&](float all, int position) {
    const float inverse = op.of_amax(all, encoding);
    // The warp that has the first element tells of it.
    if (lane == 0 && cursor.start >= position) {
      scales.amax[cursor.index] = all;
      scales.inverse[cursor.index] = inverse;
    }
  };
  const auto enter = [&](const GroupBounds& at, int position) {
    if (!kCasts || at.stop <= at.start) return;
    if constexpr (kWalk == Walk::kGiven) {
      op.of_scale(scales.given[cursor.index], encoding);
    } else {
      encode(warp_max(amax_of_group(cursor.index, ranges.after(at), scales, ranges, lane, 32)),
             position);
    }
  };
  if constexpr (kFindsAmax) {
    enter(first, turn);
  } else if (first.stop > first.start) {
    // Together: a group may have pieces in all ranges, and every block may begin in it.
    __shared__ BlockReduce::Scratch scratch;
    BlockReduce reduce(scratch);
    encode(reduce.max(amax_of_group(cursor.index, ranges.after(first), scales, ranges, threadIdx.x,
                                    kThreads)),
           turn);
  }
  const auto take = [&](int turn, const Fetched(&x)[kSteps]) {
    const int chunk = chunk_of(turn);
    if (kBackwards && chunk < cursor.begin) {
      leave();
      cursor.seek_before(groups, chunk);
    } else if (!kBackwards && chunk >= cursor.next) {
      leave();
      enter(cursor.seek(groups, chunk), chunk);
    }
    if (whole(turn) && cursor.covers(chunk, kChunk)) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const Value v = source.value(x[k]);
        if constexpr (kFindsAmax) amax.add(v);
        if constexpr (kCasts) {
          op.store(origin + chunk + k * kStep, 16, op.codes(v, encoding));
        }
      }
      return;
    }
#pragma unroll 1
    for (int step = chunk; step < chunk + kChunk && step < end; step += kStep) {
      const int64_t mine = origin + step;
      const Value v = source.load(mine);
      typename Op::Codes codes = {};
      visit_groups(
          cursor, groups, step, kStep, leave, [&](const GroupBounds& at) { enter(at, step); },
          [&] {
            const Part part = part_of<Op>(cursor, step + 16 * lane);
            const Value own = masked(v, part);
            if constexpr (kFindsAmax) amax.add(own);
            if (kCasts && !part.empty()) op.merge(codes, op.codes(own, encoding), part);
          });
      if constexpr (kCasts) op.store(mine, groups.numel - mine, codes);
    }
  };
#pragma unroll 1
  for (; turn < end; turn += kStride) {
    if constexpr (kAhead) {
      Fetched x[kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) x[k] = fetched[k];
      fetch(turn + kStride);
      take(turn, x);
    } else {
      take(turn, fetched);
      fetch(turn + kStride);
    }
  }
  leave();

  if constexpr (kWalk == Walk::kGiven) {
    if (gridDim.x == 1) return;
    cooperative_groups::this_grid().sync();
    if (threadIdx.x < 32) finish_amax(base, end, groups, scales, ranges);
  }
}

// The same as the walk of Walk::kComputed, with a block of threads for each tile: the hardware
// starts them in order, so that what is read and written at a time lies together. Where the codes
// take few instructions this is the faster one.
template <class Source, class Op>
__device__ __forceinline__ void grouped_tile(int64_t base, const Source& source, const Op& op,
                                             const Groups& groups, const GroupedScales& scales,
                                             const GroupRanges& ranges) {
  constexpr int kSteps = Source::kTileSteps, kChunk = kSteps * kStep;
  const int lane = threadIdx.x & 31;
  const int64_t left = groups.numel - base;
  const int end = left < kTile<Source> ? static_cast<int>(left) : kTile<Source>;
  const int chunk = (threadIdx.x >> 5) * kChunk;
  const bool whole = source.vector && chunk + kChunk <= end;
  typename Source::Fetched x[kSteps];
  if (whole) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) x[k] = source.fetch(base + chunk + k * kStep + 16 * lane);
  }
  GroupCursor cursor = {base};
  GroupBounds first = cursor.find(groups, 0);
  const bool one = cursor.covers(0, kTile<Source>);
  if (!one && chunk >= cursor.next) first = cursor.seek(groups, chunk);
  const RangesOf first_in = ranges.after(first);
  wait_for_previous();
  let_next_begin();

  typename Op::Encoding encoding = {};
  const auto encode = [&](float all, int position) {
    const float inverse = op.of_amax(all, encoding);
    // The warp that has the first element tells of it.
    if (lane == 0 && cursor.start >= position) {
      scales.amax[cursor.index] = all;
      scales.inverse[cursor.index] = inverse;
    }
  };
  const auto enter = [&](const GroupBounds& at, RangesOf in, int position) {
    if (at.stop <= at.start) return;
    encode(warp_max(amax_of_group(cursor.index, in, scales, ranges, lane, 32)), position);
  };
  if (one) {
    __shared__ BlockReduce::Scratch scratch;
    BlockReduce reduce(scratch);
    encode(reduce.max(amax_of_group(cursor.index, first_in, scales, ranges, threadIdx.x, kThreads)),
           chunk);
  } else {
    if (chunk >= end) return;
    enter(first, first_in, chunk);
  }
  if (whole && cursor.covers(chunk, kChunk)) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      op.store(base + chunk + k * kStep + 16 * lane, 16, op.codes(source.value(x[k]), encoding));
    }
    return;
  }
#pragma unroll 1
  for (int step = chunk; step < chunk + kChunk && step < end; step += kStep) {
    const int64_t mine = base + step + 16 * lane;
    const typename Source::Value v = source.load(mine);
    typename Op::Codes codes = {};
    visit_groups(
        cursor, groups, step, kStep, [] {},
        [&](const GroupBounds& at) { enter(at, ranges.after(at), step); },
        [&] {
          const Part part = part_of<Op>(cursor, step + 16 * lane);
          if (!part.empty()) op.merge(codes, op.codes(masked(v, part), encoding), part);
        });
    op.store(mine, groups.numel - mine, codes);
  }
}

// The order of the tiles: as they lie, so that what is read and written at a time lies together;
// but the first `early` tiles of each range come before all others, as launch 1 has read them last.
struct TileOrder {
  uint32_t ranges, early, late;  // tiles of a range: at most early + late

  // Where the tile of this block begins; -1 where it has none.
  template <int kTileSize>
  __device__ __forceinline__ int64_t begin(int64_t span) const {
    uint32_t range, turn, i = blockIdx.x;
    if (i < early * ranges) {
      turn = i / ranges, range = i - turn * ranges;
    } else {
      i -= early * ranges;
      range = i / late, turn = early + i - range * late;
    }
    constexpr uint32_t kSteps = kTileSize / kStep;
    const uint32_t steps = static_cast<uint32_t>(span / kStep);
    const auto first_of = [&](uint32_t range) { return (range * steps + kSteps - 1) / kSteps; };
    const uint32_t tile = first_of(range) + turn;
    return tile < first_of(range + 1) ? static_cast<int64_t>(tile) * kTileSize : -1;
  }
};

template <class Source, class Op>
__global__ void __launch_bounds__(kThreads, 3)
    grouped_tile_kernel(Source source, Op op, Groups groups, GroupedScales scales,
                        GroupRanges ranges, TileOrder order) {
  const int64_t base = order.begin<kTile<Source>>(ranges.span);
  if (base < 0) {
    wait_for_previous();
  } else {
    grouped_tile(base, source, op, groups, scales, ranges);
  }
}

// How the buffer is cut into the ranges of a launch's blocks.
struct GroupPlan {
  int64_t grid, span;
};

template <class Source, class Op, Walk kWalk>
GroupPlan group_plan(int64_t numel) {
  constexpr int kChunk = kWalkSteps<Source, Op, kWalk> * kStep;
  constexpr int kWarps = kWalkThreads<Source, Op, kWalk> / 32;
  const int64_t chunks = (numel + kChunk - 1) / kChunk;
  const int64_t most = persistent_grid((chunks + kWarps - 1) / kWarps,
                                       walk_blocks<Source, kWalk>(device_traits().major));
  const int64_t grid = most < kMaxPartials ? most : kMaxPartials;
  const int64_t span = chunks < 1 ? 1 : (chunks + grid - 1) / grid;
  return {chunks < 1 ? 1 : (chunks + span - 1) / span, span * kChunk};
}

inline Groups groups_of(const GroupedInput& x) {
  return {x.offsets, x.sizes, x.count, x.numel};
}

// `ranges`: of launch 1, or the only one.
template <class Source, class Op, Walk kWalk>
cudaError_t launch_walk(const GroupPlan& plan, const Source& source, const Op& op,
                        const GroupedInput& x, const GroupedScales& scales,
                        const GroupRanges& ranges, cudaStream_t stream) {
  const bool waits = kWalk == Walk::kGiven && plan.grid > 1;
  return launch<&grouped_walk_kernel<Source, Op, kWalk>>(
      {plan.grid, kWalkThreads<Source, Op, kWalk>,
       waits ? Start::kCooperative : Start::kOverlapped},
      stream, source, op, groups_of(x), scales, ranges, plan.span);
}

// Of each range as much as launch 1 has read last and the L2 cache has still: about 30 MB in all.
constexpr int kEarlyBytes = 128 << 10;

// `plan`: of launch 1.
template <class Source, class Op>
cudaError_t launch_tiles(const GroupPlan& plan, const Source& source, const Op& op,
                         const GroupedInput& x, const GroupedScales& scales,
                         const GroupRanges& ranges, cudaStream_t stream) {
  constexpr int kTileBytes = kTile<Source> * sizeof(typename Source::Element);
  const int64_t tiles = (plan.span + kTile<Source> - 1) / kTile<Source>;  // of a range
  const int64_t early = tiles < kEarlyBytes / kTileBytes ? tiles : kEarlyBytes / kTileBytes;
  const TileOrder order = {static_cast<uint32_t>(plan.grid), static_cast<uint32_t>(early),
                           static_cast<uint32_t>(tiles - early)};
  return launch<&grouped_tile_kernel<Source, Op>>({plan.grid * tiles, kThreads, Start::kOverlapped},
                                                  stream, source, op, groups_of(x), scales, ranges,
                                                  order);
}

template <class Source, class Op>
cudaError_t launch_grouped(const Source& source, const Op& op, const GroupedInput& x,
                           const GroupedScales& scales, cudaStream_t stream) {
  constexpr Walk kOnly = Walk::kGiven, kFirst = Walk::kAmax, kSecond = Walk::kComputed;
  if (scales.given != nullptr) {
    const GroupPlan plan = group_plan<Source, Op, kOnly>(x.numel);
    return launch_walk<Source, Op, kOnly>(plan, source, op, x, scales, {plan.span, scales.partials},
                                          stream);
  }
  const GroupPlan plan = group_plan<Source, Op, kFirst>(x.numel);
  const GroupRanges ranges = {plan.span, scales.partials};
  const cudaError_t error =
      launch_walk<Source, Op, kFirst>(plan, source, op, x, scales, ranges, stream);
  if (error != cudaSuccess || x.numel == 0) return error;
  if constexpr (Op::kByTile) {
    return launch_tiles(plan, source, op, x, scales, ranges, stream);
  } else {
    return launch_walk<Source, Op, kSecond>(group_plan<Source, Op, kSecond>(x.numel), source, op, x,
                                            scales, ranges, stream);
  }
}

}  // namespace jitquant
