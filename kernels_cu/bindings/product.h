// Arguments of products with NVFP4 weights.
#pragma once

#include "../gemm/experts.h"
#include "common.h"

namespace jitquant {

inline Nvfp4Weight weight_of(const View& w_fp4, const View& w_sf, const View& w_gsa) {
  const int64_t cols = 2 * w_fp4.size(1);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  JITQUANT_CHECK(w_fp4.size(0) <= kMost && cols <= kMost,
                 "w_fp4: expected fewer than 2^30 rows and columns, got shape ", shape_text(w_fp4));
  return {bytes_of(w_fp4, "w_fp4", 8), static_cast<const uint8_t*>(w_sf.data),
          given_scale(w_gsa).gsa, static_cast<int>(w_fp4.size(0)), static_cast<int>(cols)};
}

// Rows of bf16 or fp16. K may be up to 15 less than the packed columns.
inline LinearOperand values_of(const View& x) {
  const Matrix m = matrix_of(x, "x");
  return {m.data, nullptr, m.dtype, m.s2, m.rows, static_cast<int>(m.cols)};
}

// Quantized if there are scales.
inline LinearOperand operand_of(const View& x, const std::optional<View>& x_sf) {
  if (!x_sf) return values_of(x);
  LinearOperand in = {};
  in.data = bytes_of(x, "x", 8);
  in.scales = data_of<uint8_t>(x_sf);
  const int64_t bytes = x.size(x.dim() - 1);
  in.rows = x.numel() / bytes;
  in.cols = static_cast<int>(2 * bytes);
  return in;
}

inline LinearEpilogue epilogue(const std::optional<View>& x_gsa, const Memory& y) {
  LinearEpilogue to = {};
  to.cols = y.cols();
  to.dtype = dtype_of(y.dtype, "dtype");
  to.out = y.data;
  if (x_gsa) {
    const GlobalScale scale = given_scale(*x_gsa);
    to.x_gsa = scale.gsa;
    to.x_gsa_stride = scale.stride;
  }
  return to;
}
inline LinearEpilogue epilogue(const std::optional<View>& x_gsa, const std::optional<View>& bias,
                               const std::optional<View>& residual, const Memory& y) {
  LinearEpilogue to = epilogue(x_gsa, y);
  if (bias) to.bias_dtype = dtype_of(*bias, "bias");
  to.bias = data_of<void>(bias);
  to.residual = data_of<void>(residual);
  return to;
}

// The weights of experts, (experts, rows, cols / 2), with one gsa, one per expert or one per row.
inline ExpertWeights experts_of(const View& codes, const View& scales, const View& gsa,
                                const char* name) {
  const int64_t experts = codes.size(0), rows = codes.size(1), count = gsa.numel();
  ExpertWeights w = {};
  w.codes = bytes_of(codes, name, 8);
  w.scales = static_cast<const uint8_t*>(scales.data);
  w.gsa = static_cast<const float*>(gsa.data);
  w.gsa_row = count == experts * rows && count > experts ? 1 : 0;
  w.gsa_expert = w.gsa_row != 0 ? rows : count == experts ? 1 : 0;
  w.experts = static_cast<int>(experts);
  w.rows = static_cast<int>(rows);
  w.cols = static_cast<int>(2 * codes.size(2));
  return w;
}
inline ExpertWeights expert_weights(const View& w_fp4, const View& w_sf, const View& w_gsa) {
  return experts_of(w_fp4, w_sf, w_gsa, "w_fp4");
}
inline ExpertWeights gate_up_of(const View& gate_up_fp4, const View& gate_up_sf,
                                const View& gate_up_gsa) {
  return experts_of(gate_up_fp4, gate_up_sf, gate_up_gsa, "gate_up_fp4");
}
inline ExpertWeights down_of(const View& down_fp4, const View& down_sf, const View& down_gsa) {
  return experts_of(down_fp4, down_sf, down_gsa, "down_fp4");
}

// Rows that are sorted by expert.
inline Routing sorted_routing(const View& offsets, const View& x) {
  Routing routing = {};
  routing.wide = offsets.dtype == ScalarType::Long;
  routing.offsets = offsets.data;
  routing.rows = x.size(0);
  return routing;
}
inline Routing topk_routing(const View& topk_ids) {
  Routing routing = {};
  routing.wide = topk_ids.dtype == ScalarType::Long;
  routing.ids = topk_ids.data;
  routing.rows = topk_ids.size(0);
  routing.top_k = static_cast<int>(topk_ids.size(1));
  return routing;
}

// The scratch is not set.
inline ExpertLayer expert_layer(const ExpertWeights& gate_up, const ExpertWeights& down,
                                const Routing& routing, const View& topk_weights,
                                const Memory& mixture) {
  ExpertLayer layer = {};
  layer.gate_up = gate_up;
  layer.down = down;
  layer.routing = routing;
  layer.weights = topk_weights.data;
  layer.weights_dtype = dtype_of(topk_weights, "topk_weights");
  layer.out = mixture.data;
  layer.out_dtype = dtype_of(mixture.dtype, "dtype");
  return layer;
}

}  // namespace jitquant
