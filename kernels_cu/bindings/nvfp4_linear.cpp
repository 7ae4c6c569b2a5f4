#include "../gemm/linear.h"

#include "declared/nvfp4_linear.h"
#include "product.h"

namespace jitquant {
namespace {

void nvfp4_linear(Call& call, const declared::Nvfp4Linear& args, Result& y) {
  const auto& [x, w_fp4, w_sf, w_gsa, x_sf, x_gsa, bias, residual, dtype] = args;
  const int64_t cols = check_packed(w_fp4, w_sf, "w_fp4", "w_sf");
  JITQUANT_CHECK(w_fp4.dim() == 2, "w_fp4 must have two dimensions, not ", w_fp4.dim());
  const int64_t n = w_fp4.size(0);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  JITQUANT_CHECK(n <= kMost && cols <= kMost, "w_fp4 must have less than 2^30 rows and columns");
  JITQUANT_CHECK(w_gsa.numel() == 1, "w_gsa must have one element, not ", w_gsa.numel());
  const GlobalScale weight_scale = given_scale(w_gsa, "w_gsa", 1, w_fp4);
  check_cuda(x, "x", &w_fp4);
  JITQUANT_CHECK(x.dim() >= 1, "x must have at least one dimension");

  LinearOperand in = {};
  in.data = x.const_data_ptr();
  if (x_sf) {
    in.cols = static_cast<int>(check_packed(x, *x_sf, "x", "x_sf"));
    in.rows = x.numel() / x.size(x.dim() - 1);
    in.scales = static_cast<const uint8_t*>(x_sf->const_data_ptr());
    JITQUANT_CHECK(x_gsa, "x_gsa must be given with x_sf");
    JITQUANT_CHECK(in.cols == cols, "x must have ", cols, " columns, not ", in.cols);
  } else {
    const Matrix m = matrix_of(x, "x");
    JITQUANT_CHECK(m.dtype != DType::kFloat32, "x must be bfloat16 or float16");
    JITQUANT_CHECK(m.cols > cols - 16 && m.cols <= cols, "x must have ", cols - 15, " to ", cols,
                   " columns, not ", m.cols);
    JITQUANT_CHECK(m.n2 == m.rows || m.rows == 0,
                   "x must have rows at one distance from each other; pass x.contiguous()");
    in.cols = static_cast<int>(m.cols);
    in.rows = m.rows;
    in.stride = m.s2;
    in.dtype = m.dtype;
  }

  LinearEpilogue to = {};
  to.cols = n;
  const ScalarType type = dtype.value_or(x_sf ? ScalarType::BFloat16 : x.scalar_type());
  to.dtype = dtype_of(type, "dtype");
  if (x_gsa) {
    const GlobalScale scale = given_scale(*x_gsa, "x_gsa", in.rows, x);
    to.x_gsa = scale.gsa;
    to.x_gsa_stride = scale.stride;
  }
  if (bias) {
    check_cuda(*bias, "bias", &x);
    to.bias_dtype = dtype_of(*bias, "bias");
    JITQUANT_CHECK(bias->dim() == 1 && bias->size(0) == n && bias->is_contiguous(),
                   "bias must be contiguous with ", n, " elements; its shape is ",
                   shape_text(*bias));
    to.bias = bias->const_data_ptr();
  }
  const Shape shape = Shape::of(x, x.dim() - 1, n);
  if (residual) {
    check_kind(*residual, "residual", type, shape, x);
    JITQUANT_CHECK(residual->is_contiguous(), "residual must be contiguous");
    to.residual = residual->const_data_ptr();
  }
  to.out = y.memory("y", type, shape, x);

  const Nvfp4Weight w = {static_cast<const uint8_t*>(w_fp4.const_data_ptr()),
                         static_cast<const uint8_t*>(w_sf.const_data_ptr()), weight_scale.gsa,
                         static_cast<int>(n), static_cast<int>(cols)};
  const Launching at(call, x);
  check_launch(launch_nvfp4_linear(w, in, to, at.stream), "nvfp4_linear");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&nvfp4_linear>())
