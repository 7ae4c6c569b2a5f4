// Arguments of the launchers of products with the weights of many experts.
#pragma once

#include "linear.h"

namespace jitquant {

constexpr int kMostExperts = 1024, kMostTopK = 64;

// The matrices of all experts, one after another, each laid out as in `Nvfp4Weight`. `gsa_expert`
// and `gsa_row` are the strides of gsa: one for all, one per expert, or one per row.
struct ExpertWeights {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* gsa;
  int64_t gsa_expert, gsa_row;
  int experts, rows, cols;
};

// Assigns rows to experts, in one of two ways. `offsets` (experts,): where each expert's rows end,
// among `rows` rows sorted by expert. `ids` (rows, top_k): the experts of each row; ids that are
// not 0 to experts - 1 are ignored. Either is int64 if `wide`, else int32.
struct Routing {
  const void* offsets;
  const void* ids;
  bool wide;
  int64_t rows;
  int top_k;
};

// y (rows, W.rows) = x W^T with the W of each row's expert. Rows past the last offset are zero. `x`
// and `to` are as in linear.h, without bias and residual.
cudaError_t launch_nvfp4_grouped_linear(const ExpertWeights& w, const LinearOperand& x,
                                        const Routing& routing, const LinearEpilogue& to,
                                        cudaStream_t stream);

struct ExpertLayer {
  ExpertWeights gate_up;  // (2 I, H) per expert: gates, then ups
  ExpertWeights down;     // (H, I)
  Routing routing;        // by ids
  const void* weights;    // (rows, top_k), contiguous
  DType weights_dtype;
  void* activations;  // scratch: (expert_window(rows, top_k) * top_k, I) in x's dtype
  float* partials;    // scratch: (expert_window(rows, top_k) * top_k, H); unused for one row
  void* out;          // (rows, H)
  DType out_dtype;
};

// How many rows one set of launches handles.
int64_t expert_window(int64_t rows, int64_t top_k);
cudaError_t launch_nvfp4_experts(const ExpertLayer& layer, const LinearOperand& x,
                                 cudaStream_t stream);

}  // namespace jitquant
