// What jitquant's kernels use of CUDA's driver, in plain C++.
#pragma once

#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
using CUfunction = struct EmulatedFunction*;
using CUkernel = struct EmulatedKernel*;
using CUgraphNode = struct EmulatedNode*;
struct CUDA_KERNEL_NODE_PARAMS {
  CUfunction func;
  CUkernel kern;
};
// Nothing is captured.
CUresult cuGraphKernelNodeGetParams(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*);
CUresult cuFuncGetName(const char**, CUfunction);
CUresult cuKernelGetName(const char**, CUkernel);

enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_32B = 32,
  CU_TENSOR_MAP_SWIZZLE_64B = 64,
  CU_TENSOR_MAP_SWIZZLE_128B = 128,
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_128B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
  const char* data;
  uint64_t element, sizes[2], stride, box[2];
  uint64_t unused[9];
};
static_assert(sizeof(CUtensorMap) == 128);

// Of matrices, with what the driver asks of them.
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                       void* data, const cuuint64_t* sizes,
                                       const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  const uint64_t element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  if (rank != 2 || reinterpret_cast<uintptr_t>(data) % 16 != 0 || strides[0] % 16 != 0 ||
      sizes[0] == 0 || sizes[1] == 0 || box[0] * element != static_cast<uint64_t>(swizzle) ||
      box[1] > 256) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *map = {static_cast<const char*>(data),
          element,
          {sizes[0], sizes[1]},
          strides[0],
          {box[0], box[1]},
          {}};
  return CUDA_SUCCESS;
}
