// What host launchers take: plain structs, no torch, no device code. Shared by the .cu files and
// the C++ that calls them. A launcher returns a cudaError_t, allocates nothing, never synchronizes,
// and launches on the given stream of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "jitquant/nvfp4.cuh"
#include "jitquant/swizzle.cuh"

namespace jitquant {

enum class DType : int { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// Rows of elements. Row r = (i0 * n1 + i1) * n2 + i2 starts at data + i0 * s0 + i1 * s1 + i2 * s2.
// If n2 is not the number of rows, there are fewer than 2^32 rows.
struct Matrix {
  const void* data;
  DType dtype;
  int64_t rows, cols;
  int64_t n1, n2;
  int64_t s0, s1, s2;
  bool vector;  // every row is aligned to 16 bytes
};

// Rows and columns are counted in 32 bits, with room for a tile more.
struct CountedMatrix : Matrix {};

// A vector with one value per column, in the matrix's dtype or in fp32.
struct ColumnVector {
  const void* data;
  bool fp32;
  bool vector;
};

// The source of the scale of a tensor or of its rows.
struct GlobalScale {
  enum Kind : int {
    kValue,     // `value` is gsa
    kTensor,    // gsa[0]
    kRows,      // gsa[row * stride]
    kPartials,  // the amax is the maximum of partials[0 .. count), gsa = amax / divisor; the
                // previous launch wrote them and read the tensor
    kAmax,      // as kPartials, from any earlier work
    kRowAmax    // the amax of a row is gsa[row * stride]
  };
  Kind kind;
  float value;
  const float* gsa;
  int64_t stride;
  const float* partials;
  int count;
  float divisor;
  float* gsa_out;  // receives a computed gsa or `value`: (1,), or one per row; else may be null
};

inline GlobalScale partials_scale(const float* partials, int count, float divisor, float* gsa) {
  return {GlobalScale::kPartials, 0.0f, nullptr, 0, partials, count, divisor, gsa};
}

// The gsa of a tensor or of each row: given as a number, or the amax divided by `divisor`.
struct ComputedScale {
  bool given;   // `value` is gsa
  bool by_row;  // otherwise there is one
  float value, divisor;
  float* gsa;  // receives it
};

inline GlobalScale value_scale(const ComputedScale& scale) {
  return {GlobalScale::kValue, scale.value, nullptr, 0, nullptr, 0, 0.0f, scale.gsa};
}

// Gate and up columns of a matrix, in alternating runs of `run`.
struct GateAndUp {
  Matrix fused;
  int64_t run;
};

// FP4 codes, aligned to 8 bytes.
struct Codes {
  const uint8_t* data;
};

struct Nvfp4Output {
  uint8_t* codes;  // (rows, blocks * 8), aligned to 8 bytes
  uint8_t* scales;
  int64_t rows, blocks;
  bool swizzled;
};

enum class RowMode : int {
  kRowAmax,     // gsa of each row, from its amax
  kGiven,       // gsa as GlobalScale says
  kTensorAmax,  // quantizes nothing: the overall amax goes to partials
};

struct RowScale {
  RowMode mode;
  float divisor;
  float* gsa_out;     // (rows,) for kRowAmax
  float* partials;    // (gridDim.x,) for kTensorAmax
  GlobalScale given;  // for kGiven
  int maxima;         // with kTensorAmax, partials up to this count are zeroed after those written
};

// X[row, h, :] starts at row `row` of x plus h * stream_stride. A[row, h] is its weight.
struct HyperConnection {
  Matrix x;
  const void* weights;
  bool weights_fp32;  // otherwise x's dtype
  int streams;
  int64_t stream_stride, weight_row_stride, weight_stride;
};

struct Nvfp4Input {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* gsa;
  int64_t rows, blocks;
  int64_t code_stride, scale_stride, gsa_stride;  // per row, in bytes, bytes and floats
  bool swizzled;
};

// Rows of values, without gaps.
struct Values {
  void* data;
  DType dtype;
  int64_t rows, cols;
};

constexpr int kMaxPartials = 2048;

}  // namespace jitquant
