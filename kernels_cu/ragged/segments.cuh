// Many tensors in one flat buffer. A warp or a block of threads has neighbouring elements of it,
// whatever the segments are: it finds the segment of the first one by a search that its lanes
// share, and then walks with the data.
#pragma once

#include "jitquant/dispatch.cuh"
#include "jitquant/fp8.cuh"
#include "jitquant/walk.cuh"

namespace jitquant {

constexpr int kStep = 512;  // elements that a warp takes at once

struct Segments {
  const int64_t* offsets;
  const int64_t* sizes;  // may be null
  int64_t count, numel;  // less than 2^30 segments
  float density;         // segments an element

  Segments(const int64_t* offsets, const int64_t* sizes, int64_t count, int64_t numel)
      : offsets(offsets),
        sizes(sizes),
        count(count),
        numel(numel),
        density(numel == 0 ? 0.0f : static_cast<float>(count) / static_cast<float>(numel)) {}

  __device__ __forceinline__ SegmentBounds bounds(int64_t i) const {
    return segment_bounds(offsets, sizes, i, numel);
  }
};

// Where a position is among the offsets.
struct OffsetsAround {
  int low, high;     // the first offset behind the position is one of these, or between them
  int64_t from, to;  // offsets low - 1 and high
};

// Narrows it down with what each lane has of offset `first + lane * step`.
__device__ __forceinline__ void narrow(OffsetsAround& around, int64_t position, int first, int step,
                                       int64_t offset) {
  const int count = __popc(__ballot_sync(0xffffffffu, offset <= position));
  const int behind = first + count * step;
  if (count < 32 && behind < around.high) {
    around.high = behind;
    around.to = __shfl_sync(0xffffffffu, offset, count);
  }
  if (count > 0) {
    around.low = behind - step + 1;
    around.from = __shfl_sync(0xffffffffu, offset, count - 1);
  }
}
// The same down to one offset: low == high. All lanes of a warp together. They look at offsets from
// `first` on, every `step`-th, and then each at a part of what is left.
__device__ __forceinline__ void search_offsets(const Segments& segments, int64_t position,
                                               int first, int step, OffsetsAround& around) {
#pragma unroll 1
  while (around.low < around.high) {
    const int i = first + static_cast<int>(threadIdx.x & 31) * step;
    const int64_t offset =
        i < around.low ? INT64_MIN : (i < around.high ? segments.offsets[i] : INT64_MAX);
    narrow(around, position, first, step, offset);
    step = (around.high - around.low + 31) >> 5;
    first = around.low;
  }
}

// Neighbouring offsets, one of each lane: those around a position, likely, if segments are alike.
struct OffsetsWindow {
  int first;
  int64_t offset;

  __device__ __forceinline__ OffsetsWindow(const Segments& segments, int64_t position)
      : first(first_of(segments, position)) {
    const int i = first + static_cast<int>(threadIdx.x & 31);
    offset = i <= segments.count ? segments.offsets[i] : INT64_MAX;
  }

  static __device__ __forceinline__ void prefetch(const Segments& segments, int64_t position) {
    const int i = first_of(segments, position) + static_cast<int>(threadIdx.x & 31);
    if (threadIdx.x < 32 && i <= segments.count) jitquant::prefetch(segments.offsets + i);
  }

 private:
  static __device__ __forceinline__ int first_of(const Segments& segments, int64_t position) {
    const int there = static_cast<int>(segments.count) + 1;
    const int likely = static_cast<int>(static_cast<float>(position) * segments.density) - 15;
    return max(min(likely, there - 32), 0);
  }
};
// The same for any position, from what the window has on.
__device__ __forceinline__ OffsetsAround search_offsets(const Segments& segments, int64_t position,
                                                        const OffsetsWindow& window) {
  OffsetsAround around = {0, static_cast<int>(segments.count) + 1, INT64_MIN, INT64_MAX};
  narrow(around, position, window.first, 1, window.offset);
  search_offsets(segments, position, around.low, (around.high - around.low + 31) >> 5, around);
  return around;
}

// The last segment that begins at or before `position`; -1 before the first, and `count` behind the
// last offset. All lanes of a warp together.
__device__ __forceinline__ int segment_at(const Segments& segments, int64_t position) {
  return search_offsets(segments, position, OffsetsWindow(segments, position)).low - 1;
}

// The same among segments from `first` to before `behind`, the first where none begins there, by
// one thread: likely one of the first.
__device__ __forceinline__ int own_segment_at(const Segments& segments, int first, int behind,
                                              int64_t position) {
  int step = 1;
#pragma unroll 1
  for (; first + step < behind && segments.offsets[first + step] <= position; step *= 2) {
    first += step;
  }
  if (first + step < behind) behind = first + step;
#pragma unroll 1
  while (behind - first > 1) {
    const int half = (first + behind) >> 1;
    (segments.offsets[half] <= position ? first : behind) = half;
  }
  return first;
}

// Calls `f` with each segment from `first` to before `behind` that may have elements of sixteen
// from `mine` on. By one thread.
template <class F>
__device__ __forceinline__ void visit_own_segments(const Segments& segments, int first, int behind,
                                                   int64_t mine, F&& f) {
#pragma unroll 1
  for (int64_t position = mine; first < behind && position < mine + 16; ++first) {
    first = own_segment_at(segments, first, behind, position);
    f(first);
    position = segments.offsets[first + 1];
  }
}

// Where a walk through a part of the buffer is, by positions in that part, which has at most kFar
// elements. All lanes of a warp are at the same segment.
struct SegmentCursor {
  static constexpr int kFar = 1 << 30;
  int64_t base;     // where the part begins
  int index;        // the last segment that begins at or before where the walk is; -1 or `count`
                    // where there is none
  int start, stop;  // of the segment; -1 before the part
  int begin, next;  // where it, or what is no segment's there, begins, and the segment after it

  __device__ __forceinline__ int near(int64_t position) const {
    const int64_t i = position - base;
    return i < 0 ? -1 : (i < kFar ? static_cast<int>(i) : kFar);
  }
  // Goes to the segment of `position` and returns its bounds in the buffer. All lanes share the
  // search, and what they have read at its end are the bounds.
  __device__ __forceinline__ SegmentBounds find(const Segments& segments, int position,
                                                const OffsetsWindow& window) {
    return enter(segments, search_offsets(segments, base + position, window));
  }
  __device__ __forceinline__ SegmentBounds find(const Segments& segments, int position) {
    return find(segments, position, OffsetsWindow(segments, base + position));
  }
  // The same where `position` is not before `next`: to a later segment, likely close behind.
  __device__ __forceinline__ SegmentBounds seek(const Segments& segments, int position) {
    OffsetsAround around = {index + 1, static_cast<int>(segments.count) + 1, INT64_MIN, INT64_MAX};
    search_offsets(segments, base + position, index + 1, 1, around);
    return enter(segments, around);
  }
  // The same also where it is before `begin`: to an earlier one.
  __device__ __forceinline__ SegmentBounds seek_around(const Segments& segments, int position) {
    if (position >= begin) return seek(segments, position);
    OffsetsAround around = {0, index, INT64_MIN, base + begin};
    search_offsets(segments, base + position, index - 32, 1, around);
    return enter(segments, around);
  }
  __device__ __forceinline__ bool covers(int position, int count) const {
    return start <= position && position + count <= stop;
  }
  // Whether elements from where the walk is on are no segment's.
  __device__ __forceinline__ bool misses(int position, int count) const {
    return stop <= position && position + count <= next;
  }

 private:
  __device__ __forceinline__ SegmentBounds enter(const Segments& segments,
                                                 const OffsetsAround& around) {
    index = around.low - 1;
    SegmentBounds at = {base, base};
    if (index >= 0 && index < segments.count) {
      const int64_t size = segments.sizes != nullptr ? segments.sizes[index] : segments.numel;
      at = segment_between(around.from, around.to, size, segments.numel);
    }
    start = near(at.start), stop = near(at.stop);
    begin = near(around.from), next = near(around.to);
    return at;
  }
};

// Which of sixteen elements from `position` on are those of a segment.
struct Part {
  int first, behind;

  __device__ __forceinline__ Part(const SegmentBounds& at, int64_t position)
      : first(within(at.start - position)), behind(within(at.stop - position)) {}
  __device__ __forceinline__ Part(const SegmentCursor& at, int position)
      : first(within(at.start - position)), behind(within(at.stop - position)) {}
  __device__ __forceinline__ bool has(int i) const { return i >= first && i < behind; }
  __device__ __forceinline__ bool empty() const { return first >= behind; }

 private:
  template <class Integer>
  static __device__ __forceinline__ int within(Integer i) {
    return i < 0 ? 0 : (i < 16 ? static_cast<int>(i) : 16);
  }
};

// Elements of each warp's range: whole steps.
inline int64_t range_of_warp(int64_t numel, int64_t warps) {
  const int64_t steps = (numel + kStep - 1) / kStep;
  return (steps + warps - 1) / warps * kStep;
}

}  // namespace jitquant
