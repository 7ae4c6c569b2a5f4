// RMSNorm, with the residual added in place first where there is one, and eight bits of the result:
// FP8 with a scale for each row or a given one, or a scale for each group. One launch.
#include "jitquant/fp8_rows.cuh"
#include "jitquant/group_kernels.cuh"

namespace jitquant {

namespace {

// The norm, then a scale for each group of 16 * `lanes` neighbours.
template <class Source, bool kStored>
__global__ void __launch_bounds__(kStored ? kRowThreads : kRereadThreads,
                                  fp8_row_blocks_per_sm<Source>(kStored))
    norm_group_kernel(Source source, Normalize<typename Source::Element> norm,
                      GroupNumerics numerics, GroupScales scales, int lanes,
                      RowPointer<uint8_t> out, bool vector) {
  extern __shared__ uint4 row_storage[];
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const RowPasses<Source, true, kStored> passes = {source, norm, row_storage,
                                                   static_cast<int>(blocks_of(source.cols))};
  let_next_begin();
  wait_for_previous();

#pragma unroll 1
  for (int64_t r = blockIdx.x; r < source.rows; r += gridDim.x) {
    const typename Source::Row row = source.row(r);
    const float squares = passes.first(row, [](const Block<float>&) {});
    const float inverse = passes.inverse(reduce.sum_and_max(squares, 0.0f).x, r);
    const int64_t batch = r < scales.rows ? 0 : quotient(r, scales.rows);
    uint8_t* const to = out(r);
    // Whole warps, whose lanes share what they know of a group.
#pragma unroll 1
    for (int b = threadIdx.x; (b & ~31) < passes.width; b += blockDim.x) {
      Block<float> held = {};
      if (b < passes.width) held = passes.second(row, b, inverse);
      const GroupScale g = scale_of(numerics, lanes_amax(block_amax(held), lanes));
      if (b < passes.width) {
        store_codes(to + b * int64_t{16}, source.cols - b * int64_t{16}, vector,
                    encode_block(held, numerics, g));
        if ((b & (lanes - 1)) == 0) {
          store_scale(scales, batch, r - batch * scales.rows, static_cast<uint32_t>(b) / lanes, g,
                      false, true);
        }
      }
    }
  }
}

template <class Source>
cudaError_t launch_norm_group(const Source& source, const Normalize<typename Source::Element>& norm,
                              const GroupNumerics& numerics, const GroupOutput& out,
                              int64_t group_size, cudaStream_t stream) {
  const RowWork work = RowWork::of<true>(source, norm.weight, false);
  return launch_by_rows<&norm_group_kernel<Source, true>, &norm_group_kernel<Source, false>>(
      work, stream, source, norm, numerics, out.scales, static_cast<int>(group_size / 16),
      RowPointer<uint8_t>(out.data), out.data.vector);
}

// Calls f(source, norm) with the source of the rows and what they are multiplied with.
template <class F>
cudaError_t normalized(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                       float eps, float* inv_rms, F&& f) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    const Normalize<T> norm = {weight, eps, inv_rms};
    return residual != nullptr ? f(ResidualSource<T>(x, *residual), norm)
                               : f(PlainSource<T>(x), norm);
  });
}

}  // namespace

cudaError_t launch_rmsnorm_fp8(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                               float eps, float* inv_rms, const Fp8Scale& scale,
                               const ElementRows& out, cudaStream_t stream) {
  return normalized(x, residual, weight, eps, inv_rms, [&](const auto& source, const auto& norm) {
    return launch_fp8_rows<true>(source, norm, scale, out, stream);
  });
}

cudaError_t launch_rmsnorm_group(const Matrix& x, const Matrix* residual,
                                 const ColumnVector& weight, float eps, float* inv_rms,
                                 const GroupNumerics& numerics, const GroupOutput& out,
                                 int64_t group_size, cudaStream_t stream) {
  return normalized(x, residual, weight, eps, inv_rms, [&](const auto& source, const auto& norm) {
    return launch_norm_group(source, norm, numerics, out, group_size, stream);
  });
}

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
