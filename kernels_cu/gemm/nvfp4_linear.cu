// y = x W^T for an NVFP4 weight, which is read as stored. The kernel here takes up to 16 rows of x.
// For more rows on compute capability 9.0 see linear_tiles.cuh; ordered_rows.cuh prepares x for it.
//
//   block     up to kMostWarps warps, as (warps along k, row tiles of W side by side)
//   tile      16 rows of W over all of k; tiles side by side are one step, and a block takes every
//             gridDim.x-th step
//   segment   256 of k, which one stage of a warp's ring of asynchronous copies holds: 16 rows by
//             128 bytes of codes and 16 scales
//   x         a warp keeps its part: 512 of k in shared memory for up to two rows, in registers
//             for up to 8, and 256 for 16
//   pass      as much of k as the warps of a block hold
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
  int own_sums;     // bytes of sums of a warp
  int own_x;        // and of x, if it stays in shared memory
  int own_staging;  // from the x that a warp stages to that of the next; own_sums, unless these
                    // overlap with sums of other warps
  bool copies_x;    // asynchronously
  bool prefetches;  // before it waits for the previous kernel
  int kept_at;      // bytes from the sums to those kept between passes or for the other block
  int received_at;  // and to those that the other block sent, after 16 bytes for their barrier
  int row_step;     // of W, from a block's tile to its next
  int stop;         // rows of W up to whole steps: warps of a block begin a pass together
  int64_t codes_step, scales_step, four_rows;  // bytes: the same, and four rows of codes
};

// Which of the blocks that split k this is.
__device__ __forceinline__ int rank_of(const LinearPlan& plan) {
  return blockIdx.x & (plan.shares - 1);
}
// The first of W's tiles of this block.
__device__ __forceinline__ int first_row(const LinearPlan& plan) {
  return (blockIdx.x >> (plan.shares - 1)) * blockDim.y * kTile;
}
// Which warp of the block this is, along k and across W. The compiler sees that lanes agree, and
// keeps what follows from that in uniform registers.
struct WarpIndex {
  int along = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0);
  int across = __shfl_sync(~0u, static_cast<int>(threadIdx.y), 0);

  // The warp's first column of a pass.
  template <class Way>
  __device__ __forceinline__ int first_column() const {
    return along * Way::kSegments * kSegment;
  }
};
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
  __device__ __forceinline__ WeightStream(const Nvfp4Weight& w, const LinearPlan& plan,
                                          WarpIndex warp)
      : w_(w),
        plan_(plan),
        column_(warp.first_column<Way>()),
        k_(share_of_k<Way>(plan) + column_),
        first_(first_row(plan) + warp.across * kTile) {
    move_to(first_);
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
        from += plan_.four_rows;
      }
      if (lane() < kTile && row_ + lane() < w_.rows) jitquant::prefetch(scales_);
    }
  }

  // Starts to copy what comes next, segment kWhich of its tile, to `stage`. Always commits a group
  // of copies, even an empty one, so that groups count stages.
  template <int kWhich>
  __device__ __forceinline__ void next(Shared stage) {
    if (kWhich == 0 && row_ >= limit_) leave();
    if (row_ < limit_) {
      const uint8_t* from = codes_ + kWhich * (kSegment / 2);
      const Shared to = stage + codes_to_;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy_16(to + i * 4 * kStageRow, from);
        from = kept(from + plan_.four_rows);  // one addition each
      }
      if (lane() < kTile) copy_16(stage + scales_to_, scales_ + kWhich * (kSegment / 16));
    } else {
      copy_part(stage, kWhich);
    }
    __pipeline_commit();
    if constexpr (kWhich + 1 == Way::kSegments) {
      row_ += plan_.row_step;
      codes_ += plan_.codes_step;
      scales_ += plan_.scales_step;
    }
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

  __device__ __forceinline__ int end_of_hold() const {
    return min(first_ + plan_.hold * plan_.row_step, plan_.stop);
  }
  __device__ __forceinline__ void move_to(int row) {
    row_ = row;
    codes_ = codes_at(row + lane_row(), k_) + lane_piece() * 16;
    scales_ = scales_at(row + (lane() & 15), k_);
    const bool whole = kAligned && k_ + Way::kSegments * kSegment <= w_.cols;
    const int stop = first_ + plan_.hold * plan_.row_step;
    limit_ = whole ? min(stop, w_.rows - kTile + 1) : 0;
  }
  // Moves on if these are all tiles of the hold.
  __device__ __forceinline__ void leave() {
    __syncwarp();  // not computed before the branch
    if (row_ < end_of_hold() || first_ >= w_.rows) return;
    k_ += column_step<Way>();
    const int begin = share_of_k<Way>(plan_), end = begin + plan_.passes * column_step<Way>();
    if (k_ - column_ >= min(w_.cols, end)) {
      k_ = begin + column_;
      first_ += plan_.hold * plan_.row_step;
    }
    move_to(first_);
  }
  // For a tile or a column that may be out of range in part.
  __device__ __forceinline__ void copy_part(Shared stage, int which) {
    const int begin = k_ + which * kSegment;
    if (row_ >= w_.rows || begin >= w_.cols) return;
    if constexpr (!kAligned) {
      copy_parts(
          stage, w_.cols, w_.cols - begin, [&](int row) { return row_ + row < w_.rows; },
          [&](int row) { return codes_at(row_ + row, begin); },
          [&](int row) { return scales_at(row_ + row, begin); });
    } else {
#pragma unroll 1
      for (int row = lane_row(); row < kTile && row_ + row < w_.rows; row += 4) {
        copy_16(stage + row * kStageRow + lane_piece() * 16,
                codes_at(row_ + row, begin) + lane_piece() * 16);
      }
      if (lane() < kTile && row_ + lane() < w_.rows) {
        copy_16(stage + scales_to_, scales_ + which * (kSegment / 16));
      }
    }
  }

  const Nvfp4Weight& w_;
  const LinearPlan& plan_;
  const int column_;
  int k_, first_;    // of the hold
  int row_, limit_;  // rows before it begin tiles that are entirely in range
  const uint8_t* codes_;
  const uint8_t* scales_;
  // Where a lane's parts go in a stage. Kept, because they would be computed each time.
  const uint32_t codes_to_ =
      kept(uint32_t{threadIdx.x % 32 / 8 * kStageRow + threadIdx.x % 8 * 16});
  const uint32_t scales_to_ = kept(uint32_t{threadIdx.x % 32 * kStageRow + kScalesAt});
};

// A piece of a tile's sums is what a lane stores and, later, adds up: four neighboring sums, or a
// single one if scales come after the product.
template <class Way>
struct Pieces {
  static constexpr int kEach = Way::kAfter ? 1 : 4;
  static constexpr int kSums = Way::kRows * kTile;     // of a tile, in floats
  static constexpr int kUnits = kSums / (32 * kEach);  // of a tile: 32 pieces
  // Where sum i of a lane's piece belongs, in the tile.
  static __device__ __forceinline__ int row(int lane, int unit, int i) {
    return Way::kAfter ? lane >> 4 : unit * 8 + 2 * (lane & 3) + (i & 1);
  }
  static __device__ __forceinline__ int weight(int lane, int i) {
    return Way::kAfter ? lane & 15 : (lane >> 2) + (i & 2) * 4;
  }
};

template <int kEach>
__device__ __forceinline__ void load_piece(Shared from, float (&sums)[kEach]) {
  uint32_t words[kEach];
  if constexpr (kEach == 1) {
    words[0] = load_4(from);
  } else {
    load_16(from, words);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) sums[i] = bits_float(words[i]);
}
template <int kEach>
__device__ __forceinline__ void store_piece(Shared to, const float (&sums)[kEach]) {
  uint32_t words[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) words[i] = float_bits(sums[i]);
  if constexpr (kEach == 1) {
    store_4(to, words[0]);
  } else {
    store_16(to, words);
  }
}
template <int kEach>
__device__ __forceinline__ void add_piece(float (&sums)[kEach], const float (&more)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) sums[i] = add_rn(sums[i], more[i]);
}

template <class Out, int kEach>
__device__ __forceinline__ void store_each(const LinearEpilogue& to, const float (&y)[kEach],
                                           const int (&row)[kEach], const int (&n)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (row[i] >= 0) static_cast<Out*>(to.out)[row[i] * to.cols + n[i]] = from_float<Out>(y[i]);
  }
}
// Stores elements of y, given the sums without any gsa. Those with a negative row do not exist.
template <int kEach>
__device__ __forceinline__ void finish(const LinearEpilogue& to, float (&y)[kEach], float gsa,
                                       const int (&row)[kEach], const int (&n)[kEach]) {
  const auto each = [&](const auto& change) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (row[i] >= 0) y[i] = change(y[i], static_cast<int64_t>(row[i]), n[i]);
    }
  };
  each([&](float v, int64_t, int) { return mul_rn(v, gsa); });
  if (to.x_gsa != nullptr) {
    each([&](float v, int64_t r, int) { return mul_rn(v, to.x_gsa[r * to.x_gsa_stride]); });
  }
  if (to.bias != nullptr) {
    each([&](float v, int64_t, int i) { return add_rn(v, float_at(to.bias, to.bias_dtype, i)); });
  }
  if (to.residual != nullptr) {
    each([&](float v, int64_t r, int i) {
      return add_rn(v, float_at(to.residual, to.dtype, r * to.cols + i));
    });
  }
  switch (to.dtype) {
    case DType::kBFloat16:
      store_each<Bf16>(to, y, row, n);
      break;
    case DType::kFloat16:
      store_each<Fp16>(to, y, row, n);
      break;
    default:
      store_each<float>(to, y, row, n);
  }
}

template <class Input, LinearWay kWay, bool kAligned>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    nvfp4_linear_kernel(const __grid_constant__ Nvfp4Weight w,
                        const __grid_constant__ LinearOperand x,
                        const __grid_constant__ LinearEpilogue to,
                        const __grid_constant__ LinearPlan plan) {
  using Way = WayTraits<kWay>;
  using Piece = Pieces<Way>;
  constexpr int kEach = Piece::kEach, kUnits = Piece::kUnits, kUnitBytes = 32 * kEach * 4;
  extern __shared__ __align__(1024) unsigned char tiles[];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int along = blockDim.x >> 5, beside = blockDim.y;
  const WarpIndex index;
  const int warp = index.across * along + index.along;
  const int warps = along * beside, stages = plan.stages;

  const Shared ring = shared_at(tiles) + warp * stages * kStage;
  const Shared own_x = shared_at(tiles) + warps * stages * kStage + warp * plan.own_x;
  unsigned char* const after_rings = tiles + warps * (stages * kStage + plan.own_x);
  // Sums, as (warp, tile, piece), where warps first stage x. Then those kept between passes, as
  // (tile, piece).
  const Shared sums = shared_at(after_rings), own_sums = sums + warp * plan.own_sums;
  const Shared kept_sums = sums + plan.kept_at + lane * (kEach * 4);

  const int step = plan.row_step;
  WeightStream<Way, kAligned> weights(w, plan, index);
#if defined(JITQUANT_HAS_CLUSTERS)
  const Inbox inbox(reinterpret_cast<uint64_t*>(after_rings + plan.received_at));
  if (plan.shares > 1) {
    if (threadIdx.x + threadIdx.y == 0) inbox.open();
    __syncwarp();
    cluster_arrive_relaxed();
  }
#endif

  let_next_begin();
  if (plan.prefetches) weights.prefetch();
  wait_for_previous();

  Fragments<Input, kWay, kAligned> fragments;
  constexpr bool kMayCopy = fragments.kMayCopy;
  const bool many = stages == kManyStages;
  // The stage to multiply next, and the one that was multiplied last.
  Shared read = ring, free = ring + (stages - 1) * kStage;
  const Shared last = free;
  const int first_hold = first_row(plan);

  // Unit `at` of the tiles from hold_row on, where tiles side by side are consecutive.
  const int rows = static_cast<int>(x.rows);  // at most Way::kRows
  const auto finish_unit = [&](int hold_row, int at, float (&piece)[kEach], float gsa) {
    const int which = at / kUnits, tile = beside == 1 ? which : which / beside;
    const int first = hold_row + tile * step + (which - tile * beside) * kTile;
    int row[kEach], n[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      row[i] = Piece::row(lane, at % kUnits, i), n[i] = first + Piece::weight(lane, i);
      if (n[i] >= w.rows || row[i] >= rows) row[i] = -1;
      piece[i] = mul_rn(piece[i], two_to_the(-kExponent<Input, kWay>));
    }
    finish(to, piece, gsa, row, n);
  };
  // What a lane reads of a stage. Kept, as it would be computed each time.
  const uint32_t codes_from = kept(lane_codes_at(lane)), scales_from = kept(lane_scales_at(lane));
  // The sums of unit `at` that the other block sent.
  const auto received = [&](int at) {
    return after_rings + plan.received_at + 16 + (at >> 1) * kUnitBytes + lane * (kEach * 4);
  };

  for (int hold_row = first_hold; hold_row < w.rows; hold_row += plan.hold * step) {
    for (int pass = 0; is_own<Way>(plan, w, pass); ++pass) {
      const int k = share_of_k<Way>(plan) + pass * column_step<Way>() + index.first_column<Way>();
      const bool begins = hold_row == first_hold && pass == 0;
      if (begins || plan.passes > 1) {
        const Shared staging = sums + warp * plan.own_staging;
        if constexpr (kMayCopy) {
          if (plan.copies_x) {
            fragments.copy(x, k, staging);
          } else {
            fragments.request(x, k);
          }
        } else {
          fragments.request(x, k);
        }
        // Keeps the compiler from moving these loads behind the copies, where they would queue.
        __syncwarp();
        if (begins) {
          weights.template next<0>(ring);
          if (many) weights.template next<Way::kSegments - 1>(ring + kStage);
        }
        if constexpr (Way::kAfter) {
          fragments.arrange(own_x, rows);
        } else if (kMayCopy && plan.copies_x) {
          if (!begins) {
            __pipeline_wait_prior(0);
          } else if (many) {
            __pipeline_wait_prior(2);  // the two stages above
          } else {
            __pipeline_wait_prior(1);
          }
          fragments.take(staging);
        } else {
          fragments.arrange(staging);
        }
        if (plan.own_staging != plan.own_sums) __syncthreads();
        // The third stage would delay x.
        if (begins && many) weights.template next<0>(ring + 2 * kStage);
#if defined(JITQUANT_HAS_CLUSTERS)
        if (begins && plan.shares > 1) {
          __syncwarp();
          cluster_wait();  // the other block's inbox is open
        }
#endif
      }
      const float stored_gsa = w.gsa[0];  // used only after the sums, so nothing waits for it
      const int present = min(max((w.cols - k + kSegment - 1) / kSegment, 0), Way::kSegments);
      const int tiles_here = min(plan.hold, (w.rows - hold_row + step - 1) / step);
      for (int tile = 0; tile < tiles_here;) {
        const int count = min(plan.flush, tiles_here - tile);
        Shared own = own_sums + (Way::kAfter ? t * kTile + g : lane * 4) * 4;
#pragma unroll 1
        for (int left = count; left > 0; --left) {
          float acc[Way::kColumns][4] = {};
#pragma unroll
          for (int s = 0; s < Way::kSegments; ++s) {
            wait_for_stage(many);
            __syncwarp();
            LaneWords words({read + codes_from, read + scales_from});
            // Runs an odd number of stages ahead, so the other segment is next.
            if (s + 1 == Way::kSegments) {
              weights.template next<0>(free);
            } else {
              weights.template next<Way::kSegments - 1>(free);
            }
            if (s < present) {
              multiply_segment<Input, kWay>(
                  words, [&](int c, int i) { return fragments.words(s, c, i); }, acc);
            }
            free = read;
            read = read == last ? ring : read + kStage;
          }
          if constexpr (Way::kAfter) {
            float (&v)[4] = acc[0];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              v[i] = add_rn(v[i], __shfl_xor_sync(~0u, v[i], 1));
              v[i] = add_rn(v[i], __shfl_xor_sync(~0u, v[i], 2));
            }
            const float undo[2] = {__shfl_sync(~0u, fragments.undo, 0),
                                   __shfl_sync(~0u, fragments.undo, 4)};
            if (t < 2) {
              const float scale = t == 0 ? undo[0] : undo[1];
              store_4(own, float_bits(mul_rn(t == 0 ? v[0] : v[1], scale)));
              store_4(own + 8 * 4, float_bits(mul_rn(t == 0 ? v[2] : v[3], scale)));
            }
          } else {
#pragma unroll
            for (int c = 0; c < Way::kColumns; ++c) {
              store_piece<4>(own + c * kUnitBytes, acc[c]);
            }
          }
          own += Piece::kSums * 4;
        }
        __syncthreads();
        const int units = count * beside * kUnits;
        for (int unit = warp; unit < units; unit += warps) {
          const int which = unit / kUnits, from_tile = beside == 1 ? which : which / beside;
          Shared p = sums + (which - from_tile * beside) * along * plan.own_sums +
                     from_tile * (Piece::kSums * 4) + unit % kUnits * kUnitBytes +
                     lane * (kEach * 4);
          float sum[kEach];
          for (int span = 0; span < plan.spans; ++span) {
            float part[kEach];
#pragma unroll(Way::kAfter ? 4 : 2 * Way::kSegments)
            for (int i = 0; i < plan.span_pairs; ++i) {
              float pair[kEach];
              load_piece(p, pair);
              p += plan.own_sums;
              if constexpr (Way::kSegments == 1) {
                float second[kEach];
                load_piece(p, second);
                p += plan.own_sums;
                add_piece(pair, second);
              }
              if (i == 0) {
                for (int j = 0; j < kEach; ++j) part[j] = pair[j];
              } else {
                add_piece(part, pair);
              }
            }
            if (span == 0) {
              for (int j = 0; j < kEach; ++j) sum[j] = part[j];
            } else {
              add_piece(sum, part);
            }
          }
          const int at = tile * beside * kUnits + unit;
          const Shared keep = kept_sums + at * kUnitBytes;
          if (pass > 0) {
            float before[kEach];
            load_piece(keep, before);
            add_piece(sum, before);
          }
          const bool ends = !is_own<Way>(plan, w, pass + 1);
#if defined(JITQUANT_HAS_CLUSTERS)
          if (ends && plan.shares > 1 && (at & 1) != rank_of(plan)) {
            inbox.send(received(at), rank_of(plan) ^ 1, sum);
            continue;
          }
#endif
          if (ends && plan.shares == 1) {
            finish_unit(hold_row, at, sum, stored_gsa);
          } else {
            store_piece(keep, sum);
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
      const int units = min(plan.hold, (w.rows - hold_row + step - 1) / step) * beside * kUnits;
      const float gsa = w.gsa[0];
      if (threadIdx.x + threadIdx.y == 0) inbox.expect((units + 1 - rank) / 2 * kUnitBytes);
      inbox.wait((hold_row - first_hold) / of_hold & 1);
      for (int at = 2 * warp + rank; at < units; at += 2 * warps) {
        float sum[kEach], theirs[kEach];
        load_piece(kept_sums + at * kUnitBytes, sum);
        load_piece(shared_at(received(at)), theirs);
        add_piece(sum, theirs);
        finish_unit(hold_row, at, sum, gsa);
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
  using Piece = Pieces<Way>;
  constexpr int kUnitBytes = 32 * Piece::kEach * 4;
  const int64_t tiles = (w.rows + kTile - 1) / kTile;
  // As in expert_plan.cuh, with room for static shared memory.
  const int sms = sm_count(), shared_bytes = most_shared_bytes() - 1024;
  LinearPlan plan = {};
  int along = 0, beside = 0;
  int64_t grid = 0, shared = 0;
  // If a block has less shared memory than on compute capability 9.0: x through registers, then
  // fewer stages, then half as many warps.
  const auto fits = [&](int most_warps, int stages, bool copies) {
    plan.copies_x = copies;
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
    if (copies && beside > 1) return false;  // each would copy x: 2 to 4% slower

    const int64_t steps = (tiles + beside - 1) / beside;
    grid = steps < places ? steps : places;
    const int64_t own = (steps + grid - 1) / grid;
    // Sums that a step keeps, and that come from the other block.
    const int64_t units = Piece::kUnits * beside;
    const int64_t kept = plan.shares > 1 || plan.passes > 1 ? units * kUnitBytes : 0;
    const int64_t sent = plan.shares > 1 ? (units + 1) / 2 * kUnitBytes : 0, both = kept + sent;
    constexpr int64_t kTileBytes = Piece::kSums * 4;
    const int64_t own_staged = Way::kAfter ? 0 : plan.copies_x ? kCopied : kStaged;
    const int64_t staged = warps * own_staged, tile_sums = warps * kTileBytes;
    // A later pass stages x beside the sums that are kept.
    const int64_t needed = plan.passes > 1 && staged > tile_sums ? staged : tile_sums;
    plan.own_x =
        Way::kAfter ? static_cast<int>(x.rows) * TwoRowFragments<Input, kAligned>::kRowBytes : 0;
    const int64_t ring = static_cast<int64_t>(warps) * (stages * kStage + plan.own_x);
    const int64_t left = (shared_bytes - ring) / 1024 * 1024 - 16;
    if (left < staged || left < needed) return false;
    const int64_t most_kept = left - needed < left / 2 ? left - needed : left / 2;
    int64_t hold = own;
    if (both > 0 && hold * both > most_kept) hold = most_kept / both;
    // The other block may send while this one still stages x.
    if (hold * sent > left - staged) hold = (left - staged) / sent;
    if (hold < 1) return false;
    const int64_t most_flush = (left - hold * both) / tile_sums,
                  flush = most_flush < hold ? most_flush : hold;
    const bool overlaps = flush * kTileBytes < own_staged && staged + hold * both > left;
    plan.own_sums = static_cast<int>(
        flush * kTileBytes > own_staged || overlaps ? flush * kTileBytes : own_staged);
    plan.own_staging = static_cast<int>(overlaps ? own_staged : plan.own_sums);
    plan.row_step = static_cast<int>(grid * beside * kTile);
    plan.stop = static_cast<int>(steps * beside * kTile);
    plan.codes_step = static_cast<int64_t>(plan.row_step) * (w.cols / 2);
    plan.scales_step = static_cast<int64_t>(plan.row_step) * (w.cols / 16);
    plan.four_rows = static_cast<int64_t>(w.cols) * 2;
    plan.hold = static_cast<int>(hold);
    plan.flush = static_cast<int>(flush);
    plan.kept_at = warps * plan.own_sums;
    plan.received_at = plan.kept_at + static_cast<int>(hold * kept);
    if (plan.received_at < staged) plan.received_at = static_cast<int>(staged);
    shared = ring + plan.received_at + 16 + hold * sent;
    return true;
  };
  constexpr bool kMayCopy = Fragments<Input, kWay, kAligned>::kMayCopy;
  const bool planned =
      (kMayCopy && (fits(kMostWarps, kManyStages, true) || fits(kMostWarps, kFewStages, true))) ||
      fits(kMostWarps, kManyStages, false) || fits(kMostWarps, kFewStages, false) ||
      fits(kMostWarps / 2, kFewStages, false);
  if (!planned) return cudaErrorInvalidConfiguration;
  plan.prefetches = !follows_other_kernel;  // there, x would come later
  // More than half of an SM. Otherwise, while an earlier kernel ends, some SMs get two blocks and
  // others none.
  if (shared <= shared_bytes / 2) shared = shared_bytes / 2 + 1024;

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
constexpr bool kTakesTiles = kTakes32 || kTakes64 || kTakes96 || kTakes128 || kTakesMore;

// A template, so that only libraries that need the tile kernels compile them.
template <class Input>
bool takes_tiles_of(const Nvfp4Weight& w, const LinearOperand& x) {
  if constexpr (kTakesTiles) {
    return x.rows > kMostRows && takes_tiles<Input>(w, x);
  }
  return false;
}

template <class Input>
cudaError_t launch_rows(const Nvfp4Weight& w, const LinearOperand& x, const LinearEpilogue& to,
                        float* rewritten, cudaStream_t stream) {
  const bool aligned = is_aligned<Input>(w, x);
  const int64_t rows = x.rows;
  const bool taken = rows <= 2           ? kTakes2
                     : rows <= kMostRows ? kTakes16
                     : rows <= 32        ? kTakes32
                     : rows <= 64        ? kTakes64
                     : rows <= 96        ? kTakes96
                     : rows <= 128       ? kTakes128
                                         : kTakesMore;
  if (!taken) return kLacksKernels;
  if constexpr (kTakesTiles) {
    if (takes_tiles_of<Input>(w, x)) {
      using T = typename LinearInput<Input>::Operand;
      return choose_tiles<Input>(w, x).launch(reinterpret_cast<T*>(rewritten), to, stream);
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
      if (aligned) return launch_way<Input, kWay, true>(w, part, end, stream);
      if constexpr (kTakesUnaligned) {
        return launch_way<Input, kWay, false>(w, part, end, stream);
      }
      return kLacksKernels;
    };
    // In fp16, scales after the product would need more registers than a thread has.
    constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
    constexpr LinearWay kFewest = kAfter ? LinearWay::kTwoRows : LinearWay::kEightRows;
    cudaError_t error = cudaSuccess;
    if constexpr (kTakes2) {
      if (rows <= 2) error = go(std::integral_constant<LinearWay, kFewest>());
    }
    if constexpr (kTakes16) {
      if (rows > 2 && rows <= 8) {
        error = go(std::integral_constant<LinearWay, LinearWay::kEightRows>());
      }
    }
    if constexpr (kTakes16 || (kTakesTiles && kTakesUntiled)) {
      if (rows > 8) error = go(std::integral_constant<LinearWay, LinearWay::kSixteenRows>());
    } else if (rows > 8) {
      error = kLacksKernels;
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// f(input) with the kind of x, or `otherwise` if this library does not take it.
template <class R, class F>
R with_input(const LinearOperand& x, R otherwise, F&& f) {
#ifdef JITQUANT_LINEAR_CODES
  // A library for NVFP4 x only.
  if (x.scales != nullptr) return f(CodeInput());
#elif defined(JITQUANT_DTYPE)
  // A library for x in this dtype only (dispatch.cuh).
  constexpr DType kOnly = static_cast<DType>(JITQUANT_DTYPE);
  if constexpr (kOnly != DType::kFloat32) {
    using Only = std::conditional_t<kOnly == DType::kFloat16, Fp16, Bf16>;
    if (x.scales == nullptr && x.dtype == kOnly) return f(Only());
  }
#else
  if (x.scales != nullptr) return f(CodeInput());
  return x.dtype == DType::kBFloat16 ? f(Bf16()) : f(Fp16());
#endif
  return otherwise;
}

}  // namespace

// How many floats of memory a product needs for x, on the current device: 0 if it reads x as it is.
int64_t nvfp4_linear_rewritten(const Nvfp4Weight& w, const LinearOperand& x) {
  return with_input(x, int64_t{0}, [&](auto input) {
    using Input = decltype(input);
    if constexpr (kTakesTiles) {
      const bool rewrites = takes_tiles_of<Input>(w, x) && choose_tiles<Input>(w, x).rewrites();
      return rewrites ? x.rows * w.cols / 2 : int64_t{0};
    }
    return int64_t{0};
  });
}

cudaError_t launch_nvfp4_linear(const Nvfp4Weight& w, const LinearOperand& x,
                                const LinearEpilogue& to, float* rewritten, cudaStream_t stream) {
  if (w.rows == 0 || x.rows == 0) return cudaSuccess;
  if (!gives(to.dtype)) return cudaErrorInvalidValue;
  return with_input(x, cudaErrorInvalidValue, [&](auto input) {
    return launch_rows<decltype(input)>(w, x, to, rewritten, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
