// gsa = amax / divisor of a whole tensor, in one launch.
#include <cooperative_groups.h>

#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

// One block, or a cooperative grid: the barrier of the launch itself lets block 0 see the others'
// maxima, so there is no counter that a launch must find at zero.
template <class Source>
__global__ void __launch_bounds__(kThreads)
    amax_gsa_kernel(Source source, float divisor, float* partials, float* gsa) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  float amax = walked_amax(source, reduce);
  if (gridDim.x > 1) {
    if (threadIdx.x == 0) partials[blockIdx.x] = amax;
    cooperative_groups::this_grid().sync();
    if (blockIdx.x != 0) return;
    amax = 0.0f;
    for (int i = threadIdx.x; i < gridDim.x; i += kThreads) {
      amax = fmaxf(amax, __ldcg(partials + i));
    }
    amax = reduce.max(amax);
  }
  if (threadIdx.x == 0) *gsa = div_rn(amax, divisor);
}

// Blocks of the launch, each of which needs a float of workspace; 1 needs none.
int amax_gsa_blocks(const Matrix& x) {
  const int64_t items = (x.rows * blocks_of(x.cols) + 4 * kThreads - 1) / (4 * kThreads);
  return static_cast<int>(persistent_grid(items, 4));
}

cudaError_t launch_amax_gsa(const Matrix& x, float divisor, float* partials, int blocks, float* gsa,
                            cudaStream_t stream) {
  const Start start = blocks > 1 ? Start::kCooperative : Start::kAlone;
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    const LaunchShape shape = {blocks, kThreads, start};
    return is_flat(x) ? launch<&amax_gsa_kernel<FlatSource<T>>>(shape, stream, flat_source<T>(x),
                                                                divisor, partials, gsa)
                      : launch<&amax_gsa_kernel<PlainSource<T>>>(shape, stream, PlainSource<T>(x),
                                                                 divisor, partials, gsa);
  });
}

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
