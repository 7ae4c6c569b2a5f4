#include "declared/nvfp4_linear.h"
#include "product.h"

namespace jitquant {
namespace {

void nvfp4_linear(Call& call, const declared::Nvfp4Linear& args, Result& y) {
  const auto& [x, w_fp4, w_sf, w_gsa, x_sf, x_gsa, bias, residual, dtype] = args;
  const Nvfp4Weight w = weight_of(w_fp4, w_sf, w_gsa);
  LinearOperand in = {};
  in.data = x.const_data_ptr();
  if (x_sf) {
    in.data = bytes_of(x, "x", 8);
    in.cols = w.cols;
    in.rows = x.numel() / x.size(x.dim() - 1);
    in.scales = static_cast<const uint8_t*>(x_sf->const_data_ptr());
  } else {
    const Matrix m = matrix_of(x, "x");
    in.cols = static_cast<int>(m.cols);
    in.rows = m.rows;
    in.stride = m.s2;
    in.dtype = m.dtype;
  }

  const ScalarType type = dtype.value_or(x_sf ? ScalarType::BFloat16 : x.scalar_type());
  LinearEpilogue to = {};
  to.cols = w.rows;
  to.dtype = dtype_of(type, "dtype");
  if (bias) {
    to.bias_dtype = dtype_of(*bias, "bias");
    to.bias = bias->const_data_ptr();
  }
  if (residual) to.residual = residual->const_data_ptr();
  if (x_gsa) {
    const GlobalScale scale = given_scale(*x_gsa);
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
