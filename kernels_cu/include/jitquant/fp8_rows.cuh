// The FP8 kernel that goes row by row: a computed scale for each row, the amax of each row, and the
// norms, in one launch.
//   fp8_row_kernel   a block of threads a row
#pragma once

#include "jitquant/fp8_kernels.cuh"
#include "jitquant/nvfp4_rows.cuh"

namespace jitquant {

// As row_kernel in nvfp4_rows.cuh: two passes over the blocks of values of a row, which with
// kStored are in shared memory between the two, and otherwise are read again.
template <class Source, bool kNorm, bool kStored>
__global__ void __launch_bounds__(kStored ? kRowThreads : kRereadThreads,
                                  row_blocks_per_sm<Source, kNorm>(kStored))
    fp8_row_kernel(Source source, Normalize<typename Source::Element> norm, Fp8Scale scale,
                   RowPointer<uint8_t> out, bool vector, EightBit format) {
  using Value = typename Held<Source, kNorm>::Value;
  constexpr int kParts = Value::kWords / 4;
  constexpr int kFetched = sizeof(typename Source::Fetched);
  constexpr int kAtOnce = kStored && kFetched < 128 ? (kNorm ? 72 : 128) / kFetched : 1;
  extern __shared__ uint4 row_storage[];
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const int width = static_cast<int>(blocks_of(source.cols));
  const int threads = blockDim.x, mine = threadIdx.x;
  let_next_begin();
  wait_for_previous();
  float factor = 1.0f;
  if (!scale.by_row) factor = tensor_scale(scale, 0, largest(format), reduce);
  float tensor_amax = 0.0f;

#pragma unroll 1
  for (int64_t r = blockIdx.x; r < source.rows; r += gridDim.x) {
    const typename Source::Row row = source.row(r);
    float squares = 0.0f;
    Amax<typename Value::Element, true> numbers;
#pragma unroll 1
    for (int first = mine; first < width; first += kAtOnce * threads) {
      typename Source::Fetched fetched[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int b = first + k * threads;
        if (b < width) fetched[k] = source.template fetch<kStored>(row, b);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int b = first + k * threads;
        if (b >= width) break;
        const Value held = take_block<kNorm, kStored>(source, norm, fetched[k], row, b, squares);
        numbers.add(held);
        if constexpr (kStored) {
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            store_words<4>(row_storage + i * width + b, held.words + 4 * i);
          }
        }
      }
    }
    const float2 total = reduce.sum_and_max(squares, numbers.result());
    float amax = total.y, inverse = 1.0f;
    if constexpr (kNorm) {
      const float mean = div_rn(total.x, static_cast<float>(source.cols));
      inverse = reciprocal_rn(sqrt_rn(add_rn(mean, norm.eps)));
      amax = amax_keep_nan(0.0f, mul_rn(amax, inverse));
      if (mine == 0) norm.inv_rms[r] = inverse;
    }
    if (scale.by_row) {
      factor = scale.kind == Fp8Scale::kAmax
                   ? fp8_scale_from_amax(bound_amax(amax, scale.bound), largest(format))
                   : scale.given[r];
      if (mine == 0) {
        scale.scale_inv[r] = fp8_scale_inv(factor);
        if (scale.amax != nullptr) scale.amax[r] = amax;
      }
    } else {
      tensor_amax = larger_magnitude(tensor_amax, amax);
    }
    uint8_t* const to = out(r);
#pragma unroll 1
    for (int b = mine; b < width; b += threads) {
      Value held;
      if constexpr (kStored) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          load_words<4>(row_storage + i * width + b, held.words + 4 * i);
        }
      } else {
        float ignored = 0.0f;
        held = take_block<kNorm, false>(source, norm, source.template refetch<false>(row, b), row,
                                        b, ignored);
      }
      if constexpr (kNorm) {
#pragma unroll
        for (int i = 0; i < 16; ++i) set_value(held, i, mul_rn(value_of(held, i), inverse));
      }
      store_codes(to + b * int64_t{16}, source.cols - b * int64_t{16}, vector,
                  cast_block(held, factor, format));
    }
  }
  if (watches_tensor(scale)) finish_tensor_amax(tensor_amax, scale, reduce);
}

template <bool kNorm, class Source>
cudaError_t launch_fp8_rows(const Source& source, const Normalize<typename Source::Element>& norm,
                            const Fp8Scale& scale, const ElementRows& out, cudaStream_t stream) {
  int threads = row_threads(source.rows, source.cols, Source::kShare);
  const size_t bytes = blocks_of(source.cols) * sizeof(typename Held<Source, kNorm>::Value);
  auto shape = [&](int per_sm, size_t shared) {
    LaunchShape s = {persistent_grid(source.rows, per_sm), threads, Start::kOverlapped};
    if (watches_tensor(scale)) {
      if (s.grid > kMaxPartials) s.grid = kMaxPartials;
      if (s.grid > 1) s.start = Start::kCooperative;
    }
    s.shared = shared;
    return s;
  };
  const RowPointer<uint8_t> to(out.rows);
  if (source.whole() && norm.weight.vector) {
    constexpr auto kKernel = &fp8_row_kernel<Source, kNorm, true>;
    const int per_sm = blocks_per_sm<kKernel>(threads, bytes);
    if (per_sm > 0) {
      return launch<kKernel>(shape(per_sm, bytes), stream, source, norm, scale, to, out.rows.vector,
                             out.format);
    }
  }
  threads = threads < kRereadThreads ? threads : kRereadThreads;
  constexpr auto kKernel = &fp8_row_kernel<Source, kNorm, false>;
  return launch<kKernel>(shape(blocks_per_sm<kKernel>(threads, 0), 0), stream, source, norm, scale,
                         to, out.rows.vector, out.format);
}

// Of a source that is quantized as it is.
template <class Source>
cudaError_t launch_fp8_rows(const Source& source, const Fp8Scale& scale, const ElementRows& out,
                            cudaStream_t stream) {
  const Normalize<typename Source::Element> none = {{nullptr, false, true}, 0.0f, nullptr};
  return launch_fp8_rows<false>(source, none, scale, out, stream);
}

}  // namespace jitquant
