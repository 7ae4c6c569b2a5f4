// Checks that all bindings of NVFP4 products share.
#pragma once

#include "../gemm/linear.h"
#include "common.h"

namespace jitquant {

// Checks codes and linear scales, packed along the last dimension. Returns the logical columns.
inline int64_t check_packed(const View& codes, const View& scales, const char* name,
                            const char* scales_name) {
  check_cuda(codes, name);
  check_cuda(scales, scales_name, &codes);
  check_packed_kind(codes, name, ScalarType::Float4_e2m1fn_x2);
  check_packed_kind(scales, scales_name, ScalarType::Float8_e4m3fn);
  JITQUANT_CHECK(codes.dim() >= 1, name,
                 ": expected shape (..., P), or (P, N) with dim=0, got shape ()");
  const int64_t bytes = codes.size(codes.dim() - 1);
  JITQUANT_CHECK(
      bytes > 0 && bytes % 8 == 0, name,
      ": expected a multiple of 8 bytes (16 codes) along the packed dimension, got shape ",
      shape_text(codes));
  JITQUANT_CHECK(aligned(codes.const_data_ptr(), 8), name,
                 ": expected memory aligned to 8 bytes, got another address. Pass ", name,
                 ".clone()");
  const Shape expected = Shape::of(codes, codes.dim() - 1, bytes / 8);
  JITQUANT_CHECK(has_shape(scales, expected), scales_name, ": expected shape ",
                 shape_text(expected), " for ", name, " of shape ", shape_text(codes),
                 " and scale_layout 'linear', got shape ", shape_text(scales));
  return 2 * bytes;
}

inline Nvfp4Weight weight_of(const View& codes, const View& scales, const View& gsa) {
  const int64_t cols = check_packed(codes, scales, "w_fp4", "w_sf");
  JITQUANT_CHECK(codes.dim() == 2, "w_fp4: expected shape (N, P), got shape ", shape_text(codes));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  JITQUANT_CHECK(codes.size(0) <= kMost && cols <= kMost,
                 "w_fp4: expected fewer than 2^30 rows and columns, got shape ", shape_text(codes));
  JITQUANT_CHECK(gsa.numel() == 1, "w_gsa: expected one element for a weight, got shape ",
                 shape_text(gsa));
  return {static_cast<const uint8_t*>(codes.const_data_ptr()),
          static_cast<const uint8_t*>(scales.const_data_ptr()),
          given_scale(gsa, "w_gsa", 1, codes, "w_fp4").gsa, static_cast<int>(codes.size(0)),
          static_cast<int>(cols)};
}

// Checks that the rows of x are evenly strided and that x has the columns that a weight of `cols`
// takes.
inline void check_columns(const Matrix& m, const View& x, int64_t cols, const View& w_fp4) {
  JITQUANT_CHECK(m.n2 == m.rows || m.rows == 0, "x: expected rows at one stride, got shape ",
                 shape_text(x), " and strides ", strides_text(x), ". Call x.contiguous() first");
  JITQUANT_CHECK(m.cols > cols - 16 && m.cols <= cols, "x: expected ", cols - 15, " to ", cols,
                 " columns for w_fp4 of shape ", shape_text(w_fp4), ", got ", m.cols);
}

// Everything after the sums, except the factors of x and the destination.
inline LinearEpilogue epilogue_of(const View& x, int64_t cols, const std::optional<View>& bias,
                                  const std::optional<View>& residual, ScalarType dtype) {
  LinearEpilogue to = {};
  to.cols = cols;
  to.dtype = dtype_of(dtype, "dtype");
  if (bias) {
    check_cuda(*bias, "bias", &x);
    to.bias_dtype = dtype_of(*bias, "bias");
    JITQUANT_CHECK(bias->dim() == 1 && bias->size(0) == cols && bias->is_contiguous(),
                   "bias: expected shape (", cols,
                   ",), contiguous, one element for each row of the weight, got shape ",
                   shape_text(*bias), " and strides ", strides_text(*bias));
    to.bias = bias->const_data_ptr();
  }
  if (residual) {
    check_cuda(*residual, "residual", &x);
    const Shape shape = Shape::of(x, x.dim() - 1, cols);
    JITQUANT_CHECK(
        residual->dtype == dtype && has_shape(*residual, shape) && residual->is_contiguous(),
        "residual: expected ", dtype_text(dtype), " of shape ", shape_text(shape),
        ", contiguous, got ", dtype_text(residual->dtype), " of shape ", shape_text(*residual),
        " and strides ", strides_text(*residual));
    to.residual = residual->const_data_ptr();
  }
  return to;
}

}  // namespace jitquant
