// The kernels that quantize many tensors of one flat buffer, templates over where the values come
// from and over what is made of them:
//   ragged_walk_kernel   launch 1 of computed scales: the amaxes. And the only launch where scales
//                         are given: amaxes and elements
//   ragged_tile_kernel   launch 2: the elements
// Launch 1 cuts the buffer into as many ranges as it has blocks of threads. An amax needs no
// launch that zeroes it: a segment whose first element is in a block's range is that block's, which
// sets its amax to 0 before its warps add to it. The segments of the ranges before end in at most
// one piece a range, which goes to a workspace of a float for each range, however many segments
// there are; and a segment's amax is the largest of its own and those of the ranges that it goes on
// in. It goes through each range from the end to the beginning, where launch 2 begins: the L2 cache
// has that still.
//
// A source has `numel` and
//   Value             the type of a block of its values
//   kTileThreads, kTileSteps  of a block of ragged_tile_kernel, and the steps of kStep elements
//                             that each of its warps has
//   vector            the buffer is aligned to 16 bytes
//   Fetched fetch(i)  what has to be loaded for sixteen elements from i on, which are all there
//   Value value(x)    their values
//   Value load(i)     the same where some may not be there, or not aligned: zeros for those
#pragma once

#include "jitquant/reduce.cuh"
#include "launch.h"
#include "segments.cuh"

namespace jitquant {

// Some ranges, one after another.
struct RangesOf {
  int first, last;
};

// The ranges of the blocks of launch 1, and what segments of earlier ranges have in each.
struct SegmentRanges {
  int64_t span;  // elements
  int count;
  float* partials;

  __device__ __forceinline__ int of(int64_t position) const {
    return static_cast<int>(quotient(position, span));
  }
  // That a segment, which is not empty, goes on in.
  __device__ __forceinline__ RangesOf after(const SegmentBounds& at) const {
    return {of(at.start) + 1, of(at.stop - 1)};
  }
};

template <class T>
struct BufferSource {
  using Element = T;
  using Value = Block<T>;
  using Fetched = Block<T>;
  static constexpr int kTileThreads = 64, kTileSteps = sizeof(T) == 2 ? 4 : 2;
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

// The elements of a segment among sixteen; of NVFP4 none where it begins within them, which belong
// to another.
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

// Elements of a tile of ragged_tile_kernel.
template <class Source>
constexpr int kTile = Source::kTileThreads / 32 * Source::kTileSteps * kStep;

// How the work is cut, by what a thread fetches for sixteen values.
template <class Source>
constexpr bool kSmall = sizeof(typename Source::Fetched) <= 32;
// Steps of neighbouring elements that a warp has at once: a chunk. Of several, of which nothing is
// made, all are loaded when those before are done with: the registers that are left are enough for
// a block of launch 2, which can begin before launch 1 has ended.
template <class Source, Walk kWalk>
constexpr int kWalkSteps = kSmall<Source> && kWalk == Walk::kAmax ? 4 : 1;
// Blocks of threads on a multiprocessor: launch 1 leaves room for those of launch 2.
// From compute capability 10.0 on the compiler wants more registers.
template <class Source, Walk kWalk>
constexpr int blocks_of_threads(int major) {
  if (!kSmall<Source>) return kWalk == Walk::kGiven ? 2 : 3;
  if (kWalk == Walk::kAmax) return 2;
  return major >= 10 ? 3 : 4;
}
#if defined(__CUDA_ARCH__)
constexpr int kCompiledFor = __CUDA_ARCH__ / 100;
#else
constexpr int kCompiledFor = 0;
#endif

// A thread's part of the amax of segment i, which goes on in the ranges `in`, where `threads` share
// it. kCached: through the L1 cache, which has it after the first of many; only behind the launch
// that has written it.
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

// Of a range, where all pieces are there: the amax of the one segment, if any, that begins in it
// and goes on in others. A warp.
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

// The encoding of the cursor's segment by its amax, which the warp that has the segment's first
// element tells of: `position` is the first that this one has of it.
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

// Those of sixteen elements from `mine` on that are of segments which begin and end in one step:
// from segment `first` to before `behind`, each by itself. A thread, as there may be hundreds.
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
    // All that have elements of the segment tell the same of it.
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

// A step of a warp in which segments begin or end, or which is not all there: to `amax` and, as
// codes, to the result. The cursor is at the segment of `step`. `mine` is where this lane's
// elements are; `go(position, from)` brings the cursor to the segment of a position, of which those
// from `from` on are this warp's.
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

// The steps of a chunk from `chunk` on, one after another: those that are one segment's by
// `take_whole(step, fetched)`, the others by `take_mixed(step)`. Of what has been fetched, where
// all of it is there, only the first step is used, and the others are fetched once more, one ahead:
// to hold all meanwhile there are no registers.
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

  // The segments that begin here: what only this block adds to.
  __shared__ int first_here;
  if (threadIdx.x < 32) {
    const int i = blockIdx.x == 0 ? 0 : search_offsets(segments, base - 1, window).low;
    if (lane == 0) first_here = i, ranges.partials[blockIdx.x] = 0.0f;
  }
  __syncthreads();
  const bool is_last = blockIdx.x + 1 == gridDim.x;
  for (int64_t i = first_here + threadIdx.x;
       i < segments.count && (is_last || segments.offsets[i] < base + end); i += kThreads) {
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

// Where a tile of launch 2 begins, and the range of launch 1 in which that is.
struct Tile {
  int64_t begin;  // -1: there is none
  int range;
};

// A tile, of a block of threads: the hardware starts them in order, so that what is read and
// written at a time lies together.
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
  // What the amax likely needs, before it is known what: otherwise one load waits for another. The
  // pieces of 128 ranges are those of most segments. Through the L1 cache, as all tiles need the
  // same few lines.
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
  const SegmentBounds first = cursor.find(segments, chunk, window);
  typename Op::Encoding encoding = {};
  const auto take_whole = [&](int step, const typename Source::Fetched& x) {
    op.store(origin + step, 16, op.codes(source.value(x), encoding));
  };
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
  enter(first, chunk);
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

// The order of the tiles: as they lie, so that what is read and written at a time lies together;
// but some of each range, which launch 1 has read last, come before all others.
struct TileOrder {
  Divisor ranges;
  uint32_t early;  // tiles of a range, of at most early + late
  Divisor late;
  bool at_end;  // where the early ones are

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

// First as much of each range as launch 1 has read last and the L2 cache has still: about 30 MB in
// all.
template <class Source>
TileOrder tile_order(const SegmentRanges& ranges, bool at_end) {
  constexpr int64_t kTileBytes = kTile<Source> / 16 * sizeof(typename Source::Fetched);
  constexpr int64_t kEarly = (128 << 10) / kTileBytes;
  const int64_t tiles = (ranges.span + kTile<Source> - 1) / kTile<Source>;  // of a range
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

#ifndef __CUDACC_RTC__
// How the buffer is cut into the ranges of a launch's blocks.
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
  return {x.offsets, x.sizes, x.count, x.numel};
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
