// The second product of few tokens, with the sum over the experts of each.
#pragma once

#include "expert_plan.cuh"

namespace jitquant {

// Tiles of 8 rows each of two experts: choices 2i and 2i + 1 of the token.
class PairPlaces {
 public:
  __device__ __forceinline__ PairPlaces(const ExpertWeights& w, const ExpertPlan& plan,
                                        const int* ids, int top_k, int k_units)
      : w_(w), plan_(plan), ids_(ids), top_k_(top_k), k_units_(k_units) {}
  __device__ __forceinline__ int unit(int pass) const {
    return pass * (blockDim.x >> 5) + (threadIdx.x >> 5);
  }
  __device__ __forceinline__ int column(int pass) const { return unit(pass) % k_units_ * kUnit; }
  __device__ __forceinline__ int batch_end(int from) {
    return min(from + plan_.hold_two * static_cast<int>(blockDim.y), block_words().end);
  }
  __device__ __forceinline__ int expert(int choice) const {
    return choice < top_k_ ? ids_[choice] : -1;
  }
  __device__ __forceinline__ void locate(int tile, int pass, Place& place) {
    const int choice = unit(pass) / k_units_ * 2, k = column(pass), row = tile * 8;
    const int one = expert(choice), two = expert(choice + 1);
    const int64_t at = static_cast<int64_t>(max(one, 0)) * w_.rows + row;
    apart_ = static_cast<int64_t>(two - max(one, 0)) * w_.rows;
    place.codes = w_.codes + at * (w_.cols / 2) + k / 2;
    place.scales = w_.scales + at * (w_.cols / 16) + k / 16;
    place.low = one < 0 ? 8 : 0;
    place.high = two < 0 ? 8 : kTile;
  }
  __device__ __forceinline__ int steps_end(int to) const { return to; }
  __device__ __forceinline__ int64_t second_codes() const { return apart_ * (w_.cols / 2); }
  __device__ __forceinline__ int64_t second_scales() const { return apart_ * (w_.cols / 16); }

 private:
  const ExpertWeights& w_;
  const ExpertPlan& plan_;
  const int* ids_;
  const int top_k_, k_units_;
  int64_t apart_ = 0;
};

// The row of x of an expert that is absent is not written: the other one's is read for it.
struct PairRows {
  int one, two;

  __device__ __forceinline__ bool any() const { return one != kNoRow; }
  __device__ __forceinline__ int operator()(int row) const { return row == 1 ? two : one; }
};

constexpr int kPairSums = 16;  // floats per warp and tile

template <class Input>
struct PairJob {
  const PairPlaces& places;
  const ExpertWeights& w;
  const ExpertPlan& plan;
  const float* weights;  // routing weights of the choices
  float* gsas;           // of their experts, unless every row has its own
  float* sums;
  int top_k, k_units;
  uint32_t token;  // of the block
  void* out;
  DType dtype;

  __device__ __forceinline__ int unit(int pass) const { return places.unit(pass); }
  __device__ __forceinline__ int column(int pass) const { return places.column(pass); }
  __device__ __forceinline__ PairRows rows(int pass) const {
    const int one = unit(pass) / k_units * 2, two = one + 1;
    const bool has_one = places.expert(one) >= 0, has_two = places.expert(two) >= 0;
    if (!has_one && !has_two) return {kNoRow, kNoRow};
    const int first = static_cast<int>(token) * top_k;
    return {first + (has_one ? one : two), first + (has_two ? two : one)};
  }

  __device__ __forceinline__ float request_gsa() const {
    const int choice = thread_index();
    const bool there = w.gsa_row == 0 && choice < top_k && places.expert(choice) >= 0;
    return there ? w.gsa[places.expert(choice) * w.gsa_expert] : 0.0f;
  }
  __device__ __forceinline__ void keep_gsa(float gsa) const {
    if (thread_index() < top_k) gsas[thread_index()] = gsa;
  }

  template <LinearWay kWay>
  __device__ __forceinline__ void keep(float (&acc)[4], float own_undo, int tile, int own) const {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    // The first expert's rows go with the first row of x, the second's with the second.
    float one = acc[0], two = acc[3];
    if constexpr (WayTraits<kWay>::kAfter) {
      one = mul_rn(sum_of_columns(one), __shfl_sync(~0u, own_undo, 0));
      two = mul_rn(sum_of_columns(two), __shfl_sync(~0u, own_undo, 4));
    }
    if ((lane & 3) == 0 && own < plan.units) {
      float* const to = sums + (tile * plan.units + own) * kPairSums;
      to[g] = one;
      to[8 + g] = two;
    }
  }

  template <LinearWay kWay>
  __device__ __forceinline__ void add_up(int from, int count) const {
    const int lane = threadIdx.x & 31, row = lane & 7, warps = thread_count() >> 5;
    for (int i = thread_index() >> 5; i < count; i += warps) {
      const int n = (from + i) * 8 + row;
      float y = 0.0f;
      for (int choice = lane >> 3; choice < top_k; choice += 4) {
        const int expert = places.expert(choice);
        if (expert < 0) continue;
        const float* p =
            sums + (i * plan.units + choice / 2 * k_units) * kPairSums + choice % 2 * 8 + row;
        float sum = p[0];
#pragma unroll 4
        for (int unit = 1; unit < k_units; ++unit) sum = add_rn(sum, p[unit * kPairSums]);
        const float gsa =
            w.gsa_row != 0 ? w.gsa[expert * w.gsa_expert + n * w.gsa_row] : gsas[choice];
        sum = mul_rn(mul_rn(sum, two_to_the(-kExponent<Input, kWay>)), gsa);
        y = add_rn(y, mul_rn(sum, weights[choice]));
      }
      y = add_rn(y, __shfl_xor_sync(~0u, y, 8));
      y = add_rn(y, __shfl_xor_sync(~0u, y, 16));
      if (lane < 8) store_element(out, dtype, static_cast<int64_t>(token) * w.rows + n, y);
    }
  }
};

template <class Input, bool kAligned>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    nvfp4_one_down_kernel(const __grid_constant__ ExpertWeights w,
                          const __grid_constant__ LinearOperand x,
                          const __grid_constant__ BundleRouting routing, const void* choice_weights,
                          const DType weights_dtype, void* out, const DType dtype,
                          const __grid_constant__ ExpertPlan plan) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ int ids[kMostTopK];
  __shared__ float weights_of_choices[kMostTopK], gsas[kMostTopK];
  const int warp = thread_index() >> 5, warps = thread_count() >> 5;
  WarpRing ring(tiles, warp, plan.stages);
  unsigned char* const after_rings = tiles + warps * (plan.stages * kStage + kHeldX);
  const int top_k = routing.count, k_units = (w.cols + kUnit - 1) / kUnit;

  const BlockToken token(routing.tokens);
  const TileRange own = token.share(w.rows / 8);
  if (thread_index() == 0) begin_block(own);
  previous_has_waited();  // and writes only x
  for (int i = thread_index(); i < top_k; i += thread_count()) {
    const int pair = static_cast<int>(token.token) * top_k + i;
    ids[i] = expert_of(routing, pair);
    weights_of_choices[i] = float_at(choice_weights, weights_dtype, pair);
  }
  __syncthreads();
  const OwnWords words(after_rings + plan.words_at);
  const PairPlaces places(w, plan, ids, top_k, k_units);
  TileStream<PairPlaces, kAligned> weights(places, words, w.cols, plan, own.begin);
  weights.template next<0>(ring.at);
  wait_for_previous();
  let_next_begin();

  constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
  constexpr LinearWay kWay = kAfter ? LinearWay::kTwoRows : LinearWay::kEightRows;
  const PairJob<Input> job = {places,      w,
                              plan,        weights_of_choices,
                              gsas,        reinterpret_cast<float*>(after_rings + plan.sums_at),
                              top_k,       k_units,
                              token.token, out,
                              dtype};
  multiply_own_tiles<Input, kWay, kAligned>(weights, ring, words, x, plan, after_rings, job);
}

#ifndef __CUDACC_RTC__
namespace {

template <class Input>
cudaError_t launch_one_down(const ExpertWeights& w, const LinearOperand& x,
                            const BundleRouting& routing, const ExpertLayer& layer,
                            cudaStream_t stream) {
  const bool aligned = is_aligned<Input>(w, x);
  const int units = (routing.count + 1) / 2 * ((w.cols + kUnit - 1) / kUnit);
  BlockShape shape = {};
  if (!plan_shape(shape, routing.tokens, units, w.rows / 8, {4 * kPairSums, 4 * kPairSums}, aligned,
                  0)) {
    return cudaErrorInvalidConfiguration;
  }
  plan_steps(shape, w, 8);
  const auto go = [&](auto kernel) {
    return launch_shape<decltype(kernel)::value>(shape, stream, w, x, routing, layer.weights,
                                                 layer.weights_dtype, layer.out, layer.out_dtype,
                                                 shape.plan);
  };
  constexpr auto kWhole = &nvfp4_one_down_kernel<Input, true>;
  if (aligned) return go(std::integral_constant<decltype(kWhole), kWhole>());
  if constexpr (kTakesUnaligned) {
    constexpr auto kParts = &nvfp4_one_down_kernel<Input, false>;
    return go(std::integral_constant<decltype(kParts), kParts>());
  }
  return kLacksKernels;
}

}  // namespace
#endif

}  // namespace jitquant
