// Whether a CUDA graph holds launches of this library: such a graph goes on replaying this code
// after an edit has replaced it.
#pragma once

#include <cuda_runtime_api.h>

// Each library has its own. The loader reads it, by name, when another build takes its place.
__attribute__((visibility("default"))) inline int jitquant_captured = 0;

namespace jitquant {

inline void note_capture(cudaStream_t stream) {
  if (jitquant_captured != 0) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();  // not to be taken for an error of the launch
  } else if (status == cudaStreamCaptureStatusActive) {
    jitquant_captured = 1;
  }
}

}  // namespace jitquant
