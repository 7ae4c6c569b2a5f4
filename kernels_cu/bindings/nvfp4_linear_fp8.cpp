#include "../gemm/linear_fp8.h"

#include "declared/nvfp4_linear_fp8.h"
#include "product.h"

namespace jitquant {
namespace {

void nvfp4_linear_fp8(Call& call, const declared::Nvfp4LinearFp8& args, Result& y) {
  const View& x = args.x;
  const Nvfp4Weight w = weight_of(args.w_fp4, args.w_sf, args.w_gsa);
  check_cuda(x, "x", &args.w_fp4);
  JITQUANT_CHECK(x.scalar_type() == ScalarType::Float8_e4m3fn, "x must be float8_e4m3fn");
  JITQUANT_CHECK(x.dim() >= 1, "x must have at least one dimension");
  const Matrix m = rows_of(x, "x", x.dim() - 1, 1);
  check_columns(m, w.cols);

  const View& scale_inv = args.x_scale_inv;
  check_cuda(scale_inv, "x_scale_inv", &x);
  JITQUANT_CHECK(scale_inv.scalar_type() == ScalarType::Float && scale_inv.is_contiguous() &&
                     (scale_inv.numel() == 1 || scale_inv.numel() == m.rows),
                 "x_scale_inv must be a contiguous float32 of 1 or ", m.rows,
                 " elements; its shape is ", shape_text(scale_inv));
  const ScalarType type = args.dtype.value_or(ScalarType::BFloat16);
  LinearEpilogue to = epilogue_of(x, w.rows, args.bias, args.residual, type);
  to.x_gsa = static_cast<const float*>(scale_inv.const_data_ptr());
  to.x_gsa_stride = scale_inv.numel() == 1 ? 0 : 1;

  JITQUANT_CHECK(w.cols % 64 == 0 && aligned(w.codes, 16) && aligned(w.scales, 4),
                 "w_fp4 must have a multiple of 32 bytes a row and begin at a multiple of 16, and "
                 "w_sf of 4; use compute=\"exact\" for another weight");
  JITQUANT_CHECK(aligned(m.data, 16) && (m.s2 % 16 == 0 || m.rows <= 1),
                 "x must have rows that begin at multiples of 16 bytes; pass x.contiguous()");
  JITQUANT_CHECK(m.rows < int64_t{1} << 30, "x must have less than 2^30 rows");
  to.out = y.memory("y", type, Shape::of(x, x.dim() - 1, w.rows), x);
  const Fp8Operand in = {m.data, m.rows > 1 ? m.s2 : w.cols, m.rows, static_cast<int>(m.cols)};
  const Launching at(call, x);
  const cudaError_t error = launch_nvfp4_linear_fp8(w, in, to, at.stream);
  JITQUANT_CHECK(error != cudaErrorNotSupported,
                 "FP8 products with a weight in NVFP4 need compute capability 9.0 and kernels that "
                 "are built for sm_90a; use compute=\"exact\" on this device");
  check_launch(error, "nvfp4_linear_fp8");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&nvfp4_linear_fp8>())
