// The amax of a tensor or of each of its rows, in one launch.
#pragma once

#include "partials.cuh"

namespace jitquant {

// Minimum blocks per SM: leaves room for the registers of two operands.
template <class Source>
constexpr int kAmaxResidency = 2;
template <class T>
constexpr int kAmaxResidency<FlatSource<T>> = 4;
template <class T>
constexpr int kAmaxResidency<PlainSource<T>> = 4;

// One block or a cooperative grid.
template <class Source, bool kNan>
__global__ void __launch_bounds__(kThreads, kAmaxResidency<Source>)
    tensor_amax_kernel(Source source, float divisor, float* partials, float* quotient) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  with_grid_amax<kThreads>(walked_amax<kNan>(source, reduce), partials, reduce,
                           [&](float amax) { *quotient = div_rn(amax, divisor); });
}

#ifndef __CUDACC_RTC__
// Number of thread blocks. Each needs one float of workspace, unless there is only one.
inline int tensor_amax_blocks(int64_t rows, int64_t cols, int per_sm) {
  const int64_t items = (rows * blocks_of(cols) + 4 * kThreads - 1) / (4 * kThreads);
  return static_cast<int>(persistent_grid(items, per_sm));
}

// One thread block needs no workspace.
inline int64_t amax_partials(int blocks) {
  return blocks > 1 ? blocks : 0;
}

template <bool kNan, class Source>
cudaError_t launch_tensor_amax(const Source& source, float divisor, float* partials, int blocks,
                               float* quotient, cudaStream_t stream) {
  const LaunchShape shape = {blocks, kThreads, blocks > 1 ? Start::kCooperative : Start::kAlone};
  return launch<&tensor_amax_kernel<Source, kNan>>(shape, stream, source, divisor, partials,
                                                   quotient);
}

// tensor_amax_kernel on a plain tensor.
template <class T, bool kNan>
cudaError_t launch_tensor_amax_plain(const Matrix& x, float divisor, float* partials, int blocks,
                                     float* quotient, cudaStream_t stream) {
  return is_flat(x) ? launch_tensor_amax<kNan>(flat_source<T>(x), divisor, partials, blocks,
                                               quotient, stream)
                    : launch_tensor_amax<kNan>(PlainSource<T>(x), divisor, partials, blocks,
                                               quotient, stream);
}
#endif

// One thread block per row.
template <class Source, bool kNan>
__global__ void __launch_bounds__(kThreads, kAmaxResidency<Source>)
    row_amax_kernel(Source source, float* amaxes) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const int64_t width = blocks_of(source.cols);
  wait_for_previous();
  let_next_begin();
#pragma unroll 1
  for (int64_t r = blockIdx.x; r < source.rows; r += gridDim.x) {
    const typename Source::Row row = source.row(r);
    Amax<typename Source::Value::Element, kNan> mine;
#pragma unroll 1
    for (int64_t b = threadIdx.x; b < width; b += blockDim.x) {
      mine.add(source.template value<false>(source.template fetch<false>(row, b), row, b));
    }
    const float amax = reduce.max(mine.result());
    if (threadIdx.x == 0) amaxes[r] = amax;
  }
}

#ifndef __CUDACC_RTC__
template <bool kNan, class Source>
cudaError_t launch_row_amaxes(const Source& source, float* amaxes, cudaStream_t stream) {
  const int64_t width = blocks_of(source.cols);
  const int threads = width >= kThreads ? kThreads : static_cast<int>((width + 31) / 32 * 32);
  const int64_t grid = persistent_grid(source.rows, 2048 / threads);
  return launch<&row_amax_kernel<Source, kNan>>({grid, threads, Start::kOverlapped}, stream, source,
                                                amaxes);
}
#endif

}  // namespace jitquant
