// Ragged tensors: many tensors in one flat buffer. A warp or thread block takes consecutive
// elements of the buffer, whatever the segments are. Its lanes search together for the segment of
// the first element, and then walk along with the data.
#pragma once

#include "jitquant/dispatch.cuh"
#include "jitquant/fp8.cuh"
#include "jitquant/walk.cuh"

namespace jitquant {

constexpr int kStep = 512;  // elements that a warp takes at once

// Fewer than 2^30 segments.
struct Segments : SegmentTable {
  float density;  // segments per element

  explicit Segments(const SegmentTable& table)
      : SegmentTable(table),
        density(numel == 0 ? 0.0f : static_cast<float>(count) / static_cast<float>(numel)) {}
};

// The position of an element among the offsets. -1 stands for an offset before the first: unlike
// INT64_MIN, a position can be subtracted from it.
struct OffsetsAround {
  int low, high;     // the first offset past the position is one of these, or between them
  int64_t from, to;  // offsets low - 1 and high
};

// Narrows the interval; each lane has offset `first + lane * step`.
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
// Narrows it down to one offset: low == high. Called by all lanes of a warp together. They look at
// every `step`-th offset from `first` on, and then divide what is left among them.
__device__ __forceinline__ void search_offsets(const Segments& segments, int64_t position,
                                               int first, int step, OffsetsAround& around) {
#pragma unroll 1
  while (around.low < around.high) {
    const int i = first + static_cast<int>(threadIdx.x & 31) * step;
    const int64_t offset = i < around.low ? -1 : (i < around.high ? segments.offset(i) : INT64_MAX);
    narrow(around, position, first, step, offset);
    step = (around.high - around.low + 31) >> 5;
    first = around.low;
  }
}

// Consecutive offsets, one per lane, that probably surround a position if segments have similar
// sizes.
struct OffsetsWindow {
  int first;
  int64_t offset;

  __device__ __forceinline__ OffsetsWindow(const Segments& segments, int64_t position)
      : first(first_of(segments, position)) {
    const int i = first + static_cast<int>(threadIdx.x & 31);
    offset = i <= segments.count ? segments.offset(i) : INT64_MAX;
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
// The same for any position, starting from the window.
__device__ __forceinline__ OffsetsAround search_offsets(const Segments& segments, int64_t position,
                                                        const OffsetsWindow& window) {
  OffsetsAround around = {0, static_cast<int>(segments.count) + 1, -1, INT64_MAX};
  narrow(around, position, window.first, 1, window.offset);
  search_offsets(segments, position, around.low, (around.high - around.low + 31) >> 5, around);
  return around;
}

// The last segment that begins at or before `position`; -1 before the first, `count` past the last
// offset. Called by all lanes of a warp together.
__device__ __forceinline__ int segment_at(const Segments& segments, int64_t position) {
  return search_offsets(segments, position, OffsetsWindow(segments, position)).low - 1;
}

// The same among segments from `first` to before `behind` (`first` if none begins there), by one
// thread. Starts near `first`.
__device__ __forceinline__ int own_segment_at(const Segments& segments, int first, int behind,
                                              int64_t position) {
  int step = 1;
#pragma unroll 1
  for (; first + step < behind && segments.offset(first + step) <= position; step *= 2) {
    first += step;
  }
  if (first + step < behind) behind = first + step;
#pragma unroll 1
  while (behind - first > 1) {
    const int half = (first + behind) >> 1;
    (segments.offset(half) <= position ? first : behind) = half;
  }
  return first;
}

// Calls `f` with each segment from `first` to before `behind` that may contain some of the sixteen
// elements from `mine` on. Called by one thread.
template <class F>
__device__ __forceinline__ void visit_own_segments(const Segments& segments, int first, int behind,
                                                   int64_t mine, F&& f) {
#pragma unroll 1
  for (int64_t position = mine; first < behind && position < mine + 16; ++first) {
    first = own_segment_at(segments, first, behind, position);
    f(first);
    position = segments.offset(first + 1);
  }
}

// The position of a walk through a part of the buffer, which has at most kFar elements. Positions
// are relative to that part. All lanes of a warp are at the same segment.
struct SegmentCursor {
  static constexpr int kFar = 1 << 30;
  int64_t base;     // where the part begins
  int index;        // the last segment that begins at or before the position; -1 or `count` if
                    // there is none
  int start, stop;  // of the segment; -1 before the part
  int begin, next;  // start of the segment, or of the gap at the position, and of the next segment

  __device__ __forceinline__ int near(int64_t position) const {
    const int64_t i = position - base;
    return i < 0 ? -1 : (i < kFar ? static_cast<int>(i) : kFar);
  }
  // Moves to the segment of `position` and returns its bounds in the buffer. All lanes share the
  // search; its last reads are the bounds.
  __device__ __forceinline__ SegmentBounds find(const Segments& segments, int position,
                                                const OffsetsWindow& window) {
    return enter(segments, search_offsets(segments, base + position, window));
  }
  __device__ __forceinline__ SegmentBounds find(const Segments& segments, int position) {
    return find(segments, position, OffsetsWindow(segments, base + position));
  }
  // The same if `position` is at or after `next`: moves forward, probably not far.
  __device__ __forceinline__ SegmentBounds seek(const Segments& segments, int position) {
    OffsetsAround around = {index + 1, static_cast<int>(segments.count) + 1, -1, INT64_MAX};
    search_offsets(segments, base + position, index + 1, 1, around);
    return enter(segments, around);
  }
  // The same, but `position` may also be before `begin`: moves backward. Not if it is also after
  // `next`, as where offsets do not ascend: a walk forward would never end.
  __device__ __forceinline__ SegmentBounds seek_around(const Segments& segments, int position) {
    if (position >= next) return seek(segments, position);
    OffsetsAround around = {0, index, -1, base + begin};
    search_offsets(segments, base + position, index - 32, 1, around);
    return enter(segments, around);
  }
  __device__ __forceinline__ bool covers(int position, int count) const {
    return start <= position && position + count <= stop;
  }
  // Whether `count` elements from `position` on, near the cursor, belong to no segment.
  __device__ __forceinline__ bool misses(int position, int count) const {
    return stop <= position && position + count <= next;
  }

 private:
  __device__ __forceinline__ SegmentBounds enter(const Segments& segments,
                                                 const OffsetsAround& around) {
    index = around.low - 1;
    SegmentBounds at = {base, base};
    if (index >= 0 && index < segments.count) {
      at = segment_between(around.from, around.to, segments.size(index), segments.numel);
    }
    start = near(at.start), stop = near(at.stop);
    begin = near(around.from), next = near(around.to);
    return at;
  }
};

// Which of sixteen elements from `position` on belong to a segment.
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

// Elements per warp: whole steps.
inline int64_t range_of_warp(int64_t numel, int64_t warps) {
  const int64_t steps = (numel + kStep - 1) / kStep;
  return (steps + warps - 1) / warps * kStep;
}

}  // namespace jitquant
