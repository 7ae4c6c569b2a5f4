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
    JITQUANT_CHECK(x_fp4.scalar_type() == ScalarType::Float4_e2m1fn_x2 ||
                       x_fp4.scalar_type() == ScalarType::Byte,
                   "x_fp4 must be float4_e2m1fn_x2, or its bytes as uint8");
    JITQUANT_CHECK(
        x_sf.scalar_type() == ScalarType::Float8_e4m3fn || x_sf.scalar_type() == ScalarType::Byte,
        "x_sf must be float8_e4m3fn, or its bytes as uint8");
    JITQUANT_CHECK(x_fp4.dim() >= 1, "x_fp4 must have at least one dimension");
    JITQUANT_CHECK(dim == -1 || dim == 0, "dim must be -1 or 0, not ", dim);
    const bool columns = dim == 0;
    JITQUANT_CHECK(!columns || (x_fp4.dim() == 2 && !swizzled),
                   "dim 0 needs a two-dimensional x_fp4 and scale_layout 'linear'");
    JITQUANT_CHECK(x_fp4.is_contiguous() && aligned(x_fp4.const_data_ptr(), 8),
                   "x_fp4 must be contiguous and aligned to 8 bytes; pass x_fp4.contiguous()");
    JITQUANT_CHECK(x_sf.is_contiguous(), "x_sf must be contiguous; pass x_sf.contiguous()");

    const int64_t bytes = x_fp4.size(columns ? 0 : x_fp4.dim() - 1);
    JITQUANT_CHECK(bytes > 0 && bytes % 8 == 0,
                   "the packed dimension of x_fp4 must be a multiple of 8 bytes, not ", bytes);
    const int64_t logical = cols.value_or(2 * bytes);
    JITQUANT_CHECK(logical > 2 * bytes - 16 && logical <= 2 * bytes, "cols must be from ",
                   2 * bytes - 15, " to ", 2 * bytes, ", not ", logical);

    Nvfp4Input in = {};
    in.codes = static_cast<const uint8_t*>(x_fp4.const_data_ptr());
    in.scales = static_cast<const uint8_t*>(x_sf.const_data_ptr());
    in.blocks = bytes / 8;
    in.rows = columns ? x_fp4.size(1) : x_fp4.numel() / bytes;
    in.code_stride = columns ? in.rows : bytes;
    in.scale_stride = columns ? in.rows : in.blocks;
    in.swizzled = swizzled;
    const GlobalScale scale = given_scale(gsa, "gsa", columns ? 1 : in.rows, x_fp4);
    in.gsa = scale.gsa;
    in.gsa_stride = scale.stride;
    const PackedShape packed =
        PackedShape::of(x_fp4, x_fp4.dim() - 1, in.rows, 2 * bytes, swizzled);
    const Shape scales = columns ? Shape::of(in.blocks, in.rows) : packed.scales;
    bool same = x_sf.dim() == scales.dim();
    for (int64_t i = 0; same && i < x_sf.dim(); ++i) same = x_sf.size(i) == scales.size(i);
    JITQUANT_CHECK(same, "x_sf must have shape ", shape_text(scales), ", not ", shape_text(x_sf));
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
