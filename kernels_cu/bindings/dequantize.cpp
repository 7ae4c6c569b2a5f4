#include "declared/dequantize.h"
#include "../fp8/launch.h"

namespace jitquant {

cudaError_t launch_dequantize(const Matrix& data, EightBit format, const StoredScales& scales,
                              void* out, DType dtype, cudaStream_t stream);

namespace {

EightBit format_of(ScalarType dtype) {
  if (dtype == ScalarType::Float8_e4m3fn) return EightBit::kE4m3;
  if (dtype == ScalarType::Float8_e5m2) return EightBit::kE5m2;
  return EightBit::kInt8;
}

StoredScales::Type type_of(ScalarType dtype) {
  if (dtype == ScalarType::Float) return StoredScales::kFloat;
  if (dtype == ScalarType::Int) return StoredScales::kPacked;
  JITQUANT_CHECK(dtype == ScalarType::Float8_e8m0fnu || dtype == ScalarType::Byte,
                 "scale_inv: expected float32, int32 of packed exponents, float8_e8m0fnu or its "
                 "bytes as uint8, got ",
                 dtype_text(dtype));
  return StoredScales::kE8m0;
}

int64_t up_to(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// How a layout stores the scales of the `leading` first dimensions of data, the last of which
// counts `lines` (rows or blocks).
struct Layout {
  bool column = false, padded_cols = false, padded_rows = false, swizzled = false;

  static Layout of(std::string_view name) {
    if (name == "row" || name == "linear") return {};
    if (name == "row_padded") return {false, true, false, false};
    if (name == "column") return {true, false, false, false};
    if (name == "column_tma") return {true, false, true, false};
    return {false, true, false, true};
  }
};

StoredScales stored_scales(const View& data, const View& scale_inv, int64_t block_rows,
                           int64_t block_cols, std::string_view scale_layout) {
  check_cuda(scale_inv, "scale_inv", &data);
  const Layout layout = Layout::of(scale_layout);
  StoredScales s = {};
  s.data = scale_inv.const_data_ptr();
  s.type = type_of(scale_inv.scalar_type());
  JITQUANT_CHECK(
      block_rows >= 0 && block_cols >= 0 && block_cols % 16 == 0,
      "block_rows and block_cols: expected 0 or more, with block_cols a multiple of 16, got ",
      block_rows, " and ", block_cols);
  JITQUANT_CHECK(data.size(data.dim() - 1) < (int64_t{1} << 34) && block_cols < (int64_t{1} << 34),
                 "data: expected fewer than 2^34 columns, got shape ", shape_text(data));
  JITQUANT_CHECK(block_rows <= 1 || data.dim() >= 2,
                 "data: expected shape (..., N) with N >= 1, or (..., N, K) for blocks, got shape ",
                 shape_text(data));
  s.block_rows = block_rows;
  s.halves_per_col = static_cast<uint32_t>(block_cols / 8);

  // The required shape.
  int64_t expected[64];
  int64_t rank = 0;
  if (block_rows == 0) {
    JITQUANT_CHECK(s.type == StoredScales::kFloat,
                   "scale_inv: expected float32 with block_rows 0 (one scale for the tensor), got ",
                   dtype_text(scale_inv.dtype), ". Pass its value as torch.float32");
    expected[rank++] = 1;
  } else {
    const int64_t leading = data.dim() - 1;
    JITQUANT_CHECK(leading < 60, "data: expected fewer than 61 dimensions, got ", data.dim());
    const int64_t cols = data.size(leading);
    int64_t groups = block_cols == 0 ? 1 : (cols + block_cols - 1) / block_cols;
    if (s.type == StoredScales::kPacked) groups = (groups + 3) / 4;
    const int64_t per_batch = leading == 0 ? 1 : data.size(leading - 1);
    const int64_t lines = (per_batch + block_rows - 1) / block_rows;
    int64_t batches = 1;
    for (int64_t i = 0; i < leading - 1; ++i) batches *= data.size(i);
    s.matrix_rows = per_batch > 0 ? per_batch : 1;
    s.per_matrix = block_rows > 1 || layout.column;
    s.swizzled = layout.swizzled;
    s.grid.order = layout.column ? ScaleOrder::kColumn : ScaleOrder::kRow;
    s.grid.stored_cols = layout.padded_cols ? up_to(groups, 4) : groups;
    s.grid.stored_rows = layout.padded_rows ? up_to(lines, 4) : lines;
    JITQUANT_CHECK(!layout.swizzled || s.type == StoredScales::kE8m0,
                   "scale_inv: expected float8_e8m0fnu or its bytes as uint8 with scale_layout "
                   "'swizzled_128x4', got ",
                   dtype_text(scale_inv.dtype), ". Scales of other dtypes have another layout");
    if (layout.swizzled) {
      expected[rank++] = up_to(batches * lines, 128);
      expected[rank++] = s.grid.stored_cols;
    } else {
      for (int64_t i = 0; i < leading - 1; ++i) expected[rank++] = data.size(i);
      if (layout.column) {
        expected[rank++] = s.grid.stored_cols;
        expected[rank++] = s.grid.stored_rows;
      } else {
        if (leading > 0) expected[rank++] = lines;
        expected[rank++] = s.grid.stored_cols;
      }
    }
  }
  bool same = scale_inv.dim() == rank && scale_inv.is_contiguous();
  for (int64_t i = 0; same && i < rank; ++i) same = scale_inv.size(i) == expected[i];
  JITQUANT_CHECK(
      same, "scale_inv: expected shape ", tuple_text(rank, [&](int64_t i) { return expected[i]; }),
      ", contiguous, for data of shape ", shape_text(data), " and scale_layout '", scale_layout,
      "', got shape ", shape_text(scale_inv), " and strides ", strides_text(scale_inv));
  return s;
}

void dequantize(Call& call, const declared::Dequantize& args, Result& out) {
  check_cuda(args.data, "data");
  JITQUANT_CHECK(
      args.data.dim() >= 1,
      "data: expected shape (..., N) with N >= 1, or (..., N, K) for blocks, got shape ()");
  const EightBit format = format_of(args.data.scalar_type());
  Matrix rows = rows_of(args.data, "data", args.data.dim() - 1, 1);
  rows.vector = aligned(rows.data, 8) && rows.s0 % 8 == 0 && rows.s1 % 8 == 0 && rows.s2 % 8 == 0;
  const StoredScales scales =
      stored_scales(args.data, args.scale_inv, args.block_rows, args.block_cols, args.scale_layout);
  const ScalarType type = args.dtype.value_or(ScalarType::BFloat16);
  const DType element = dtype_of(type, "dtype");
  void* to =
      out.memory("out", type, Shape::of(args.data, args.data.dim() - 1, rows.cols), args.data);
  const Launching at(call, args.data);
  if (rows.rows == 0) return;
  check_launch(launch_dequantize(rows, format, scales, to, element, at.stream), "dequantize");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&dequantize>())
