// Where the values of a quantizer come from. A source has `rows` and `cols` and
//   load(row, block, v)    the 16 values of a block, zeros past the last column; called once a
//   block reload(row, block, v)  the same values once more
#pragma once

#include "jitquant/launch.h"
#include "jitquant/memory.cuh"
#include "jitquant/nvfp4.cuh"

namespace jitquant {

template <class T>
struct RowPointer {
  T* data;
  int64_t rows, n1, n2, s0, s1, s2;

  explicit RowPointer(const Matrix& m)
      : data(static_cast<T*>(const_cast<void*>(m.data))),
        rows(m.rows),
        n1(m.n1),
        n2(m.n2),
        s0(m.s0),
        s1(m.s1),
        s2(m.s2) {}

  __device__ __forceinline__ T* operator()(int64_t row) const {
    if (n2 == rows) return data + row * s2;
    const int64_t i = row / n2;
    return data + (i / n1) * s0 + (i % n1) * s1 + (row % n2) * s2;
  }
};

template <class T>
struct PlainSource {
  using Element = T;
  static constexpr int kBlocksPerSm = 5;
  RowPointer<const T> row_pointer;
  int64_t rows, cols;
  bool vector;

  explicit PlainSource(const Matrix& m)
      : row_pointer(m), rows(m.rows), cols(m.cols), vector(m.vector) {}

  __device__ __forceinline__ void load(int64_t row, int64_t block, float (&v)[16]) const {
    load16(row_pointer(row) + block * 16, cols - block * 16, vector, v);
  }
  __device__ __forceinline__ void reload(int64_t row, int64_t block, float (&v)[16]) const {
    load(row, block, v);
  }
};

__device__ __forceinline__ float swiglu(float gate, float up) {
  return mul_rn(div_rn(gate, add_rn(1.0f, expf(-gate))), up);
}

// Gate and up columns in turns of `run`: run == cols is the plain layout [gate | up].
template <class T>
struct DeinterleaveSource {
  using Element = T;
  static constexpr int kBlocksPerSm = 3;
  RowPointer<const T> row_pointer;
  int64_t rows, cols;
  uint32_t run;
  bool activate;  // silu(gate) * up; otherwise the gate as it is
  bool vector;    // eight neighbours are in one run and aligned

  DeinterleaveSource(const Matrix& m, int64_t run, bool activate)
      : row_pointer(m),
        rows(m.rows),
        cols(m.cols / 2),
        run(static_cast<uint32_t>(run)),
        activate(activate),
        vector(m.vector && run % 8 == 0) {}

  __device__ __forceinline__ int64_t gate_column(uint32_t c) const {
    if (run == 8) return 2 * static_cast<int64_t>(c & ~7u) + (c & 7u);
    if (run == cols) return c;
    return static_cast<int64_t>(c / run) * 2 * run + c % run;
  }

  __device__ __forceinline__ void load(int64_t row, int64_t block, float (&v)[16]) const {
    const T* p = row_pointer(row);
    const uint32_t first = static_cast<uint32_t>(block * 16);
    if (vector && first + 16 <= cols) {
#pragma unroll
      for (int half = 0; half < 16; half += 8) {
        const T* gate = p + gate_column(first + half);
        load8(gate, v + half);
        if (activate) {
          float up[8];
          load8(gate + run, up);
#pragma unroll
          for (int i = 0; i < 8; ++i) v[half + i] = swiglu(v[half + i], up[i]);
        }
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        float value = 0.0f;
        if (first + i < cols) {
          const T* gate = p + gate_column(first + i);
          value = to_float(gate[0]);
          if (activate) value = swiglu(value, to_float(gate[run]));
        }
        // A constant index keeps v in registers.
#pragma unroll
        for (int j = 0; j < 16; ++j) v[j] = j == i ? value : v[j];
      }
    }
  }
  __device__ __forceinline__ void reload(int64_t row, int64_t block, float (&v)[16]) const {
    load(row, block, v);
  }
};

// x, or x + residual: the sum is made in fp32, rounded once to the residual's type, stored there,
// and that is the value that goes on, as in a model that adds and normalizes in two steps.
template <class T>
struct ResidualSource {
  using Element = T;
  static constexpr int kBlocksPerSm = 3;
  RowPointer<const T> row_pointer;
  RowPointer<T> residual;
  int64_t rows, cols;
  bool vector, has_residual;

  ResidualSource(const Matrix& x, const Matrix* residual)
      : row_pointer(x),
        residual(residual ? *residual : x),
        rows(x.rows),
        cols(x.cols),
        vector(x.vector && (!residual || residual->vector)),
        has_residual(residual != nullptr) {}

  __device__ __forceinline__ void load(int64_t row, int64_t block, float (&v)[16]) const {
    load16(row_pointer(row) + block * 16, cols - block * 16, vector, v);
    if (has_residual) {
      T* r = residual(row) + block * 16;
      float sum[16];
      load16(static_cast<const T*>(r), cols - block * 16, vector, sum);
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i] = to_float(from_float<T>(add_rn(v[i], sum[i])));
      store16(r, cols - block * 16, vector, v);
    }
  }
  __device__ __forceinline__ void reload(int64_t row, int64_t block, float (&v)[16]) const {
    const T* p = has_residual ? static_cast<const T*>(residual(row)) : row_pointer(row);
    load16(p + block * 16, cols - block * 16, vector, v);
  }
};

// The mix of n streams of a hyper-connection: sum over h of A[row, h] * X[row, h, :], h in order.
template <class T>
struct HyperConnectionSource {
  using Element = T;
  static constexpr int kBlocksPerSm = 3;
  RowPointer<const T> row_pointer;  // of (row, 0, 0)
  const void* weights;
  int64_t rows, cols, stream_stride, weight_row_stride, weight_stride;
  int streams;
  bool vector, weights_fp32;

  __device__ __forceinline__ float weight(int64_t row, int h) const {
    const int64_t i = row * weight_row_stride + h * weight_stride;
    return weights_fp32 ? static_cast<const float*>(weights)[i]
                        : to_float(static_cast<const T*>(weights)[i]);
  }

  __device__ __forceinline__ void load(int64_t row, int64_t block, float (&v)[16]) const {
    const T* p = row_pointer(row) + block * 16;
    load16(p, cols - block * 16, vector, v);
    const float first = weight(row, 0);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = mul_rn(first, v[i]);
    for (int h = 1; h < streams; ++h) {
      const float a = weight(row, h);
      float x[16];
      load16(p + h * stream_stride, cols - block * 16, vector, x);
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i] = fma_rn(a, x[i], v[i]);
    }
    // A negative weight has made the zeros past the last column negative.
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i >= cols - block * 16) v[i] = 0.0f;
    }
  }
  __device__ __forceinline__ void reload(int64_t row, int64_t block, float (&v)[16]) const {
    load(row, block, v);
  }
};

// What RMSNorm multiplies with: values of a source times inv_rms[row] times weight.
template <class T>
struct Normalize {
  ColumnVector weight;
  float eps;
  float* inv_rms;  // (rows,)

  __device__ __forceinline__ void apply(float inverse, int64_t block, int64_t cols,
                                        float (&v)[16]) const {
    float w[16];
    const int64_t left = cols - block * 16;
    if (weight.fp32) {
      load16(static_cast<const float*>(weight.data) + block * 16, left, weight.vector, w);
    } else {
      load16(static_cast<const T*>(weight.data) + block * 16, left, weight.vector, w);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = mul_rn(mul_rn(v[i], inverse), w[i]);
  }
};

// The normalized values of a source whose inv_rms an earlier launch wrote.
template <class Source>
struct NormalizedSource {
  using Element = typename Source::Element;
  static constexpr int kBlocksPerSm = 3;
  Source source;
  Normalize<Element> norm;
  int64_t rows, cols;

  NormalizedSource(const Source& source, const Normalize<Element>& norm)
      : source(source), norm(norm), rows(source.rows), cols(source.cols) {}

  __device__ __forceinline__ void load(int64_t row, int64_t block, float (&v)[16]) const {
    source.reload(row, block, v);
    norm.apply(norm.inv_rms[row], block, cols, v);
  }
};

}  // namespace jitquant
