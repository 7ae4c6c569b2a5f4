// Arguments of the launchers of products with the weights of many experts.
#pragma once

#include "linear.h"

namespace jitquant {

constexpr int kMostTopK = 64;

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

struct ExpertLayer {
  ExpertWeights gate_up;  // (2 I, H) per expert: gates, then ups
  ExpertWeights down;     // (H, I)
  Routing routing;        // by ids
  const void* weights;    // (rows, top_k), contiguous
  DType weights_dtype;
  float* activations;  // scratch, see ExpertScratch, each aligned to 128 bytes
  float* partials;
  float* sorted;
  void* out;  // (rows, H)
  DType out_dtype;
};

// How many rows one set of launches handles on the current device, and how many floats of scratch
// it needs.
struct ExpertScratch {
  int64_t window;
  int64_t activations;  // (window * top_k, I) in x's dtype, then the order of the sorted pairs
  int64_t partials;     // (window * top_k, H); none for one row
  int64_t sorted;       // if tile kernels multiply: x, activations and places of the sorted pairs
};

}  // namespace jitquant
