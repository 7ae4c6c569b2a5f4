// Bundles of rows that have the same expert: sorting rows by expert, and sharing the tiles of all
// bundles among blocks.
#pragma once

#include "experts.h"
#include "product.cuh"

namespace jitquant {

constexpr int kBundleRows = 8;
// Relative time of a tile: if its expert has at most two rows, and if it has more.
constexpr int kTwoCost = 8, kEightCost = 10;

// The rows of a bundle: `count` of the sorted rows, at most kBundleRows, from `first` on.
struct Bundle {
  int expert;
  uint32_t packed;  // first << 5 | count << 1 | whether the expert has at most two rows

  __device__ __forceinline__ int first() const { return static_cast<int>(packed >> 5); }
  __device__ __forceinline__ int count() const { return static_cast<int>(packed >> 1) & 15; }
  __device__ __forceinline__ bool few() const { return (packed & 1u) != 0; }
};

// All in shared memory.
struct BundleTables {
  int* total;       // bundles, rows, and bundles of experts with at most two rows
  int* counts;      // (experts,): once sorted, the first row of each expert
  Bundle* bundles;  // (most_bundles,): those of experts with at most two rows first
  uint16_t* order;  // (pairs,): the pair of each sorted row
};

struct BundleRouting {
  const void* offsets;
  const void* ids;
  bool wide;
  int count;       // by offsets: rows; by ids: pairs of a row and one of its experts, of each row
                   // apart if rows are not sorted
  int64_t before;  // rows before the first one of this launch
  int experts, top_k;
  bool of_tokens;  // a row of x serves top_k pairs
  int most;        // rows of an expert, if this launch multiplies them
  uint4* tables;   // in global memory, or null: if is_sorted, what an earlier launch of the same
  bool is_sorted;  // rows has stored there, else where to store it
  int tokens;      // rows that are not sorted but divide the blocks, else 1
};

JITQUANT_HD int most_bundles(int count, int experts) {
  const int most = experts + count / kBundleRows;
  return count < most ? count : most;
}
JITQUANT_HD int table_bytes(int count, int experts) {
  return 16 + (experts * 4 + 15) / 16 * 16 + (most_bundles(count, experts) * 8 + 15) / 16 * 16 +
         (count * 2 + 15) / 16 * 16;
}
__device__ __forceinline__ BundleTables tables_at(unsigned char* p, const BundleRouting& r) {
  BundleTables t;
  t.total = reinterpret_cast<int*>(p);
  p += 16;
  t.counts = reinterpret_cast<int*>(p);
  p += (r.experts * 4 + 15) / 16 * 16;
  t.bundles = reinterpret_cast<Bundle*>(p);
  p += (most_bundles(r.count, r.experts) * 8 + 15) / 16 * 16;
  t.order = reinterpret_cast<uint16_t*>(p);
  return t;
}

// The expert of a pair; -1 if none.
__device__ __forceinline__ int expert_of(const BundleRouting& r, int pair) {
  const int64_t id = integer_at(r.ids, r.wide, pair);
  return id >= 0 && id < r.experts ? static_cast<int>(id) : -1;
}

__device__ __forceinline__ int thread_index() {
  return threadIdx.y * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int thread_count() {
  return blockDim.y * blockDim.x;
}

// The sum or the maximum over the lanes before this one.
__device__ __forceinline__ int sum_before(int value, int lane) {
  return sum_up_to(value, lane) - value;
}
__device__ __forceinline__ int max_before(int value, int lane) {
  const int most = __shfl_up_sync(~0u, max_up_to(value, lane), 1);
  return lane == 0 ? 0 : most;
}

// The lanes that have the same value as this lane.
__device__ __forceinline__ uint32_t lanes_alike(int value) {
  return __match_any_sync(~0u, value);
}

// Sorts rows by expert. The sort is stable, so all blocks find the same order. `scratch` has 4
// bytes per pair, and 2 per expert and warp.
__device__ __forceinline__ void sort_rows(const BundleRouting& r, const BundleTables& t,
                                          unsigned char* scratch) {
  const int thread = thread_index(), threads = thread_count();
  const int warp = thread >> 5, lane = thread & 31;
  int16_t* const experts = reinterpret_cast<int16_t*>(scratch);
  uint16_t* const places = reinterpret_cast<uint16_t*>(experts + r.count);
  // Each of so many warps counts a share of the pairs, as few as suffice.
  const int counting = min((r.count + 31) >> 5, threads >> 5);
  const int share = ((r.count + 31) / 32 + counting - 1) / counting * 32;
  uint16_t* const counts = places + r.count;  // (counting, r.experts)
  if (r.offsets != nullptr) {
    for (int e = thread; e < r.experts; e += threads) {
      const int64_t given = integer_at(r.offsets, r.wide, e) - r.before;
      t.counts[e] = given < 0 ? 0 : given > r.count ? r.count : static_cast<int>(given);
    }
  }
  if (r.ids != nullptr) {
    if (warp < counting) {
      uint16_t* const own = counts + warp * r.experts;
      for (int e = lane; e < r.experts; e += 32) own[e] = 0;
      __syncwarp();
      for (int first = warp * share; first < min(warp * share + share, r.count); first += 32) {
        const int pair = first + lane, expert = pair < r.count ? expert_of(r, pair) : -1;
        const uint32_t alike = lanes_alike(expert);
        const int before = __popc(alike & ((1u << lane) - 1u));
        const int count = expert >= 0 ? own[expert] : 0;
        __syncwarp();
        if (pair < r.count) experts[pair] = static_cast<int16_t>(expert);
        if (expert >= 0) {
          places[pair] = static_cast<uint16_t>(count + before);
          if (before == 0) own[expert] = static_cast<uint16_t>(count + __popc(alike));
        }
        __syncwarp();
      }
    }
    // A single warp goes on alone.
    if (counting > 1) __syncthreads();
    if (counting > 1 || warp == 0) {
      for (int e = thread; e < r.experts; e += counting > 1 ? threads : 32) {
        int sum = 0;
        for (int w = 0; w < counting; ++w) {
          const int count = counts[w * r.experts + e];
          counts[w * r.experts + e] = static_cast<uint16_t>(sum);
          sum += count;
        }
        t.counts[e] = sum;
      }
      __syncwarp();
    }
  }
  if (r.ids == nullptr || counting > 1) __syncthreads();
  if (thread < 32) {
    const int each = (r.experts + 31) / 32;
    const int begin = min(thread * each, r.experts), stop = min(begin + each, r.experts);
    if (r.offsets != nullptr) {
      int most = 0;
      for (int e = begin; e < stop; ++e) most = max(most, t.counts[e]);
      int before = max_before(most, thread);
      for (int e = begin; e < stop; ++e) {
        const int end = max(t.counts[e], before);
        t.counts[e] = end - before;
        before = end;
      }
    }
    int rows = 0, few = 0, bundles = 0;
    for (int e = begin; e < stop; ++e) {
      const int count = t.counts[e];
      rows += count;
      few += count > 0 && count <= 2;
      if (count <= r.most) bundles += (count + kBundleRows - 1) / kBundleRows;
    }
    int row = sum_before(rows, thread), two = sum_before(few, thread);
    const int all_few = __shfl_sync(~0u, two + few, 31);
    int eight = all_few + sum_before(bundles - few, thread);
    for (int e = begin; e < stop; ++e) {
      const int count = t.counts[e];
      t.counts[e] = row;
      for (int i = 0; i < count && count <= r.most; i += kBundleRows) {
        const int own = min(count - i, kBundleRows);
        t.bundles[count <= 2 ? two++ : eight++] = {
            e, static_cast<uint32_t>((row + i) << 5 | own << 1 | (count <= 2))};
      }
      row += count;
    }
    if (thread == 31) t.total[0] = eight, t.total[1] = row, t.total[2] = all_few;
  }
  __syncthreads();
  if (r.ids != nullptr) {
    for (int pair = thread; pair < r.count; pair += threads) {
      const int expert = experts[pair];
      if (expert < 0) continue;
      const int before = counts[pair / share * r.experts + expert];
      t.order[t.counts[expert] + before + places[pair]] = static_cast<uint16_t>(pair);
    }
    __syncthreads();
  }
}

// Sorts the rows, or loads what an earlier launch has stored.
__device__ __forceinline__ void route(const BundleRouting& r, const BundleTables& t,
                                      unsigned char* scratch) {
  uint4* const own = reinterpret_cast<uint4*>(t.total);
  const int words = table_bytes(r.count, r.experts) / 16;
  if (r.is_sorted) {
    for (int i = thread_index(); i < words; i += thread_count()) own[i] = __ldcg(r.tables + i);
    __syncthreads();
    return;
  }
  sort_rows(r, t, scratch);
  if (r.tables == nullptr || blockIdx.x != 0) return;
  for (int i = thread_index(); i < words; i += thread_count()) r.tables[i] = own[i];
}

// A contiguous range of tiles.
struct TileRange {
  int begin, end;
};
// The share of one of `blocks` blocks: the number of its first part of `all`, at its place, and of
// the next block's. 32-bit division only, as nothing hides its latency.
__device__ __forceinline__ TileRange share_of_block(uint32_t all, uint32_t block, uint32_t blocks) {
  const uint32_t share = all / blocks, rest = all - share * blocks;
  const uint32_t begin = block * share + min(block, rest);
  return {static_cast<int>(begin), static_cast<int>(begin + share + (block < rest ? 1 : 0))};
}
// The token of a block, where tokens divide the blocks of a grid: each has as many of them.
struct BlockToken {
  uint32_t blocks, token;

  __device__ __forceinline__ explicit BlockToken(int tokens)
      : blocks(gridDim.x / tokens), token(blockIdx.x / blocks) {}
  __device__ __forceinline__ TileRange share(uint32_t tiles) const {
    return share_of_block(tiles, blockIdx.x - token * blocks, blocks);
  }
};
// The tiles of a block. All blocks get the same estimated time: if kEither, tiles of experts with
// at most two rows, which come first, cost less than others.
template <bool kEither>
__device__ __forceinline__ TileRange tiles_of_block(const BundleTables& t, int tiles) {
  const uint32_t all = t.total[0] * tiles;
  if constexpr (!kEither) {
    return share_of_block(all, blockIdx.x, gridDim.x);
  } else {
    const uint32_t few = t.total[2] * tiles, first = few * kTwoCost;
    const TileRange costs = share_of_block(first + (all - few) * kEightCost, blockIdx.x, gridDim.x);
    const auto tile_at = [&](uint32_t at) {
      return static_cast<int>(at < first ? at / kTwoCost : few + (at - first) / kEightCost);
    };
    return {tile_at(costs.begin), tile_at(costs.end)};
  }
}

// Prefetches `rows` rows of an expert's weight, from `row` on, into L2.
__device__ __forceinline__ void prefetch_rows(const ExpertWeights& w, int expert, int row,
                                              int rows) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const int64_t at = static_cast<int64_t>(expert) * w.rows + row;
  prefetch_bulk(w.codes + at * (w.cols / 2), rows * (w.cols / 2));
  prefetch_bulk(w.scales + at * (w.cols / 16), rows * (w.cols / 16));
#endif
}

}  // namespace jitquant
