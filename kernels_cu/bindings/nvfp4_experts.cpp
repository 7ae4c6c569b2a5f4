#include "declared/nvfp4_experts.h"
#include "product.h"

namespace jitquant {
namespace {

// The weights of experts, (experts, rows, cols / 2), with one gsa, one per expert or one per row.
ExpertWeights experts_of(const View& codes, const View& scales, const View& gsa, const char* name) {
  const int64_t experts = codes.size(0), rows = codes.size(1), count = gsa.numel();
  ExpertWeights w = {};
  w.codes = bytes_of(codes, name, 8);
  w.scales = static_cast<const uint8_t*>(scales.const_data_ptr());
  w.gsa = static_cast<const float*>(gsa.const_data_ptr());
  w.gsa_row = count == experts * rows && count > experts ? 1 : 0;
  w.gsa_expert = w.gsa_row != 0 ? rows : count == experts ? 1 : 0;
  w.experts = static_cast<int>(experts);
  w.rows = static_cast<int>(rows);
  w.cols = static_cast<int>(2 * codes.size(2));
  return w;
}

// Rows (T, K) of bf16 or fp16. K may be up to 15 less than the packed columns.
LinearOperand rows_to_multiply(const View& x) {
  const Matrix m = matrix_of(x, "x");
  return {m.data, nullptr, m.dtype, m.s2, m.rows, static_cast<int>(m.cols)};
}

void nvfp4_grouped_linear(Call& call, const declared::Nvfp4GroupedLinear& args, Result& y) {
  const auto& [x, w_fp4, w_sf, w_gsa, offsets, x_sf, x_gsa, dtype] = args;
  const ExpertWeights w = experts_of(w_fp4, w_sf, w_gsa, "w_fp4");
  LinearOperand in = {};
  if (x_sf) {
    in.cols = w.cols;
    in.rows = x.size(0);
    in.data = bytes_of(x, "x", 8);
    in.scales = static_cast<const uint8_t*>(x_sf->const_data_ptr());
  } else {
    in = rows_to_multiply(x);
  }
  Routing routing = {};
  routing.wide = offsets.dtype == ScalarType::Long;
  routing.offsets = offsets.const_data_ptr();
  routing.rows = in.rows;

  LinearEpilogue to = {};
  to.cols = w.rows;
  const ScalarType type = dtype.value_or(x_sf ? ScalarType::BFloat16 : x.scalar_type());
  to.dtype = dtype_of(type, "dtype");
  if (x_gsa) {
    const GlobalScale scale = given_scale(*x_gsa);
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
  layer.gate_up = experts_of(gate_up_fp4, gate_up_sf, gate_up_gsa, "gate_up_fp4");
  layer.down = experts_of(down_fp4, down_sf, down_gsa, "down_fp4");
  const ExpertWeights &up = layer.gate_up, &down = layer.down;
  const LinearOperand in = rows_to_multiply(x);
  layer.routing.wide = topk_ids.dtype == ScalarType::Long;
  layer.routing.ids = topk_ids.const_data_ptr();
  layer.routing.rows = in.rows;
  layer.routing.top_k = static_cast<int>(topk_ids.size(1));
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
