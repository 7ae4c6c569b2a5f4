// y = x W^T for an NVFP4 weight, which is read as stored. The kernel here takes up to 16 rows of x.
// For more rows on compute capability 9.0 see linear_tiles.cuh; NVFP4 x is first decoded for it by
// decoded_rows.cuh.
//
//   block     up to kMostWarps warps, as (warps along k, row tiles of W side by side)
//   tile      16 rows of W over all of k; tiles side by side are one step, and a block takes every
//             gridDim.x-th step
//   segment   256 of k, which one stage of a warp's ring of asynchronous copies holds: 16 rows by
//             128 bytes of codes and 16 scales
//   x         a warp keeps its part in registers: 512 of k for up to 8 rows, 256 for 16
//   pass      as much of k as the warps of a block hold in registers
//   cluster   from compute capability 9.0 on, if one pass is not enough: two blocks with the same
//             tiles, of which each makes half of the passes and finishes half of the results
//
// There are three ways to multiply. With up to two rows of x (except in fp16), a column of the
// matrix product is a block of 16 codes, and the block's scale is applied afterwards, in fp32. With
// up to 8 or up to 16 rows, a column is a row of x, and codes are multiplied by their scales first,
// which is exact in bf16 and fp16.
//
// Sums are in fp32. Their order depends only on k, the way, and the device's shared memory: pairs
// of segments in the tensor core (16 rows: segment by segment), then the pairs of a span (at most
// 4096 of k), then spans, then the blocks of a cluster. So within a way, a row's result does not
// depend on the number of rows.
#include "decoded_rows.cuh"
#include "jitquant/cluster.cuh"
#include "linear_tiles.cuh"
#include "product.cuh"

namespace jitquant {

struct LinearPlan {
  int shares;                     // blocks that split k: 1, or the 2 of a cluster
  int passes, span_pairs, spans;  // most passes of a block, pairs of segments in a span, spans in a
                                  // pass
  int stages;
  int flush, hold;  // tiles whose sums a block collects before adding up, and keeps between passes
  int kept_at;      // floats from the sums to those kept between passes or for the other block
  int received_at;  // and to those that the other block sent, after two floats for their barrier
};

// Which of the blocks that split k this is.
__device__ __forceinline__ int rank_of(const LinearPlan& plan) {
  return blockIdx.x & (plan.shares - 1);
}
// The first of W's tiles of this block, and rows of W from one step to the next.
__device__ __forceinline__ int first_row(const LinearPlan& plan) {
  return (blockIdx.x >> (plan.shares - 1)) * blockDim.y * kTile;
}
__device__ __forceinline__ int row_step(const LinearPlan& plan) {
  return (gridDim.x >> (plan.shares - 1)) * blockDim.y * kTile;
}
template <class Way>
__device__ __forceinline__ int first_column() {
  return (threadIdx.x >> 5) * Way::kSegments * kSegment;
}
template <class Way>
__device__ __forceinline__ int column_step() {
  return (blockDim.x >> 5) * Way::kSegments * kSegment;
}
// Where this block's share of k begins.
template <class Way>
__device__ __forceinline__ int share_of_k(const LinearPlan& plan) {
  return rank_of(plan) * plan.passes * column_step<Way>();
}

// Whether pass `pass` of this block exists.
template <class Way>
__device__ __forceinline__ bool is_own(const LinearPlan& plan, const Nvfp4Weight& w, int pass) {
  return pass < plan.passes && share_of_k<Way>(plan) + pass * column_step<Way>() < w.cols;
}

// The stages of a warp, in the order in which it multiplies them: all segments of a tile, `hold`
// tiles, the same tiles in each further pass over k, then the next `hold` tiles.
template <class Way, bool kAligned>
class WeightStream {
 public:
  __device__ __forceinline__ WeightStream(const Nvfp4Weight& w, const LinearPlan& plan)
      : w_(w), plan_(plan), k_(share_of_k<Way>(plan) + first_column<Way>()) {
    move_to(first_row(plan) + threadIdx.y * kTile);
    end_ = row_ + plan.hold * row_step(plan);
  }

  // Only prefetches the first stage, into L2: an earlier kernel may still be writing it. More would
  // delay x, which is loaded next.
  __device__ __forceinline__ void prefetch() const {
    if constexpr (kAligned) {
      if (k_ >= w_.cols) return;
      const uint8_t* from = codes_;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row_ + 4 * i + lane_row() < w_.rows) jitquant::prefetch(from);
        from += static_cast<int64_t>(w_.cols) * 2;  // four rows further
      }
      if (lane() < kTile && row_ + lane() < w_.rows) jitquant::prefetch(scales_);
    }
  }

  // Starts to copy what comes next, segment kWhich of its tile, to `stage`. Always commits a group
  // of copies, even an empty one, so that groups count stages.
  template <int kWhich>
  __device__ __forceinline__ void next(Shared stage) {
    const int begin = k_ + kWhich * kSegment;
    if (row_ < w_.rows && begin < w_.cols) {
      if constexpr (kAligned) {
        const uint8_t* from = codes_ + kWhich * (kSegment / 2);
        const Shared to = stage + lane_row() * 128 + code_piece(lane_row(), lane_piece()) * 16;
        const bool whole = row_ + kTile <= w_.rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (whole || row_ + 4 * i + lane_row() < w_.rows) copy_16(to + i * 512, from);
          from += static_cast<int64_t>(w_.cols) * 2;  // four rows further
        }
        if (lane() < kTile && (whole || row_ + lane() < w_.rows)) {
          copy_16(stage + kScalesAt + lane() * 16, scales_ + kWhich * (kSegment / 16));
        }
      } else {
        load_parts(stage, begin);
      }
    }
    __pipeline_commit();
    if constexpr (kWhich + 1 == Way::kSegments) advance();
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ int lane_row() { return lane() >> 3; }
  static __device__ __forceinline__ int lane_piece() { return lane() & 7; }
  __device__ __forceinline__ const uint8_t* codes_at(int row, int k) const {
    return w_.codes + static_cast<int64_t>(row) * (w_.cols / 2) + k / 2;
  }
  __device__ __forceinline__ const uint8_t* scales_at(int row, int k) const {
    return w_.scales + static_cast<int64_t>(row) * (w_.cols / 16) + k / 16;
  }

  __device__ __forceinline__ void move_to(int row) {
    row_ = row;
    codes_ = codes_at(row + lane_row(), k_) + lane_piece() * 16;
    scales_ = scales_at(row + (lane() & 15), k_);
  }
  __device__ __forceinline__ void advance() {
    const int step = row_step(plan_), next = row_ + step;
    if (next < end_ && next < w_.rows) {
      row_ = next;
      codes_ += static_cast<int64_t>(step) * (w_.cols / 2);
      scales_ += static_cast<int64_t>(step) * (w_.cols / 16);
      return;
    }
    k_ += column_step<Way>();
    int first = end_ - plan_.hold * step;
    const int begin = share_of_k<Way>(plan_), end = begin + plan_.passes * column_step<Way>();
    if (k_ - first_column<Way>() >= min(w_.cols, end)) {
      k_ = begin + first_column<Way>();
      first = end_;
      end_ += plan_.hold * step;
    }
    move_to(first);
  }
  // For rows that 16-byte copies cannot handle. Codes and scales beyond k are zero.
  __device__ __forceinline__ void load_parts(Shared stage, int begin) {
#pragma unroll 1
    for (int i = lane(); i < kTile * 8; i += 32) {
      const int row = i >> 3, piece = i & 7;
      if (row_ + row >= w_.rows) continue;
      const uint2* const from =
          reinterpret_cast<const uint2*>(codes_at(row_ + row, begin) + piece * 16);
      const int there = w_.cols - begin - piece * 32;
      const uint2 low = there > 0 ? from[0] : make_uint2(0, 0);
      const uint2 high = there > 16 ? from[1] : make_uint2(0, 0);
      const uint32_t words[4] = {low.x, low.y, high.x, high.y};
      store_16(stage + row * 128 + code_piece(row, piece) * 16, words);
    }
#pragma unroll 1
    for (int i = lane(); i < kTile * 4; i += 32) {
      const int row = i >> 2, block = i % 4 * 4;
      if (row_ + row >= w_.rows) continue;
      uint32_t scales = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (begin + (block + j) * 16 < w_.cols) {
          scales |= static_cast<uint32_t>(scales_at(row_ + row, begin)[block + j]) << (8 * j);
        }
      }
      store_4(stage + kScalesAt + row * 16 + block, scales);
    }
  }

  const Nvfp4Weight& w_;
  const LinearPlan& plan_;
  int k_, row_, end_;
  const uint8_t* codes_;
  const uint8_t* scales_;
};

// Stores one element of y, given the sum without any gsa.
__device__ __forceinline__ void finish(const LinearEpilogue& to, float sum, float gsa, int row,
                                       int64_t n) {
  float y = mul_rn(sum, gsa);
  if (to.x_gsa != nullptr) y = mul_rn(y, to.x_gsa[row * to.x_gsa_stride]);
  if (to.bias != nullptr) y = add_rn(y, float_at(to.bias, to.bias_dtype, n));
  const int64_t i = row * to.cols + n;
  if (to.residual != nullptr) y = add_rn(y, float_at(to.residual, to.dtype, i));
  switch (to.dtype) {
    case DType::kBFloat16:
      static_cast<Bf16*>(to.out)[i] = from_float<Bf16>(y);
      break;
    case DType::kFloat16:
      static_cast<Fp16*>(to.out)[i] = from_float<Fp16>(y);
      break;
    default:
      static_cast<float*>(to.out)[i] = y;
  }
}

template <class Input, LinearWay kWay, bool kAligned>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    nvfp4_linear_kernel(const __grid_constant__ Nvfp4Weight w,
                        const __grid_constant__ LinearOperand x,
                        const __grid_constant__ LinearEpilogue to,
                        const __grid_constant__ LinearPlan plan) {
  using Way = WayTraits<kWay>;
  extern __shared__ __align__(1024) unsigned char tiles[];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int along = blockDim.x >> 5, beside = blockDim.y;
  const int warp_k = threadIdx.x >> 5, warp = threadIdx.y * along + warp_k;
  const int warps = along * beside, stages = plan.stages;

  const Shared ring = shared_at(tiles) + warp * stages * kStage;
  unsigned char* const after_rings = tiles + warps * stages * kStage;
  float* const sums = reinterpret_cast<float*>(after_rings);
  // Sums kept between passes, as (tile, 16 rows by two columns).
  float* const kept_sums = sums + plan.kept_at;

  const int step = row_step(plan);
  WeightStream<Way, kAligned> weights(w, plan);
#if defined(JITQUANT_HAS_CLUSTERS)
  const Inbox inbox(reinterpret_cast<uint64_t*>(sums + plan.received_at));
  if (plan.shares > 1) {
    if (threadIdx.x + threadIdx.y == 0) inbox.open();
    __syncwarp();
    cluster_arrive_relaxed();
  }
#endif

  let_next_begin();
  weights.prefetch();
  wait_for_previous();

  std::conditional_t<Way::kAfter, HeldRows<Input, kAligned>, HeldX<Input, kWay, kAligned>> held;
  const bool many = stages == kManyStages;
  const int last = (stages - 1) * kStage;
  int read = 0;
  // The stage that was multiplied last.
  const auto free_stage = [&] { return ring + (read == 0 ? last : read - kStage); };
  constexpr int kPairs = Way::kRows / 2;  // of columns
  const int first_hold = first_row(plan);

  // Unit `at` of the tiles from hold_row on is two columns of one of them, where tiles side by side
  // are consecutive.
  const auto finish_unit = [&](int hold_row, int at, float sum, float gsa) {
    const int which = at / kPairs, tile = beside == 1 ? which : which / beside;
    const int row = at % kPairs * 2 + (lane >> 4);
    const int n = hold_row + tile * step + (which - tile * beside) * kTile + (lane & 15);
    if (n < w.rows && row < x.rows) {
      finish(to, mul_rn(sum, power_of_two(-kExponent<Input, kWay>)), gsa, row, n);
    }
  };
  const auto received_sums = [&](int at) {
    return sums + plan.received_at + 2 + (at >> 1) * 32 + lane;
  };

  for (int hold_row = first_hold; hold_row < w.rows; hold_row += plan.hold * step) {
    for (int pass = 0; is_own<Way>(plan, w, pass); ++pass) {
      const int k = share_of_k<Way>(plan) + pass * column_step<Way>() + first_column<Way>();
      const bool begins = hold_row == first_hold && pass == 0;
      if (begins || plan.passes > 1) {
        held.request(x, k);
        // Keeps the compiler from moving these loads behind the copies, where they would queue.
        __syncwarp();
        if (begins) {
          weights.template next<0>(ring);
#pragma unroll 1
          for (int stage = 1; stage < stages - 1; stage += 2) {
            if (stage > 1) weights.template next<0>(ring + (stage - 1) * kStage);
            weights.template next<Way::kSegments - 1>(ring + stage * kStage);
          }
        }
        held.arrange(Way::kAfter ? free_stage() : shared_at(after_rings) + warp * kStaged);
        if constexpr (held.kTurned) __syncthreads();  // the sums reuse the memory that staged x
#if defined(JITQUANT_HAS_CLUSTERS)
        if (begins && plan.shares > 1) {
          __syncwarp();
          cluster_wait();  // the other block's inbox is open
        }
#endif
      }
      const float stored_gsa = w.gsa[0];  // used only after the sums, so nothing waits for it
      const int present = min(max((w.cols - k + kSegment - 1) / kSegment, 0), Way::kSegments);
      for (int tile = 0; tile < plan.hold && hold_row + tile * step < w.rows;) {
        int count = 0;
        for (; count < plan.flush && tile + count < plan.hold &&
               hold_row + (tile + count) * step < w.rows;
             ++count) {
          float acc[Way::kColumns][4] = {};
#pragma unroll
          for (int s = 0; s < Way::kSegments; ++s) {
            wait_for_stage(many);
            __syncwarp();
            // Runs an even number of stages ahead, so this is the same segment of a later tile.
            if (s == 0) {
              weights.template next<0>(free_stage());
            } else {
              weights.template next<Way::kSegments - 1>(free_stage());
            }
            if (s < present) {
              multiply_segment<Input, kWay>(ring + read, held.pairs[s], acc);
            }
            read = read == last ? 0 : read + kStage;
          }
          float* const own = sums + (count * warps + warp) * Way::kSums;
          if constexpr (Way::kAfter) {
            float (&v)[4] = acc[0];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              v[i] = add_rn(v[i], __shfl_xor_sync(~0u, v[i], 1));
              v[i] = add_rn(v[i], __shfl_xor_sync(~0u, v[i], 2));
            }
            const float undo[2] = {__shfl_sync(~0u, held.undo, 0), __shfl_sync(~0u, held.undo, 4)};
            if (t < 2) {
              const float scale = t == 0 ? undo[0] : undo[1];
              own[t * kPitch + g] = mul_rn(t == 0 ? v[0] : v[1], scale);
              own[t * kPitch + g + 8] = mul_rn(t == 0 ? v[2] : v[3], scale);
            }
          } else {
#pragma unroll
            for (int c = 0; c < Way::kColumns; ++c) {
              float* const column = own + (c * 8 + 2 * t) * kPitch + g;
              column[0] = acc[c][0], column[kPitch] = acc[c][1];
              column[8] = acc[c][2], column[kPitch + 8] = acc[c][3];
            }
          }
        }
        __syncthreads();
        // Each warp adds up two columns of a tile.
        const int units = count * beside * kPairs;
        for (int unit = warp; unit < units; unit += warps) {
          const int row = unit % kPairs * 2 + (lane >> 4);
          const float* p = sums + unit / kPairs * along * Way::kSums + row * kPitch + (lane & 15);
          float sum = 0.0f;
          for (int span = 0; span < plan.spans; ++span) {
            float part = 0.0f;
#pragma unroll 4
            for (int i = 0; i < plan.span_pairs; ++i) {
              float pair = p[0];
              if constexpr (Way::kSegments == 1) pair = add_rn(pair, p[Way::kSums]);
              p += 2 / Way::kSegments * Way::kSums;
              part = i == 0 ? pair : add_rn(part, pair);
            }
            sum = span == 0 ? part : add_rn(sum, part);
          }
          const int at = tile * beside * kPairs + unit;
          if (pass > 0) sum = add_rn(kept_sums[at * 32 + lane], sum);
          const bool ends = !is_own<Way>(plan, w, pass + 1);
#if defined(JITQUANT_HAS_CLUSTERS)
          if (ends && plan.shares > 1 && (at & 1) != rank_of(plan)) {
            inbox.send(received_sums(at), rank_of(plan) ^ 1, sum);
            continue;
          }
#endif
          if (ends && plan.shares == 1) {
            finish_unit(hold_row, at, sum, stored_gsa);
          } else {
            kept_sums[at * 32 + lane] = sum;
          }
        }
        __syncthreads();
        tile += count;
      }
    }
#if defined(JITQUANT_HAS_CLUSTERS)
    if (plan.shares > 1) {
      // Every second unit is finished here, the others in the other block.
      const int rank = rank_of(plan), of_hold = plan.hold * step;
      const int tiles_here = min(plan.hold, (w.rows - hold_row + step - 1) / step);
      const int units = tiles_here * beside * kPairs;
      const float gsa = w.gsa[0];
      if (threadIdx.x + threadIdx.y == 0) inbox.expect((units + 1 - rank) / 2 * (32 * 4));
      inbox.wait((hold_row - first_hold) / of_hold & 1);
      for (int at = 2 * warp + rank; at < units; at += 2 * warps) {
        finish_unit(hold_row, at, add_rn(kept_sums[at * 32 + lane], *received_sums(at)), gsa);
      }
      if (hold_row + of_hold < w.rows) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
      }
    }
#endif
  }
}

#ifndef __CUDACC_RTC__
namespace {

template <class Input, LinearWay kWay, bool kAligned>
cudaError_t launch_way(const Nvfp4Weight& w, const LinearOperand& x, const LinearEpilogue& to,
                       cudaStream_t stream) {
  using Way = WayTraits<kWay>;
  const int64_t tiles = (w.rows + kTile - 1) / kTile;
  const int sms = sm_count(), shared_bytes = most_shared_bytes();
  LinearPlan plan = {};
  int along = 0, beside = 0;
  int64_t grid = 0, shared = 0;
  // Fewer stages, then half as many warps, if a block has less shared memory than on compute
  // capability 9.0.
  const auto fits = [&](int most_warps, int stages) {
    // Spans of nearly equal length, with few enough pairs for the warps of a block.
    constexpr int kPairWarps = 2 / Way::kSegments;
    const int pairs = (w.cols + 2 * kSegment - 1) / (2 * kSegment);
    const int most_pairs = most_warps / kPairWarps < 8 ? most_warps / kPairWarps : 8;
    const int spans = (pairs + most_pairs - 1) / most_pairs;
    plan.span_pairs = (pairs + spans - 1) / spans;
    plan.spans = spans % 2 == 0 && 2 * plan.span_pairs * kPairWarps <= most_warps ? 2 : 1;
    plan.passes = (spans + plan.spans - 1) / plan.spans;
    plan.shares = plan.passes > 1 && device_traits().major >= 9 && sms > 1 ? 2 : 1;
    plan.passes = (plan.passes + plan.shares - 1) / plan.shares;
    along = plan.spans * plan.span_pairs * kPairWarps;

    // As many tiles side by side as take no longer than one after another.
    const int64_t places = sms / plan.shares;
    const auto rounds = [&](int64_t tiles_beside) {
      return ((tiles + tiles_beside - 1) / tiles_beside + places - 1) / places * tiles_beside;
    };
    beside = 1;
    for (int more = 2; more * along <= most_warps && more <= tiles; ++more) {
      if (rounds(more) <= rounds(beside)) beside = more;
    }
    const int warps = along * beside;
    plan.stages = stages;
    if (stages == kManyStages && warps > 8) return false;

    const int64_t steps = (tiles + beside - 1) / beside;
    grid = steps < places ? steps : places;
    const int64_t own = (steps + grid - 1) / grid;
    // Sums that a step keeps; half as many come from the other block.
    const int64_t units = Way::kRows / 2 * beside;
    const int64_t keep = plan.shares > 1   ? (2 * units + units + 1) / 2 * 32 * 4
                         : plan.passes > 1 ? units * 32 * 4
                                           : 0;
    const int64_t step_sums = warps * Way::kSums * 4, staged = Way::kAfter ? 0 : warps * kStaged;
    const int64_t needed = staged > step_sums ? staged : step_sums;
    const int64_t ring = static_cast<int64_t>(warps) * stages * kStage;
    const int64_t left = (shared_bytes - ring) / 1024 * 1024;
    const int64_t most_kept = left - needed < left / 2 ? left - needed : left / 2;
    if (most_kept < keep + 8) return false;
    const int64_t hold = keep > 0 && own * keep > most_kept - 8 ? (most_kept - 8) / keep : own;
    const int64_t flushed = (left - hold * keep - 8) / step_sums,
                  flush = flushed < hold ? flushed : hold;
    const int64_t before = flush * step_sums > staged ? flush * step_sums : staged;
    plan.hold = static_cast<int>(hold);
    plan.flush = static_cast<int>(flush);
    plan.kept_at = static_cast<int>(before / 4);
    plan.received_at = plan.kept_at + static_cast<int>(hold * units * 32);
    shared = ring + before + hold * keep + 8;
    return true;
  };
  if (!fits(kMostWarps, kManyStages) && !fits(kMostWarps, kFewStages) &&
      !fits(kMostWarps / 2, kFewStages)) {
    return cudaErrorInvalidConfiguration;
  }

  constexpr auto kKernel = &nvfp4_linear_kernel<Input, kWay, kAligned>;
  if (blocks_per_sm<kKernel>(along * beside * 32, static_cast<size_t>(shared)) < 1) {
    return cudaErrorInvalidConfiguration;
  }
  LaunchShape shape = {grid * plan.shares, along * 32, Start::kOverlapped, plan.shares};
  shape.block_y = beside;
  shape.shared = static_cast<size_t>(shared);
  return launch<kKernel>(shape, stream, w, x, to, plan);
}

constexpr int kMostRows = 16;  // per launch of nvfp4_linear_kernel
constexpr bool kTakesMany = kTakesSome || kTakesMost;

// NVFP4 x after decoding.
LinearOperand decoded_rows(const LinearOperand& x, void* values) {
  return {values, nullptr, DType::kBFloat16, x.cols, x.rows, x.cols};
}

// A template, so that only libraries that need the tile kernels compile them.
template <class Input>
int64_t count_decoded(const Nvfp4Weight& w, const LinearOperand& x) {
  using T = typename LinearInput<Input>::Operand;
  if constexpr (kTakesMany && LinearInput<Input>::kCodes) {
    if (x.rows > kMostRows && takes_tiles<T>(w, decoded_rows(x, nullptr))) return x.rows * x.cols;
  }
  return 0;
}

template <class Input>
cudaError_t launch_rows(const Nvfp4Weight& w, const LinearOperand& x, const LinearEpilogue& to,
                        void* decoded, cudaStream_t stream) {
  const auto apart = [](const void* p, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && bytes % 16 == 0;
  };
  const bool aligned = w.cols % kSegment == 0 && x.cols == w.cols && apart(w.codes, 0) &&
                       apart(w.scales, 0) &&
                       (LinearInput<Input>::kCodes || apart(x.data, x.stride * 2));
  const int64_t rows = x.rows;
  const bool taken = rows <= kMostRows ? kTakesFew : rows <= 64 ? kTakesSome : kTakesMost;
  if (!taken) return cudaErrorInvalidValue;
  if constexpr (kTakesMany && LinearInput<Input>::kCodes) {
    using T = typename LinearInput<Input>::Operand;
    if (decoded != nullptr) {
      const cudaError_t error = launch_decode_rows(x, static_cast<T*>(decoded), stream);
      if (error != cudaSuccess) return error;
      return launch_as_tiles<T>(w, decoded_rows(x, decoded), to, stream);
    }
  } else if constexpr (kTakesMany) {
    if (rows > kMostRows && takes_tiles<Input>(w, x)) {
      return launch_as_tiles<Input>(w, x, to, stream);
    }
  }
  const int64_t row_bytes = LinearInput<Input>::kCodes ? (x.cols + 15) / 16 * 8 : x.stride * 2;
  const int64_t out_bytes = to.cols * (to.dtype == DType::kFloat32 ? 4 : 2);
  for (int64_t first = 0; first < rows; first += kMostRows) {
    LinearOperand part = x;
    part.rows = static_cast<int>(rows - first < kMostRows ? rows - first : kMostRows);
    part.data = static_cast<const uint8_t*>(x.data) + first * row_bytes;
    if (x.scales != nullptr) part.scales = x.scales + first * ((x.cols + 15) / 16);
    LinearEpilogue end = to;
    end.out = static_cast<uint8_t*>(to.out) + first * out_bytes;
    if (to.residual != nullptr) {
      end.residual = static_cast<const uint8_t*>(to.residual) + first * out_bytes;
    }
    if (to.x_gsa != nullptr) end.x_gsa = to.x_gsa + first * to.x_gsa_stride;
    const auto go = [&](auto way) {
      constexpr LinearWay kWay = decltype(way)::value;
      return aligned ? launch_way<Input, kWay, true>(w, part, end, stream)
                     : launch_way<Input, kWay, false>(w, part, end, stream);
    };
    // In fp16, scales after the product would need more registers than a thread has.
    constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
    constexpr LinearWay kFewest = kAfter ? LinearWay::kTwoRows : LinearWay::kEightRows;
    cudaError_t error = cudaSuccess;
    if constexpr (kTakesFew) {
      if (rows <= 2) {
        error = go(std::integral_constant<LinearWay, kFewest>());
      } else if (rows <= 8) {
        error = go(std::integral_constant<LinearWay, LinearWay::kEightRows>());
      }
    }
    if (rows > 8) error = go(std::integral_constant<LinearWay, LinearWay::kSixteenRows>());
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

int64_t nvfp4_linear_decoded(const Nvfp4Weight& w, const LinearOperand& x) {
#if defined(JITQUANT_DTYPE)
  return 0;  // this library takes only bf16 or only fp16 x
#else
  return x.scales != nullptr ? count_decoded<CodeInput>(w, x) : 0;
#endif
}

cudaError_t launch_nvfp4_linear(const Nvfp4Weight& w, const LinearOperand& x,
                                const LinearEpilogue& to, void* decoded, cudaStream_t stream) {
  if (w.rows == 0 || x.rows == 0) return cudaSuccess;
  if (!gives(to.dtype)) return cudaErrorInvalidValue;
#ifdef JITQUANT_LINEAR_CODES
  // A library for NVFP4 x only.
  return x.scales != nullptr ? launch_rows<CodeInput>(w, x, to, decoded, stream)
                             : cudaErrorInvalidValue;
#elif defined(JITQUANT_DTYPE)
  // A library for x in this dtype only (dispatch.cuh).
  constexpr DType kOnly = static_cast<DType>(JITQUANT_DTYPE);
  if constexpr (kOnly != DType::kFloat32) {
    using Only = std::conditional_t<kOnly == DType::kFloat16, Fp16, Bf16>;
    if (x.scales == nullptr && x.dtype == kOnly)
      return launch_rows<Only>(w, x, to, decoded, stream);
  }
  return cudaErrorInvalidValue;
#else
  if (x.scales != nullptr) return launch_rows<CodeInput>(w, x, to, decoded, stream);
  return x.dtype == DType::kBFloat16 ? launch_rows<Bf16>(w, x, to, decoded, stream)
                                     : launch_rows<Fp16>(w, x, to, decoded, stream);
#endif
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
