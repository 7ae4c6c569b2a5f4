// Whether a CUDA graph contains launches of this library. Such a graph keeps replaying this code
// even after an edit has replaced it.
#pragma once

#include <cuda_runtime_api.h>

// One per library. The loader reads it by name when another build replaces this one.
__attribute__((visibility("default"))) inline int jitquant_captured = 0;

namespace jitquant {

inline void note_capture(cudaStream_t stream) {
  if (jitquant_captured != 0) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();  // so that it is not reported as an error of the launch
  } else if (status == cudaStreamCaptureStatusActive) {
    jitquant_captured = 1;
  }
}

}  // namespace jitquant
