// Shared by the NVFP4 kernels: where codes and scales go, and the encoding of a tensor or a row.
#pragma once

#include "jitquant/device.cuh"
#include "jitquant/reduce.cuh"
#include "jitquant/sources.cuh"
#include "jitquant/walk.cuh"

namespace jitquant {

JITQUANT_HD int64_t padded_blocks(const Nvfp4Output& out) {
  return out.swizzled ? swizzled_blocks(out.blocks) : out.blocks;
}

// The offset of a block's scale from the first scale of its row.
__device__ __forceinline__ int64_t scale_place(const Nvfp4Output& out, int64_t block) {
  return out.swizzled ? swizzle_128x4(0, block, 0) : block;
}

// Where a row's codes and scales go.
struct OutputRow {
  uint2* codes;
  uint8_t* scales;

  __device__ __forceinline__ OutputRow(const Nvfp4Output& out, int64_t row)
      : codes(reinterpret_cast<uint2*>(out.codes) + row * out.blocks),
        scales(out.scales +
               (out.swizzled ? swizzle_128x4(row, 0, padded_blocks(out)) : row * out.blocks)) {}
  // `place` is the block's scale_place.
  __device__ __forceinline__ void store(int64_t block, int64_t place, const Nvfp4Codes& x) const {
    codes[block] = make_uint2(x.low, x.high);
    scales[place] = x.scale;
  }
};

__device__ __forceinline__ void zero_padding(const Nvfp4Output& out) {
  if (out.swizzled) zero_swizzle_padding(out.scales, out.rows, out.blocks);
}

// The encoding of a tensor if gsa is kValue or kTensor.
__device__ __forceinline__ Nvfp4Encoding given_encoding(const GlobalScale& scale,
                                                        Nvfp4Recipe recipe) {
  const float gsa = scale.kind == GlobalScale::kValue ? scale.value : *scale.gsa;
  if (scale.gsa_out != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *scale.gsa_out = gsa;
  return nvfp4_encoding_from_gsa(gsa, recipe);
}

// The encoding of the whole tensor, called by every thread of the block. Not for scales per row.
__device__ __forceinline__ Nvfp4Encoding tensor_encoding(const GlobalScale& scale,
                                                         Nvfp4Recipe recipe, BlockReduce& reduce) {
  if (scale.kind != GlobalScale::kPartials && scale.kind != GlobalScale::kAmax) {
    return given_encoding(scale, recipe);
  }
  const float amax = partials_amax(scale.partials, scale.count, reduce);
  if (scale.gsa_out != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    *scale.gsa_out = div_rn(amax, scale.divisor);
  }
  return nvfp4_encoding_from_amax(amax, scale.divisor, recipe);
}

// Whether a thread of a persistent grid prefetches its first values. Also in large grids if it then
// waits for an amax, because it loads the values together with the maxima.
__device__ __forceinline__ bool prefetches_first(const GlobalScale& scale) {
  return scale.kind == GlobalScale::kPartials ? is_first() : is_small_grid();
}

JITQUANT_HD bool is_by_row(const GlobalScale& scale) {
  return scale.kind == GlobalScale::kRows || scale.kind == GlobalScale::kRowAmax;
}

// The encoding of a row. The thread that has the row's first block writes the outputs.
__device__ __forceinline__ Nvfp4Encoding row_encoding(const GlobalScale& scale, int64_t row,
                                                      int64_t block, Nvfp4Recipe recipe) {
  const float given = scale.gsa[row * scale.stride];
  if (scale.kind == GlobalScale::kRows) return nvfp4_encoding_from_gsa(given, recipe);
  if (block == 0) scale.gsa_out[row] = div_rn(given, scale.divisor);
  return nvfp4_encoding_from_amax(given, scale.divisor, recipe);
}

}  // namespace jitquant
