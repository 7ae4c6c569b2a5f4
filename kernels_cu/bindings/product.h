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
                 " has shape (); accepted is (..., P), or (P, N) with dim=0");
  const int64_t bytes = codes.size(codes.dim() - 1);
  JITQUANT_CHECK(bytes > 0 && bytes % 8 == 0, name, " has shape ", shape_text(codes),
                 "; accepted is a multiple of 8 bytes (16 codes) along the packed dimension");
  JITQUANT_CHECK(aligned(codes.const_data_ptr(), 8), name, " must be aligned to 8 bytes; pass ",
                 name, ".clone()");
  const Shape expected = Shape::of(codes, codes.dim() - 1, bytes / 8);
  bool same = scales.dim() == expected.dim();
  for (int64_t i = 0; same && i < scales.dim(); ++i) same = scales.size(i) == expected.size(i);
  JITQUANT_CHECK(same, scales_name, " has shape ", shape_text(scales), "; accepted is ",
                 shape_text(expected), " for ", name, " of shape ", shape_text(codes),
                 " and scale_layout 'linear'");
  return 2 * bytes;
}

inline Nvfp4Weight weight_of(const View& codes, const View& scales, const View& gsa) {
  const int64_t cols = check_packed(codes, scales, "w_fp4", "w_sf");
  JITQUANT_CHECK(codes.dim() == 2, "w_fp4 must have two dimensions, not ", codes.dim());
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  JITQUANT_CHECK(codes.size(0) <= kMost && cols <= kMost,
                 "w_fp4 must have less than 2^30 rows and columns");
  JITQUANT_CHECK(gsa.numel() == 1, "w_gsa must have one element, not ", gsa.numel());
  return {static_cast<const uint8_t*>(codes.const_data_ptr()),
          static_cast<const uint8_t*>(scales.const_data_ptr()),
          given_scale(gsa, "w_gsa", 1, codes, "w_fp4").gsa, static_cast<int>(codes.size(0)),
          static_cast<int>(cols)};
}

// Checks that the rows of x are evenly strided and that x has the columns that a weight of `cols`
// takes.
inline void check_columns(const Matrix& x, int64_t cols) {
  JITQUANT_CHECK(x.cols > cols - 16 && x.cols <= cols, "x must have ", cols - 15, " to ", cols,
                 " columns, not ", x.cols);
  JITQUANT_CHECK(x.n2 == x.rows || x.rows == 0,
                 "x must have rows at one distance from each other; pass x.contiguous()");
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
                   "bias must be contiguous with ", cols, " elements; its shape is ",
                   shape_text(*bias));
    to.bias = bias->const_data_ptr();
  }
  if (residual) {
    check_kind(*residual, "residual", dtype, Shape::of(x, x.dim() - 1, cols), x);
    JITQUANT_CHECK(residual->is_contiguous(), "residual must be contiguous");
    to.residual = residual->const_data_ptr();
  }
  return to;
}

}  // namespace jitquant
