// What jitquant's kernels use of CUDA's asynchronous copies.
#pragma once

#include "cuda_runtime.h"

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0) {
  emulation::copy_later(to, from, bytes, zeros);
}
inline void __pipeline_commit() {
  emulation::end_group();
}
inline void __pipeline_wait_prior(size_t but) {
  emulation::copy_now(but);
}
