// Products of a few rows with the NVFP4 weights of their experts, which are read as stored: a
// product of rows sorted by expert, and a whole mixture-of-experts layer.
//
//   group     up to 8 rows of one expert, which a warp multiplies at once
//   tile      16 rows of a weight: neighboring rows; 8 gates and their 8 ups; or 8 rows each of two
//             experts by two rows of x, keeping only each expert's product with its own row
//   unit      512 of k (for a pair of experts: of both), whose x a warp holds in registers
//   block     up to kMostWarps warps (product.cuh), as (units side by side, tiles side by side)
//
// A block takes a contiguous range of the tiles of all groups, so that it meets few groups and few
// blocks read each weight. Every block sorts the rows by expert itself (expert_groups.cuh). If a
// layer has only one row, it needs no sorting: all its experts have the same x. Then the tiles of
// the second product hold pairs of experts, and the sum over experts needs no launch of its own.
//
// Experts with many rows are multiplied by the kernels of expert_tiles.cuh, on compute capability
// 9.0.
//
// Sums are in fp32. Their order depends on k, on whether an expert has at most two rows (except in
// fp16), on whether it has many, and on whether there is only one row in all.
#include "expert_stream.cuh"
#include "expert_tiles.cuh"

namespace jitquant {

constexpr int kSumThreads = 256, kSumsAtOnce = 8;
// How much of the second product's weights a block of the first one prefetches into L2.
constexpr int kAheadBytes = 131072;

// Where the results of groups go. A row of `out` is a sorted row, or a pair.
struct GroupOutput {
  void* out;
  DType dtype;
  int cols;
  bool activate;  // silu(gate) * up, if tiles have both
  const float* x_gsa;
  int64_t x_gsa_stride;
  ExpertWeights next;  // the next launch's weights, to prefetch; without rows if unknown
};

// Maps the rows of a group to rows of x. Each lane finds one and keeps it: if each of the loads of
// x found its own, that would take thousands of cycles per group. Rows that the group does not have
// are its first one, because no other row of x is sure to be written.
class GroupRows {
 public:
  // `order` is null if the rows of x are sorted.
  __device__ __forceinline__ GroupRows(const uint16_t* order, Group group, int divisor) {
    const int lane = threadIdx.x & 31;
    const int i = group.first() + (lane < group.count() ? lane : 0);
    own_ = order == nullptr ? i : order[i] / divisor;
  }
  static __device__ __forceinline__ bool any() { return true; }
  __device__ __forceinline__ int operator()(int row) const { return __shfl_sync(~0u, own_, row); }

 private:
  int own_;
};

template <class Input, bool kOneToken>
struct GroupJob {
  // Whether the number of an expert's rows decides between two ways to multiply.
  static constexpr bool kEither =
      !kOneToken && std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;

  const ExpertWeights& w;
  const TileLayout& layout;
  const GroupRouting& routing;
  const GroupOutput& to;
  const ExpertPlan& plan;
  const GroupTables& tables;
  float* sums;

  // If kOneToken, the only row of x.
  __device__ __forceinline__ Group group() const {
    return kOneToken ? Group{0, 1u << 1 | 1u} : tables.groups[block_words().group];
  }
  __device__ __forceinline__ int unit(int pass) const {
    return pass * (blockDim.x >> 5) + (threadIdx.x >> 5);
  }
  __device__ __forceinline__ int column(int pass) const { return unit(pass) * kUnit; }
  __device__ __forceinline__ GroupRows rows(int) const {
    return {kOneToken || routing.ids == nullptr ? nullptr : tables.order, group(),
            routing.of_tokens ? routing.top_k : 1};
  }

  __device__ __forceinline__ float request_gsa() const {
    return kOneToken || w.gsa_row != 0 ? 0.0f : w.gsa[group().expert * w.gsa_expert];
  }
  __device__ __forceinline__ void keep_gsa(float gsa) const {
    if (!kOneToken && thread_index() == 0) block_words().gsa = gsa;
  }

  template <LinearWay kWay>
  __device__ __forceinline__ void keep(float (&acc)[4], float own_undo, int tile, int own) const {
    using Way = WayTraits<kWay>;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float* const to_sums = sums + (tile * plan.units + own) * Way::kSums;
    if constexpr (Way::kAfter && kOneToken) {
      const float undo = __shfl_sync(~0u, own_undo, 0);
      const float one = sum_of_columns(acc[0]), two = sum_of_columns(acc[2]);
      if (t == 0 && own < plan.units) {
        to_sums[g] = mul_rn(one, undo);
        to_sums[g + 8] = mul_rn(two, undo);
      }
    } else if constexpr (Way::kAfter) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[i] = sum_of_columns(acc[i]);
      const float undo[2] = {__shfl_sync(~0u, own_undo, 0), __shfl_sync(~0u, own_undo, 4)};
      if (t < 2 && own < plan.units) {
        const float scale = t == 0 ? undo[0] : undo[1];
        to_sums[t * kPitch + g] = mul_rn(t == 0 ? acc[0] : acc[1], scale);
        to_sums[t * kPitch + g + 8] = mul_rn(t == 0 ? acc[2] : acc[3], scale);
      }
    } else if (own < plan.units) {
      float* const column = to_sums + 2 * t * kPitch + g;
      column[0] = acc[0], column[kPitch] = acc[1];
      column[8] = acc[2], column[kPitch + 8] = acc[3];
    }
  }

  // Without this, memory would be idle while the block adds up its last sums and the next launch
  // begins. Called by one thread of the block.
  __device__ __forceinline__ void prefetch_next() const {
    const ExpertWeights& next = to.next;
    if (next.rows == 0) return;
    const int tiles = (next.rows + kTile - 1) / kTile;
    const TileRange range = tiles_of_block<kEither>(tables, tiles);
    const int group = range.begin / tiles, row = (range.begin - group * tiles) * kTile;
    const int most = min(next.rows - row, kAheadBytes / (next.cols / 2));
    const int rows = min((range.end - range.begin) * kTile, most);
    if (rows > 0) prefetch_rows(next, tables.groups[group].expert, row, rows);
  }

  template <LinearWay kWay>
  __device__ __forceinline__ void add_up(int from, int count) const {
    using Way = WayTraits<kWay>;
    const int lane = threadIdx.x & 31, n = lane & 15, warps = thread_count() >> 5;
    const Group group = this->group();
    if constexpr (!kOneToken) {
      // By the last warp, which has the least to add up.
      if (thread_index() == thread_count() - 1 && from + count == block_words().end) {
        prefetch_next();
      }
    }
    const int first = kOneToken ? 0 : block_words().group * layout.tiles;
    const int rows_here = group.count(), pairs = (rows_here + 1) / 2;  // at most 4
    const int inverse = pairs == 1 ? 1 << 16 : pairs == 2 ? 1 << 15 : pairs == 3 ? 21846 : 1 << 14;
    // Each warp adds up two rows of x of a tile.
#pragma unroll 2
    for (int i = thread_index() >> 5; i < count * pairs; i += warps) {
      const int which = i * inverse >> 16, row = (i - which * pairs) * 2 + (lane >> 4);
      const float* p = sums + which * plan.units * Way::kSums + row * kPitch + n;
      float sum = 0.0f;
#pragma unroll 4
      for (int unit = 0; unit < plan.units; ++unit, p += Way::kSums) {
        sum = unit == 0 ? *p : add_rn(sum, *p);
      }
      int tile = from + which - first, expert = group.expert, out_row = group.first() + row;
      if constexpr (kOneToken) {
        out_row = tile / layout.tiles;
        tile -= out_row * layout.tiles;
        expert = tables.groups[out_row].expert;
        if (expert < 0) continue;
      }
      const bool there = row < rows_here;
      const int half = layout.tile_rows == kTile ? n : n & 7;
      const int column = tile * layout.tile_rows + half;
      const int w_row = column + (n == half ? 0 : w.rows / 2);
      if (there && w_row < w.rows) {
        const float gsa = kOneToken || w.gsa_row != 0
                              ? w.gsa[expert * w.gsa_expert + w_row * w.gsa_row]
                              : block_words().gsa;
        sum = mul_rn(mul_rn(sum, power_of_two(-kExponent<Input, kWay>)), gsa);
      }
      if (!kOneToken && there) {
        if (routing.ids != nullptr) out_row = tables.order[out_row];
        if (to.x_gsa != nullptr) sum = mul_rn(sum, to.x_gsa[out_row * to.x_gsa_stride]);
      }
      const float up = __shfl_xor_sync(~0u, sum, 8);
      if (to.activate) sum = swiglu(sum, up);
      if (there && n == half && w_row < w.rows) {
        store_element(to.out, to.dtype, static_cast<int64_t>(out_row) * to.cols + column, sum);
      }
    }
  }
};

template <class Input, bool kAligned, bool kOneToken>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    nvfp4_groups_kernel(const __grid_constant__ ExpertWeights w,
                        const __grid_constant__ TileLayout layout,
                        const __grid_constant__ LinearOperand x,
                        const __grid_constant__ GroupRouting routing,
                        const __grid_constant__ GroupOutput to,
                        const __grid_constant__ ExpertPlan plan) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  const int warp = thread_index() >> 5, warps = thread_count() >> 5;
  WarpRing ring(tiles, warp, plan.stages);
  unsigned char* const after_rings = tiles + warps * plan.stages * kStage;
  const GroupTables tables = tables_at(after_rings + plan.tables_at, routing);
  float* const sums = reinterpret_cast<float*>(after_rings + plan.sums_at);

  using Job = GroupJob<Input, kOneToken>;
  TileRange own = {};
  if constexpr (kOneToken) own = share_of_block(routing.count * layout.tiles);
  wait_for_previous();
  let_next_begin();
  if constexpr (kOneToken) {
    for (int i = thread_index(); i < routing.count; i += thread_count()) {
      tables.groups[i] = {expert_of(routing, i), 1u << 1 | 1u};
    }
  } else {
    route(routing, tables, tiles);  // the rings are not in use yet
    own = tiles_of_block<Job::kEither>(tables, layout.tiles);
  }
  if (thread_index() == 0) begin_block(own);
  __syncthreads();
  const int begin = own.begin;
  volatile BlockWords& block = block_words();

  using Places = GroupPlaces<kOneToken>;
  const OwnWords words(after_rings + plan.words_at);
  TileStream<Places, kAligned> weights(Places(w, layout, plan, tables.groups, begin, words), words,
                                       w.cols, plan.passes, begin);
  weights.template next<0>(ring.at);

  constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
  const Job job = {w, layout, routing, to, plan, tables, sums};
  if constexpr (kOneToken) {
    constexpr LinearWay kWay = kAfter ? LinearWay::kTwoRows : LinearWay::kEightRows;
    multiply_own_tiles<Input, kWay, kAligned>(weights, ring, words, x, plan, after_rings, job);
  } else {
    if (routing.offsets != nullptr) {
      // Rows without an expert are zero.
      const int64_t first = static_cast<int64_t>(tables.total[1]) * to.cols;
      const int64_t none = static_cast<int64_t>(routing.count) * to.cols - first;
      for (int64_t i = static_cast<int64_t>(blockIdx.x) * thread_count() + thread_index(); i < none;
           i += static_cast<int64_t>(gridDim.x) * thread_count()) {
        store_element(to.out, to.dtype, first + i, 0.0f);
      }
    }
    // Groups of experts with at most two rows come first.
    int group = begin / layout.tiles;
    const auto multiply_groups = [&](auto way, int groups) {
      for (; group < groups && block.from < block.end; ++group) {
        __syncthreads();
        if (thread_index() == 0) {
          block.group = group;
          block.stop = min(block.end, (group + 1) * layout.tiles);
        }
        __syncthreads();
        multiply_own_tiles<Input, decltype(way)::value, kAligned>(weights, ring, words, x, plan,
                                                                  after_rings, job);
      }
    };
    if constexpr (Job::kEither) {
      multiply_groups(std::integral_constant<LinearWay, LinearWay::kTwoRows>(), tables.total[2]);
    }
    multiply_groups(std::integral_constant<LinearWay, LinearWay::kEightRows>(), tables.total[0]);
  }
}

// ---- the second product of one token, with the sum over its experts -----------------------------

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
  __device__ __forceinline__ bool step(int, Place& place) {
    if (plan_.step_codes == 0) return false;
    place.codes += plan_.step_codes;
    place.scales += plan_.step_scales;
    return true;
  }
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
  void* out;
  DType dtype;

  __device__ __forceinline__ int unit(int pass) const { return places.unit(pass); }
  __device__ __forceinline__ int column(int pass) const { return places.column(pass); }
  __device__ __forceinline__ PairRows rows(int pass) const {
    const int one = unit(pass) / k_units * 2, two = one + 1;
    const bool has_one = places.expert(one) >= 0, has_two = places.expert(two) >= 0;
    return {has_one ? one : has_two ? two : kNoRow, has_two ? two : has_one ? one : kNoRow};
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
        sum = mul_rn(mul_rn(sum, power_of_two(-kExponent<Input, kWay>)), gsa);
        y = add_rn(y, mul_rn(sum, weights[choice]));
      }
      y = add_rn(y, __shfl_xor_sync(~0u, y, 8));
      y = add_rn(y, __shfl_xor_sync(~0u, y, 16));
      if (lane < 8) store_element(out, dtype, n, y);
    }
  }
};

template <class Input, bool kAligned>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    nvfp4_one_down_kernel(const __grid_constant__ ExpertWeights w,
                          const __grid_constant__ LinearOperand x,
                          const __grid_constant__ GroupRouting routing, const void* choice_weights,
                          const DType weights_dtype, void* out, const DType dtype,
                          const __grid_constant__ ExpertPlan plan) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ int ids[kMostTopK];
  __shared__ float weights_of_choices[kMostTopK], gsas[kMostTopK];
  const int warp = thread_index() >> 5, warps = thread_count() >> 5;
  WarpRing ring(tiles, warp, plan.stages);
  unsigned char* const after_rings = tiles + warps * plan.stages * kStage;
  const int top_k = routing.count, k_units = (w.cols + kUnit - 1) / kUnit;

  const TileRange own = share_of_block(w.rows / 8);
  if (thread_index() == 0) begin_block(own);
  wait_for_previous();
  let_next_begin();
  for (int i = thread_index(); i < top_k; i += thread_count()) {
    ids[i] = expert_of(routing, i);
    weights_of_choices[i] = float_at(choice_weights, weights_dtype, i);
  }
  __syncthreads();
  const OwnWords words(after_rings + plan.words_at);
  const PairPlaces places(w, plan, ids, top_k, k_units);
  TileStream<PairPlaces, kAligned> weights(places, words, w.cols, plan.passes, own.begin);
  weights.template next<0>(ring.at);

  constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
  constexpr LinearWay kWay = kAfter ? LinearWay::kTwoRows : LinearWay::kEightRows;
  const PairJob<Input> job = {places, w,
                              plan,   weights_of_choices,
                              gsas,   reinterpret_cast<float*>(after_rings + plan.sums_at),
                              top_k,  k_units,
                              out,    dtype};
  multiply_own_tiles<Input, kWay, kAligned>(weights, ring, words, x, plan, after_rings, job);
}

// ---- the sum over the experts of several tokens -------------------------------------------------

// y[row] = sum of weight * partials[row * top_k + choice] over the choices, in their order.
__global__ void __launch_bounds__(kSumThreads)
    nvfp4_sum_experts_kernel(const float* partials, const __grid_constant__ GroupRouting routing,
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

struct BlockShape {
  ExpertPlan plan;
  int along, beside;
  int64_t grid, shared;
};

// Bytes of sums per tile and unit, if an expert has at most two rows and if it has more.
struct SumBytes {
  int two, eight;
};

// Plans a block with `units` side by side. `tiles` is the total of tiles, or 0 if unknown.
bool plan_shape(BlockShape& shape, int units, int64_t tiles, SumBytes sums, bool turned,
                int tables) {
  const int sms = sm_count();
  const int64_t most_shared = most_shared_bytes() - 1024;
  const auto fits = [&](int most_warps, int stages) {
    ExpertPlan& plan = shape.plan;
    plan.units = units;
    plan.passes = (units + most_warps - 1) / most_warps;
    shape.along = (units + plan.passes - 1) / plan.passes;
    shape.beside = tiles > 0 ? 1 : most_warps / shape.along;
    // As many tiles side by side as take no longer than one after another.
    const auto rounds = [&](int64_t beside) {
      const int64_t own = (tiles + sms - 1) / sms;
      return (own + beside - 1) / beside * beside;
    };
    if (tiles > 0) {
      for (int more = 2; more * shape.along <= most_warps && more <= tiles; ++more) {
        if (rounds(more) <= rounds(shape.beside)) shape.beside = more;
      }
    }
    const int warps = shape.along * shape.beside;
    plan.stages = stages;
    if (stages == kManyStages && warps > 8) return false;
    const int64_t ring = static_cast<int64_t>(warps) * stages * kStage;
    const int64_t staged = turned ? warps * kStaged : 0;
    // A later pass stages x again, which must not overwrite the sums.
    plan.sums_at = static_cast<int>(plan.passes > 1 ? staged : 0);
    const int64_t words = static_cast<int64_t>(warps) * 32 * OwnWords::kCount * 4;
    const int64_t left = (most_shared - ring - tables - words - plan.sums_at) / 1024 * 1024;
    const int64_t step = static_cast<int64_t>(units) * shape.beside;
    const int64_t two = left / (step * sums.two), eight = left / (step * sums.eight);
    if (two < 1 || eight < 1 || left + plan.sums_at < staged) return false;
    constexpr int64_t kMostHeld = 64;
    plan.hold_two = static_cast<int>(two < kMostHeld ? two : kMostHeld);
    plan.hold_eight = static_cast<int>(eight < kMostHeld ? eight : kMostHeld);
    plan.words_at = static_cast<int>(left + plan.sums_at);
    plan.tables_at = static_cast<int>(plan.words_at + words);
    shape.shared = ring + plan.tables_at + tables;
    shape.grid =
        tiles > 0 && tiles < sms * shape.beside ? (tiles + shape.beside - 1) / shape.beside : sms;
    return true;
  };
  return fits(kMostWarps, kManyStages) || fits(kMostWarps, kFewStages) ||
         fits(kMostWarps / 2, kFewStages);
}

// Tiles of `tile_rows` rows of W are alike unless the last one is cut off.
void plan_steps(BlockShape& shape, const ExpertWeights& w, int tile_rows) {
  const int64_t bytes = static_cast<int64_t>(shape.beside) * tile_rows * (w.cols / 2);
  const bool alike = w.rows % kTile == 0 || tile_rows < kTile;
  const bool fits = bytes <= std::numeric_limits<int>::max();
  shape.plan.step_codes = alike && fits ? static_cast<int>(bytes) : 0;
  shape.plan.step_scales = shape.plan.step_codes / 8;
}

template <auto kKernel, class... Args>
cudaError_t launch_shape(const BlockShape& shape, cudaStream_t stream, const Args&... args) {
  const int threads = shape.along * shape.beside * 32;
  if (blocks_per_sm<kKernel>(threads, static_cast<size_t>(shape.shared)) < 1) {
    return cudaErrorInvalidConfiguration;
  }
  LaunchShape to = {shape.grid, shape.along * 32, Start::kOverlapped};
  to.block_y = shape.beside;
  to.shared = static_cast<size_t>(shape.shared);
  return launch<kKernel>(to, stream, args...);
}

// How many sorted rows or pairs a launch takes. Tables for more do not fit next to the rings.
int64_t most_sorted() {
  return most_shared_bytes() >= 160 << 10 ? 2048 : 1024;
}

bool apart_by_16(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && bytes % 16 == 0;
}

template <class Input>
bool is_aligned(const ExpertWeights& w, const LinearOperand& x) {
  return w.cols % kSegment == 0 && x.cols == w.cols && apart_by_16(w.codes, 0) &&
         apart_by_16(w.scales, 0) &&
         (LinearInput<Input>::kCodes || apart_by_16(x.data, x.stride * 2));
}

template <class Input, bool kOneToken>
cudaError_t launch_groups(const ExpertWeights& w, const LinearOperand& x,
                          const GroupRouting& routing, const GroupOutput& to, cudaStream_t stream) {
  TileLayout layout = {};
  layout.tile_rows = to.activate ? 8 : kTile;
  const int tiled = to.activate ? w.rows / 2 : w.rows;
  layout.tiles = (tiled + layout.tile_rows - 1) / layout.tile_rows;
  const int64_t second = to.activate ? w.rows / 2 : 8;
  layout.second_codes = second * (w.cols / 2);
  layout.second_scales = second * (w.cols / 16);

  using Two = WayTraits<LinearWay::kTwoRows>;
  using Eight = WayTraits<LinearWay::kEightRows>;
  constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
  const bool aligned = is_aligned<Input>(w, x);
  const int units = (w.cols + kUnit - 1) / kUnit;
  const SumBytes sums = {4 * (kAfter ? Two::kSums : Eight::kSums),
                         4 * (kOneToken && kAfter ? Two::kSums : Eight::kSums)};
  const bool turned = aligned && !LinearInput<Input>::kCodes;
  BlockShape shape = {};
  if (!plan_shape(shape, units, kOneToken ? static_cast<int64_t>(routing.count) * layout.tiles : 0,
                  sums, turned, table_bytes(routing.count, routing.experts))) {
    return cudaErrorInvalidConfiguration;
  }
  plan_steps(shape, w, layout.tile_rows);
  return aligned ? launch_shape<&nvfp4_groups_kernel<Input, true, kOneToken>>(
                       shape, stream, w, layout, x, routing, to, shape.plan)
                 : launch_shape<&nvfp4_groups_kernel<Input, false, kOneToken>>(
                       shape, stream, w, layout, x, routing, to, shape.plan);
}

template <class Input>
cudaError_t launch_one_down(const ExpertWeights& w, const LinearOperand& x,
                            const GroupRouting& routing, const ExpertLayer& layer,
                            cudaStream_t stream) {
  const bool aligned = is_aligned<Input>(w, x);
  const int units = (routing.count + 1) / 2 * ((w.cols + kUnit - 1) / kUnit);
  BlockShape shape = {};
  if (!plan_shape(shape, units, w.rows / 8, {4 * kPairSums, 4 * kPairSums}, aligned, 0)) {
    return cudaErrorInvalidConfiguration;
  }
  plan_steps(shape, w, 8);
  const auto go = [&](auto kernel) {
    return launch_shape<decltype(kernel)::value>(shape, stream, w, x, routing, layer.weights,
                                                 layer.weights_dtype, layer.out, layer.out_dtype,
                                                 shape.plan);
  };
  constexpr auto kWhole = &nvfp4_one_down_kernel<Input, true>;
  constexpr auto kParts = &nvfp4_one_down_kernel<Input, false>;
  return aligned ? go(std::integral_constant<decltype(kWhole), kWhole>())
                 : go(std::integral_constant<decltype(kParts), kParts>());
}

// Experts with more rows are multiplied by the tile kernels of expert_tiles.cuh, on devices that
// have them.
constexpr int kMostOfGroups = 16;
// Rows from which on an expert may have many, and pairs per expert from which on the tile kernels
// multiply all of them. Measured on an H200: with 128 experts of 2048 x 768 they are faster from 7
// pairs per expert on, with 256 of 7168 x 2048 from 9.
constexpr int kFewestRows = 33, kTiledPairs = 9;

// A library for fewer rows compiles in less time.
#ifdef JITQUANT_EXPERTS_FEW_ROWS
constexpr bool kHasTiles = false;
#else
constexpr bool kHasTiles = true;
#endif
bool takes(int64_t rows) {
  return kHasTiles || rows < kFewestRows;
}

template <class Input>
constexpr bool kMayTile = kHasTiles && !LinearInput<Input>::kCodes;

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
      const SortedRows rows = {given.offsets,
                               given.wide,
                               nullptr,
                               nullptr,
                               static_cast<int>(x.rows),
                               all ? 1 : kMostOfGroups + 1};
      const TileOutput output = {to.out,         to.dtype == DType::kFloat32, all, w.rows, to.x_gsa,
                                 to.x_gsa_stride};
      const cudaError_t error = launch_expert_tiles<Input, false>(w, x, rows, output, stream);
      if (all || error != cudaSuccess) return error;
      most = kMostOfGroups;
    }
  }
  for (int64_t first = 0; first < x.rows; first += window) {
    const int64_t rows = x.rows - first < window ? x.rows - first : window;
    LinearOperand part = x;
    part.rows = rows;
    part.data = static_cast<const uint8_t*>(x.data) + first * row_bytes;
    if (x.scales != nullptr) part.scales = x.scales + first * blocks;
    const GroupRouting routing = {given.offsets, nullptr,   given.wide, static_cast<int>(rows),
                                  first,         w.experts, 1,          false,
                                  most,          nullptr,   false};
    const GroupOutput output = {static_cast<uint8_t*>(to.out) + first * out_bytes,
                                to.dtype,
                                w.rows,
                                false,
                                to.x_gsa == nullptr ? nullptr : to.x_gsa + first * to.x_gsa_stride,
                                to.x_gsa_stride,
                                {}};
    const cudaError_t error = launch_groups<Input, false>(w, part, routing, output, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Which kernels multiply the rows of a layer: those of groups, those of tiles, or each the experts
// with few and with many rows.
enum class LayerWay : int { kGroups, kBoth, kTiles };

template <class T>
LayerWay way_of(const ExpertWeights& up, const ExpertWeights& down, const LinearOperand& x,
                int top_k) {
  if constexpr (kHasTiles) {
    const bool tiled = x.rows >= kFewestRows && apart_by_16(x.data, x.stride * 2) &&
                       has_expert_tiles<T>(up) && has_expert_tiles<T>(down);
    const int64_t pairs = x.rows * top_k;
    const bool all =
        pairs > most_sorted() || pairs >= kTiledPairs * static_cast<int64_t>(up.experts);
    return !tiled ? LayerWay::kGroups : all ? LayerWay::kTiles : LayerWay::kBoth;
  }
  return LayerWay::kGroups;
}

// Elements of the products of one set of launches by tiles, 1 GiB in fp32. Sets of fewer rows would
// decode the weights more often.
constexpr int64_t kMostTiled = int64_t{1} << 28;

int64_t floats_of(int64_t elements) {
  return (elements / 2 + 31) / 32 * 32;  // 128-byte aligned
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
cudaError_t launch_layer(const ExpertLayer& layer, const LinearOperand& x, cudaStream_t stream) {
  const ExpertWeights &up = layer.gate_up, &down = layer.down;
  const int top_k = layer.routing.top_k, id_bytes = layer.routing.wide ? 8 : 4;
  const LayerWay way = way_of<Input>(up, down, x, top_k);
  const int64_t window = expert_scratch(up, down, x, top_k).window;
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
    GroupRouting routing = {
        nullptr,
        own.routing.ids,
        layer.routing.wide,
        static_cast<int>(pairs),
        0,
        up.experts,
        top_k,
        true,
        way == LayerWay::kGroups ? std::numeric_limits<int>::max() : kMostOfGroups,
        reinterpret_cast<uint4*>(layer.activations + floats_of(pairs * down.cols)),
        false};
    GroupOutput between = {layer.activations, x.dtype, down.cols, true, nullptr, 0, {}};
    // Bulk prefetches need this alignment.
    if (down.cols % kSegment == 0 && apart_by_16(down.codes, 0) && apart_by_16(down.scales, 0)) {
      between.next = down;
    }
    LinearOperand h = {layer.activations, nullptr, x.dtype, down.cols, pairs, down.cols};

    if (rows == 1) {
      cudaError_t error = launch_groups<Input, true>(up, part, routing, between, stream);
      if (error == cudaSuccess) error = launch_one_down<Input>(down, h, routing, own, stream);
      if (error != cudaSuccess) return error;
      continue;
    }
    const bool tiles = way != LayerWay::kGroups;
    const int least = way == LayerWay::kTiles ? 1 : kMostOfGroups + 1;
    if constexpr (kHasTiles) {
      if (tiles) {
        cudaError_t error = launch_layer_tiles<Input>(own, part, least, stream, true);
        if (error == cudaSuccess) {
          error = launch_layer_tiles<Input>(own, part, least, stream, false);
        }
        if (error != cudaSuccess) return error;
      }
    }
    if (way != LayerWay::kTiles) {
      cudaError_t error = launch_groups<Input, false>(up, part, routing, between, stream);
      if (error != cudaSuccess) return error;
      routing.of_tokens = false, routing.is_sorted = true;
      const GroupOutput partials = {
          layer.partials, DType::kFloat32, down.rows, false, nullptr, 0, {}};
      error = launch_groups<Input, false>(down, h, routing, partials, stream);
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

ExpertScratch expert_scratch(const ExpertWeights& up, const ExpertWeights& down,
                             const LinearOperand& x, int top_k) {
  LayerWay way = LayerWay::kGroups;
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
  if (x.rows > 1) scratch.partials = pairs * down.rows;
  if (way != LayerWay::kGroups) {
    scratch.sorted =
        floats_of(pairs * up.cols) + floats_of(pairs * down.cols) + up.experts + 1 + pairs;
  }
  return scratch;
}

cudaError_t launch_nvfp4_grouped_linear(const ExpertWeights& w, const LinearOperand& x,
                                        const Routing& routing, const LinearEpilogue& to,
                                        cudaStream_t stream) {
  if (w.rows == 0 || x.rows == 0) return cudaSuccess;
  if (!takes(x.rows)) return cudaErrorInvalidValue;
#ifdef JITQUANT_DTYPE
  // A library for x in this dtype only (dispatch.cuh).
  constexpr DType kOnly = static_cast<DType>(JITQUANT_DTYPE);
  if constexpr (kOnly != DType::kFloat32) {
    using Only = std::conditional_t<kOnly == DType::kFloat16, Fp16, Bf16>;
    if (x.scales == nullptr && x.dtype == kOnly) {
      return launch_grouped<Only>(w, x, routing, to, stream);
    }
  }
  return cudaErrorInvalidValue;
#else
  if (x.scales != nullptr) return launch_grouped<CodeInput>(w, x, routing, to, stream);
  return x.dtype == DType::kBFloat16 ? launch_grouped<Bf16>(w, x, routing, to, stream)
                                     : launch_grouped<Fp16>(w, x, routing, to, stream);
#endif
}

cudaError_t launch_nvfp4_experts(const ExpertLayer& layer, const LinearOperand& x,
                                 cudaStream_t stream) {
  if (x.rows == 0) return cudaSuccess;
  if (!takes(x.rows)) return cudaErrorInvalidValue;
#ifdef JITQUANT_DTYPE
  constexpr DType kOnly = static_cast<DType>(JITQUANT_DTYPE);
  if constexpr (kOnly != DType::kFloat32) {
    using Only = std::conditional_t<kOnly == DType::kFloat16, Fp16, Bf16>;
    if (x.dtype == kOnly) return launch_layer<Only>(layer, x, stream);
  }
  return cudaErrorInvalidValue;
#else
  return x.dtype == DType::kBFloat16 ? launch_layer<Bf16>(layer, x, stream)
                                     : launch_layer<Fp16>(layer, x, stream);
#endif
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
