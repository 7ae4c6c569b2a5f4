// RMSNorm and 8-bit quantization with one scale per group, in one launch. A residual, if any, is
// added in place first.
#include "../fp8/rows.cuh"
#include "kernels.cuh"

namespace jitquant {

namespace {

// Zeroes the padding columns of the scales after this row's groups and, after a matrix's last row,
// the padding rows. Called by all threads of the block.
__device__ __forceinline__ void zero_padding_scales(const GroupScales& s, int64_t batch,
                                                    int64_t row) {
  const int64_t stored = (s.format == ScaleFormat::kPacked ? 4 : 1) * s.grid.stored_cols;
  const bool last = s.grid.order == ScaleOrder::kColumn && row + 1 == s.rows;
  const int64_t end = last ? s.grid.stored_rows : row + 1;
  int64_t group = s.groups + threadIdx.x;
#pragma unroll 1
  for (; row < end; ++row) {
#pragma unroll 1
    for (; group < stored; group += blockDim.x) put_scale(s, batch, row, group, {}, true);
    group = threadIdx.x;
  }
}

// The amaxes of the groups of a thread's blocks. If groups span several lanes (`shares`), each lane
// of two gets the amax of one of the two blocks: half of the data goes to the other lane.
// Branch-free, so that these shuffles and those of the sum of squares overlap.
template <int kBlocks>
__device__ __forceinline__ void groups_amax(const Block<float> (&x)[kBlocks], int lanes,
                                            bool shares, float (&b)[kBlocks]) {
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) b[k] = block_amax(x[k]);
  if constexpr (kBlocks == 1) {
    b[0] = lanes_amax(b[0], lanes);
  } else {
    const bool odd = shares && (threadIdx.x & 1);
    const float kept = odd ? b[1] : b[0];
    const float other = __shfl_xor_sync(0xffffffffu, odd ? b[0] : b[1], 1);
    b[0] = amax_keep_nan(kept, shares ? other : kept);
#pragma unroll
    for (int offset = 2; offset < 16; offset <<= 1) {
      b[0] = amax_with_lane(b[0], offset & (lanes - 1));
    }
  }
}

// kUsual: E4M3 with fp32 scales of recipe "te", groups of more than 16 values, one matrix.
// kDivided: elements are divided by scales that are not powers of two.
enum class GroupCase : int { kUsual, kAny, kDivided };

// The norm, then one scale per group of 16 * 2^log_lanes neighbors.
template <class Source, Rows kRows, GroupCase kCase>
__global__ void __launch_bounds__(row_threads_most<Source, kRows>(),
                                  row_blocks_per_sm<Source, kRows>())
    norm_group_kernel(Source source, Normalize<typename Source::Element> norm, RowWidth width,
                      GroupNumerics numerics, GroupScales scales, ScalePlaces places, int log_lanes,
                      bool padded, RowPointer<uint8_t> out, bool vector) {
  constexpr bool kHolds = kRows != Rows::kReread;
  constexpr bool kUsual = kCase == GroupCase::kUsual, kDivides = kCase == GroupCase::kDivided;
  if constexpr (kUsual) {
    numerics.format = EightBit::kE4m3, numerics.recipe = GroupRecipe::kTe;
    numerics.scale_format = scales.format = ScaleFormat::kFloat32;
    numerics.bounded = false;
    places.batched = false;
  }
  using Passes = RowPasses<Source, true, kRows>;
  Passes passes(source, norm, width);
  __shared__ typename Passes::Reduce::Scratch scratch;
  typename Passes::Reduce reduce = passes.reduce(scratch);
  constexpr int kBlocks = passes.kBlocks;
  const int lanes = 1 << log_lanes;
  // Each of two lanes of a group computes the scale of one of their blocks.
  const bool shares = kBlocks > 1 && (kUsual || lanes > 1);
  const int mine = shares ? threadIdx.x & 1 : 0;

  RowIndex<kHolds> r = passes.first_row();
  passes.begin(r);
  wait_for_previous();
  let_next_begin();
#pragma unroll 1
  while (kIsOneRow<kRows> || r < source.rows) {
    const typename Source::Row row = source.row(r);
    passes.first(row, reduce, [](int, const Block<float>&) {});
    passes.prefetch_next(r);
    float amax[kBlocks];
    if constexpr (kHolds) groups_amax(passes.held, lanes, shares, amax);
    const float inverse = passes.inverse(passes.sum(reduce));
    if (passes.leads()) norm.inv_rms[r] = inverse;
    passes.second(row, [&](int begin, Block<float>(&values)[kBlocks]) {
      if constexpr (!kHolds) groups_amax(values, lanes, shares, amax);
      // Per group: the factor of its elements, or the reciprocal of its scale.
      float factor[kBlocks], scale[kBlocks];
#pragma unroll 1
      for (int k = mine; k < kBlocks; k += shares ? kBlocks : 1) {
        const GroupScale g = group_scale(numerics, mul_rn(amax[0], inverse));
        const uint32_t block = begin + k * passes.team.threads(), group = block >> log_lanes;
        // The group exists if its first block does.
        if ((block & (lanes - 1)) < kBlocks &&
            static_cast<int>(group << log_lanes) < passes.width) {
          if constexpr (kHolds) {
            place_scale<ScaleKind::kOther>(scales, places, r, group, g);
          } else {
            const int64_t batch = divide_index(r, scales.rows);
            put_scale(scales, batch, r - batch * scales.rows, group, g, false);
          }
        }
#pragma unroll
        for (int i = 0; i + 1 < kBlocks; ++i) {
          amax[i] = amax[i + 1], factor[i] = factor[i + 1], scale[i] = scale[i + 1];
        }
        if constexpr (kDivides) {
          factor[kBlocks - 1] = group_reciprocal(g.scale_inv);
          scale[kBlocks - 1] = g.scale_inv;
        } else {
          // As one product with inv_rms. A negative sign marks a product that is not a normal
          // number.
          const float product = mul_rn(inverse, g.factor);
          factor[kBlocks - 1] = is_ordinary(product) ? product : -g.factor;
        }
      }
      if (shares) {
        const float of_mine = factor[kBlocks - 1], scale_of_mine = scale[kBlocks - 1];
#pragma unroll
        for (int k = 0; k < kBlocks; ++k) {
          const int from = (threadIdx.x & 31 & ~(kBlocks - 1)) | k;
          factor[k] = __shfl_sync(0xffffffffu, of_mine, from);
          if constexpr (kDivides) scale[k] = __shfl_sync(0xffffffffu, scale_of_mine, from);
        }
      }
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        if constexpr (kDivides) {
          multiply(values[k], inverse);
          const GroupDivisor divisor = group_divisor(scale[k], factor[k]);
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            set_value(values[k], i, divide(value_of(values[k], i), divisor));
          }
          factor[k] = 1.0f;
        } else if (static_cast<int>(float_bits(factor[k])) < 0) {
          multiply(values[k], inverse);
          factor[k] = abs_of(factor[k]);
        }
      }
      uint8_t* const to = out(r);
      with_format(numerics.format, [&](auto format) {
#pragma unroll
        for (int k = 0; k < kBlocks; ++k) {
          const uint4 codes = encode_block<format>(values[k], numerics, false, factor[k], 0.0f);
          const int block = begin + k * passes.team.threads();
          if (passes.stores(block)) passes.store(to, block, codes, vector);
        }
      });
    });
    if (padded) {
      const int64_t batch = divide_index(int64_t{r}, scales.rows);
      zero_padding_scales(scales, batch, r - batch * scales.rows);
    }
    if (kIsOneRow<kRows>) return;
    r += gridDim.x;
  }
}

template <GroupCase kCase, class Source>
cudaError_t launch_norm_group(const Source& source, const Normalize<typename Source::Element>& norm,
                              const GroupNumerics& numerics, const GroupOutput& out, int log_lanes,
                              cudaStream_t stream) {
  constexpr GroupCase kOthers = kCase == GroupCase::kUsual ? GroupCase::kAny : kCase;
  RowWork work = RowWork::of(source, norm.weight, out.data);
  const GroupScales& s = out.scales;
  const bool padded = s.grid.stored_rows != s.rows ||
                      s.grid.stored_cols * (s.format == ScaleFormat::kPacked ? 4 : 1) != s.groups;
  // The lanes of a row hold whole groups, and zero no padding.
  work.least_lanes_log2 = padded ? 6 : (log_lanes > 1 ? log_lanes : 1);
  RowWidth width(source.cols);
  const RowPointer<uint8_t> to(out.data);
  if constexpr (kCase == GroupCase::kUsual && kHasFew<Source>) {
    if (work.few()) {
      return launch<&norm_group_kernel<Source, Rows::kFew, kCase>>(
          work.few_shape(), stream, source, norm, width, numerics, s, ScalePlaces(s), log_lanes,
          padded, to, out.data.vector);
    }
  }
  if constexpr (kTakesLong && kCase == GroupCase::kUsual && kHasLoose<Source>) {
    using Loose = LooseSource<typename Source::Element>;
    if (work.loose()) {
      return launch<&norm_group_kernel<Loose, Rows::kLoose, kCase>>(
          work.block_per_row(), stream, Loose(source), norm, width, numerics, s, ScalePlaces(s),
          log_lanes, padded, to, out.data.vector);
    }
  }
  // What is named is compiled.
  constexpr Rows kOneBlock = Rows::kBlockPerRow;
  constexpr Rows kSplit = kTakesLong ? Rows::kCluster : kOneBlock;
  constexpr Rows kReread = kTakesLong ? Rows::kReread : kOneBlock;
  constexpr GroupCase kOfLong = kTakesLong ? kOthers : kCase;
  return launch_by_rows<&norm_group_kernel<Source, kOneBlock, kCase>,
                        &norm_group_kernel<Source, kSplit, kOfLong>,
                        &norm_group_kernel<Source, Rows::kLanes, kCase>,
                        &norm_group_kernel<Source, kReread, kOfLong>>(
      work, width, stream, source, norm, width, numerics, s, ScalePlaces(s), log_lanes, padded, to,
      out.data.vector);
}

}  // namespace

#ifndef __CUDACC_RTC__
cudaError_t launch_rmsnorm_quantize_per_token_group(const Matrix& x, const Matrix* residual,
                                                    const ColumnVector& weight, float eps,
                                                    float* inv_rms, const GroupNumerics& numerics,
                                                    const GroupOutput& out, int64_t group_size,
                                                    cudaStream_t stream) {
  if (x.rows == 0) return cudaSuccess;
  int log_lanes = 0;
  while ((int64_t{16} << log_lanes) < group_size) ++log_lanes;
  return normalized(x, residual, weight, eps, inv_rms, [&](const auto& source, const auto& norm) {
    const auto launch = [&](auto kind) {
      return launch_norm_group<decltype(kind)::value>(source, norm, numerics, out, log_lanes,
                                                      stream);
    };
    const bool fp32 = numerics.scale_format == ScaleFormat::kFloat32;
    const bool divided = fp32 && numerics.recipe == GroupRecipe::kVllm;
    if constexpr (kTakesDivided) {
      if (divided) return launch(Constant<GroupCase::kDivided>{});
    }
    if constexpr (kTakesOthers) {
      const bool usual = fp32 && numerics.recipe == GroupRecipe::kTe &&
                         numerics.format == EightBit::kE4m3 && !numerics.bounded && log_lanes > 0 &&
                         out.scales.batches == 1;
      if (usual) return launch(Constant<GroupCase::kUsual>{});
      if (!divided) return launch(Constant<GroupCase::kAny>{});
    }
    return kLacksKernels;
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
