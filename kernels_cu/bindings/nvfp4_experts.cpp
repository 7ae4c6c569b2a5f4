#include "../gemm/experts.h"

#include "declared/nvfp4_experts.h"
#include "product.h"

namespace jitquant {
namespace {

// The weights of experts, (experts, rows, cols / 2), with one gsa, one per expert or one per row.
ExpertWeights experts_of(const View& codes, const View& scales, const View& gsa, const char* name,
                         const char* scales_name, const char* gsa_name) {
  const int64_t cols = check_packed(codes, scales, name, scales_name);
  JITQUANT_CHECK(codes.dim() == 3, name, " must have three dimensions, not ", codes.dim());
  const int64_t experts = codes.size(0), rows = codes.size(1);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  JITQUANT_CHECK(experts >= 1 && experts <= kMostExperts, name, " must be of 1 to ", kMostExperts,
                 " experts, not ", experts);
  JITQUANT_CHECK(rows <= kMost / kMostExperts && cols <= kMost, name,
                 " must have less than 2^20 rows and 2^30 columns");
  check_cuda(gsa, gsa_name, &codes);
  const int64_t count = gsa.numel();
  JITQUANT_CHECK((count == 1 || count == experts || count == experts * rows) && gsa.is_contiguous(),
                 gsa_name, " must have one element, or be contiguous with one for each of the ",
                 experts, " experts or of their ", experts * rows, " rows; its shape is ",
                 shape_text(gsa));
  ExpertWeights w = {};
  w.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  w.scales = static_cast<const uint8_t*>(scales.const_data_ptr());
  w.gsa = static_cast<const float*>(gsa.const_data_ptr());
  w.gsa_row = count == experts * rows && count > experts ? 1 : 0;
  w.gsa_expert = w.gsa_row != 0 ? rows : count == experts ? 1 : 0;
  w.experts = static_cast<int>(experts);
  w.rows = static_cast<int>(rows);
  w.cols = static_cast<int>(cols);
  return w;
}

// Rows (T, K) of bf16 or fp16. K may be up to 15 less than the packed columns.
LinearOperand rows_to_multiply(const View& x, int64_t cols) {
  JITQUANT_CHECK(x.dim() == 2, "x must have two dimensions, not ", x.dim());
  const Matrix m = matrix_of(x, "x");
  JITQUANT_CHECK(m.dtype != DType::kFloat32, "x must be bfloat16 or float16");
  JITQUANT_CHECK(m.cols > cols - 16 && m.cols <= cols, "x must have ", cols - 15, " to ", cols,
                 " columns, not ", m.cols);
  return {m.data, nullptr, m.dtype, m.s2, m.rows, static_cast<int>(m.cols)};
}

bool is_wide(const View& t, const char* name, const View& like) {
  check_cuda(t, name, &like);
  JITQUANT_CHECK(t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long, name,
                 " must be int32 or int64");
  JITQUANT_CHECK(t.is_contiguous(), name, " must be contiguous; pass ", name, ".contiguous()");
  return t.scalar_type() == ScalarType::Long;
}

void nvfp4_grouped_linear(Call& call, const declared::Nvfp4GroupedLinear& args, Result& y) {
  const auto& [x, w_fp4, w_sf, w_gsa, offsets, x_sf, x_gsa, dtype] = args;
  const ExpertWeights w = experts_of(w_fp4, w_sf, w_gsa, "w_fp4", "w_sf", "w_gsa");
  check_cuda(x, "x", &w_fp4);
  LinearOperand in = {};
  if (x_sf) {
    JITQUANT_CHECK(x.dim() == 2, "x must have two dimensions, not ", x.dim());
    in.cols = static_cast<int>(check_packed(x, *x_sf, "x", "x_sf"));
    in.rows = x.size(0);
    in.data = x.const_data_ptr();
    in.scales = static_cast<const uint8_t*>(x_sf->const_data_ptr());
    JITQUANT_CHECK(x_gsa, "x_gsa must be given with x_sf");
    JITQUANT_CHECK(in.cols == w.cols, "x must have ", w.cols, " columns, not ", in.cols);
  } else {
    in = rows_to_multiply(x, w.cols);
  }
  Routing routing = {};
  routing.wide = is_wide(offsets, "offsets", x);
  JITQUANT_CHECK(offsets.dim() == 1 && offsets.size(0) == w.experts, "offsets must have shape (",
                 w.experts, ",), not ", shape_text(offsets));
  routing.offsets = offsets.const_data_ptr();
  routing.rows = in.rows;

  LinearEpilogue to = {};
  to.cols = w.rows;
  const ScalarType type = dtype.value_or(x_sf ? ScalarType::BFloat16 : x.scalar_type());
  to.dtype = dtype_of(type, "dtype");
  if (x_gsa) {
    const GlobalScale scale = given_scale(*x_gsa, "x_gsa", in.rows, x, "x");
    to.x_gsa = scale.gsa;
    to.x_gsa_stride = scale.stride;
  }
  to.out = y.memory("y", type, Shape::of(x, 1, w.rows), x);
  const Launching at(call, x);
  check_launch(launch_nvfp4_grouped_linear(w, in, routing, to, at.stream), "nvfp4_grouped_linear");
}

void nvfp4_experts(Call& call, const declared::Nvfp4Experts& args, Result& mixture) {
  const auto& [x, gate_up_fp4, gate_up_sf, gate_up_gsa, down_fp4, down_sf, down_gsa, topk_ids,
               topk_weights, dtype] = args;
  ExpertLayer layer = {};
  layer.gate_up =
      experts_of(gate_up_fp4, gate_up_sf, gate_up_gsa, "gate_up_fp4", "gate_up_sf", "gate_up_gsa");
  layer.down = experts_of(down_fp4, down_sf, down_gsa, "down_fp4", "down_sf", "down_gsa");
  const ExpertWeights &up = layer.gate_up, &down = layer.down;
  check_cuda(x, "x", &gate_up_fp4);
  check_cuda(down_fp4, "down_fp4", &gate_up_fp4);
  JITQUANT_CHECK(down.experts == up.experts && down.rows == up.cols && 2 * down.cols == up.rows,
                 "down_fp4 must have shape (", up.experts, ", ", up.cols, ", ", up.rows / 4,
                 "), not ", shape_text(down_fp4));
  const LinearOperand in = rows_to_multiply(x, up.cols);
  JITQUANT_CHECK(in.cols == up.cols, "x must have ", up.cols, " columns, not ", in.cols);
  layer.routing.wide = is_wide(topk_ids, "topk_ids", x);
  JITQUANT_CHECK(topk_ids.dim() == 2 && topk_ids.size(0) == in.rows && topk_ids.size(1) >= 1 &&
                     topk_ids.size(1) <= kMostTopK,
                 "topk_ids must have shape (", in.rows, ", 1 to ", kMostTopK, "), not ",
                 shape_text(topk_ids));
  layer.routing.ids = topk_ids.const_data_ptr();
  layer.routing.rows = in.rows;
  layer.routing.top_k = static_cast<int>(topk_ids.size(1));
  check_kind(topk_weights, "topk_weights", topk_weights.scalar_type(),
             Shape::of(topk_ids, 1, topk_ids.size(1)), x);
  JITQUANT_CHECK(topk_weights.is_contiguous(),
                 "topk_weights must be contiguous; pass topk_weights.contiguous()");
  layer.weights = topk_weights.const_data_ptr();
  layer.weights_dtype = dtype_of(topk_weights, "topk_weights");

  const ScalarType type = dtype.value_or(x.scalar_type());
  layer.out_dtype = dtype_of(type, "dtype");
  layer.out = mixture.memory("mixture", type, Shape::of(x, 1, down.rows), x);
  const Launching at(call, x);
  const int64_t pairs = expert_window(in.rows, layer.routing.top_k) * layer.routing.top_k;
  const Workspace activations((pairs * down.cols + 1) / 2, x);
  const Workspace partials(in.rows > 1 ? pairs * down.rows : 0, x);
  layer.activations = activations.floats();
  layer.partials = partials.floats();
  check_launch(launch_nvfp4_experts(layer, in, at.stream), "nvfp4_experts");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&nvfp4_grouped_linear>(), function<&nvfp4_experts>())
