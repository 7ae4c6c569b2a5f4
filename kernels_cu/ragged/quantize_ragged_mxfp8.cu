// MXFP8 of ragged tensors (many tensors in one buffer), in blocks of 32 neighbors of the buffer. A
// block needs no scale of its segment: one launch.
#include "../group/kernels.cuh"
#include "kernels.cuh"

namespace jitquant {

// A warp takes a range of the buffer, a lane half a block at a time. Loads the next step while it
// computes the current one.
template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    ragged_mxfp8_kernel(BufferSource<T> source, Segments segments, int64_t range,
                        GroupNumerics numerics, RaggedElements out, uint8_t* scales) {
  numerics.recipe = GroupRecipe::kDeepGemm, numerics.scale_format = ScaleFormat::kE8m0;
  numerics.bounded = false;
  const int lane = threadIdx.x & 31;
  const int64_t base = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32 * range;
  const int64_t left = segments.numel - base;
  const int end = static_cast<int>(left < 0 ? 0 : (left < range ? left : range));
  wait_for_previous();
  let_next_begin();
  if (end == 0) return;
  const int64_t origin = base + 16 * lane;
  Block<T> next = source.load(origin);
  SegmentCursor cursor = {base};
  cursor.find(segments, 0);
#pragma unroll 1
  for (int step = 0; step < end; step += kStep) {
    const Block<T> x = next;
    const int64_t mine = origin + step;
    if (step + kStep < end) next = source.load(mine + kStep);
    if (step >= cursor.next) cursor.seek(segments, step);
    Block<T> own = x;
    if (!cursor.covers(step, kStep)) {
      own = {};
      visit_own_segments(segments, max(cursor.index, 0), static_cast<int>(segments.count), mine,
                         [&](int i) {
                           const Block<T> part = masked(x, Part(segments.bounds(i), mine));
#pragma unroll
                           for (int k = 0; k < Block<T>::kWords; ++k) own.words[k] |= part.words[k];
                         });
    }
    const GroupScale g = group_scale(numerics, lanes_amax(block_amax(own), 2));
    if (mine >= segments.numel) continue;
    store_bytes(out.data + mine, segments.numel - mine, out.vector, encode_block(own, numerics, g));
    if ((lane & 1) == 0) scales[mine >> 5] = static_cast<uint8_t>(g.exponent);
  }
}

#ifndef __CUDACC_RTC__
cudaError_t launch_quantize_ragged_mxfp8(const RaggedInput& x, const GroupNumerics& numerics,
                                         const RaggedElements& out, uint8_t* block_scales,
                                         cudaStream_t stream) {
  if (x.numel == 0) return cudaSuccess;
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kWarps = kThreads / 32;
    const int64_t steps = (x.numel + kStep - 1) / kStep;
    const int per_sm = blocks_per_sm<&ragged_mxfp8_kernel<T>>(kThreads, 0);
    const int64_t grid = persistent_grid((steps + kWarps - 1) / kWarps, per_sm);
    return launch<&ragged_mxfp8_kernel<T>>(
        {grid, kThreads, Start::kOverlapped}, stream, BufferSource<T>(x), segments_of(x),
        range_of_warp(x.numel, grid * kWarps), numerics, out, block_scales);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
