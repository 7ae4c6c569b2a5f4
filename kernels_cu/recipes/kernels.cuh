// The kernels of recipes for training and rotation:
//   rotated_amax_kernel       amax of a tensor after a rotation, into partials (without a rotation
//                             that is amax_kernel)
//   flat_rotated_amax_kernel  the same of contiguous whole blocks
//   rotated_row_amax_kernel   the same for each row
//   recipe_kernel             quantizes, given the amax of the values
//   flat_recipe_kernel        the same of contiguous whole blocks
// Each thread has a block of 16 neighbors, or two. Blocks that share a rotation or a scale are in
// the same warp.
#pragma once

#include "../amax/partials.cuh"
#include "../nvfp4/common.cuh"
#include "source.cuh"

namespace jitquant {

enum class Scaling : int { kTe, kSelect, kMx };

// The blocks of a warp's lanes: neighbors in a row or, with `tile`, in 16 rows. All lanes of a warp
// take the same number of steps, because they compute together.
struct LaneWalk {
  BlockWalk walk;
  int64_t position, step, units, rows;
  bool tile;

  __device__ __forceinline__ LaneWalk(int64_t rows, int64_t width, bool tile)
      : walk(width, first_of(tile), step_of(tile)),
        position(first_of(tile) - ((threadIdx.x & 31) >> (tile ? 4 : 0))),
        step(step_of(tile)),
        units((tile ? (rows + 15) / 16 : rows) * width),
        rows(rows),
        tile(tile) {}
  static __device__ __forceinline__ int64_t first_of(bool tile) {
    return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> (tile ? 4 : 0);
  }
  static __device__ __forceinline__ int64_t step_of(bool tile) {
    return (static_cast<int64_t>(gridDim.x) * blockDim.x) >> (tile ? 4 : 0);
  }
  __device__ __forceinline__ bool more() const { return position < units; }
  __device__ __forceinline__ void next() {
    walk.next();
    position += step;
  }
  __device__ __forceinline__ int64_t block() const { return walk.block; }
  __device__ __forceinline__ int64_t row() const {
    return tile ? 16 * walk.row + (threadIdx.x & 15) : walk.row;
  }
  __device__ __forceinline__ bool exists() const { return row() < rows; }
};

template <class T, Rotate kRotate>
using RowSource =
    std::conditional_t<kRotate == Rotate::kRope, RotatedSource<T, true>, PlainSource<T>>;

template <class Source>
__device__ __forceinline__ typename Source::Fetched fetch_lane(const Source& source,
                                                               const LaneWalk& at) {
  typename Source::Fetched x = {};
  if (at.exists() && at.block() * 16 < source.cols) {
    x = source.template fetch<false>(source.row(at.row()), at.block());
  }
  return x;
}

// A lane's block after the rotation, which lanes compute together.
template <Rotate kRotate, class Source>
__device__ __forceinline__ auto rotated_lane(const Source& source,
                                             const typename Source::Fetched& x, int64_t block,
                                             const Rotation& rotation, uint32_t minus) {
  return rotated<kRotate>(source.template value<false>(x, typename Source::Row(), block), rotation,
                          minus);
}

// The index of a lane's block among those that are rotated together.
__device__ __forceinline__ int part_of(const Rotation& r) {
  return static_cast<int>(threadIdx.x) & (r.lanes > 0 ? r.lanes - 1 : 0);
}

// Partials of a tensor whose size does not depend on the device: kMaxPartials, of which those
// without a thread block are zero.
struct AllPartials {
  static __device__ __forceinline__ void put(float* partials, float amax) {
    EachPartial::put(partials, amax);
    if (blockIdx.x != 0) return;
    for (int i = gridDim.x + threadIdx.x; i < kMaxPartials; i += blockDim.x) partials[i] = 0.0f;
  }
};

// Pairs of columns for RoPE, and those fetched ahead, take more registers.
template <class T, Rotate kRotate>
__global__ void __launch_bounds__(kThreads, (sizeof(T) == 2 ? 4 : 2) >> (kRotate == Rotate::kRope))
    rotated_amax_kernel(RowSource<T, kRotate> source, Rotation rotation, float* maxima) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  wait_for_previous();
  let_next_begin();
  const uint32_t minus = minus_signs(rotation, part_of(rotation));
  LaneWalk walk(source.rows, blocks_of(source.cols), false);
  Amax<typename Rotated<kRotate, T>::Element> mine;
  auto next = fetch_lane(source, walk);
#pragma unroll 1
  while (walk.more()) {
    const auto x = next;
    const int64_t block = walk.block();
    walk.next();
    next = fetch_lane(source, walk);
    mine.add(rotated_lane<kRotate>(source, x, block, rotation, minus));
  }
  AllPartials::put(maxima, reduce.max(mine.result()));
}

// Blocks per thread of contiguous tensors.
template <class T, Rotate kRotate>
constexpr int kFlatBlocks = kRotate == Rotate::kWide && sizeof(T) == 2 ? 2 : 1;

// These blocks of a thread, and which of their signs are minus.
template <int kBlocks>
struct FlatBlocks {
  LaneBlocks<kBlocks> lanes;
  uint32_t minus[kBlocks];

  __device__ __forceinline__ explicit FlatBlocks(const Rotation& r) : lanes(r) {
    const uint32_t last = r.lanes > 0 ? r.lanes - 1 : 0;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) minus[k] = minus_signs(r, lanes.of(threadIdx.x, k) & last);
  }
  // Their values; kChecked: zeros past the last block.
  template <bool kChecked, class T>
  __device__ __forceinline__ void fetch(const FlatSource<T>& source, uint32_t thread,
                                        Block<T> (&x)[kBlocks]) const {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      const uint32_t block = lanes.of(thread, k);
      if (kChecked) x[k] = {};
      if (!kChecked || block < static_cast<uint32_t>(source.blocks)) x[k] = source.fetch(block);
    }
  }
};

// The same for a contiguous tensor of fewer than 2^31 whole blocks.
template <class T, Rotate kRotate>
__global__ void __launch_bounds__(kThreads, (sizeof(T) == 2 ? 5 : 3) - kFlatBlocks<T, kRotate>)
    flat_rotated_amax_kernel(FlatSource<T> source, Rotation rotation, float* maxima) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  constexpr int kBlocks = kFlatBlocks<T, kRotate>;
  wait_for_previous();
  let_next_begin();
  const FlatBlocks<kBlocks> blocks(rotation);
  const uint32_t count = (static_cast<uint32_t>(source.blocks) + kBlocks - 1) / kBlocks;
  const uint32_t step = gridDim.x * kThreads;
  uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  Amax<typename Rotated<kRotate, T>::Element> mine;
  Block<T> next[kBlocks];
  blocks.template fetch<true>(source, i, next);
#pragma unroll 1
  while (i - (threadIdx.x & 31) < count) {
    Block<T> x[kBlocks];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) x[k] = next[k];
    i += step;
    blocks.template fetch<true>(source, i, next);
    Rotated<kRotate, T> y[kBlocks];
    rotate<kRotate>(x, rotation, blocks.minus, y);
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) mine.add(y[k]);
  }
  AllPartials::put(maxima, reduce.max(mine.result()));
}

template <class T, Rotate kRotate>
__global__ void __launch_bounds__(kThreads)
    rotated_row_amax_kernel(RowSource<T, kRotate> source, Rotation rotation, float* amaxes) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  wait_for_previous();
  let_next_begin();
  const uint32_t minus = minus_signs(rotation, part_of(rotation));
  const int64_t width = blocks_of(source.cols);
#pragma unroll 1
  for (int64_t r = blockIdx.x; r < source.rows; r += gridDim.x) {
    Amax<typename Rotated<kRotate, T>::Element> mine;
#pragma unroll 1
    for (int64_t first = 0; first < width; first += blockDim.x) {
      const int64_t block = first + threadIdx.x;
      typename RowSource<T, kRotate>::Fetched x = {};
      if (block < width) x = source.template fetch<false>(source.row(r), block);
      mine.add(rotated_lane<kRotate>(source, x, block, rotation, minus));
    }
    const float amax = reduce.max(mine.result());
    if (threadIdx.x == 0) amaxes[r] = amax;
  }
}

// Where the amax or the given gsa comes from, and where gsa goes.
struct RecipeScale {
  const float* maxima;  // `count` for the tensor, or one per row
  int count;
  bool by_row;
  bool from_gsa;  // a given gsa instead of an amax
  float divisor;
  Nvfp4Recipe rule;
  float* gsa;

  // The amax of the tensor or its given gsa, whose `count` is 1. A branch around the loop makes a
  // call with an amax 0.2 us slower, 4.25 instead of 4.07 us for one row.
  __device__ __forceinline__ float of_tensor(BlockReduce& reduce) const {
    const float amax = partials_amax(maxima, count, reduce);
    return from_gsa ? *maxima : amax;
  }

  // The selection for one of these values. Also writes gsa.
  __device__ __forceinline__ Selection selection(float value, float* gsa_out,
                                                 Nvfp4Recipe rule = Nvfp4Recipe::kTe) const {
    if (gsa_out != nullptr) *gsa_out = from_gsa ? value : div_rn(value, divisor);
    return selection_of(value, divisor, from_gsa, rule);
  }
};

// The mask of the 16 lanes that have a tile's rows.
__device__ __forceinline__ uint32_t tile_lanes() {
  return 0xffffu << (threadIdx.x & 16);
}
__device__ __forceinline__ float tile_amax(float b) {
  return lanes_amax(b, 16, tile_lanes());
}
__device__ __forceinline__ float tile_error(float e, bool largest) {
  if (largest) return tile_amax(e);
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) {
    e = add_rn(e, __shfl_xor_sync(tile_lanes(), e, offset));
  }
  return e;
}

// The given random bytes of a block.
__device__ __forceinline__ RandomBytes given_bytes(const uint8_t* bytes, int64_t row, int64_t block,
                                                   int64_t cols) {
  RandomBytes r = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int64_t col = 16 * block + i;
    if (col < cols) r.words[i >> 2] |= uint32_t{bytes[row * cols + col]} << (8 * (i & 3));
  }
  return r;
}

// The amaxes of blocks and their neighbors, which the lane has (`within`) or the lane next to it.
template <int kBlocks>
__device__ __forceinline__ void neighbors_amax(float (&b)[kBlocks], bool within) {
  if (within) {
    b[0] = b[kBlocks - 1] = amax_keep_nan(b[0], b[kBlocks - 1]);
    return;
  }
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) b[k] = amax_with_lane(b[k], 1);
}

// Quantizes a lane's block, whose amax is b.
template <Scaling kScaling, bool kStochastic, class T, class Bytes, class Over>
__device__ __forceinline__ Nvfp4Codes recipe_block(const Block<T>& y, float b,
                                                   const Selection& selection, const Recipe& recipe,
                                                   Bytes&& bytes, Over&& over) {
  if constexpr (kScaling == Scaling::kMx) {
    if constexpr (kStochastic) {
      const RandomBytes r = bytes();
      return mxfp4_block(y, b, recipe.scaling, &r);
    } else {
      return mxfp4_block(y, b, recipe.scaling, nullptr);
    }
  } else if constexpr (kScaling == Scaling::kSelect && kStochastic) {
    return static_stochastic_block(y, b, selection, recipe.select.full, bytes());
  } else if constexpr (kScaling == Scaling::kSelect) {
    return selected_block(y, b, selection, recipe.select, over);
  } else if constexpr (kStochastic) {
    return nvfp4_stochastic_block(y, b, selection.encoding, bytes());
  } else {
    return nvfp4_quantize_block(y, b, selection.encoding);
  }
}

// Minimum thread blocks per SM, which limits the registers. Without a limit the fp32 kernels take
// 60 to 102 on sm_90a, so two blocks fit. With four, a selection after a rotation would spill.
template <class T, Rotate kRotate, Scaling kScaling, bool kStochastic>
constexpr int recipe_blocks_per_sm() {
  if (sizeof(T) == 4) return 1;
  if (kFlatBlocks<T, kRotate> == 2) return kScaling == Scaling::kSelect || kStochastic ? 2 : 3;
  return kRotate != Rotate::kNone && kScaling == Scaling::kSelect ? 3 : 4;
}

// A contiguous tensor of fewer than 2^31 whole blocks, with linear scales, one amax, generated
// random bytes or none, and the rule kTe: if it were an argument, one thread block less would fit
// on an SM with rotated rows.
template <class T, Rotate kRotate, Scaling kScaling, bool kStochastic>
__global__ void __launch_bounds__(kThreads,
                                  recipe_blocks_per_sm<T, kRotate, kScaling, kStochastic>())
    flat_recipe_kernel(FlatSource<T> source, Divisor width, RecipeScale scale, Recipe recipe,
                       Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  constexpr bool kMx = kScaling == Scaling::kMx;
  wait_for_previous();
  let_next_begin();
  constexpr int kBlocks = kFlatBlocks<T, kRotate>;
  const FlatBlocks<kBlocks> blocks(recipe.rotation);
  // From the end, which the launch before has left in the L2 cache.
  const int count = static_cast<int>(source.blocks), step = static_cast<int>(gridDim.x) * kThreads;
  const int last = (count + kBlocks * kThreads - 1) / (kBlocks * kThreads) - 1;
  int i = (last - static_cast<int>(blockIdx.x)) * kThreads + static_cast<int>(threadIdx.x);
  Block<T> next[kBlocks];
  if (i >= 0) blocks.template fetch<true>(source, i, next);
  Selection selection = {};
  if (!kMx) {
    const float value = scale.of_tensor(reduce);
    selection = scale.selection(value, blockIdx.x == 0 && threadIdx.x == 0 ? scale.gsa : nullptr);
  }
  Draws draws;
  if (kStochastic) draws = Draws(recipe.rounding.rng_state);
#pragma unroll 1
  while (i >= 0) {
    Block<T> x[kBlocks];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) x[k] = next[k];
    const int mine = i;
    i -= step;
    if (i >= 0) blocks.template fetch<false>(source, i, next);
    Rotated<kRotate, T> y[kBlocks];
    if constexpr (kRotate == Rotate::kNone) {
      y[0] = x[0];
    } else {
      rotate<kRotate>(x, recipe.rotation, blocks.minus, y);
    }
    float b[kBlocks];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) b[k] = block_amax(y[k]);
    if (kMx) neighbors_amax(b, kBlocks == 2 && blocks.lanes.step == 1);
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      const uint32_t here = blocks.lanes.of(mine, k);
      const Nvfp4Codes codes = recipe_block<kScaling, kStochastic>(
          y[k], b[k], selection, recipe,
          [&] {
            const uint32_t row = width.quotient_of(here);
            return draws.of(row, here - row * width.divisor);
          },
          [](float e, bool) { return e; });
      if (here >= static_cast<uint32_t>(count)) continue;
      reinterpret_cast<uint2*>(out.codes)[here] = make_uint2(codes.low, codes.high);
      if (!kMx) out.scales[here] = codes.scale;
      if (kMx && (here & 1) == 0) out.scales[here / 2] = codes.scale;
    }
  }
}

template <class T, Rotate kRotate, Scaling kScaling, bool kStochastic>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 && kRotate == Rotate::kRope ? 1 : 2)
    recipe_kernel(RowSource<T, kRotate> source, RecipeScale scale, Recipe recipe, Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  constexpr bool kMx = kScaling == Scaling::kMx;
  wait_for_previous();
  let_next_begin();
  const uint32_t minus = minus_signs(recipe.rotation, part_of(recipe.rotation));
  const bool tile = !kMx && recipe.tile;
  LaneWalk walk(out.rows, out.blocks, tile);
  auto next = fetch_lane(source, walk);
  Selection selection = {};
  const bool by_row = !kMx && scale.by_row;
  if (!kMx && !by_row) {
    const float value = scale.of_tensor(reduce);
    selection = scale.selection(value, blockIdx.x == 0 && threadIdx.x == 0 ? scale.gsa : nullptr,
                                scale.rule);
  }
  Draws draws;
  if (kStochastic) draws = Draws(recipe.rounding.rng_state);
  Nvfp4Output scales = out;
  if (kMx) scales.blocks = out.blocks / 2;

#pragma unroll 1
  while (walk.more()) {
    const auto x = next;
    const int64_t row = walk.row(), block = walk.block();
    const bool exists = walk.exists();
    walk.next();
    next = fetch_lane(source, walk);
    auto y = rotated_lane<kRotate>(source, x, block, recipe.rotation, minus);
    // Signs would change the zeros past the last column.
    if (kMx && kRotate != Rotate::kNone && 16 * block >= source.cols) y = {};
    float b = block_amax(y);
    if (kMx) b = amax_with_lane(b, 1);
    if (tile) b = tile_amax(b);
    if (by_row) {
      selection = scale.selection(exists ? scale.maxima[row] : 0.0f,
                                  exists && block == 0 ? scale.gsa + row : nullptr, scale.rule);
    }
    const Nvfp4Codes codes = recipe_block<kScaling, kStochastic>(
        y, b, selection, recipe,
        [&] {
          return recipe.rounding.random_bytes == nullptr || !exists
                     ? draws.of(row, block)
                     : given_bytes(recipe.rounding.random_bytes, row, block, source.cols);
        },
        [&](float e, bool largest) { return tile ? tile_error(e, largest) : e; });
    if (!exists) continue;
    const OutputRow to(out, row);
    to.codes[block] = make_uint2(codes.low, codes.high);
    if constexpr (kMx) {
      if ((block & 1) == 0) {
        OutputRow(scales, row).scales[scale_place(scales, block / 2)] = codes.scale;
      }
    } else {
      to.scales[scale_place(out, block)] = codes.scale;
    }
  }
  zero_padding(scales);
}

#ifndef __CUDACC_RTC__
// Calls f with the kind of rotation as a compile-time constant. -DJITQUANT_ROTATE=<number> builds a
// library for that kind alone, which compiles faster. Without kAll, there are two kinds.
template <bool kAll = true, class F>
cudaError_t with_rotation(const Rotation& rotation, const Rope& rope, F&& f) {
  const Rotate rotate = rope.size > 0         ? Rotate::kRope
                        : rotation.lanes == 0 ? Rotate::kNone
                        : rotation.rounded    ? Rotate::kTe
                                              : Rotate::kWide;
#ifdef JITQUANT_ROTATE
  constexpr Rotate kOnly = static_cast<Rotate>(JITQUANT_ROTATE);
  return rotate == kOnly ? f(std::integral_constant<Rotate, kOnly>()) : cudaErrorInvalidValue;
#else
  if (rotate == Rotate::kNone) return f(std::integral_constant<Rotate, Rotate::kNone>());
  if (rotate == Rotate::kTe) return f(std::integral_constant<Rotate, Rotate::kTe>());
  if constexpr (kAll) {
    if (rotate == Rotate::kWide) return f(std::integral_constant<Rotate, Rotate::kWide>());
    return f(std::integral_constant<Rotate, Rotate::kRope>());
  }
  return cudaErrorInvalidValue;
#endif
}

// Calls f with whether scales are selected and whether rounding is stochastic, as compile-time
// constants. -DJITQUANT_SELECT=0 builds a library for scales that are not selected, =1 for those
// that are, =2 for stochastic rounding with these.
template <class F>
cudaError_t with_rule(const Recipe& recipe, F&& f) {
#ifdef JITQUANT_SELECT
  constexpr auto takes = [](int rule) { return rule == JITQUANT_SELECT; };
#else
  constexpr auto takes = [](int rule) { return true; };
#endif
  constexpr std::integral_constant<Scaling, Scaling::kTe> te = {};
  constexpr std::integral_constant<Scaling, Scaling::kSelect> select = {};
  constexpr std::true_type yes = {};
  constexpr std::false_type no = {};
  const bool stochastic = recipe.rounding.stochastic;
  if constexpr (takes(0)) {
    if (recipe.select.none) return stochastic ? f(te, yes) : f(te, no);
  }
  if constexpr (takes(1)) {
    if (!recipe.select.none && !stochastic) return f(select, no);
  }
  if constexpr (takes(2)) {
    if (!recipe.select.none && stochastic) return f(select, yes);
  }
  return cudaErrorInvalidValue;
}

template <class T, Rotate kRotate>
RowSource<T, kRotate> row_source(const Matrix& x, const Rotation& rotation, const Rope& rope) {
  if constexpr (kRotate == Rotate::kRope) {
    return {x, rotation, rope};
  } else {
    return PlainSource<T>(x);
  }
}

// Whether a tensor is contiguous and has fewer than 2^31 blocks, all whole.
inline bool has_flat_blocks(const Matrix& x) {
  return is_flat(x) && x.rows * blocks_of(x.cols) < (int64_t{1} << 31) - (int64_t{1} << 24);
}

template <Scaling kScaling, bool kStochastic>
cudaError_t launch_recipe(const Matrix& x, const Rope& rope, const RecipeScale& scale,
                          const Recipe& recipe, const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    return with_rotation(recipe.rotation, rope, [&](auto rotate) {
      const int64_t blocks = out.rows * out.blocks;
      const bool flat = has_flat_blocks(x) && out.blocks * 16 == x.cols && !out.swizzled &&
                        !recipe.tile && !scale.by_row && scale.rule == Nvfp4Recipe::kTe &&
                        recipe.rounding.random_bytes == nullptr;
      // For one that is rarely asked for, the kernel for all tensors has to do.
      constexpr bool kRare = kScaling == Scaling::kSelect && kStochastic;
      if constexpr (rotate != Rotate::kRope && !kRare) {
        if (flat) {
          constexpr auto kKernel = &flat_recipe_kernel<T, rotate, kScaling, kStochastic>;
          constexpr int kWork = kThreads * kFlatBlocks<T, rotate>;
          const int64_t grid =
              persistent_grid((blocks + kWork - 1) / kWork, blocks_per_sm<kKernel>(kThreads, 0));
          return launch<kKernel>({grid, kThreads, Start::kOverlapped}, stream, flat_source<T>(x),
                                 Divisor(static_cast<uint32_t>(out.blocks)), scale, recipe, out);
        }
      }
      constexpr auto kKernel = &recipe_kernel<T, rotate, kScaling, kStochastic>;
      const int64_t items = (blocks + kThreads - 1) / kThreads + 16;
      const int64_t grid = persistent_grid(items, blocks_per_sm<kKernel>(kThreads, 0));
      return launch<kKernel>({grid, kThreads, Start::kOverlapped}, stream,
                             row_source<T, rotate>(x, recipe.rotation, rope), scale, recipe, out);
    });
  });
}
#endif

}  // namespace jitquant
