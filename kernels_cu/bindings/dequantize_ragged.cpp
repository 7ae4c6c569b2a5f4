#include "declared/dequantize_ragged.h"
#include "ragged.h"

namespace jitquant {
namespace {

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
    const SegmentOffsets segments = SegmentOffsets::of(args.offsets, args.sizes);
    const ScalarType type = args.dtype.value_or(ScalarType::BFloat16);
    const DType element = dtype_of(type, "dtype");
    const int64_t last = args.data.dim() - 1;
    return {static_cast<const uint8_t*>(args.data.const_data_ptr()),
            eight_bit_of(args.data.dtype),
            segments,
            segments.table(args.data.numel(), row_of(args.data)),
            element,
            out.memory("out", type, Shape::of(args.data, last, args.data.size(last)), args.data)};
  }
};

void dequantize_ragged_fp8(Call& call, const declared::DequantizeRaggedFp8& args, Result& out) {
  const Fp8Buffer b = Fp8Buffer::of(args, out);
  const float* scales = static_cast<const float*>(args.scale_inv.data);
  const Launching at(call, args.data);
  check_launch(
      launch_dequantize_ragged_fp8(b.data, b.format, scales, b.table, b.to, b.element, at.stream),
      "dequantize_ragged_fp8");
}

void dequantize_ragged_mxfp8(Call& call, const declared::DequantizeRaggedMxfp8& args, Result& out) {
  const Fp8Buffer b = Fp8Buffer::of(args, out);
  const uint8_t* scales = static_cast<const uint8_t*>(args.block_scales.data);
  const Launching at(call, args.data);
  check_launch(
      launch_dequantize_ragged_mxfp8(b.data, b.format, scales, b.table, b.to, b.element, at.stream),
      "dequantize_ragged_mxfp8");
}

void dequantize_ragged_nvfp4(Call& call, const declared::DequantizeRaggedNvfp4& args, Result& out) {
  const uint8_t* codes = bytes_of(args.x_fp4, "x_fp4", 8);
  const uint8_t* scales = static_cast<const uint8_t*>(args.x_sf.data);
  const float* factors = static_cast<const float*>(args.gsa.data);
  const SegmentOffsets segments = SegmentOffsets::of(args.offsets, args.sizes);
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
