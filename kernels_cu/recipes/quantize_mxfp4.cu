// MXFP4: E2M1 with one E8M0 scale per 32 neighbors in a row, handled by two lanes with 16 each; and
// dequantization.
#include "jitquant/fp8.cuh"
#include "kernels.cuh"

namespace jitquant {

// Each thread has eight neighbors, one word of codes.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_mxfp4_kernel(Mxfp4Input in, T* out, int64_t cols, bool vector) {
  wait_for_previous();
  let_next_begin();
  const uint32_t* const codes = reinterpret_cast<const uint32_t*>(in.codes);
#pragma unroll 1
  for (BlockWalk walk(4 * in.groups); walk.row < in.rows; walk.next()) {
    const int64_t group = walk.block >> 2, left = cols - 8 * walk.block;
    if (left <= 0) continue;
    const uint32_t word = codes[walk.row * walk.width + walk.block];
    const float power = float_from_e8m0(
        in.scales[scale_offset(in.swizzled, walk.row, group, in.groups, in.groups)]);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = mul_rn(float_from_e2m1(word >> (4 * i)), power);
    uint32_t words[2 * sizeof(T)];
    round_values<T>(v, words);
    store_elements<2 * sizeof(T)>(out + walk.row * cols + 8 * walk.block, left, vector, words);
  }
}

#ifndef __CUDACC_RTC__
cudaError_t launch_quantize_mxfp4(const Matrix& x, const Rope& rope, const Recipe& recipe,
                                  const Nvfp4Output& out, cudaStream_t stream) {
  return recipe.rounding.stochastic
             ? launch_recipe<Scaling::kMx, true>(x, rope, {}, recipe, out, stream)
             : launch_recipe<Scaling::kMx, false>(x, rope, {}, recipe, out, stream);
}

cudaError_t launch_dequantize_mxfp4(const Mxfp4Input& in, const Values& out, cudaStream_t stream) {
  const int64_t cols = out.cols;
  const int64_t items = (in.rows * in.groups * 4 + kThreads - 1) / kThreads;
  return dispatch(out.dtype, [&](auto element) {
    using T = decltype(element);
    const bool vector = reinterpret_cast<uintptr_t>(out.data) % 16 == 0 && cols % 8 == 0;
    return launch<&dequantize_mxfp4_kernel<T>>(
        {persistent_grid(items, blocks_per_sm<&dequantize_mxfp4_kernel<T>>(kThreads, 0)), kThreads,
         Start::kOverlapped},
        stream, in, static_cast<T*>(out.data), cols, vector);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
