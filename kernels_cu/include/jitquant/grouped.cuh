// Many tensors in one flat buffer. A warp or a block of threads has neighbouring elements of it,
// whatever the groups are: it finds the group of the first one by a search that its lanes share,
// and then walks with the data.
#pragma once

#include "jitquant/fp8.cuh"
#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

constexpr int kStep = 512;  // elements that a warp takes at once

struct Groups {
  const int64_t* offsets;
  const int64_t* sizes;  // may be null
  int64_t count, numel;  // less than 2^30 groups

  __device__ __forceinline__ GroupBounds bounds(int64_t i) const {
    return group_bounds(offsets, sizes, i, numel);
  }
};

// The last group that begins at or before `position`; -1 before the first, and `count` behind the
// last offset. All lanes of a warp together, each with a part of what is left to be searched.
__device__ __forceinline__ int64_t group_at(const Groups& groups, int64_t position) {
  int64_t low = 0, high = groups.count + 1;  // the first offset behind the position is in between
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  while (low < high) {
    const int64_t step = (high - low + 31) >> 5, i = low + lane * step;
    const bool before = i < high && groups.offsets[i] <= position;
    const int count = __popc(__ballot_sync(0xffffffffu, before));
    if (count == 0) break;
    const int64_t first = low;
    low = first + (count - 1) * step + 1;
    if (first + count * step < high) high = first + count * step;
  }
  return low - 1;
}

// Where a walk through a part of the buffer is, by positions in that part, which has at most kFar
// elements. All lanes of a warp are at the same group.
struct GroupCursor {
  static constexpr int kFar = 1 << 30;
  int64_t base;     // where the part begins
  int index;        // the last group that begins at or before where the walk is; -1 or `count`
                    // where there is none
  int start, stop;  // of the group; -1 before the part
  int begin, next;  // where it, or what is no group's there, begins, and the group after it

  __device__ __forceinline__ int near(int64_t position) const {
    const int64_t i = position - base;
    return i < 0 ? -1 : (i < kFar ? static_cast<int>(i) : kFar);
  }
  // Goes to the group of `position` and returns its bounds in the buffer. All lanes share the
  // search, and what they have read at its end are the bounds.
  __device__ __forceinline__ GroupBounds find(const Groups& groups, int position) {
    return search(groups, base + position, Where::kAnywhere);
  }
  // The same where `position` is not before `next`: to a later group.
  __device__ __forceinline__ GroupBounds seek(const Groups& groups, int position) {
    return search(groups, base + position, Where::kBehind);
  }
  // The same where `position` is before `begin`: to an earlier one.
  __device__ __forceinline__ GroupBounds seek_before(const Groups& groups, int position) {
    return search(groups, base + position, Where::kBefore);
  }
  __device__ __forceinline__ bool covers(int position, int count) const {
    return start <= position && position + count <= stop;
  }

 private:
  // Where the group is: anywhere, or likely close before or behind the one it is at.
  enum class Where { kAnywhere, kBefore, kBehind };

  __device__ __forceinline__ GroupBounds search(const Groups& groups, int64_t position,
                                                Where where) {
    const int lane = threadIdx.x & 31;
    const int there = static_cast<int>(groups.count);
    // The first offset behind is from low to high; offsets low - 1 and high are from and to.
    int low = where == Where::kBehind ? index + 1 : 0;
    int high = where == Where::kBefore ? index : there + 1;
    int64_t from = INT64_MIN, to = where == Where::kBefore ? base + begin : INT64_MAX;
    // The lanes look at neighbours first.
    bool close = where != Where::kAnywhere;
#pragma unroll 1
    while (low < high) {
      const int step = close ? 1 : (high - low + 31) >> 5;
      const int first = close && where == Where::kBefore ? high - 32 : low;
      const int i = first + lane * step;
      close = false;
      const int64_t offset = i < 0 ? INT64_MIN : (i < high ? groups.offsets[i] : INT64_MAX);
      const int count = __popc(__ballot_sync(0xffffffffu, offset <= position));
      const int behind = first + count * step;
      if (count < 32 && behind < high) {
        high = behind;
        to = __shfl_sync(0xffffffffu, offset, count);
      }
      if (count > 0) {
        low = behind - step + 1;
        from = __shfl_sync(0xffffffffu, offset, count - 1);
      }
    }
    index = low - 1;
    GroupBounds at = {base, base};
    if (index >= 0 && index < there) {
      const int64_t size = groups.sizes != nullptr ? groups.sizes[index] : groups.numel;
      at = group_between(from, to, size, groups.numel);
    }
    start = near(at.start), stop = near(at.stop);
    begin = near(from), next = near(to);
    return at;
  }
};

// Which of sixteen elements from `position` on are those of a group.
struct Part {
  int first, behind;

  __device__ __forceinline__ Part(const GroupBounds& at, int64_t position)
      : first(within(at.start - position)), behind(within(at.stop - position)) {}
  __device__ __forceinline__ Part(const GroupCursor& at, int position)
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
