// The kernels that quantize ragged tensors (many tensors in one buffer), as templates over the
// source of the values and the kind of result:
//   ragged_walk_kernel   launch 1 of computed scales: the amaxes. Also the only launch if
//                        scales are given: amaxes and elements
//   ragged_tile_kernel   launch 2: the elements
//   ragged_alone_kernel  the only launch of a small buffer, by one thread block: everything
// Launch 1 divides the buffer into one range per thread block. No launch has to zero the amaxes: a
// segment belongs to the thread block whose range has its first element, which sets its amax to 0
// before its warps update it. Segments from earlier ranges have at most one piece in each range.
// Its amax goes to a workspace of one float per range, however many segments there are. A segment's
// amax is the maximum of its own and those of the ranges that it continues in. Launch 1 walks each
// range backwards, so that the beginning of the range, where launch 2 starts, is still in the L2
// cache.
//
// A source has `numel` and
//   Value             the type of a block of its values
//   kTileThreads, kTileSteps  threads per block of ragged_tile_kernel, and steps of kStep elements
//                             per warp
//   kMostBlocks       the most blocks of kThreads threads per SM that have enough registers
//   vector            the buffer is aligned to 16 bytes
//   Fetched fetch(i)  loads what is needed for sixteen elements from i on, which all exist
//   Value value(x)    their values
//   Value load(i)     the same if some may not exist or may be unaligned; zeros for missing ones
#pragma once

#include "jitquant/reduce.cuh"
#include "launch.h"
#include "segments.cuh"

namespace jitquant {

// Consecutive ranges.
struct RangesOf {
  int first, last;
};

// The ranges of the thread blocks of launch 1, and the amax in each of a segment from earlier
// ranges.
struct SegmentRanges {
  int64_t span;  // elements per range
  int count;
  float* partials;

  __device__ __forceinline__ int of(int64_t position) const {
    return static_cast<int>(divide_index(position, span));
  }
  // The ranges that a nonempty segment continues in.
  __device__ __forceinline__ RangesOf after(const SegmentBounds& at) const {
    return {of(at.start) + 1, of(at.stop - 1)};
  }
};

template <class T>
struct BufferSource {
  using Element = T;
  using Value = Block<T>;
  using Fetched = Block<T>;
  static constexpr int kTileThreads = 64, kTileSteps = sizeof(T) == 2 ? 4 : 2, kMostBlocks = 4;
  const T* data;
  int64_t numel;
  bool vector;

  explicit BufferSource(const RaggedInput& x)
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

// The elements of a segment among sixteen. For NVFP4, none if the segment begins within them: then
// they belong to another segment.
template <class Op, class Bounds, class Integer>
__device__ __forceinline__ Part part_of(const Bounds& at, Integer position) {
  Part part(at, position);
  if (Op::kWholeBlocks && part.first > 0) part.behind = 0;
  return part;
}

enum class Walk {
  kAmax,     // launch 1: amaxes
  kGiven,    // the only launch: amaxes, and elements with given scales
  kComputed  // launch 2, by tiles: elements
};

// Elements per tile of ragged_tile_kernel.
template <class Source>
constexpr int kTile = Source::kTileThreads / 32 * Source::kTileSteps * kStep;

// Selects how the work is divided, by what a thread fetches for sixteen values.
template <class Source>
constexpr bool kSmall = sizeof(typename Source::Fetched) <= 32;
// Steps of consecutive elements that a warp has at once: a chunk. With several steps, which compute
// only amaxes, all are loaded when the previous ones are done. This leaves enough registers for a
// thread block of launch 2, which can start before launch 1 has ended.
template <class Source, Walk kWalk>
constexpr int kWalkSteps = kSmall<Source> && kWalk == Walk::kAmax ? Source::kTileSteps : 1;
// Thread blocks per SM: launch 1 leaves room for those of launch 2. From compute capability 10.0
// on, nvcc needs more registers.
template <class Source, Walk kWalk>
constexpr int blocks_of_threads(int major) {
  int blocks = major >= 10 ? 3 : 4;
  if (kWalk == Walk::kAmax) blocks = 2;
  if (!kSmall<Source>) blocks = kWalk == Walk::kGiven ? 2 : 3;
  return blocks < Source::kMostBlocks ? blocks : Source::kMostBlocks;
}
#if defined(__CUDA_ARCH__)
constexpr int kCompiledFor = __CUDA_ARCH__ / 100;
#else
constexpr int kCompiledFor = 0;
#endif

// One thread's share of the amax of segment i, which continues in the ranges `in`; `threads`
// threads share the work. kCached: reads through the L1 cache, which helps if many read the same.
// Only allowed after the launch that writes the data.
template <bool kCached>
__device__ __forceinline__ float amax_of_segment(int64_t i, RangesOf in, const RaggedScales& scales,
                                                 const SegmentRanges& ranges, int thread,
                                                 int threads) {
  const auto load = [](const float* p) { return float_bits(kCached ? *p : __ldcg(p)); };
  uint32_t bits = thread == 0 ? load(scales.amax + i) : 0u;
#pragma unroll 4
  for (int range = in.first + thread; range <= in.last; range += threads) {
    bits = max(bits, load(ranges.partials + range));
  }
  return bits_float(bits);
}

// After all partials of a range are written: the amax of the segment, if any, that begins in the
// range and continues in others. Called by a warp.
__device__ __forceinline__ void finish_amax(int64_t base, int end, const Segments& segments,
                                            const RaggedScales& scales,
                                            const SegmentRanges& ranges) {
  SegmentCursor cursor = {base};
  const SegmentBounds at = cursor.find(segments, end - 1);
  if (cursor.start < 0 || at.stop <= base + end) return;
  const int lane = threadIdx.x & 31;
  const float all =
      warp_max(amax_of_segment<false>(cursor.index, ranges.after(at), scales, ranges, lane, 32));
  if (lane == 0) scales.amax[cursor.index] = all;
}

// The encoding of the cursor's segment from its amax. The warp that has the segment's first element
// writes the outputs; `position` is the first element of the segment that this warp has.
template <class Op>
__device__ __forceinline__ void encode_segment(const SegmentCursor& cursor, float amax,
                                               int position, const Op& op,
                                               const RaggedScales& scales,
                                               typename Op::Encoding& encoding) {
  const float inverse = op.of_amax(amax, encoding);
  if ((threadIdx.x & 31) == 0 && cursor.start >= position) {
    scales.amax[cursor.index] = amax;
    scales.inverse[cursor.index] = inverse;
  }
}

// Handles, of sixteen elements from `mine` on, those of segments that begin and end within one
// step: from segment `first` to before `behind`, one at a time. Called per thread, because there
// may be hundreds.
template <Walk kWalk, class Source, class Op>
__device__ __forceinline__ void take_short_segments(const Segments& segments, int first, int behind,
                                                    int64_t mine, const typename Source::Value& v,
                                                    const Op& op, const RaggedScales& scales,
                                                    const SegmentRanges& ranges,
                                                    typename Op::Codes& codes) {
  const auto take = [&](int i) {
    const SegmentBounds at = segments.bounds(i);
    const Part part = part_of<Op>(at, mine);
    if (part.empty()) return;
    typename Op::Encoding encoding = {};
    if constexpr (kWalk == Walk::kGiven) op.of_scale(scales.given[i], encoding);
    // All threads that have elements of the segment write the same values.
    if constexpr (kWalk == Walk::kComputed) {
      const float amax = amax_of_segment<false>(i, ranges.after(at), scales, ranges, 0, 1);
      scales.amax[i] = amax, scales.inverse[i] = op.of_amax(amax, encoding);
    }
    const auto own = masked(v, part);
    if constexpr (kWalk != Walk::kComputed) {
      Amax<typename Source::Value::Element, Op::kKeepsNan> amax;
      amax.add(own);
      atomicMax(reinterpret_cast<unsigned*>(scales.amax + i), float_bits(amax.result()));
    }
    if constexpr (kWalk != Walk::kAmax) op.merge(codes, op.codes(own, encoding), part);
  };
  if constexpr (Op::kWholeBlocks) {
    take(own_segment_at(segments, first, behind, mine));
  } else {
    visit_own_segments(segments, first, behind, mine, take);
  }
}

// Handles a warp's step in which segments begin or end, or which is not complete: updates `amax`
// and stores codes. The cursor is at the segment of `step`. `mine` is the position of this lane's
// elements. `go(position, from)` moves the cursor to the segment of a position; elements from
// `from` on belong to this warp.
template <Walk kWalk, class Source, class Op, class Go>
__device__ __forceinline__ void take_mixed_step(
    SegmentCursor& cursor, const Segments& segments, int step, int64_t mine, const Source& source,
    const Op& op, const RaggedScales& scales, const SegmentRanges& ranges,
    const typename Op::Encoding& encoding,
    Amax<typename Source::Value::Element, Op::kKeepsNan>& amax, Go&& go) {
  using Value = typename Source::Value;
  typename Op::Codes codes = {};
  if (!cursor.misses(step, kStep)) {
    const int position = static_cast<int>(mine - cursor.base);
    const Value v = source.load(mine);
#pragma unroll 1
    for (;;) {
      const Part part = part_of<Op>(cursor, position);
      const Value own = masked(v, part);
      if constexpr (kWalk != Walk::kComputed) amax.add(own);
      if (kWalk != Walk::kAmax && !part.empty()) op.merge(codes, op.codes(own, encoding), part);
      if (cursor.next >= step + kStep) break;
      const int behind = cursor.index + 1;
      go(step + kStep - 1, step);
      if (behind < cursor.index) {
        take_short_segments<kWalk, Source>(segments, behind, cursor.index, mine, v, op, scales,
                                           ranges, codes);
      }
    }
  }
  if constexpr (kWalk != Walk::kAmax) op.store(mine, segments.numel - mine, codes);
}

// The steps of a chunk from `chunk` on, in order: `take_whole(step, fetched)` for those within one
// segment, `take_mixed(step)` for the others. If all of the chunk was fetched, only the first step
// of that is used, and the others are fetched again, one step ahead: there are no registers to hold
// all of them.
template <class Source, int kSteps, class Go, class Whole, class Mixed>
__device__ __forceinline__ void take_steps(const SegmentCursor& cursor, int chunk, int end,
                                           int64_t origin, bool whole, const Source& source,
                                           const typename Source::Fetched (&x)[kSteps], Go&& go,
                                           Whole&& take_whole, Mixed&& take_mixed) {
  typename Source::Fetched ahead = x[0];
#pragma unroll 1
  for (int k = 0; k < kSteps && chunk + k * kStep < end; ++k) {
    const int step = chunk + k * kStep;
    const typename Source::Fetched now = ahead;
    if (whole && k + 1 < kSteps) ahead = source.fetch(origin + step + kStep);
    go(step, step);
    if (whole && cursor.covers(step, kStep)) {
      take_whole(step, now);
    } else {
      take_mixed(step);
    }
  }
}

template <class Source, class Op, Walk kWalk>
__global__ void __launch_bounds__(kThreads, blocks_of_threads<Source, kWalk>(kCompiledFor))
    ragged_walk_kernel(Source source, Op op, Segments segments, RaggedScales scales,
                       SegmentRanges ranges) {
  using Fetched = typename Source::Fetched;
  using Value = typename Source::Value;
  constexpr bool kCasts = kWalk == Walk::kGiven, kBackwards = kWalk == Walk::kAmax;
  constexpr int kSteps = kWalkSteps<Source, kWalk>;
  constexpr int kChunk = kSteps * kStep, kStride = kThreads / 32 * kChunk;
  const int lane = threadIdx.x & 31;
  const int64_t base = blockIdx.x * ranges.span;
  const int64_t left = segments.numel - base;
  const int end =
      static_cast<int>(kept(static_cast<uint32_t>(left < ranges.span ? left : ranges.span)));
  // For this lane. kept(): otherwise both would be recomputed for each chunk.
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
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (whole(turn)) source.prefetch(origin + chunk_of(turn) + k * kStep);
  }
  wait_for_previous();
  let_next_begin();
  fetch(turn);
  const OffsetsWindow window(segments, base + chunk_of(turn));
  SegmentCursor cursor = {base};
  cursor.find(segments, chunk_of(turn), window);

  // The segments that begin here, which only this thread block updates.
  __shared__ int first_here;
  if (threadIdx.x < 32) {
    const int i = blockIdx.x == 0 ? 0 : search_offsets(segments, base - 1, window).low;
    if (lane == 0) first_here = i, ranges.partials[blockIdx.x] = 0.0f;
  }
  __syncthreads();
  const bool is_last = blockIdx.x + 1 == gridDim.x;
  for (int64_t i = first_here + threadIdx.x;
       i < segments.count && (is_last || segments.offset(i) < base + end); i += kThreads) {
    typename Op::Encoding ignored;
    scales.amax[i] = 0.0f;
    scales.inverse[i] = kCasts ? op.of_scale(scales.given[i], ignored) : op.of_amax(0.0f, ignored);
  }
  __syncthreads();

  typename Op::Encoding encoding = {};
  Amax<typename Value::Element, Op::kKeepsNan> amax;
  const auto leave = [&] {
    const uint32_t bits = __reduce_max_sync(0xffffffffu, float_bits(amax.result()));
    amax = {};
    if (lane != 0 || bits == 0u) return;
    float* const to = cursor.start >= 0 ? scales.amax + cursor.index : ranges.partials + blockIdx.x;
    atomicMax(reinterpret_cast<unsigned*>(to), bits);
  };
  const auto enter = [&] {
    if (kCasts && cursor.stop > cursor.start) op.of_scale(scales.given[cursor.index], encoding);
  };
  enter();
  const auto go = [&](int position, int) {
    if ((!kBackwards || position >= cursor.begin) && position < cursor.next) return;
    leave();
    kBackwards ? cursor.seek_around(segments, position) : cursor.seek(segments, position);
    enter();
  };
  const auto take_whole = [&](int step, const Fetched& x) {
    const Value v = source.value(x);
    amax.add(v);
    if constexpr (kCasts) op.store(origin + step, 16, op.codes(v, encoding));
  };
  const auto take_mixed = [&](int step) {
    take_mixed_step<kWalk>(cursor, segments, step, origin + step, source, op, scales, ranges,
                           encoding, amax, go);
  };
  const auto take = [&](int turn, const Fetched(&x)[kSteps]) {
    const int chunk = chunk_of(turn);
    go(chunk, chunk);
    if (whole(turn) && cursor.covers(chunk, kChunk)) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) take_whole(chunk + k * kStep, x[k]);
    } else if constexpr (kSteps == 1) {
      take_mixed(chunk);
    } else {
      take_steps(cursor, chunk, end, origin, whole(turn), source, x, go, take_whole, take_mixed);
    }
  };
#pragma unroll 1
  for (; turn < end; turn += kStride) {
    if constexpr (kSteps == 1) {
      const Fetched x[1] = {fetched[0]};
      fetch(turn + kStride);
      take(turn, x);
    } else {
      take(turn, fetched);
      fetch(turn + kStride);
    }
  }
  leave();

  if constexpr (kCasts) {
    if (gridDim.x == 1) return;
    sync_grid();
    if (threadIdx.x < 32) finish_amax(base, end, segments, scales, ranges);
  }
}

// Where a tile of launch 2 begins, and the range of launch 1 that contains it.
struct Tile {
  int64_t begin;  // -1: no tile
  int range;
};

// One tile per thread block. The hardware starts them in order, so that concurrent reads and writes
// are close together.
template <class Source, class Op>
__device__ __forceinline__ void ragged_tile(Tile at, const Source& source, const Op& op,
                                            const Segments& segments, const RaggedScales& scales,
                                            const SegmentRanges& ranges) {
  constexpr int kSteps = Source::kTileSteps, kChunk = kSteps * kStep;
  const int lane = threadIdx.x & 31;
  if (at.begin < 0) {
    wait_for_previous();
    return;
  }
  const int64_t base = at.begin, left = segments.numel - base, origin = base + 16 * lane;
  const int end = left < kTile<Source> ? static_cast<int>(left) : kTile<Source>;
  const int chunk = (threadIdx.x >> 5) * kChunk;
  const bool whole = source.vector && chunk + kChunk <= end;
  if (is_first()) {
    OffsetsWindow::prefetch(segments, base);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (whole) source.prefetch(origin + chunk + k * kStep);
    }
  }
  wait_for_previous();
  let_next_begin();
  const OffsetsWindow window(segments, base);
  typename Source::Fetched x[kSteps];
  if (whole) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) x[k] = source.fetch(origin + chunk + k * kStep);
  }
  // Loads what the amax probably needs before the exact ranges are known; otherwise one load would
  // wait for another. The partials of 128 ranges cover most segments. Goes through the L1 cache,
  // because all tiles need the same few lines.
  constexpr int kThreadsHere = Source::kTileThreads;
  constexpr int kPieces = (128 + kThreadsHere - 1) / kThreadsHere, kNear = kPieces * kThreadsHere;
  const int near_first = at.range - kNear / 2;
  const int near_mine = near_first + static_cast<int>(threadIdx.x);
  uint32_t pieces[kPieces] = {}, amaxes = 0;
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    const int range = near_mine + k * kThreadsHere;
    if (range >= 0 && range < ranges.count) pieces[k] = float_bits(ranges.partials[range]);
  }
  if (threadIdx.x < 32 && window.first + lane < segments.count) {
    amaxes = float_bits(scales.amax[window.first + lane]);
  }
  SegmentCursor cursor = {base};
  const SegmentBounds first = cursor.find(segments, 0, window);
  typename Op::Encoding encoding = {};
  const auto take_whole = [&](int step, const typename Source::Fetched& x) {
    op.store(origin + step, 16, op.codes(source.value(x), encoding));
  };
  // All warps decide alike, even if offsets do not ascend: from the tile's first element.
  if (source.vector && cursor.covers(0, kTile<Source>)) {
    const int near = cursor.index - window.first;
    float part;
    if (near >= 0 && near < 32 && first.start >= near_first * ranges.span &&
        first.stop <= (near_first + kNear) * ranges.span) {
      uint32_t bits = __shfl_sync(0xffffffffu, amaxes, near);
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int64_t begin = (near_mine + k * kThreadsHere) * ranges.span;
        if (begin > first.start && begin < first.stop) bits = max(bits, pieces[k]);
      }
      part = bits_float(bits);
    } else {
      part = amax_of_segment<true>(cursor.index, ranges.after(first), scales, ranges, threadIdx.x,
                                   kThreadsHere);
    }
    __shared__ BlockReduce::Scratch scratch;
    BlockReduce reduce(scratch);
    encode_segment(cursor, reduce.max(part), chunk, op, scales, encoding);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) take_whole(chunk + k * kStep, x[k]);
    return;
  }

  const auto enter = [&](const SegmentBounds& at, int from) {
    if (at.stop <= at.start) return;
    const float all =
        warp_max(amax_of_segment<true>(cursor.index, ranges.after(at), scales, ranges, lane, 32));
    encode_segment(cursor, all, from, op, scales, encoding);
  };
  if (chunk < cursor.next) enter(first, chunk);
  const auto go = [&](int position, int from) {
    if (position < cursor.next) return;
    enter(cursor.seek(segments, position), from);
  };
  Amax<typename Source::Value::Element, Op::kKeepsNan> unused;
  const auto take_mixed = [&](int step) {
    take_mixed_step<Walk::kComputed>(cursor, segments, step, origin + step, source, op, scales,
                                     ranges, encoding, unused, go);
  };
  take_steps(cursor, chunk, end, origin, whole, source, x, go, take_whole, take_mixed);
}

// The order of the tiles: memory order, so that concurrent reads and writes are close together,
// except that the tiles of each range that launch 1 read last come first.
struct TileOrder {
  Divisor ranges;
  uint32_t early;  // early tiles of each range; there are at most early + late
  Divisor late;
  bool at_end;  // whether the early tiles are at the end of a range

  int64_t tiles() const { return static_cast<int64_t>(ranges.divisor) * (early + late.divisor); }
  // Tile i in this order.
  template <int kTileSize>
  __device__ __forceinline__ Tile tile(uint32_t i, int64_t span) const {
    const bool is_early = i < early * ranges.divisor;
    if (!is_early) i -= early * ranges.divisor;
    const Divisor& by = is_early ? ranges : late;
    const uint32_t quotient = by.quotient_of(i), rest = i - quotient * by.divisor;
    const uint32_t range = is_early ? rest : quotient, turn = is_early ? quotient : rest;
    const auto first_of = [&](uint32_t range) {
      return static_cast<int64_t>((range * static_cast<uint64_t>(span) + kTileSize - 1) /
                                  kTileSize);
    };
    const int64_t first = first_of(range);
    int64_t behind = first_of(range + 1), tile = first + turn;
    if (is_early && at_end) tile = behind - early + turn;
    if (!is_early && at_end) behind -= early;
    if (!is_early && !at_end) tile += early;
    return {tile >= first && tile < behind ? tile * kTileSize : -1, static_cast<int>(range)};
  }
};

// First the part of each range that launch 1 read last and that is still in the L2 cache: about 30
// MB in total.
template <class Source>
TileOrder tile_order(const SegmentRanges& ranges, bool at_end) {
  constexpr int64_t kTileBytes = kTile<Source> / 16 * sizeof(typename Source::Fetched);
  constexpr int64_t kEarly = (128 << 10) / kTileBytes;
  const int64_t tiles = (ranges.span + kTile<Source> - 1) / kTile<Source>;  // per range
  const int64_t early = tiles - 1 < kEarly ? tiles - 1 : kEarly;
  return {Divisor(ranges.count), static_cast<uint32_t>(early),
          Divisor(static_cast<uint32_t>(tiles - early)), at_end};
}

template <class Source, class Op>
__global__ void __launch_bounds__(Source::kTileThreads,
                                  blocks_of_threads<Source, Walk::kComputed>(kCompiledFor) *
                                      (kThreads / Source::kTileThreads))
    ragged_tile_kernel(Source source, Op op, Segments segments, RaggedScales scales,
                       SegmentRanges ranges, TileOrder order) {
  ragged_tile(order.tile<kTile<Source>>(blockIdx.x, ranges.span), source, op, segments, scales,
              ranges);
}

// One launch of one thread block for buffers up to this size, sixteen values per thread, which
// spares the host a launch and a workspace.
constexpr int kAloneThreads = 512, kAloneSegments = 512, kAloneValues = 16 * kAloneThreads;

// The whole buffer by such a thread block: `see(i, values)` gets each sixteen values before the
// barrier. Returns the segments as they are in shared memory, in elements.
template <class Source, class Op, class See>
__device__ __forceinline__ Segments ragged_alone(const Source& source, const Op& op,
                                                 Segments segments, const RaggedScales& scales,
                                                 See&& see) {
  using Value = typename Source::Value;
  constexpr int kStride = 16 * kAloneThreads;
  __shared__ int64_t offsets[kAloneSegments + 1], sizes[kAloneSegments];
  __shared__ uint32_t amaxes[kAloneSegments];
  const int lane = threadIdx.x & 31, origin = 16 * static_cast<int>(threadIdx.x);
  const int numel = static_cast<int>(segments.numel), count = static_cast<int>(segments.count);
  const auto whole = [&](int mine) { return source.vector && mine + 16 <= numel; };
  typename Source::Fetched ahead = {};
  const auto fetch = [&](int mine) {
    if (whole(mine)) ahead = source.fetch(mine);
  };
  if (whole(origin)) source.prefetch(origin);
  wait_for_previous();
  let_next_begin();
  fetch(origin);
  for (int i = threadIdx.x; i <= count; i += kAloneThreads) {
    offsets[i] = segments.offset(i);
    if (i < count) sizes[i] = segments.size(i), amaxes[i] = 0u;
  }
  segments.offsets = offsets, segments.sizes = sizes;
  segments.row = 1, segments.rows = numel;
  __syncthreads();

  const auto encode = [&](int i, typename Op::Encoding& encoding) {
    return scales.given != nullptr ? op.of_scale(scales.given[i], encoding)
                                   : op.of_amax(bits_float(amaxes[i]), encoding);
  };
  const auto walk = [&](auto casts) {
    constexpr bool kCasts = decltype(casts)::value;
#pragma unroll 1
    for (int mine = origin; mine - 16 * lane < numel; mine += kStride) {
      const int step = mine - 16 * lane;
      const Value v = whole(mine) ? source.value(ahead) : source.load(mine);
      fetch(mine + kStride);
      SegmentCursor cursor = {0};
      cursor.find(segments, step);
      const bool covered = cursor.covers(step, kStep);
      typename Op::Codes codes = {};
      const auto take = [&](int i) {
        const Part part = part_of<Op>(segments.bounds(i), mine);
        if (!covered && part.empty()) return;
        const Value own = masked(v, part);
        if constexpr (kCasts) {
          typename Op::Encoding encoding = {};
          encode(i, encoding);
          op.merge(codes, op.codes(own, encoding), part);
        } else {
          Amax<typename Value::Element, Op::kKeepsNan> amax;
          amax.add(own);
          uint32_t bits = float_bits(amax.result());
          if (covered) bits = __reduce_max_sync(0xffffffffu, bits);
          if (!covered || lane == 0) atomicMax(amaxes + i, bits);
        }
      };
      const int first = max(cursor.index, 0), behind = covered ? first + 1 : count;
      if constexpr (!Op::kWholeBlocks) {
        visit_own_segments(segments, first, behind, mine, take);
      } else if (first < behind) {
        take(own_segment_at(segments, first, behind, mine));
      }
      if constexpr (kCasts) {
        op.store(mine, numel - mine, codes);
      } else {
        see(mine, v);
      }
    }
    fetch(origin);
  };
  walk(std::false_type());
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kAloneThreads) {
    typename Op::Encoding ignored;
    scales.amax[i] = bits_float(amaxes[i]);
    scales.inverse[i] = encode(i, ignored);
  }
  walk(std::true_type());
  return segments;
}

template <class Source, class Op>
__global__ void __launch_bounds__(kAloneThreads)
    ragged_alone_kernel(Source source, Op op, Segments segments, RaggedScales scales) {
  ragged_alone(source, op, segments, scales, [](int, const typename Source::Value&) {});
}

#ifndef __CUDACC_RTC__
inline bool fits_alone(const RaggedInput& x) {
  return x.numel <= kAloneValues && x.count <= kAloneSegments;
}

// Floats of workspace for amaxes.
inline int64_t partials_of(const RaggedInput& x) {
  return fits_alone(x) ? 0 : kMaxPartials;
}

// How the buffer is divided into the ranges of a launch's thread blocks.
template <class Source, Walk kWalk>
SegmentRanges ranges_of(int64_t numel, float* partials) {
  constexpr int kChunk = kWalkSteps<Source, kWalk> * kStep, kWarps = kThreads / 32;
  const int64_t chunks = (numel + kChunk - 1) / kChunk;
  const int64_t most = persistent_grid((chunks + kWarps - 1) / kWarps,
                                       blocks_of_threads<Source, kWalk>(device_traits().major));
  const int64_t grid = most < kMaxPartials ? most : kMaxPartials;
  const int64_t span = chunks < 1 ? 1 : (chunks + grid - 1) / grid;
  return {span * kChunk, chunks < 1 ? 1 : static_cast<int>((chunks + span - 1) / span), partials};
}

inline Segments segments_of(const RaggedInput& x) {
  return Segments({x.offsets, x.sizes, x.count, x.numel, x.row});
}

template <Walk kWalk, class Source, class Op>
cudaError_t launch_walk(const Source& source, const Op& op, const RaggedInput& x,
                        const RaggedScales& scales, const SegmentRanges& ranges,
                        cudaStream_t stream) {
  const bool waits = kWalk == Walk::kGiven && ranges.count > 1;
  return launch<&ragged_walk_kernel<Source, Op, kWalk>>(
      {ranges.count, kThreads, waits ? Start::kCooperative : Start::kOverlapped}, stream, source,
      op, segments_of(x), scales, ranges);
}

template <class Source, class Op>
cudaError_t launch_ragged(const Source& source, const Op& op, const RaggedInput& x,
                          const RaggedScales& scales, cudaStream_t stream) {
  if (fits_alone(x)) {
    return launch<&ragged_alone_kernel<Source, Op>>({1, kAloneThreads, Start::kOverlapped}, stream,
                                                    source, op, segments_of(x), scales);
  }
  if (scales.given != nullptr) {
    const SegmentRanges ranges = ranges_of<Source, Walk::kGiven>(x.numel, scales.partials);
    return launch_walk<Walk::kGiven>(source, op, x, scales, ranges, stream);
  }
  const SegmentRanges ranges = ranges_of<Source, Walk::kAmax>(x.numel, scales.partials);
  const cudaError_t error = launch_walk<Walk::kAmax>(source, op, x, scales, ranges, stream);
  if (error != cudaSuccess || x.numel == 0) return error;
  const TileOrder order = tile_order<Source>(ranges, false);
  return launch<&ragged_tile_kernel<Source, Op>>(
      {order.tiles(), Source::kTileThreads, Start::kOverlapped}, stream, source, op, segments_of(x),
      scales, ranges, order);
}
#endif

}  // namespace jitquant
