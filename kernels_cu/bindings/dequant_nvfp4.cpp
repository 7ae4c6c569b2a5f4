#include "declared/dequant_nvfp4.h"

namespace jitquant {

cudaError_t launch_dequant_nvfp4(const Nvfp4Input& in, void* out, DType dtype, int64_t cols,
                                 cudaStream_t stream);
cudaError_t launch_dequant_nvfp4_columns(const Nvfp4Input& in, void* out, DType dtype,
                                         int64_t out_rows, int64_t cols, cudaStream_t stream);

namespace {

constexpr const char* kName = "dequant_nvfp4";

// The packed tensors as rows of blocks, and the shape of the output.
struct Packed {
  Nvfp4Input in;
  Shape shape;
  int64_t cols;  // logical size of the packed dimension
  bool columns;

  static Packed of(const View& x_fp4, const View& x_sf, const View& gsa,
                   std::optional<int64_t> cols, int64_t dim, bool swizzled) {
    check_cuda(x_fp4, "x_fp4");
    check_cuda(x_sf, "x_sf", &x_fp4);
    check_cuda(gsa, "gsa", &x_fp4);
    JITQUANT_CHECK(dim == -1 || dim == 0,
                   "dim: expected -1 (blocks along the last dimension) or 0, got ", dim);
    const bool columns = dim == 0;
    JITQUANT_CHECK(!columns || !swizzled,
                   "scale_layout: expected 'linear' with dim=0, got 'swizzled_128x4'");
    check_packed_kind(x_fp4, "x_fp4", ScalarType::Float4_e2m1fn_x2);
    check_packed_kind(x_sf, "x_sf", ScalarType::Float8_e4m3fn);
    JITQUANT_CHECK(x_fp4.dim() >= 1 && (!columns || x_fp4.dim() == 2),
                   "x_fp4: expected shape (..., P), or (P, N) with dim=0, got shape ",
                   shape_text(x_fp4));
    JITQUANT_CHECK(
        aligned(x_fp4.const_data_ptr(), 8),
        "x_fp4: expected memory aligned to 8 bytes, got another address. Pass x_fp4.clone()");

    const int64_t bytes = x_fp4.size(columns ? 0 : x_fp4.dim() - 1);
    JITQUANT_CHECK(
        bytes > 0 && bytes % 8 == 0,
        "x_fp4: expected a multiple of 8 bytes (16 codes) along the packed dimension, got shape ",
        shape_text(x_fp4));
    const int64_t logical = cols.value_or(2 * bytes);
    JITQUANT_CHECK(logical > 2 * bytes - 16 && logical <= 2 * bytes, "cols: expected ",
                   2 * bytes - 15, " to ", 2 * bytes, " for x_fp4 of shape ", shape_text(x_fp4),
                   ", got ", logical);

    Nvfp4Input in = {};
    in.codes = static_cast<const uint8_t*>(x_fp4.const_data_ptr());
    in.scales = static_cast<const uint8_t*>(x_sf.const_data_ptr());
    in.blocks = bytes / 8;
    in.rows = columns ? x_fp4.size(1) : x_fp4.numel() / bytes;
    in.code_stride = columns ? in.rows : bytes;
    in.scale_stride = columns ? in.rows : in.blocks;
    in.swizzled = swizzled;
    const GlobalScale scale = given_scale(gsa, "gsa", columns ? 1 : in.rows, x_fp4, "x_fp4");
    in.gsa = scale.gsa;
    in.gsa_stride = scale.stride;
    const PackedShape packed =
        PackedShape::of(x_fp4, x_fp4.dim() - 1, in.rows, 2 * bytes, swizzled);
    const Shape scales = columns ? Shape::of(in.blocks, in.rows) : packed.scales;
    bool same = x_sf.dim() == scales.dim();
    for (int64_t i = 0; same && i < x_sf.dim(); ++i) same = x_sf.size(i) == scales.size(i);
    JITQUANT_CHECK(same, "x_sf: expected shape ", shape_text(scales), " for x_fp4 of shape ",
                   shape_text(x_fp4), " and scale_layout '", swizzled ? "swizzled_128x4" : "linear",
                   "', got shape ", shape_text(x_sf));
    return {in, columns ? Shape::of(logical, in.rows) : Shape::of(x_fp4, x_fp4.dim() - 1, logical),
            logical, columns};
  }
};

void dequant_nvfp4(Call& call, const declared::DequantNvfp4& args, Result& out) {
  const Packed p = Packed::of(args.x_fp4, args.x_sf, args.gsa, args.cols, args.dim,
                              swizzled_of(args.scale_layout));
  const ScalarType type = args.dtype.value_or(ScalarType::BFloat16);
  const DType element = dtype_of(type, "dtype");
  void* data = out.memory("out", type, p.shape, args.x_fp4);
  const Launching at(call, args.x_fp4);
  if (p.in.rows == 0) return;
  check_launch(p.columns
                   ? launch_dequant_nvfp4_columns(p.in, data, element, p.cols, p.in.rows, at.stream)
                   : launch_dequant_nvfp4(p.in, data, element, p.cols, at.stream),
               kName);
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&dequant_nvfp4>())
