// What the launchers of products with the weights of many experts take.
#pragma once

#include "linear.h"

namespace jitquant {

constexpr int kMostExperts = 1024, kMostTopK = 64;

// Matrices of `experts` experts, one after the other as `Nvfp4Weight` has one, with gsas
// `gsa_expert` and `gsa_row` apart: of one for all, of one an expert, or of one a row.
struct ExpertWeights {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* gsa;
  int64_t gsa_expert, gsa_row;
  int experts, rows, cols;
};

// Which rows an expert has: `offsets` (experts,) where they end, in `rows` sorted rows; or `ids`
// (rows, top_k), of which others than 0 to experts - 1 are no expert's. Of int64 if `wide`.
struct Routing {
  const void* offsets;
  const void* ids;
  bool wide;
  int64_t rows;
  int top_k;
};

// y (rows, W.rows) = x W^T of each row's expert; rows past the last offset are zero. x and to as in
// linear.h, without bias and residual.
cudaError_t launch_nvfp4_grouped_linear(const ExpertWeights& w, const LinearOperand& x,
                                        const Routing& routing, const LinearEpilogue& to,
                                        cudaStream_t stream);

struct ExpertLayer {
  ExpertWeights gate_up;  // (2 I, H) of each expert: gates, then ups
  ExpertWeights down;     // (H, I)
  Routing routing;        // by ids
  const void* weights;    // (rows, top_k), contiguous
  DType weights_dtype;
  void* activations;  // room for (expert_window(rows, top_k) * top_k, I) in x's dtype
  float* partials;    // of more than one row: for (expert_window(rows, top_k) * top_k, H)
  void* out;          // (rows, H)
  DType out_dtype;
};

// Rows that take part in one set of launches.
int64_t expert_window(int64_t rows, int64_t top_k);
cudaError_t launch_nvfp4_experts(const ExpertLayer& layer, const LinearOperand& x,
                                 cudaStream_t stream);

}  // namespace jitquant
