// gsa = amax / divisor of a whole tensor, in one launch.
#include <cooperative_groups.h>

#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

// One block, or a cooperative grid: the barrier of the launch itself lets block 0 see the others'
// maxima, so there is no counter that a launch must find at zero.
template <class T>
__global__ void __launch_bounds__(kThreads)
    amax_gsa_kernel(PlainSource<T> source, float divisor, float* partials, float* gsa) {
  __shared__ float scratch[33];
  float amax = block_amax(source, scratch);
  if (gridDim.x > 1) {
    if (threadIdx.x == 0) partials[blockIdx.x] = amax;
    cooperative_groups::this_grid().sync();
    if (blockIdx.x != 0) return;
    amax = 0.0f;
    for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x)
      amax = fmaxf(amax, __ldcg(partials + i));
    amax = block_reduce<MaxOp>(amax, scratch);
  }
  if (threadIdx.x == 0) *gsa = div_rn(amax, divisor);
}

// Blocks of the launch, each of which needs a float of workspace; 1 needs none.
int amax_gsa_blocks(const Matrix& x) {
  const int64_t items = (x.rows * blocks_of(x.cols) + 4 * kThreads - 1) / (4 * kThreads);
  return static_cast<int>(persistent_grid(items, 2));
}

cudaError_t launch_amax_gsa(const Matrix& x, float divisor, float* partials, int blocks, float* gsa,
                            cudaStream_t stream) {
  LaunchShape shape = {blocks, kThreads};
  shape.cooperative = blocks > 1;
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    return launch<&amax_gsa_kernel<T>>(shape, stream, PlainSource<T>(flattened(x)), divisor,
                                       partials, gsa);
  });
}

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
