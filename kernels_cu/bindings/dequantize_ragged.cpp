#include "declared/dequantize_ragged.h"
#include "ragged.h"

namespace jitquant {

cudaError_t launch_dequantize_ragged_fp8(const uint8_t* data, EightBit format,
                                         const float* scale_inv, const SegmentTable& segments,
                                         void* out, DType dtype, cudaStream_t stream);
cudaError_t launch_dequantize_ragged_mxfp8(const uint8_t* data, EightBit format,
                                           const uint8_t* scales, const SegmentTable& segments,
                                           void* out, DType dtype, cudaStream_t stream);
cudaError_t launch_dequantize_ragged_nvfp4(const uint8_t* codes, const uint8_t* scales,
                                           const float* gsa, const SegmentTable& segments,
                                           void* out, DType dtype, cudaStream_t stream);

namespace {

const uint8_t* bytes_of(const View& t, const char* name, ScalarType dtype, int64_t count,
                        int64_t numel) {
  JITQUANT_CHECK(t.scalar_type() == dtype || t.scalar_type() == ScalarType::Byte, name,
                 ": expected ", dtype_text(dtype), " or its bytes as torch.uint8, got ",
                 dtype_text(t.dtype), ". View it with ", name, ".view(torch.uint8)");
  JITQUANT_CHECK(t.dim() == 1 && t.numel() == count && t.is_contiguous(), name,
                 ": expected shape (", count, ",) for ", numel, " elements, got shape ",
                 shape_text(t));
  return static_cast<const uint8_t*>(t.const_data_ptr());
}

// A buffer of FP8 elements, and the values that it becomes.
struct Fp8Buffer {
  const uint8_t* data;
  EightBit format;
  SegmentOffsets segments;
  SegmentTable table;
  DType element;
  void* to;

  template <class Args>
  static Fp8Buffer of(const Args& args, Result& out) {
    check_cuda(args.data, "data");
    const bool e4m3 = args.data.scalar_type() == ScalarType::Float8_e4m3fn;
    JITQUANT_CHECK(e4m3 || args.data.scalar_type() == ScalarType::Float8_e5m2,
                   "data: expected float8_e4m3fn or float8_e5m2, got ",
                   dtype_text(args.data.dtype));
    JITQUANT_CHECK(args.data.dim() >= 1 && args.data.is_contiguous(),
                   "data: expected a contiguous buffer, got one that is not. Offsets count its "
                   "rows. Call data.contiguous() first");
    const SegmentOffsets segments = SegmentOffsets::of(args.offsets, args.sizes, args.data);
    const ScalarType type = args.dtype.value_or(ScalarType::BFloat16);
    const DType element = dtype_of(type, "dtype");
    const int64_t last = args.data.dim() - 1;
    return {static_cast<const uint8_t*>(args.data.const_data_ptr()),
            e4m3 ? EightBit::kE4m3 : EightBit::kE5m2,
            segments,
            segments.table(args.data.numel(), row_of(args.data)),
            element,
            out.memory("out", type, Shape::of(args.data, last, args.data.size(last)), args.data)};
  }
};

void dequantize_ragged_fp8(Call& call, const declared::DequantizeRaggedFp8& args, Result& out) {
  const Fp8Buffer b = Fp8Buffer::of(args, out);
  const float* scales = b.segments.floats(args.scale_inv, "scale_inv", args.data);
  const Launching at(call, args.data);
  check_launch(
      launch_dequantize_ragged_fp8(b.data, b.format, scales, b.table, b.to, b.element, at.stream),
      "dequantize_ragged_fp8");
}

void dequantize_ragged_mxfp8(Call& call, const declared::DequantizeRaggedMxfp8& args, Result& out) {
  const Fp8Buffer b = Fp8Buffer::of(args, out);
  check_cuda(args.block_scales, "block_scales", &args.data);
  const uint8_t* scales = bytes_of(args.block_scales, "block_scales", ScalarType::Float8_e8m0fnu,
                                   (b.table.numel + 31) / 32, b.table.numel);
  const Launching at(call, args.data);
  check_launch(
      launch_dequantize_ragged_mxfp8(b.data, b.format, scales, b.table, b.to, b.element, at.stream),
      "dequantize_ragged_mxfp8");
}

void dequantize_ragged_nvfp4(Call& call, const declared::DequantizeRaggedNvfp4& args, Result& out) {
  check_cuda(args.x_fp4, "x_fp4");
  check_cuda(args.x_sf, "x_sf", &args.x_fp4);
  JITQUANT_CHECK(args.numel >= 0, "numel: expected 0 or more, got ", args.numel);
  JITQUANT_CHECK(args.row_size >= 0, "row_size: expected 0 or more, got ", args.row_size);
  const int64_t blocks = (args.numel + 15) / 16;
  const uint8_t* codes =
      bytes_of(args.x_fp4, "x_fp4", ScalarType::Float4_e2m1fn_x2, blocks * 8, args.numel);
  const uint8_t* scales =
      bytes_of(args.x_sf, "x_sf", ScalarType::Float8_e4m3fn, blocks, args.numel);
  JITQUANT_CHECK(
      aligned(codes, 8),
      "x_fp4: expected memory aligned to 8 bytes, got another address. Pass x_fp4.clone()");
  const SegmentOffsets segments = SegmentOffsets::of(args.offsets, args.sizes, args.x_fp4);
  const float* factors = segments.floats(args.gsa, "gsa", args.x_fp4);
  const ScalarType type = args.dtype.value_or(ScalarType::BFloat16);
  const DType element = dtype_of(type, "dtype");
  void* to = out.memory("out", type, Shape::of(args.numel), args.x_fp4);
  const Launching at(call, args.x_fp4);
  check_launch(launch_dequantize_ragged_nvfp4(codes, scales, factors,
                                              segments.table(args.numel, args.row_size), to,
                                              element, at.stream),
               "dequantize_ragged_nvfp4");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&dequantize_ragged_fp8>(), function<&dequantize_ragged_mxfp8>(),
                   function<&dequantize_ragged_nvfp4>())
