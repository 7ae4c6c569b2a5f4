// FP8 of the gradients of ragged tensors, times the derivative of an activation, with the sums of
// their columns: the bias gradients.
//
// The first or only launch works on rows: a warp has 512 columns of a range of rows and adds up the
// rows of one segment, because its lanes have the same columns in every row. As for the amaxes,
// nothing has to be zeroed: the sum of a segment that begins in the range goes to dbias, the sum of
// one that continues from an earlier range goes to a row of a workspace. In the end those rows are
// added, always in the same order.
//
// Small buffers take one launch of one thread block (ragged_grad_alone_kernel).
#include "fp8.cuh"

namespace jitquant {

template <class T>
struct GradSource {
  using Value = Block<float>;
  static constexpr int kTileThreads = kThreads, kTileSteps = sizeof(T) == 2 ? 2 : 1;
  static constexpr int kMostBlocks = 3;
  struct Fetched {
    Block<T> grad, input;
  };
  const T* grad;
  const T* input;
  Activation activation;
  int64_t numel;
  bool vector;

  GradSource(const RaggedInput& x, const RaggedGradient& g)
      : grad(static_cast<const T*>(x.data)),
        input(static_cast<const T*>(g.act_input)),
        activation(g.activation),
        numel(x.numel),
        vector((reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(input)) % 16 == 0) {
  }

  __device__ __forceinline__ Fetched fetch(int64_t i) const {
    Fetched x;
    x.grad = load_block<true>(grad + i, 16, true);
    if (activation != Activation::kNone) x.input = load_block<true>(input + i, 16, true);
    return x;
  }
  __device__ __forceinline__ void prefetch(int64_t i) const {
    prefetch_block(grad + i, 16);
    if (activation != Activation::kNone) prefetch_block(input + i, 16);
  }
  __device__ __forceinline__ Value value(const Fetched& x) const {
    Value v;
#pragma unroll
    for (int i = 0; i < 16; ++i) v.words[i] = float_bits(value_of(x.grad, i));
    with_activation(activation, [&](auto act) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        v.words[i] = float_bits(mul_rn(value_of(v, i), act.slope(value_of(x.input, i))));
      }
    });
    return v;
  }
  // Loads `count` elements from i on, which may be unaligned.
  __device__ __forceinline__ Fetched gather(int64_t i, int64_t count) const {
    Fetched x = {};
    if (count <= 0) return x;
    x.grad = gather_block<T>(count, [&](int k) { return grad[i + k]; });
    if (activation != Activation::kNone) {
      x.input = gather_block<T>(count, [&](int k) { return input[i + k]; });
    }
    return x;
  }
  __device__ __forceinline__ Value load(int64_t i) const { return value(gather(i, numel - i)); }
};

// The whole rows of a gradient.
struct GradRows {
  int64_t cols;
  int phases;
  int slices;    // per thread block of finish_sums: each adds some of the pieces
  float* dbias;  // may be null
  float* sums;
  bool vector;  // rows and sums are aligned to 16 bytes

  // Parts of the columns in finish_sums.
  JITQUANT_HD int64_t parts() const {
    const int threads = kThreads / slices;
    return (cols + 4 * threads - 1) / (4 * threads);
  }
};

// Adds the pieces of the sums. Item i is the i-th segment or, if there are fewer ranges than
// segments, the one that continues after range i. Each thread block handles a part of the columns.
__device__ __forceinline__ void finish_sums(int64_t item, int64_t part, const Segments& segments,
                                            const SegmentRanges& ranges, const GradRows& rows) {
  SegmentBounds at;
  int64_t segment = item;
  if (segments.count <= ranges.count) {
    at = segments.bounds(segment);
  } else {
    const int64_t behind = (item + 1) * ranges.span;
    if (behind >= segments.numel) return;
    segment = segment_at(segments, behind - 1);
    if (segment < 0 || segment >= segments.count) return;
    at = segments.bounds(segment);
    if (at.stop <= behind || ranges.of(at.start) != item) return;
  }
  if (at.stop <= at.start) return;
  const int first = ranges.of(at.start) + 1, last = ranges.of(at.stop - 1);
  if (last < first) return;
  // Handles all columns of a thread together, so that their sums do not wait for each other.
  const int threads = kThreads / rows.slices, slice = threadIdx.x / threads;
  const int64_t c = 4 * threads * part + threadIdx.x % threads;
  const auto has = [&](int k) { return c + k * threads < rows.cols; };
  float* const to = rows.dbias + segment * rows.cols + c;
  float sums[4] = {};
#pragma unroll 4
  for (int range = first + slice; range <= last; range += rows.slices) {
    const float* const piece = rows.sums + range * rows.cols + c;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (has(k)) sums[k] = add_rn(sums[k], __ldcg(piece + k * threads));
    }
  }
  __shared__ float4 all[kThreads];
  __syncthreads();  // the previous item may still use it
  all[threadIdx.x] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  __syncthreads();
  if (slice != 0) return;
  for (int i = 1; i < rows.slices; ++i) {
    const float4 others = all[i * threads + threadIdx.x];
    sums[0] = add_rn(sums[0], others.x), sums[1] = add_rn(sums[1], others.y);
    sums[2] = add_rn(sums[2], others.z), sums[3] = add_rn(sums[3], others.w);
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (has(k)) to[k * threads] = add_rn(__ldcg(to + k * threads), sums[k]);
  }
}

// Calls `part` with the cursor on each nonempty segment among `count` elements from `position` on.
// The cursor starts at the segment of `position`. When it moves on, calls `leave`, and then `enter`
// with the bounds of the next segment.
template <class Leave, class Enter, class F>
__device__ __forceinline__ void visit_segments(SegmentCursor& cursor, const Segments& segments,
                                               int position, int count, Leave&& leave,
                                               Enter&& enter, F&& part) {
#pragma unroll 1
  for (;;) {
    part();
    if (cursor.next >= position + count) return;
    leave(), enter(cursor.seek(segments, cursor.next));
  }
}

template <class T, bool kCasts>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 2 : 1)
    ragged_rows_kernel(GradSource<T> source, RaggedFp8 op, Segments segments, RaggedScales scales,
                       SegmentRanges ranges, GradRows rows) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t first_range = static_cast<int64_t>(blockIdx.x) * rows.phases;
  const int64_t block_base = first_range * ranges.span;
  const int64_t block_end = block_base + rows.phases * ranges.span;
  wait_for_previous();
  let_next_begin();

  // The segments that begin here, which only this thread block updates.
  const bool is_last = blockIdx.x + 1 == gridDim.x;
  const int64_t before = blockIdx.x == 0 ? 0 : segment_at(segments, block_base - 1) + 1;
  for (int64_t i = before + threadIdx.x;
       i < segments.count && (is_last || segments.offset(i) < block_end); i += kThreads) {
    float ignored;
    scales.amax[i] = 0.0f;
    scales.inverse[i] = kCasts ? op.of_scale(scales.given[i], ignored) : op.of_amax(0.0f, ignored);
  }
  if (threadIdx.x < rows.phases && first_range + threadIdx.x < ranges.count) {
    scales.partials[first_range + threadIdx.x] = 0.0f;
  }
  const auto zero = [&](int64_t segment) {
    for (int64_t c = lane; c < rows.cols; c += 32) rows.dbias[segment * rows.cols + c] = 0.0f;
  };
  if (rows.dbias != nullptr) {
    // Segments that are not whole rows may have no values in some columns.
    for (int64_t i = before + warp;
         i < segments.count && (is_last || segments.offset(i) < block_end); i += kWarps) {
      const SegmentBounds at = segments.bounds(i);
      const bool ragged = at.start % rows.cols != 0 || at.stop % rows.cols != 0;
      if (at.stop > at.start && ragged) zero(i);
    }
    // There may be many empty segments at the same position.
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + warp; i < segments.count;
         i += static_cast<int64_t>(gridDim.x) * kWarps) {
      const SegmentBounds at = segments.bounds(i);
      if (at.stop <= at.start) zero(i);
    }
  }
  __syncthreads();

  const int strips = static_cast<int>((rows.cols + kStep - 1) / kStep);
  const int phase = rows.phases > 1 ? warp / strips : 0;
  const int64_t range = first_range + phase, base = range * ranges.span;
  const int64_t left = segments.numel - base;
  const int end = left < 0 ? 0 : static_cast<int>(left < ranges.span ? left : ranges.span);
  const int cols = static_cast<int>(rows.cols);
#pragma unroll 1
  for (int strip = rows.phases > 1 ? warp % strips : warp; strip < strips && phase < rows.phases;
       strip += rows.phases > 1 ? strips : kWarps) {
    const int column = strip * kStep + 16 * lane;
    const int count = cols - column < 16 ? cols - column : 16;  // of this lane
    const int width = cols - strip * kStep < kStep ? cols - strip * kStep : kStep;
    SegmentCursor cursor = {base};
    float factor = 1.0f;
    float sums[16] = {};
    Amax<float, true> amax;
    const auto leave = [&] {
      const uint32_t bits = __reduce_max_sync(0xffffffffu, float_bits(amax.result()));
      amax = {};
      const bool is_segment = cursor.index >= 0 && cursor.index < segments.count;
      if (!is_segment || cursor.stop <= (cursor.start > 0 ? cursor.start : 0)) return;
      if (lane == 0 && bits != 0u) {
        float* const to = cursor.start >= 0 ? scales.amax + cursor.index : scales.partials + range;
        atomicMax(reinterpret_cast<unsigned*>(to), bits);
      }
      if (rows.dbias == nullptr) return;
      float* const to = (cursor.start >= 0 ? rows.dbias + cursor.index * rows.cols
                                           : rows.sums + range * rows.cols) +
                        column;
      if (rows.vector && count == 16) {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
          *reinterpret_cast<float4*>(to + i) =
              make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if (i < count) to[i] = sums[i];
        }
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) sums[i] = 0.0f;
    };
    const auto enter = [&](const SegmentBounds& at) {
      if (kCasts && at.stop > at.start) op.of_scale(scales.given[cursor.index], factor);
    };
    const auto add = [&](const Block<float>& v) {
      amax.add(v);
#pragma unroll
      for (int i = 0; i < 16; ++i) sums[i] = add_rn(sums[i], value_of(v, i));
    };
    enter(cursor.find(segments, base == 0 ? 0 : -1));
    // Loads the next row while it computes the current one.
    const auto whole = [&](int row) {
      return rows.vector && count == 16 && row + column + 16 <= end;
    };
    typename GradSource<T>::Fetched ahead = {};
    if (whole(0)) ahead = source.fetch(base + column);
#pragma unroll 1
    for (int row = 0; row < end; row += cols) {
      const int segment = row + strip * kStep, mine = row + column;
      const int there = end - mine < count ? end - mine : count;
      typename GradSource<T>::Fetched x = ahead;
      if (whole(row + cols)) ahead = source.fetch(base + mine + cols);
      if (!whole(row)) x = source.gather(base + mine, there);
      if (segment >= cursor.next) leave(), enter(cursor.seek(segments, segment));
      if (cursor.misses(segment, width)) {
        if constexpr (kCasts) op.store(base + mine, there, uint4{});
        continue;
      }
      const Block<float> v = source.value(x);
      if (cursor.covers(segment, width)) {
        add(v);
        if constexpr (kCasts) op.store(base + mine, there, op.codes(v, factor));
        continue;
      }
      uint4 codes = {};
      visit_segments(cursor, segments, segment, width, leave, enter, [&] {
        Part part(cursor, mine);
        if (part.behind > there) part.behind = there;
        const Block<float> own = masked(v, part);
        add(own);
        if (kCasts && !part.empty()) op.merge(codes, op.codes(own, factor), part);
      });
      if constexpr (kCasts) op.store(base + mine, there, codes);
    }
    leave();
  }

  if constexpr (kCasts) {
    if (gridDim.x == 1 && rows.phases == 1) return;
    if (gridDim.x > 1) {
      sync_grid();
    } else {
      __syncthreads();
    }
    if (warp < rows.phases) {
      const int64_t from = (first_range + warp) * ranges.span;
      const int64_t rest = segments.numel - from;
      if (rest > 0) {
        const int to = static_cast<int>(rest < ranges.span ? rest : ranges.span);
        finish_amax(from, to, segments, scales, ranges);
      }
    }
    if (rows.dbias == nullptr) return;
    const int64_t items = segments.count < ranges.count ? segments.count : ranges.count;
    const int64_t parts = rows.parts();
    for (int64_t i = blockIdx.x; i < items * parts; i += gridDim.x) {
      finish_sums(i / parts, i % parts, segments, ranges, rows);
    }
  }
}

// The first `finishing` thread blocks add the sums. The others do the work of ragged_tile_kernel.
template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    ragged_grad_tile_kernel(GradSource<T> source, RaggedFp8 op, Segments segments,
                            RaggedScales scales, SegmentRanges ranges, GradRows rows,
                            uint32_t finishing, TileOrder order) {
  if (blockIdx.x >= finishing) {
    ragged_tile(order.tile<kTile<GradSource<T>>>(blockIdx.x - finishing, ranges.span), source, op,
                segments, scales, ranges);
    return;
  }
  wait_for_previous();
  let_next_begin();
  const int64_t parts = rows.parts();
  finish_sums(blockIdx.x / parts, blockIdx.x % parts, segments, ranges, rows);
}

// With sums, a thread block alone keeps all values, and a thread adds a column of a segment.
constexpr int kAloneRows = 128, kAloneSums = 65536;

template <class T>
__global__ void __launch_bounds__(kAloneThreads)
    ragged_grad_alone_kernel(GradSource<T> source, RaggedFp8 op, Segments segments,
                             RaggedScales scales, int cols, float* dbias) {
  __shared__ Block<float> values[kAloneValues / 16];
  const auto see = [&](int i, const Block<float>& v) {
    if (dbias != nullptr) values[i >> 4] = v;
  };
  const Segments here = ragged_alone(source, op, segments, scales, see);
  if (dbias == nullptr) return;
  int threads = 32;  // per segment
  while (threads < cols && threads < kAloneThreads) threads *= 2;
  for (int i = threadIdx.x / threads; i < here.count; i += kAloneThreads / threads) {
    const SegmentBounds at = here.bounds(i);
    for (int c = threadIdx.x % threads; c < cols; c += threads) {
      float sum = 0.0f;
      for (int k = static_cast<int>(at.start) + c; k < at.stop; k += cols) {
        sum = add_rn(sum, value_of(values[k >> 4], k & 15));
      }
      dbias[i * cols + c] = sum;
    }
  }
}

#ifndef __CUDACC_RTC__
namespace {

// Without sums, the row length does not matter: any value works.
constexpr int64_t kAnyCols = kThreads / 32 * kStep;

bool fits_alone(const RaggedInput& x, const RaggedGradient& gradient) {
  if (!fits_alone(x) || gradient.dbias == nullptr) return fits_alone(x);
  const int64_t cols = gradient.cols;
  return x.numel <= kAloneRows * cols && x.count * cols <= kAloneSums;
}

template <class T>
cudaError_t launch_gradient(const RaggedInput& x, const RaggedScales& scales,
                            const RaggedGradient& gradient, const RaggedElements& out,
                            const RowCut& cut, cudaStream_t stream) {
  const GradSource<T> source(x, gradient);
  if (fits_alone(x, gradient)) {
    return launch<&ragged_grad_alone_kernel<T>>({1, kAloneThreads, Start::kOverlapped}, stream,
                                                source, RaggedFp8{out}, segments_of(x), scales,
                                                static_cast<int>(gradient.cols), gradient.dbias);
  }
  const int64_t cols = gradient.dbias != nullptr ? gradient.cols : kAnyCols;
  GradRows rows = {
      cols,
      cut.phases,
      1,
      gradient.dbias,
      gradient.sums,
      source.vector && cols % 16 == 0 && reinterpret_cast<uintptr_t>(gradient.dbias) % 16 == 0};
  const int64_t items = x.count < cut.ranges ? x.count : cut.ranges;
  // More slices shorten the sums if there are few segments. Only while most thread blocks are
  // tiles.
  while (rows.slices < 8 && 2 * items * rows.parts() <= 128) rows.slices *= 2;
  const RaggedFp8 op = {out};
  RaggedFp8 op_of_rows = op;
  op_of_rows.out.vector = out.vector && cols % 16 == 0;
  const Segments segments = segments_of(x);
  const SegmentRanges ranges = {cut.range_rows * cols, static_cast<int>(cut.ranges),
                                scales.partials};
  const int64_t grid = (cut.ranges + cut.phases - 1) / cut.phases;
  if (scales.given != nullptr) {
    const Start start = grid > 1 ? Start::kCooperative : Start::kOverlapped;
    return launch<&ragged_rows_kernel<T, true>>({grid, kThreads, start}, stream, source, op_of_rows,
                                                segments, scales, ranges, rows);
  }
  const cudaError_t error =
      launch<&ragged_rows_kernel<T, false>>({grid, kThreads, Start::kOverlapped}, stream, source,
                                            op_of_rows, segments, scales, ranges, rows);
  if (error != cudaSuccess || x.numel == 0) return error;
  int64_t finishing = 0;
  if (gradient.dbias != nullptr) {
    finishing = items * rows.parts();
  }
  const TileOrder order = tile_order<GradSource<T>>(ranges, true);
  return launch<&ragged_grad_tile_kernel<T>>(
      {finishing + order.tiles(), kThreads, Start::kOverlapped}, stream, source, op, segments,
      scales, ranges, rows, static_cast<uint32_t>(finishing), order);
}

RowCut cut_of(const RaggedInput& x, const RaggedGradient& gradient) {
  const bool with_dbias = gradient.dbias != nullptr;
  const int64_t numel = x.numel;
  int64_t cols = gradient.cols;
  if (!with_dbias) cols = kAnyCols;
  const int64_t rows = (numel + cols - 1) / cols, strips = (cols + kStep - 1) / kStep;
  const int warps = kThreads / 32, phases = strips < warps ? warps / static_cast<int>(strips) : 1;
  int64_t blocks = persistent_grid(rows, x.dtype == DType::kFloat32 ? 1 : 2);
  if (blocks * phases > kMaxPartials) blocks = kMaxPartials / phases;
  // With shorter ranges, the workspace would be larger than the gradient.
  int64_t range_rows = (rows + blocks * phases - 1) / (blocks * phases);
  if (range_rows < 4) range_rows = 4;
  if (range_rows > SegmentCursor::kFar / cols) range_rows = SegmentCursor::kFar / cols;
  const int64_t ranges = (rows + range_rows - 1) / range_rows;
  return {range_rows, ranges < 1 ? 1 : ranges, phases};
}

}  // namespace

int64_t quantize_ragged_grad_fp8_partials(const RaggedInput& x, const RaggedGradient& gradient) {
  return fits_alone(x, gradient) ? 0 : kMaxPartials;
}

int64_t quantize_ragged_grad_fp8_sums(const RaggedInput& x, const RaggedGradient& gradient) {
  if (fits_alone(x, gradient)) return 0;
  return gradient.dbias != nullptr ? cut_of(x, gradient).ranges * gradient.cols : 0;
}

cudaError_t launch_quantize_ragged_grad_fp8(const RaggedInput& x, const RaggedScales& scales,
                                            float* partials, const RaggedGradient& gradient,
                                            float* sums, const RaggedElements& out,
                                            cudaStream_t stream) {
  RaggedGradient own = gradient;
  own.sums = sums;
  return dispatch(x.dtype, [&](auto element) {
    return launch_gradient<decltype(element)>(x, scales.with(partials), own, out,
                                              cut_of(x, gradient), stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
