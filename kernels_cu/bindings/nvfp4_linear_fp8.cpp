#include "../gemm/linear_fp8.h"

#include "declared/nvfp4_linear_fp8.h"
#include "product.h"

namespace jitquant {
namespace {

void nvfp4_linear_fp8(Call& call, const declared::Nvfp4LinearFp8& args, Result& y) {
  const View& x = args.x;
  const Nvfp4Weight w = weight_of(args.w_fp4, args.w_sf, args.w_gsa);
  check_cuda(x, "x", &args.w_fp4);
  JITQUANT_CHECK(x.scalar_type() == ScalarType::Float8_e4m3fn, "x: expected float8_e4m3fn, got ",
                 dtype_text(x.dtype), ". quantize_fp8 returns it");
  JITQUANT_CHECK(x.dim() >= 1,
                 "x: expected shape (..., K) with a contiguous last dimension, got shape ",
                 shape_text(x), " and strides ", strides_text(x), ". Call x.contiguous() first");
  const Matrix m = rows_of(x, "x", x.dim() - 1, 1);
  check_columns(m, x, w.cols, args.w_fp4);

  const View& scale_inv = args.x_scale_inv;
  check_cuda(scale_inv, "x_scale_inv", &x);
  JITQUANT_CHECK(scale_inv.scalar_type() == ScalarType::Float && scale_inv.is_contiguous() &&
                     (scale_inv.numel() == 1 || scale_inv.numel() == m.rows),
                 "x_scale_inv: expected 1 or ", m.rows, " contiguous elements in float32, got ",
                 dtype_text(scale_inv.dtype), " of shape ", shape_text(scale_inv),
                 ". quantize_fp8 returns them with granularity 'tensor' or 'row'");
  const ScalarType type = args.dtype.value_or(ScalarType::BFloat16);
  LinearEpilogue to = epilogue_of(x, w.rows, args.bias, args.residual, type);
  to.x_gsa = static_cast<const float*>(scale_inv.const_data_ptr());
  to.x_gsa_stride = scale_inv.numel() == 1 ? 0 : 1;

  JITQUANT_CHECK(w.cols % 64 == 0 && aligned(w.codes, 16) && aligned(w.scales, 4),
                 "w_fp4: expected a multiple of 32 bytes in a row, aligned to 16 bytes, with w_sf "
                 "aligned to 4, got shape ",
                 shape_text(args.w_fp4), ". Use compute='exact' for other weights");
  JITQUANT_CHECK(aligned(m.data, 16) && (m.s2 % 16 == 0 || m.rows <= 1),
                 "x: expected rows aligned to 16 bytes, got strides ", strides_text(x),
                 ". Call x.contiguous() first");
  JITQUANT_CHECK(m.rows < int64_t{1} << 30, "x: expected fewer than 2^30 rows, got shape ",
                 shape_text(x));
  to.out = y.memory("y", type, Shape::of(x, x.dim() - 1, w.rows), x);
  const Fp8Operand in = {m.data, m.rows > 1 ? m.s2 : w.cols, m.rows, static_cast<int>(m.cols)};
  const Launching at(call, x);
  const Workspace scratch(nvfp4_linear_fp8_scratch(w) / 4, x);  // in floats
  const cudaError_t error = launch_nvfp4_linear_fp8(w, in, to, scratch.floats(), at.stream);
  JITQUANT_CHECK(error != cudaErrorNotSupported,
                 "compute: expected 'exact' on this device, got 'fp8'. FP8 products with a weight "
                 "in NVFP4 need compute capability 9.0 and kernels built for sm_90a");
  check_launch(error, "nvfp4_linear_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&nvfp4_linear_fp8>())
