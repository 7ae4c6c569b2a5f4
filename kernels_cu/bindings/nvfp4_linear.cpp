#include "../gemm/linear.h"

#include "declared/nvfp4_linear.h"
#include "product.h"

namespace jitquant {
namespace {

void nvfp4_linear(Call& call, const declared::Nvfp4Linear& args, Result& y) {
  const auto& [x, w_fp4, w_sf, w_gsa, x_sf, x_gsa, bias, residual, dtype] = args;
  const Nvfp4Weight w = weight_of(w_fp4, w_sf, w_gsa);
  check_cuda(x, "x", &w_fp4);
  JITQUANT_CHECK(x.dim() >= 1,
                 "x: expected shape (..., K) with a contiguous last dimension, got shape ",
                 shape_text(x), " and strides ", strides_text(x), ". Call x.contiguous() first");

  LinearOperand in = {};
  in.data = x.const_data_ptr();
  if (x_sf) {
    in.cols = static_cast<int>(check_packed(x, *x_sf, "x", "x_sf"));
    in.rows = x.numel() / x.size(x.dim() - 1);
    in.scales = static_cast<const uint8_t*>(x_sf->const_data_ptr());
    JITQUANT_CHECK(x_gsa, "x_gsa: expected the gsa of x beside x_sf, got None");
    JITQUANT_CHECK(in.cols == w.cols, "x: expected ", w.cols - 15, " to ", w.cols,
                   " columns for w_fp4 of shape ", shape_text(w_fp4), ", got ", in.cols);
  } else {
    JITQUANT_CHECK(x.dtype != ScalarType::Float, "x: expected bfloat16 or float16, got ",
                   dtype_text(x.dtype), ". Convert it with .to(), or quantize it");
    const Matrix m = matrix_of(x, "x");
    check_columns(m, x, w.cols, w_fp4);
    in.cols = static_cast<int>(m.cols);
    in.rows = m.rows;
    in.stride = m.s2;
    in.dtype = m.dtype;
  }

  const ScalarType type = dtype.value_or(x_sf ? ScalarType::BFloat16 : x.scalar_type());
  LinearEpilogue to = epilogue_of(x, w.rows, bias, residual, type);
  if (x_gsa) {
    const GlobalScale scale = given_scale(*x_gsa, "x_gsa", in.rows, x, "x");
    to.x_gsa = scale.gsa;
    to.x_gsa_stride = scale.stride;
  }
  to.out = y.memory("y", type, Shape::of(x, x.dim() - 1, w.rows), x);
  const Launching at(call, x);
  const Workspace decoded(nvfp4_linear_decoded(w, in) / 2, x);  // two of bf16 in a float
  check_launch(launch_nvfp4_linear(w, in, to, decoded.floats(), at.stream), "nvfp4_linear");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&nvfp4_linear>())
