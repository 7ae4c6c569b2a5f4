// Kernels that do what a GPU leaves undefined, for the test that the machine says so. And the
// shapes of launches that depend on a device.
#include <cuda_pipeline_primitives.h>

#include "jitquant/cluster.cuh"

namespace {

enum class What : int { kNothing, kReads, kWrites, kCopies, kPrefetches, kMisaligns, kReadsEarly };

void kernel(What what, float* data, int count) {
  thread_local float4 shared[1];
  float before = 0.0f;
  if (what == What::kReadsEarly) jitquant::previous_has_waited();
  if (what == What::kReads || what == What::kReadsEarly) before = data[threadIdx.x];
  if (what == What::kWrites) data[threadIdx.x] = 1.0f;
  jitquant::prefetch(what == What::kPrefetches ? data + count : data);
  jitquant::wait_for_previous();
  jitquant::let_next_begin();
  if (what == What::kCopies && threadIdx.x == 0) {
    __pipeline_memcpy_async(shared, data + count - 1, 16, 12);
    __pipeline_commit();
    __pipeline_wait_prior(0);
  }
  if (what == What::kMisaligns) *reinterpret_cast<uint2*>(data + 1) = {};
  data[threadIdx.x] += 1.0f + before;
}

}  // namespace

extern "C" {

// Of five floats, of which four change, as many blocks of threads.
__attribute__((visibility("default"))) int violate(int what, float* data, int grid) {
  return jitquant::launch<&kernel>({grid, 4, jitquant::Start::kOverlapped}, nullptr,
                                   static_cast<What>(what), data, 5);
}

// The blocks and threads of the cluster for a row of `threads` threads; none: zeros.
__attribute__((visibility("default"))) void cluster_of(int threads, int warps, int* shape) {
  shape[0] = shape[1] = 0;
  if (!jitquant::cluster_holds(3, threads)) return;
  const jitquant::LaunchShape made = jitquant::cluster_rows(3, threads, warps);
  shape[0] = made.grid == 3 * made.cluster ? made.cluster : -1, shape[1] = made.block;
}
}
