#include "declared/dequant_nvfp4.h"

namespace jitquant {
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
    const bool columns = dim == 0;
    const int64_t bytes = x_fp4.size(columns ? 0 : x_fp4.dim() - 1);
    const int64_t logical = cols.value_or(2 * bytes);
    Nvfp4Input in = {};
    in.codes = bytes_of(x_fp4, "x_fp4", 8);
    in.scales = static_cast<const uint8_t*>(x_sf.const_data_ptr());
    in.blocks = bytes / 8;
    in.rows = columns ? x_fp4.size(1) : x_fp4.numel() / bytes;
    in.code_stride = columns ? in.rows : bytes;
    in.scale_stride = columns ? in.rows : in.blocks;
    in.swizzled = swizzled;
    const GlobalScale scale = given_scale(gsa);
    in.gsa = scale.gsa;
    in.gsa_stride = scale.stride;
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
