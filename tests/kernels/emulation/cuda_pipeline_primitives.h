// What jitquant's kernels use of CUDA's asynchronous copies, of which a thread waits for all it has
// begun.
#pragma once

#include "cuda_runtime.h"

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  emulation::copy_later(to, from, bytes);
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(size_t) {
  emulation::copy_now();
}
