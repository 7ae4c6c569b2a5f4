// What a host launcher takes: plain structs, no torch, no device code. Shared by the .cu files and
// by the C++ that calls them. A launcher returns a cudaError_t, allocates nothing, never
// synchronises, and launches on the given stream of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "jitquant/nvfp4.cuh"
#include "jitquant/swizzle.cuh"

namespace jitquant {

enum class DType : int { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// Rows of elements. Row r = (i0 * n1 + i1) * n2 + i2 starts at data + i0 * s0 + i1 * s1 + i2 * s2.
// Where n2 is not all rows there are less than 2^32 of them.
struct Matrix {
  const void* data;
  DType dtype;
  int64_t rows, cols;
  int64_t n1, n2;
  int64_t s0, s1, s2;
  bool vector;  // every row starts on a multiple of 16 bytes
};

// A vector with one value for each column, in the matrix's dtype or in fp32.
struct ColumnVector {
  const void* data;
  bool fp32;
  bool vector;
};

// Where the tensor's (or the rows') scale comes from.
struct GlobalScale {
  enum Kind : int {
    kValue,     // `value` is gsa
    kTensor,    // gsa[0]
    kRows,      // gsa[row * stride]
    kPartials,  // the amax is the maximum of partials[0 .. count), gsa = amax / divisor; the launch
                // before has written them, and read the tensor
    kAmax,      // the same, from wherever
    kRowAmax    // the amax of a row is gsa[row * stride]
  };
  Kind kind;
  float value;
  const float* gsa;
  int64_t stride;
  const float* partials;
  int count;
  float divisor;
  float* gsa_out;  // written where it is computed or a value: (1,), or one a row; else may be null
};

inline GlobalScale partials_scale(const float* partials, int count, float divisor, float* gsa) {
  return {GlobalScale::kPartials, 0.0f, nullptr, 0, partials, count, divisor, gsa};
}

struct Nvfp4Output {
  uint8_t* codes;  // (rows, blocks * 8), aligned to 8 bytes
  uint8_t* scales;
  int64_t rows, blocks;
  bool swizzled;
};

enum class RowMode : int {
  kRowAmax,     // gsa of each row from its amax
  kGiven,       // gsa as GlobalScale says
  kTensorAmax,  // nothing is quantized: the amax of everything goes to partials
};

struct RowScale {
  RowMode mode;
  float divisor;
  float* gsa_out;     // (rows,) for kRowAmax
  float* partials;    // (gridDim.x,) for kTensorAmax
  GlobalScale given;  // for kGiven
  int maxima;         // with kTensorAmax, partials up to here are zeroed after those written
};

// X[row, h, :] starts at row `row` of x plus h * stream_stride; A[row, h] weighs it.
struct HyperConnection {
  Matrix x;
  const void* weights;
  bool weights_fp32;  // else in x's dtype
  int streams;
  int64_t stream_stride, weight_row_stride, weight_stride;
};

// Lines of `length` elements, packed along the line.
struct WeightShape {
  int64_t length, line_stride, element_stride;
  bool columns;  // a line is a column of the weight
  bool tile;     // a scale for 16 lines
};

struct Nvfp4Input {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* gsa;
  int64_t rows, blocks;
  int64_t code_stride, scale_stride, gsa_stride;  // of a row, in bytes, bytes and floats
  bool swizzled;
};

constexpr int kMaxPartials = 2048;

}  // namespace jitquant
