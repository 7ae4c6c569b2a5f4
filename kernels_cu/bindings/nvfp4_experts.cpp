#include "../gemm/experts.h"

#include "declared/nvfp4_experts.h"
#include "product.h"

namespace jitquant {
namespace {

// The weights of experts, (experts, rows, cols / 2), with one gsa, one per expert or one per row.
ExpertWeights experts_of(const View& codes, const View& scales, const View& gsa, const char* name,
                         const char* scales_name, const char* gsa_name) {
  const int64_t cols = check_packed(codes, scales, name, scales_name);
  JITQUANT_CHECK(codes.dim() == 3 && codes.size(0) >= 1 && codes.size(0) <= kMostExperts, name,
                 ": expected shape (E, N, P), the weights of 1 to ", kMostExperts,
                 " experts, got shape ", shape_text(codes));
  const int64_t experts = codes.size(0), rows = codes.size(1);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  JITQUANT_CHECK(rows <= kMost / kMostExperts && cols <= kMost, name,
                 ": expected less than 2^20 rows in an expert and 2^30 columns, got shape ",
                 shape_text(codes));
  check_cuda(gsa, gsa_name, &codes);
  const int64_t count = gsa.numel();
  JITQUANT_CHECK((count == 1 || count == experts || count == experts * rows) && gsa.is_contiguous(),
                 gsa_name, ": expected one contiguous element, ", experts,
                 " (one for each expert) or ", experts * rows, " (one for each row), got shape ",
                 shape_text(gsa), " and strides ", strides_text(gsa));
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
LinearOperand rows_to_multiply(const View& x, int64_t cols, const View& like,
                               const char* like_name) {
  JITQUANT_CHECK(x.dtype != ScalarType::Float, "x: expected bfloat16 or float16, got ",
                 dtype_text(x.dtype), ". Convert it with .to()");
  const Matrix m = matrix_of(x, "x");
  JITQUANT_CHECK(x.dim() == 2 && m.cols > cols - 16 && m.cols <= cols, "x: expected shape (T, ",
                 cols, ") for ", like_name, " of shape ", shape_text(like), ", got shape ",
                 shape_text(x));
  return {m.data, nullptr, m.dtype, m.s2, m.rows, static_cast<int>(m.cols)};
}

bool is_wide(const View& t, const char* name, const View& like) {
  check_cuda(t, name, &like);
  check_contiguous(t, name);
  return t.scalar_type() == ScalarType::Long;
}

void nvfp4_grouped_linear(Call& call, const declared::Nvfp4GroupedLinear& args, Result& y) {
  const auto& [x, w_fp4, w_sf, w_gsa, offsets, x_sf, x_gsa, dtype] = args;
  const ExpertWeights w = experts_of(w_fp4, w_sf, w_gsa, "w_fp4", "w_sf", "w_gsa");
  check_cuda(x, "x", &w_fp4);
  LinearOperand in = {};
  if (x_sf) {
    in.cols = static_cast<int>(check_packed(x, *x_sf, "x", "x_sf"));
    in.rows = x.size(0);
    in.data = x.const_data_ptr();
    in.scales = static_cast<const uint8_t*>(x_sf->const_data_ptr());
    JITQUANT_CHECK(x.dim() == 2 && in.cols == w.cols, "x: expected shape (T, ", w.cols / 2,
                   ") for w_fp4 of shape ", shape_text(w_fp4), ", got shape ", shape_text(x));
    JITQUANT_CHECK(x_gsa, "x_gsa: expected the gsa of x beside x_sf, got None");
  } else {
    in = rows_to_multiply(x, w.cols, w_fp4, "w_fp4");
  }
  Routing routing = {};
  routing.wide = is_wide(offsets, "offsets", x);
  JITQUANT_CHECK(offsets.dim() == 1 && offsets.size(0) == w.experts, "offsets: expected shape (",
                 w.experts, ",), the end of each expert's rows, got shape ", shape_text(offsets));
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
                 "down_fp4: expected shape (", up.experts, ", ", up.cols, ", ", up.rows / 4,
                 ") for gate_up_fp4 of shape ", shape_text(gate_up_fp4), ", got shape ",
                 shape_text(down_fp4));
  const LinearOperand in = rows_to_multiply(x, up.cols, gate_up_fp4, "gate_up_fp4");
  JITQUANT_CHECK(in.cols == up.cols, "x: expected shape (T, ", up.cols,
                 ") for gate_up_fp4 of shape ", shape_text(gate_up_fp4), ", got shape ",
                 shape_text(x));
  layer.routing.wide = is_wide(topk_ids, "topk_ids", x);
  JITQUANT_CHECK(topk_ids.dim() == 2 && topk_ids.size(0) == in.rows && topk_ids.size(1) >= 1 &&
                     topk_ids.size(1) <= kMostTopK,
                 "topk_ids: expected shape (", in.rows, ", k) with k from 1 to ", kMostTopK,
                 ", got shape ", shape_text(topk_ids));
  layer.routing.ids = topk_ids.const_data_ptr();
  layer.routing.rows = in.rows;
  layer.routing.top_k = static_cast<int>(topk_ids.size(1));
  check_cuda(topk_weights, "topk_weights", &x);
  JITQUANT_CHECK(same_shape(topk_weights, topk_ids) && topk_weights.is_contiguous(),
                 "topk_weights: expected shape ", shape_text(topk_ids),
                 ", contiguous, as topk_ids has, got shape ", shape_text(topk_weights),
                 " and strides ", strides_text(topk_weights));
  layer.weights = topk_weights.const_data_ptr();
  layer.weights_dtype = dtype_of(topk_weights, "topk_weights");

  const ScalarType type = dtype.value_or(x.scalar_type());
  layer.out_dtype = dtype_of(type, "dtype");
  layer.out = mixture.memory("mixture", type, Shape::of(x, 1, down.rows), x);
  const Launching at(call, x);
  const ExpertScratch scratch = expert_scratch(up, down, in, layer.routing.top_k);
  const Workspace activations(scratch.activations, x), partials(scratch.partials, x),
      sorted(scratch.sorted, x);
  layer.activations = activations.floats();
  layer.partials = partials.floats();
  layer.sorted = sorted.floats();
  check_launch(launch_nvfp4_experts(layer, in, at.stream), "nvfp4_experts");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&nvfp4_grouped_linear>(), function<&nvfp4_experts>())
