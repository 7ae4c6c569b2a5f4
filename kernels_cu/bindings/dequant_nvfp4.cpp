#include "common.h"

namespace jitquant {

cudaError_t launch_dequant_nvfp4(const Nvfp4Input& in, void* out, DType dtype, int64_t cols,
                                 cudaStream_t stream);
cudaError_t launch_dequant_nvfp4_columns(const Nvfp4Input& in, void* out, DType dtype,
                                         int64_t out_rows, int64_t cols, cudaStream_t stream);

namespace {

constexpr const char* kName = "dequant_nvfp4";

// The packed tensors as rows of blocks, and the shape of what comes out.
struct Packed {
  Nvfp4Input in;
  std::vector<int64_t> sizes;
  int64_t cols;  // logical size of the packed dimension
  bool columns;

  static Packed of(const Tensor& x_fp4, const Tensor& x_sf, const Tensor& gsa,
                   std::optional<int64_t> cols, int64_t dim, bool swizzled) {
    check_cuda(x_fp4, "x_fp4");
    check_cuda(x_sf, "x_sf", &x_fp4);
    check_cuda(gsa, "gsa", &x_fp4);
    JITQUANT_CHECK(x_fp4.scalar_type() == ScalarType::Float4_e2m1fn_x2 ||
                       x_fp4.scalar_type() == ScalarType::Byte,
                   "x_fp4 must be float4_e2m1fn_x2, or its bytes as uint8");
    JITQUANT_CHECK(
        x_sf.scalar_type() == ScalarType::Float8_e4m3fn || x_sf.scalar_type() == ScalarType::Byte,
        "x_sf must be float8_e4m3fn, or its bytes as uint8");
    JITQUANT_CHECK(gsa.scalar_type() == ScalarType::Float, "gsa must be float32");
    JITQUANT_CHECK(x_fp4.dim() >= 1, "x_fp4 must have at least one dimension");
    JITQUANT_CHECK(dim >= -2 && dim <= 1, "dim must be -1 or 0, not ", dim);
    Packed p = {};
    p.columns = dim == -2 || (dim == 0 && x_fp4.dim() == 2);
    JITQUANT_CHECK(!p.columns || (x_fp4.dim() == 2 && !swizzled),
                   "dim 0 needs a two-dimensional x_fp4 and scale_layout 'linear'");
    JITQUANT_CHECK(x_fp4.is_contiguous() && aligned(x_fp4.const_data_ptr(), 8),
                   "x_fp4 must be contiguous and aligned to 8 bytes; pass x_fp4.contiguous()");
    JITQUANT_CHECK(x_sf.is_contiguous(), "x_sf must be contiguous; pass x_sf.contiguous()");

    const int64_t axis = p.columns ? 0 : x_fp4.dim() - 1;
    const int64_t bytes = x_fp4.size(axis);
    JITQUANT_CHECK(bytes > 0 && bytes % 8 == 0,
                   "the packed dimension of x_fp4 must be a multiple of 8 bytes, not ", bytes);
    p.cols = cols.value_or(2 * bytes);
    JITQUANT_CHECK(p.cols > 2 * bytes - 16 && p.cols <= 2 * bytes, "cols must be from ",
                   2 * bytes - 15, " to ", 2 * bytes, ", not ", p.cols);
    p.sizes = leading_sizes(x_fp4, x_fp4.dim());
    p.sizes[axis] = p.cols;

    Nvfp4Input& in = p.in;
    in.codes = static_cast<const uint8_t*>(x_fp4.const_data_ptr());
    in.scales = static_cast<const uint8_t*>(x_sf.const_data_ptr());
    in.gsa = static_cast<const float*>(gsa.const_data_ptr());
    in.blocks = bytes / 8;
    in.rows = p.columns ? x_fp4.size(1) : (bytes == 0 ? 0 : x_fp4.numel() / bytes);
    in.code_stride = p.columns ? in.rows : bytes;
    in.scale_stride = p.columns ? in.rows : in.blocks;
    in.swizzled = swizzled;
    if (swizzled) {
      JITQUANT_CHECK(x_sf.dim() == 2 && x_sf.size(0) == (in.rows + 127) / 128 * 128 &&
                         x_sf.size(1) == (in.blocks + 3) / 4 * 4,
                     "x_sf must have the padded shape of scale_layout 'swizzled_128x4' for ",
                     in.rows, " rows of ", in.blocks, " blocks; its shape is ", shape_text(x_sf));
    } else {
      JITQUANT_CHECK(x_sf.numel() == in.rows * in.blocks, "x_sf must have ", in.rows * in.blocks,
                     " elements, one a block; its shape is ", shape_text(x_sf));
    }
    if (gsa.numel() != 1) {
      JITQUANT_CHECK(!p.columns && gsa.dim() == 1 && gsa.size(0) == in.rows,
                     "gsa must have one element", p.columns ? "" : ", or one a row",
                     "; its shape is ", shape_text(gsa));
      in.gsa_stride = gsa.stride(0);
    }
    return p;
  }
};

void launch_packed(const Packed& p, const Tensor& like, const Tensor& out) {
  const DType dtype = dtype_of(out, "out");
  check_out(out, "out", out.scalar_type(), p.sizes, like);
  if (out.numel() == 0) return;
  const DeviceGuard guard(like.get_device_index());
  const cudaStream_t stream = current_stream(like);
  void* data = out.mutable_data_ptr();
  check_launch(p.columns
                   ? launch_dequant_nvfp4_columns(p.in, data, dtype, p.cols, p.in.rows, stream)
                   : launch_dequant_nvfp4(p.in, data, dtype, p.cols, stream),
               kName);
}

void dequant_nvfp4_out(const Tensor& x_fp4, const Tensor& x_sf, const Tensor& gsa,
                       std::optional<int64_t> cols, int64_t dim, const std::string& scale_layout,
                       std::optional<ScalarType> dtype, const Tensor& out) {
  JITQUANT_CHECK(!dtype || *dtype == out.scalar_type(), "dtype and out's dtype differ");
  launch_packed(Packed::of(x_fp4, x_sf, gsa, cols, dim, swizzled_of(scale_layout)), x_fp4, out);
}

Tensor dequant_nvfp4(const Tensor& x_fp4, const Tensor& x_sf, const Tensor& gsa,
                     std::optional<int64_t> cols, int64_t dim, const std::string& scale_layout,
                     std::optional<ScalarType> dtype) {
  const Packed p = Packed::of(x_fp4, x_sf, gsa, cols, dim, swizzled_of(scale_layout));
  Tensor out = empty(p.sizes, dtype.value_or(ScalarType::BFloat16), x_fp4);
  launch_packed(p, x_fp4, out);
  return out;
}

}  // namespace
}  // namespace jitquant

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "dequant_nvfp4(Tensor x_fp4, Tensor x_sf, Tensor gsa, *, int? cols=None, int dim=-1, "
      "str scale_layout='linear', ScalarType? dtype=None) -> Tensor");
  m.def(
      "dequant_nvfp4.out(Tensor x_fp4, Tensor x_sf, Tensor gsa, *, int? cols=None, int dim=-1, "
      "str scale_layout='linear', ScalarType? dtype=None, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("dequant_nvfp4", TORCH_BOX(&jitquant::dequant_nvfp4));
  m.impl("dequant_nvfp4.out", TORCH_BOX(&jitquant::dequant_nvfp4_out));
}
