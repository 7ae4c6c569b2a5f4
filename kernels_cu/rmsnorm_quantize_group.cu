// RMSNorm, with the residual added in place first where there is one, and eight bits of the result
// with a scale for each group. One launch.
#include "jitquant/fp8_rows.cuh"
#include "jitquant/group_kernels.cuh"

namespace jitquant {

namespace {

// The matrix of the stack that a row is in.
__device__ __forceinline__ uint32_t matrix_of_row(uint32_t row, int64_t rows) {
  return row < rows ? 0 : row / static_cast<uint32_t>(rows);
}
__device__ __forceinline__ int64_t matrix_of_row(int64_t row, int64_t rows) {
  return row < rows ? 0 : quotient(row, rows);
}

// The scale of a group: a float, or its byte of a packed element.
__device__ __forceinline__ void store_float_or_byte(const GroupScales& s, int64_t batch,
                                                    int64_t row, uint32_t group,
                                                    const GroupScale& g) {
  if (s.format == ScaleFormat::kPacked) {
    const int64_t at = s.grid.offset(batch, row, group >> 2) * 4 + (group & 3);
    static_cast<uint8_t*>(s.data)[at] = static_cast<uint8_t>(g.exponent);
  } else {
    static_cast<float*>(s.data)[s.grid.offset(batch, row, group)] = g.scale_inv;
  }
}

// Zero where the grid of scales has columns after the groups of this row, and after the last row of
// a matrix, rows. All threads of the block.
__device__ __forceinline__ void zero_rest(const GroupScales& s, int64_t batch, int64_t row) {
  const int64_t stored = (s.format == ScaleFormat::kPacked ? 4 : 1) * s.grid.stored_cols;
  const bool last = s.grid.order == ScaleOrder::kColumn && row + 1 == s.rows;
  const int64_t end = last ? s.grid.stored_rows : row + 1;
  int64_t group = s.groups + threadIdx.x;
#pragma unroll 1
  for (; row < end; ++row) {
#pragma unroll 1
    for (; group < stored; group += blockDim.x) {
      store_float_or_byte(s, batch, row, static_cast<uint32_t>(group), {});
    }
    group = threadIdx.x;
  }
}

// The norm, then a scale for each group of 16 * 2^log_lanes neighbours.
template <class Source, int kHeld>
__global__ void __launch_bounds__(most_threads<Source>(kHeld), rows_per_sm<Source>(kHeld))
    norm_group_kernel(Source source, Normalize<typename Source::Element> norm,
                      GroupNumerics numerics, GroupScales scales, int log_lanes,
                      RowPointer<uint8_t> out, bool vector, bool rehearses) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  RowPasses<Source, true, kHeld> passes(source, norm);
  constexpr int kBlocks = passes.kBlocks;
  const int lanes = 1 << log_lanes;
  // Of the lanes of a group, each computes the scale of one of their blocks.
  const bool shares = lanes >= kBlocks;
  const int mine = shares ? threadIdx.x & (kBlocks - 1) : 0;
  const bool by_division = divides(numerics);
  bool rehearsal = kHeld > 0 && rehearses;

  RowIndex<kHeld> r = blockIdx.x;
#pragma unroll 1
  while (r < source.rows) {
    passes.width = rehearsal ? 0 : static_cast<int>(blocks_of(source.cols));
    if (!rehearsal) {
      wait_for_previous();
      let_next_begin();
    }
    const typename Source::Row row = source.row(r);
    const float inverse =
        passes.inverse(reduce.sum(passes.first(row, [](int, const Block<float>&) {})));
    if (!rehearsal && threadIdx.x == 0) norm.inv_rms[r] = inverse;
    passes.second(row, [&](int begin, Block<float>(&values)[kBlocks]) {
      float b[kBlocks];
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        b[k] = block_amax(values[k]);
#pragma unroll
        for (int offset = 8; offset > 0; offset >>= 1) {
          b[k] = amax_keep_nan(b[k], __shfl_xor_sync(0xffffffffu, b[k], offset & (lanes - 1)));
        }
      }
      const auto learn = [&](int k, float amax) {
        const GroupScale g = scale_of(numerics, amax_keep_nan(0.0f, mul_rn(amax, inverse)));
        const uint32_t block = begin + k * blockDim.x, group = block >> log_lanes;
        // The group is there where its first block is.
        if ((block & (lanes - 1)) < kBlocks &&
            static_cast<int>(group << log_lanes) < passes.width) {
          const RowIndex<kHeld> batch = matrix_of_row(r, scales.rows);
          store_float_or_byte(scales, batch, r - batch * scales.rows, group, g);
        }
        return make_float2(by_division ? group_reciprocal(g.scale_inv) : g.factor, g.scale_inv);
      };
      const float2 own = learn(mine, mine > 0 ? b[kBlocks - 1] : b[0]);
      uint8_t* const to = out(r);
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        float2 g = own;  // what the group of block k is multiplied with, and its scale
        if (shares) {
          const int from = (threadIdx.x & 31 & ~(kBlocks - 1)) | k;
          g.x = __shfl_sync(0xffffffffu, own.x, from);
          if (by_division) g.y = __shfl_sync(0xffffffffu, own.y, from);
        } else if (k > 0) {
          g = learn(k, b[k]);
        }
        if (by_division) {
          const GroupDivisor divisor = group_divisor(g.y, g.x);
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            set_value(values[k], i, divide(mul_rn(value_of(values[k], i), inverse), divisor));
          }
        }
        const float f = by_division ? 1.0f : combined_factor(values[k], inverse, g.x);
        uint4 codes;
        with_format(numerics.format,
                    [&](auto format) { codes = encode_block<format>(values[k], false, f, 0.0f); });
        const int block = begin + k * blockDim.x;
        if (block < passes.width) passes.store(to, block, codes, vector);
      }
    });
    if (!rehearsal) {
      const RowIndex<kHeld> batch = matrix_of_row(r, scales.rows);
      zero_rest(scales, batch, r - batch * scales.rows);
      if constexpr (kHeld > 0) break;
      r += gridDim.x;
    }
    rehearsal = false;
  }
}

template <class Source>
cudaError_t launch_norm_group(const Source& source, const Normalize<typename Source::Element>& norm,
                              const GroupNumerics& numerics, const GroupOutput& out,
                              int64_t group_size, cudaStream_t stream) {
  const RowWork work = RowWork::of(source, norm.weight, out.data, false);
  int log_lanes = 0;
  while ((int64_t{16} << log_lanes) < group_size) ++log_lanes;
  return launch_by_rows<&norm_group_kernel<Source, kHeldBlocks>, &norm_group_kernel<Source, 0>>(
      work, stream, source, norm, numerics, out.scales, log_lanes, RowPointer<uint8_t>(out.data),
      out.data.vector);
}

}  // namespace

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
