// Products of a few rows with the NVFP4 weights of their experts, which are read as stored: a
// product of rows sorted by expert, and a whole mixture-of-experts layer.
//
//   bundle    up to 8 rows of one expert, which a warp multiplies at once
//   tile      16 rows of a weight: neighboring rows; 8 gates and their 8 ups; or 8 rows each of two
//             experts by two rows of x, keeping only each expert's product with its own row
//   unit      512 of k (for a pair of experts: of both), whose x a warp holds in registers
//   block     up to kMostWarps warps (product.cuh), as (units side by side, tiles side by side)
//
// A block takes a contiguous range of the tiles of all bundles, so that it meets few bundles and
// few blocks read each weight. Every block of the first product sorts the rows by expert itself,
// and one stores the order for the second product (expert_bundles.cuh). A layer of one row, or of
// few rows with small experts, sorts nothing: blocks are divided among the rows, so that all
// experts of a block have the same x. Then the tiles of the second product hold pairs of experts,
// and the sum over experts needs no launch of its own (expert_pairs.cuh).
//
// Experts with many rows are multiplied by the kernels of expert_tiles.cuh, on compute capability
// 9.0.
//
// Sums are in fp32. Their order depends on k, on whether an expert has at most two rows (except in
// fp16), on whether it has many, and on whether rows are sorted at all.
#include "expert_pairs.cuh"
#include "expert_rows.cuh"
#include "expert_tiles.cuh"

namespace jitquant {

// ---- the sum over the experts of several tokens -------------------------------------------------

constexpr int kSumThreads = 256, kSumsAtOnce = 8;

// y[row] = sum of weight * partials[row * top_k + choice] over the choices, in their order.
__global__ void __launch_bounds__(kSumThreads)
    nvfp4_sum_experts_kernel(const float* partials, const __grid_constant__ BundleRouting routing,
                             const void* weights, const DType weights_dtype, void* out,
                             const DType dtype, const int cols) {
  __shared__ float own_weights[kMostTopK];
  __shared__ bool there[kMostTopK];
  const int per_row = cols / 4, row = blockIdx.x / ((per_row + kSumThreads - 1) / kSumThreads);
  const int at = (blockIdx.x % ((per_row + kSumThreads - 1) / kSumThreads)) * kSumThreads +
                 static_cast<int>(threadIdx.x);
  const int top_k = routing.top_k;
  wait_for_previous();
  let_next_begin();
  if (threadIdx.x < top_k) {
    const int pair = row * top_k + static_cast<int>(threadIdx.x);
    there[threadIdx.x] = expert_of(routing, pair) >= 0;
    own_weights[threadIdx.x] = float_at(weights, weights_dtype, pair);
  }
  __syncthreads();
  if (at >= per_row) return;
  float y[4] = {};
  for (int first = 0; first < top_k; first += kSumsAtOnce) {
    uint32_t words[kSumsAtOnce][4] = {};
#pragma unroll
    for (int j = 0; j < kSumsAtOnce; ++j) {
      const int64_t pair = static_cast<int64_t>(row) * top_k + first + j;
      if (first + j < top_k && there[first + j]) {
        load_words<4>(partials + pair * cols + at * 4, words[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kSumsAtOnce; ++j) {
      if (first + j >= top_k || !there[first + j]) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = add_rn(y[i], mul_rn(bits_float(words[j][i]), own_weights[first + j]));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_element(out, dtype, static_cast<int64_t>(row) * cols + at * 4 + i, y[i]);
  }
}

#ifndef __CUDACC_RTC__
namespace {

// Rows of a layer that are not sorted, if those behind the first have at most so many weights in
// their experts. Then sorting takes longer than to read half of these weights again, as if each row
// shared half of its experts.
constexpr int kMostUnsorted = 8;
constexpr int64_t kMostReadAgain = int64_t{5} << 26;

bool sorts(const ExpertWeights& up, const ExpertWeights& down, int64_t rows, int top_k) {
  const int64_t weights =
      static_cast<int64_t>(up.rows) * up.cols + static_cast<int64_t>(down.rows) * down.cols;
  return rows > 1 && (rows > kMostUnsorted || (rows - 1) * top_k * weights > kMostReadAgain);
}

// Experts with more rows are multiplied by the tile kernels of expert_tiles.cuh, on devices that
// have them.
constexpr int kMostOfBundles = 16;
// Rows from which on an expert may have many, and pairs per expert from which on the tile kernels
// multiply all of them. Measured on an H200: with 128 experts of 2048 x 768 they are faster from 7
// pairs per expert on, with 256 of 7168 x 2048 from 9.
constexpr int kFewestRows = 33, kTiledPairs = 9;

bool takes(int64_t rows) {
  return has(kTiled) || rows < kFewestRows;
}

template <class Input>
constexpr bool kMayTile = has(kTiled) && !LinearInput<Input>::kCodes;

template <class Input>
cudaError_t launch_grouped(const ExpertWeights& w, const LinearOperand& x, const Routing& given,
                           const LinearEpilogue& to, cudaStream_t stream) {
  const int64_t blocks = w.cols / 16;
  const int64_t row_bytes = LinearInput<Input>::kCodes ? blocks * 8 : x.stride * 2;
  const int64_t out_bytes = to.cols * (to.dtype == DType::kFloat32 ? 4 : 2);
  const int64_t window = most_sorted();
  int most = std::numeric_limits<int>::max();
  if constexpr (kMayTile<Input>) {
    const bool tiled = x.rows >= kFewestRows && x.rows < std::numeric_limits<int>::max() / 2 &&
                       x.cols == w.cols && apart_by_16(x.data, x.stride * 2) &&
                       (to.dtype == DType::kFloat32 || to.dtype == x.dtype) &&
                       has_expert_tiles<Input>(w);
    if (tiled) {
      const bool all = x.rows > window || x.rows >= kTiledPairs * static_cast<int64_t>(w.experts);
      if (!has(to.dtype == DType::kFloat32 ? kToFloat : kToOwn)) return kLacksKernels;
      if (!all && !has(kBundled)) return kLacksKernels;
      const SortedRows rows = {given.offsets,
                               given.wide,
                               nullptr,
                               nullptr,
                               static_cast<int>(x.rows),
                               all ? 1 : kMostOfBundles + 1};
      const TileOutput output = {to.out,         to.dtype == DType::kFloat32, all, w.rows, to.x_gsa,
                                 to.x_gsa_stride};
      const cudaError_t error = launch_expert_tiles<Input, false>(w, x, rows, output, stream);
      if (all || error != cudaSuccess) return error;
      most = kMostOfBundles;
    }
  }
  for (int64_t first = 0; first < x.rows; first += window) {
    if constexpr (!has(kBundled)) return kLacksKernels;
    const int64_t rows = x.rows - first < window ? x.rows - first : window;
    LinearOperand part = x;
    part.rows = rows;
    part.data = static_cast<const uint8_t*>(x.data) + first * row_bytes;
    if (x.scales != nullptr) part.scales = x.scales + first * blocks;
    const BundleRouting routing = {given.offsets, nullptr,   given.wide, static_cast<int>(rows),
                                   first,         w.experts, 1,          false,
                                   most,          nullptr,   false,      1};
    const BundleOutput output = {static_cast<uint8_t*>(to.out) + first * out_bytes,
                                 to.dtype,
                                 w.rows,
                                 false,
                                 to.x_gsa == nullptr ? nullptr : to.x_gsa + first * to.x_gsa_stride,
                                 to.x_gsa_stride,
                                 {}};
    cudaError_t error = cudaSuccess;
    if constexpr (has(kBundled)) {
      error = launch_bundles<Input, false>(w, part, routing, output, stream);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Which kernels multiply the rows of a layer: those of bundles, those of tiles, or each the experts
// with few and with many rows.
enum class LayerWay : int { kBundles, kBoth, kTiles };

template <class T>
LayerWay way_of(const ExpertWeights& up, const ExpertWeights& down, const LinearOperand& x,
                int top_k) {
  if constexpr (has(kTiled)) {
    const bool tiled = x.rows >= kFewestRows && apart_by_16(x.data, x.stride * 2) &&
                       has_expert_tiles<T>(up) && has_expert_tiles<T>(down);
    const int64_t pairs = x.rows * top_k;
    const bool all =
        pairs > most_sorted() || pairs >= kTiledPairs * static_cast<int64_t>(up.experts);
    return !tiled ? LayerWay::kBundles : all ? LayerWay::kTiles : LayerWay::kBoth;
  }
  return LayerWay::kBundles;
}

// Elements of the products of one set of launches by tiles, 1 GiB in fp32. Sets of fewer rows would
// decode the weights more often.
constexpr int64_t kMostTiled = int64_t{1} << 28;

int64_t aligned_floats(int64_t floats) {
  return (floats + 31) / 32 * 32;  // 128 bytes
}

int64_t floats_of(int64_t elements) {
  return aligned_floats(elements / 2);
}

ExpertScratch expert_scratch(const ExpertWeights& up, const ExpertWeights& down,
                             const LinearOperand& x, int top_k) {
  LayerWay way = LayerWay::kBundles;
#ifdef JITQUANT_DTYPE
  constexpr DType kOnly = static_cast<DType>(JITQUANT_DTYPE);
  if constexpr (kOnly != DType::kFloat32) {
    way = way_of<std::conditional_t<kOnly == DType::kFloat16, Fp16, Bf16>>(up, down, x, top_k);
  }
#else
  way = x.dtype == DType::kBFloat16 ? way_of<Bf16>(up, down, x, top_k)
                                    : way_of<Fp16>(up, down, x, top_k);
#endif
  const int64_t tiled = kMostTiled / (down.rows * static_cast<int64_t>(top_k));
  const int64_t most = way == LayerWay::kTiles && tiled > 0 ? tiled : most_sorted() / top_k;
  const int64_t sets = x.rows > most ? (x.rows + most - 1) / most : 1;
  const int64_t rows = (x.rows + sets - 1) / sets, pairs = rows * top_k;
  ExpertScratch scratch = {rows, 0, 0, 0};
  if (way != LayerWay::kTiles) {
    const int sorted = table_bytes(static_cast<int>(pairs), up.experts) / 4;
    scratch.activations = floats_of(pairs * down.cols) + sorted;
  }
  if (sorts(up, down, x.rows, top_k)) scratch.partials = pairs * down.rows;
  if (way != LayerWay::kBundles) {
    scratch.sorted =
        floats_of(pairs * up.cols) + floats_of(pairs * down.cols) + up.experts + 1 + pairs;
  }
  return scratch;
}

// Multiplies the rows of experts with at least `least` rows, up to the products of each pair.
template <class T>
cudaError_t launch_layer_tiles(const ExpertLayer& layer, const LinearOperand& x, int least,
                               cudaStream_t stream, bool sorts) {
  const ExpertWeights &up = layer.gate_up, &down = layer.down;
  const int64_t pairs = x.rows * layer.routing.top_k;
  float* const sorted = layer.sorted;
  float* const h = sorted + floats_of(pairs * up.cols);
  int* const ends = reinterpret_cast<int*>(h + floats_of(pairs * down.cols));
  int* const order = ends + up.experts + 1;
  if (sorts) {
    return launch_sort_pairs<T>(x, layer.routing, up.experts, {sorted, ends, order, least}, stream);
  }
  const LinearOperand rows_of_x = {sorted, nullptr, x.dtype, up.cols, pairs, up.cols};
  const LinearOperand rows_of_h = {h, nullptr, x.dtype, down.cols, pairs, down.cols};
  SortedRows rows = {ends, false, ends + up.experts, nullptr, static_cast<int>(pairs), least};
  const cudaError_t error = launch_expert_tiles<T, true>(
      up, rows_of_x, rows, {h, false, false, down.cols, nullptr, 0}, stream);
  if (error != cudaSuccess) return error;
  rows.order = order;
  return launch_expert_tiles<T, false>(
      down, rows_of_h, rows, {layer.partials, true, false, down.rows, nullptr, 0}, stream);
}

template <class Input>
cudaError_t launch_layer(const ExpertLayer& requested, const LinearOperand& x, float* scratch,
                         cudaStream_t stream) {
  const ExpertWeights &up = requested.gate_up, &down = requested.down;
  const int top_k = requested.routing.top_k;
  const ExpertScratch parts = expert_scratch(up, down, x, top_k);
  ExpertLayer layer = requested;
  layer.activations = scratch;
  layer.partials = layer.activations + aligned_floats(parts.activations);
  layer.sorted = layer.partials + aligned_floats(parts.partials);
  const int id_bytes = layer.routing.wide ? 8 : 4;
  const LayerWay way = way_of<Input>(up, down, x, top_k);
  const int64_t window = parts.window;
  const int64_t out_bytes = down.rows * (layer.out_dtype == DType::kFloat32 ? 4 : 2);
  for (int64_t first = 0; first < x.rows; first += window) {
    const int64_t rows = x.rows - first < window ? x.rows - first : window, pairs = rows * top_k;
    ExpertLayer own = layer;
    own.weights = static_cast<const uint8_t*>(layer.weights) +
                  first * top_k * (layer.weights_dtype == DType::kFloat32 ? 4 : 2);
    own.out = static_cast<uint8_t*>(layer.out) + first * out_bytes;
    own.routing.ids = static_cast<const uint8_t*>(layer.routing.ids) + first * top_k * id_bytes;
    LinearOperand part = x;
    part.rows = rows;
    part.data = static_cast<const uint8_t*>(x.data) + first * x.stride * 2;
    BundleRouting routing = {
        nullptr,
        own.routing.ids,
        layer.routing.wide,
        static_cast<int>(pairs),
        0,
        up.experts,
        top_k,
        true,
        way == LayerWay::kBundles ? std::numeric_limits<int>::max() : kMostOfBundles,
        reinterpret_cast<uint4*>(layer.activations + floats_of(pairs * down.cols)),
        false,
        1};
    BundleOutput between = {layer.activations, x.dtype, down.cols, true, nullptr, 0, {}};
    // Bulk prefetches need this alignment.
    if (down.cols % kSegment == 0 && apart_by_16(down.codes, 0) && apart_by_16(down.scales, 0)) {
      between.next = down;
    }
    LinearOperand h = {layer.activations, nullptr, x.dtype, down.cols, pairs, down.cols};

    if (!sorts(up, down, rows, top_k)) {
      routing.count = top_k, routing.tokens = static_cast<int>(rows);
      cudaError_t error = kLacksKernels;
      if constexpr (has(kUnsorted)) {
        error = launch_bundles<Input, true>(up, part, routing, between, stream);
        if (error == cudaSuccess) error = launch_one_down<Input>(down, h, routing, own, stream);
      }
      if (error != cudaSuccess) return error;
      continue;
    }
    const bool tiles = way != LayerWay::kBundles;
    const int least = way == LayerWay::kTiles ? 1 : kMostOfBundles + 1;
    if constexpr (has(kTiled)) {
      if (tiles) {
        cudaError_t error = launch_layer_tiles<Input>(own, part, least, stream, true);
        if (error == cudaSuccess) {
          error = launch_layer_tiles<Input>(own, part, least, stream, false);
        }
        if (error != cudaSuccess) return error;
      }
    }
    if (way != LayerWay::kTiles) {
      cudaError_t error = kLacksKernels;
      if constexpr (has(kBundled)) {
        error = launch_bundles<Input, false>(up, part, routing, between, stream);
        if (error != cudaSuccess) return error;
        routing.of_tokens = false, routing.is_sorted = true;
        const BundleOutput partials = {
            layer.partials, DType::kFloat32, down.rows, false, nullptr, 0, {}};
        error = launch_bundles<Input, false>(down, h, routing, partials, stream);
      }
      if (error != cudaSuccess) return error;
    }
    const int64_t blocks = rows * ((down.rows / 4 + kSumThreads - 1) / kSumThreads);
    const cudaError_t error = launch<&nvfp4_sum_experts_kernel>(
        {blocks, kSumThreads, Start::kOverlapped}, stream,
        static_cast<const float*>(layer.partials), routing, own.weights, own.weights_dtype, own.out,
        own.out_dtype, down.rows);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

// y (rows, W.rows) = x W^T with the W of each row's expert. Rows past the last offset are zero. `x`
// and `to` are as in linear.h, without bias and residual.
cudaError_t launch_nvfp4_grouped_linear(const ExpertWeights& w, const LinearOperand& x,
                                        const Routing& routing, const LinearEpilogue& to,
                                        cudaStream_t stream) {
  if (w.rows == 0 || x.rows == 0) return cudaSuccess;
  if (!takes(x.rows)) return kLacksKernels;
#ifdef JITQUANT_DTYPE
  // A library for x in this dtype only (dispatch.cuh).
  constexpr DType kOnly = static_cast<DType>(JITQUANT_DTYPE);
  if constexpr (kOnly != DType::kFloat32 && kGrouped) {
    using Only = std::conditional_t<kOnly == DType::kFloat16, Fp16, Bf16>;
    if (x.scales == nullptr && x.dtype == kOnly) {
      return launch_grouped<Only>(w, x, routing, to, stream);
    }
  }
  return kLacksKernels;
#else
  if (x.scales != nullptr) return launch_grouped<CodeInput>(w, x, routing, to, stream);
  return x.dtype == DType::kBFloat16 ? launch_grouped<Bf16>(w, x, routing, to, stream)
                                     : launch_grouped<Fp16>(w, x, routing, to, stream);
#endif
}

int64_t nvfp4_experts_scratch(const ExpertLayer& layer, const LinearOperand& x) {
  const ExpertScratch parts = expert_scratch(layer.gate_up, layer.down, x, layer.routing.top_k);
  return aligned_floats(parts.activations) + aligned_floats(parts.partials) + parts.sorted;
}

cudaError_t launch_nvfp4_experts(const ExpertLayer& layer, const LinearOperand& x, float* scratch,
                                 cudaStream_t stream) {
  if (x.rows == 0) return cudaSuccess;
  if (!takes(x.rows)) return kLacksKernels;
#ifdef JITQUANT_DTYPE
  constexpr DType kOnly = static_cast<DType>(JITQUANT_DTYPE);
  if constexpr (kOnly != DType::kFloat32 && has(kLayer)) {
    using Only = std::conditional_t<kOnly == DType::kFloat16, Fp16, Bf16>;
    if (x.dtype == kOnly) return launch_layer<Only>(layer, x, scratch, stream);
  }
  return kLacksKernels;
#else
  return x.dtype == DType::kBFloat16 ? launch_layer<Bf16>(layer, x, scratch, stream)
                                     : launch_layer<Fp16>(layer, x, scratch, stream);
#endif
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
