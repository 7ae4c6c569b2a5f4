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
// blocks read each weight. Every block sorts the rows by expert itself. If a layer has only one
// row, it needs no sorting: all its experts have the same x. Then the tiles of the second product
// hold pairs of experts, and the sum over experts needs no launch of its own.
//
// Sums are in fp32. Their order depends on k, on whether an expert has at most two rows (except in
// fp16), and on whether there is only one row in all.
#include "experts.h"
#include "product.cuh"

namespace jitquant {

constexpr int kGroup = 8;
constexpr int kUnit = 2 * kSegment;
constexpr int kSumThreads = 256, kSumsAtOnce = 8;
// Relative time of a tile: if its expert has at most two rows, and if it has more.
constexpr int kTwoCost = 8, kEightCost = 10;
// How much of the second product's weights a block of the first one prefetches into L2.
constexpr int kAheadBytes = 131072;

// Where tiles are in memory. The second 8 rows of a tile start `second_*` bytes after the first 8.
struct TileLayout {
  int64_t second_codes, second_scales;
  int tile_rows;  // rows from one tile to the next: 16, or 8 if both halves advance
  int tiles;      // per expert
};

struct ExpertPlan {
  int passes, units;
  int stages;
  int hold_two, hold_eight;          // steps of tiles whose sums a block collects before adding up
  int sums_at, tables_at, words_at;  // byte offsets after the rings
};

// The rows of a group: `count` of the sorted rows, at most kGroup, from `first` on.
struct Group {
  int expert;
  uint32_t packed;  // first << 5 | count << 1 | whether the expert has at most two rows

  __device__ __forceinline__ int first() const { return static_cast<int>(packed >> 5); }
  __device__ __forceinline__ int count() const { return static_cast<int>(packed >> 1) & 15; }
  __device__ __forceinline__ bool few() const { return (packed & 1u) != 0; }
};

// All in shared memory.
struct GroupTables {
  int* total;       // groups, rows, and groups of experts with at most two rows
  int* counts;      // (experts,): once sorted, the first row of each expert
  Group* groups;    // (most_groups,): those of experts with at most two rows first
  uint16_t* order;  // (pairs,): the pair of each sorted row
};

struct GroupRouting {
  const void* offsets;
  const void* ids;
  bool wide;
  int count;       // by offsets: rows; by ids: pairs of a row and one of its experts
  int64_t before;  // rows before the first one of this launch
  int experts, top_k;
  bool of_tokens;  // a row of x serves top_k pairs
};

JITQUANT_HD int most_groups(int count, int experts) {
  const int most = experts + count / kGroup;
  return count < most ? count : most;
}
JITQUANT_HD int table_bytes(int count, int experts) {
  return 16 + (experts * 4 + 15) / 16 * 16 + (most_groups(count, experts) * 8 + 15) / 16 * 16 +
         (count * 2 + 15) / 16 * 16;
}
__device__ __forceinline__ GroupTables tables_at(unsigned char* p, const GroupRouting& r) {
  GroupTables t;
  t.total = reinterpret_cast<int*>(p);
  p += 16;
  t.counts = reinterpret_cast<int*>(p);
  p += (r.experts * 4 + 15) / 16 * 16;
  t.groups = reinterpret_cast<Group*>(p);
  p += (most_groups(r.count, r.experts) * 8 + 15) / 16 * 16;
  t.order = reinterpret_cast<uint16_t*>(p);
  return t;
}

__device__ __forceinline__ int64_t routed(const void* p, bool wide, int i) {
  return wide ? __ldcg(static_cast<const int64_t*>(p) + i)
              : __ldcg(static_cast<const int32_t*>(p) + i);
}
// The expert of a pair; -1 if none.
__device__ __forceinline__ int expert_of(const GroupRouting& r, int pair) {
  const int64_t id = routed(r.ids, r.wide, pair);
  return id >= 0 && id < r.experts ? static_cast<int>(id) : -1;
}

__device__ __forceinline__ int thread_index() {
  return threadIdx.y * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int thread_count() {
  return blockDim.y * blockDim.x;
}

// The sum over the lanes before this one.
__device__ __forceinline__ int sum_before(int value, int lane) {
  int sum = value;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) {
    const int other = __shfl_up_sync(~0u, sum, lanes);
    if (lane >= lanes) sum += other;
  }
  return sum - value;
}
__device__ __forceinline__ int max_before(int value, int lane) {
  int most = value;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes <<= 1) {
    const int other = __shfl_up_sync(~0u, most, lanes);
    if (lane >= lanes) most = max(most, other);
  }
  most = __shfl_up_sync(~0u, most, 1);
  return lane == 0 ? 0 : most;
}

// The lanes that have the same value as this lane.
__device__ __forceinline__ uint32_t lanes_alike(int value) {
  return __match_any_sync(~0u, value);
}

// Sorts rows by expert. The sort is stable, so all blocks find the same order. `scratch` has 4
// bytes per pair.
__device__ __forceinline__ void sort_rows(const GroupRouting& r, const GroupTables& t,
                                          unsigned char* scratch) {
  const int thread = thread_index(), threads = thread_count();
  int16_t* const experts = reinterpret_cast<int16_t*>(scratch);
  uint16_t* const places = reinterpret_cast<uint16_t*>(experts + r.count);
  for (int e = thread; e < r.experts; e += threads) {
    int end = 0;
    if (r.offsets != nullptr) {
      const int64_t given = routed(r.offsets, r.wide, e) - r.before;
      end = given < 0 ? 0 : given > r.count ? r.count : static_cast<int>(given);
    }
    t.counts[e] = end;
  }
  if (r.ids != nullptr) {
    for (int pair = thread; pair < r.count; pair += threads) {
      experts[pair] = static_cast<int16_t>(expert_of(r, pair));
    }
  }
  __syncthreads();
  if (thread < 32) {
    if (r.ids != nullptr) {
      for (int first = 0; first < r.count; first += 32) {
        const int pair = first + thread, expert = pair < r.count ? experts[pair] : -1;
        const uint32_t alike = lanes_alike(expert);
        const int before = __popc(alike & ((1u << thread) - 1u));
        const int count = expert >= 0 ? t.counts[expert] : 0;
        __syncwarp();
        if (expert >= 0) {
          places[pair] = static_cast<uint16_t>(count + before);
          if (before == 0) t.counts[expert] = count + __popc(alike);
        }
        __syncwarp();
      }
    }
    const int share = (r.experts + 31) / 32;
    const int begin = min(thread * share, r.experts), stop = min(begin + share, r.experts);
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
    int rows = 0, few = 0, groups = 0;
    for (int e = begin; e < stop; ++e) {
      const int count = t.counts[e];
      rows += count;
      few += count > 0 && count <= 2;
      groups += (count + kGroup - 1) / kGroup;
    }
    int row = sum_before(rows, thread), two = sum_before(few, thread);
    const int all_few = __shfl_sync(~0u, two + few, 31);
    int eight = all_few + sum_before(groups - few, thread);
    for (int e = begin; e < stop; ++e) {
      const int count = t.counts[e];
      t.counts[e] = row;
      for (int i = 0; i < count; i += kGroup) {
        const int own = min(count - i, kGroup);
        t.groups[count <= 2 ? two++ : eight++] = {
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
      if (expert >= 0) t.order[t.counts[expert] + places[pair]] = static_cast<uint16_t>(pair);
    }
    __syncthreads();
  }
}

// The first tile of a block. All blocks get the same estimated time: if kEither, tiles of experts
// with at most two rows, which come first, cost less than others.
template <bool kEither>
__device__ __forceinline__ int first_of_block(const GroupTables& t, int tiles, int block) {
  const int64_t all = static_cast<int64_t>(t.total[0]) * tiles;
  if (!kEither) return static_cast<int>(all * block / gridDim.x);
  const int64_t few = static_cast<int64_t>(t.total[2]) * tiles, first = few * kTwoCost;
  const int64_t at = (first + (all - few) * kEightCost) * block / gridDim.x;
  return static_cast<int>(at < first ? at / kTwoCost : few + (at - first) / kEightCost);
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

// Where a tile is, at a warp's column. Only its rows low to high - 1 exist.
struct Place {
  const uint8_t* codes;
  const uint8_t* scales;
  int low, high;
};

// A thread's own words in shared memory: what it needs once per tile and has no registers for. A
// register spilled to local memory would have to queue behind the copies of weights.
class OwnWords {
 public:
  static constexpr int kCount = 7;  // odd, so that lanes use different banks
  // For the stream of stages: its pass, its batch of tiles, its group and the group's first tile.
  // For the product: the unit and how many of its segments are in range.
  enum Word { kPass, kFrom, kTo, kGroup, kFirst, kUnit, kPresent };

  __device__ __forceinline__ explicit OwnWords(unsigned char* shared)
      : at_(shared_at(shared + thread_index() * (kCount * 4))) {}
  __device__ __forceinline__ int get(Word word) const {
    return static_cast<int>(load_4(at_ + 4 * word));
  }
  __device__ __forceinline__ void set(Word word, int value) const {
    store_4(at_ + 4 * word, static_cast<uint32_t>(value));
  }

 private:
  Shared at_;
};

// The same for a block.
struct BlockWords {
  int end;     // of the block's tiles
  int group;   // whose tiles the block multiplies
  int from;    // the first tile whose sums are not added up yet
  int stop;    // past the last tile with these rows of x
  int filled;  // whether the rings are filled
  float gsa;   // of the group's expert, unless every row has its own
};
__device__ __forceinline__ volatile BlockWords& block_words() {
  __shared__ BlockWords words;
  return words;
}

// The tiles of all groups, one group after another. If kOneToken, a group is a choice of the token.
template <bool kOneToken>
class GroupPlaces {
 public:
  __device__ __forceinline__ GroupPlaces(const ExpertWeights& w, const TileLayout& layout,
                                         const ExpertPlan& plan, const Group* groups, int begin,
                                         OwnWords words)
      : w_(w), layout_(layout), plan_(plan), groups_(groups), words_(words) {
    move_to(begin);
  }
  __device__ __forceinline__ int column(int pass) const {
    return (pass * (blockDim.x >> 5) + (threadIdx.x >> 5)) * kUnit;
  }
  // The end of the batch of tiles from `from` on whose sums are added up together.
  __device__ __forceinline__ int batch_end(int from) {
    const int beside = static_cast<int>(blockDim.y), end = block_words().end;
    if (kOneToken || from >= end) return min(from + plan_.hold_two * beside, end);
    int first = words_.get(OwnWords::kFirst);
    if (from - first >= layout_.tiles) move_to(from), first = from;
    const bool few = groups_[words_.get(OwnWords::kGroup)].few();
    const int hold = few ? plan_.hold_two : plan_.hold_eight;
    return min(min(from + hold * beside, end), first + layout_.tiles);
  }
  __device__ __forceinline__ void locate(int tile, int pass, Place& place) {
    int first = words_.get(OwnWords::kFirst);
    // Tiles side by side may belong to two groups.
    if (kOneToken && (tile < first || tile - first >= layout_.tiles)) {
      move_to(tile);
      first = words_.get(OwnWords::kFirst);
    }
    const int expert = groups_[words_.get(OwnWords::kGroup)].expert;
    const int row = (tile - first) * layout_.tile_rows, k = column(pass);
    const int64_t at = static_cast<int64_t>(max(expert, 0)) * w_.rows + row;
    place.codes = w_.codes + at * (w_.cols / 2) + k / 2;
    place.scales = w_.scales + at * (w_.cols / 16) + k / 16;
    place.low = 0;
    // Gates and ups always fill their tiles.
    place.high = expert < 0 ? 0 : layout_.tile_rows == kTile ? min(w_.rows - row, kTile) : kTile;
  }
  __device__ __forceinline__ int64_t second_codes() const { return layout_.second_codes; }
  __device__ __forceinline__ int64_t second_scales() const { return layout_.second_scales; }

 private:
  __device__ __forceinline__ void move_to(int tile) {
    const int group = tile / layout_.tiles;
    words_.set(OwnWords::kGroup, group);
    words_.set(OwnWords::kFirst, group * layout_.tiles);
  }

  const ExpertWeights& w_;
  const TileLayout& layout_;
  const ExpertPlan& plan_;
  const Group* groups_;
  OwnWords words_;
};

// The stages of a warp, in the order in which it multiplies them: both segments of a tile, the
// tiles of a batch, the same tiles in each further pass, then the next batch.
template <class Places, bool kAligned>
class TileStream {
 public:
  __device__ __forceinline__ TileStream(const Places& places, OwnWords words, int cols, int passes,
                                        int begin)
      : places_(places), words_(words), cols_(cols), passes_(passes), tile_(begin) {
    const int to = places_.batch_end(begin);
    words_.set(OwnWords::kPass, 0);
    words_.set(OwnWords::kFrom, begin);
    words_.set(OwnWords::kTo, to);
    locate(to, 0);
  }

  template <int kWhich>
  __device__ __forceinline__ void next(Shared stage) {
    const int begin = k_ + kWhich * kSegment;
    if (place_.low < place_.high && begin < cols_) {
      if constexpr (kAligned) {
        copy<kWhich>(stage);
      } else {
        load_parts<kWhich>(stage, begin);
      }
    }
    __pipeline_commit();
    if constexpr (kWhich == 1) advance();
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }

  __device__ __forceinline__ void advance() {
    int pass = words_.get(OwnWords::kPass), to = words_.get(OwnWords::kTo);
    tile_ += blockDim.y;
    if (tile_ >= to) {
      tile_ = words_.get(OwnWords::kFrom);
      if (++pass >= passes_) {
        pass = 0;
        tile_ = to;
        to = places_.batch_end(tile_);
        words_.set(OwnWords::kFrom, tile_);
        words_.set(OwnWords::kTo, to);
      }
      words_.set(OwnWords::kPass, pass);
    }
    locate(to, pass);
  }
  __device__ __forceinline__ void locate(int to, int pass) {
    const int own = tile_ + static_cast<int>(threadIdx.y);
    place_.low = place_.high = 0;
    k_ = places_.column(pass);
    if (own < to) places_.locate(own, pass, place_);
  }
  __device__ __forceinline__ bool there(int row) const {
    return row >= place_.low && row < place_.high;
  }

  template <int kWhich>
  __device__ __forceinline__ void copy(Shared stage) {
    const int lane_row = lane() >> 3, piece = lane() & 7, pitch = cols_ / 2;
    const uint8_t* from =
        place_.codes + static_cast<int64_t>(lane_row) * pitch + piece * 16 + kWhich * kSegment / 2;
    const Shared to = stage + lane_row * 128 + code_piece(lane_row, piece) * 16;
    const int64_t four = static_cast<int64_t>(pitch) * 4;
    const bool whole = place_.high - place_.low == kTile;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (whole || there(4 * i + lane_row)) {
        copy_16(to + i * 512,
                i < 2 ? from + i * four : from + places_.second_codes() + (i - 2) * four);
      }
    }
    const int row = lane();
    if (row < kTile && (whole || there(row))) {
      copy_16(stage + kScalesAt + row * 16, scales_at(row) + kWhich * (kSegment / 16));
    }
  }
  __device__ __forceinline__ const uint8_t* codes_at(int row) const {
    return place_.codes + (row < 8 ? 0 : places_.second_codes()) +
           static_cast<int64_t>(row & 7) * (cols_ / 2);
  }
  __device__ __forceinline__ const uint8_t* scales_at(int row) const {
    return place_.scales + (row < 8 ? 0 : places_.second_scales()) +
           static_cast<int64_t>(row & 7) * (cols_ / 16);
  }
  // For rows that 16-byte copies cannot handle. Codes and scales beyond k are zero.
  template <int kWhich>
  __device__ __forceinline__ void load_parts(Shared stage, int begin) {
#pragma unroll 1
    for (int i = lane(); i < kTile * 8; i += 32) {
      const int row = i >> 3, piece = i & 7;
      if (!there(row)) continue;
      const uint2* const from =
          reinterpret_cast<const uint2*>(codes_at(row) + kWhich * (kSegment / 2) + piece * 16);
      const int left = cols_ - begin - piece * 32;
      const uint2 low = left > 0 ? from[0] : make_uint2(0, 0);
      const uint2 high = left > 16 ? from[1] : make_uint2(0, 0);
      const uint32_t words[4] = {low.x, low.y, high.x, high.y};
      store_16(stage + row * 128 + code_piece(row, piece) * 16, words);
    }
#pragma unroll 1
    for (int i = lane(); i < kTile * 4; i += 32) {
      const int row = i >> 2, block = i % 4 * 4;
      if (!there(row)) continue;
      uint32_t scales = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (begin + (block + j) * 16 < cols_) {
          const uint8_t scale = (scales_at(row) + kWhich * (kSegment / 16))[block + j];
          scales |= static_cast<uint32_t>(scale) << (8 * j);
        }
      }
      store_4(stage + kScalesAt + row * 16 + block, scales);
    }
  }

  Places places_;
  OwnWords words_;
  const int cols_, passes_;
  int tile_, k_;
  Place place_;
};

// A warp's ring of stages.
struct Ring {
  Shared at;
  int stages;
  int read, written;

  __device__ __forceinline__ Ring(unsigned char* shared, int warp, int stages)
      : at(shared_at(shared) + warp * stages * kStage),
        stages(stages),
        read(0),
        written((stages - 1) * kStage) {}
  // Requests all stages but the first, which is already on its way, and the last.
  template <class Stream>
  __device__ __forceinline__ void fill(Stream& weights) {
#pragma unroll 1
    for (int stage = 1; stage < stages - 1; stage += 2) {
      if (stage > 1) weights.template next<0>(at + (stage - 1) * kStage);
      weights.template next<1>(at + stage * kStage);
    }
  }
};

enum class Ways { kTwo, kEight, kEither };

// Multiplies the block's tiles up to block.stop, which all have the same rows of x. Job says which
// columns and rows of x a warp has in a pass, and what to do with the sums.
template <class Input, Ways kWays, bool kAligned, class Stream, class Job>
__device__ __forceinline__ void multiply_tiles(Stream& weights, Ring& ring, OwnWords words,
                                               const LinearOperand& x, const ExpertPlan& plan,
                                               unsigned char* after_rings, const Job& job) {
  constexpr LinearWay kTwo = LinearWay::kTwoRows, kEight = LinearWay::kEightRows;
  using Pairs = HeldPairs<2, 1>;
  const bool few = kWays == Ways::kTwo || (kWays == Ways::kEither && job.few());
  const auto by_way = [&](auto&& f) {
    if constexpr (kWays != Ways::kEight) {
      if (few) f(std::integral_constant<LinearWay, kTwo>());
    }
    if constexpr (kWays != Ways::kTwo) {
      if (!few) f(std::integral_constant<LinearWay, kEight>());
    }
  };
  const int beside = blockDim.y, warp = thread_index() >> 5;
  const int hold = (few ? plan.hold_two : plan.hold_eight) * beside;
  const int last = (ring.stages - 1) * kStage;
  const bool many = ring.stages == kManyStages;
  volatile BlockWords& block = block_words();
  Pairs held;  // shared by both ways
  bool holds = false;
  for (int count; (count = min(block.stop - block.from, hold)) > 0;) {
    for (int pass = 0; pass < plan.passes; ++pass) {
      if (plan.passes > 1 || !holds) {
        const bool first = !holds && block.filled == 0;
        holds = true;
        by_way([&](auto way) {
          HeldX<Input, decltype(way)::value, kAligned> own;
          own.request(x, job.column(pass), job.rows(pass));
          held = own;
        });
        // Loaded together with x, because later loads queue behind the copies of weights.
        const float gsa = job.request_gsa();
        __syncwarp();
        if (first) ring.fill(weights);
        by_way([&](auto way) {
          HeldX<Input, decltype(way)::value, kAligned> own;
          static_cast<Pairs&>(own) = held;
          own.arrange(shared_at(after_rings) + warp * kStaged);
          held = own;
          if constexpr (own.kTurned) __syncthreads();  // sums may reuse the memory that staged x
        });
        job.keep_gsa(gsa);
      }
      const int left = (x.cols - job.column(pass) + kSegment - 1) / kSegment;
      words.set(OwnWords::kUnit, job.unit(pass));
      words.set(OwnWords::kPresent, job.unit(pass) < plan.units ? min(max(left, 0), 2) : 0);
      for (int step = 0; step < count; step += beside) {
        float acc[1][4] = {};
        const int tile = step + static_cast<int>(threadIdx.y);
        const int own = tile < count ? words.get(OwnWords::kPresent) : 0;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          wait_for_stage(many);
          __syncwarp();
          if (s == 0) {
            weights.template next<0>(ring.at + ring.written);
          } else {
            weights.template next<1>(ring.at + ring.written);
          }
          ring.written = ring.written == last ? 0 : ring.written + kStage;
          if (s < own) {
            by_way([&](auto way) {
              multiply_segment<Input, decltype(way)::value>(ring.at + ring.read, held.pairs[s],
                                                            acc);
            });
          }
          ring.read = ring.read == last ? 0 : ring.read + kStage;
        }
        by_way([&](auto way) {
          job.template keep<decltype(way)::value>(acc[0], held.undo, tile,
                                                  words.get(OwnWords::kUnit));
        });
      }
    }
    __syncthreads();
    by_way([&](auto way) { job.template add_up<decltype(way)::value>(block.from, count); });
    __syncthreads();
    if (thread_index() == 0) block.from = block.from + count, block.filled = 1;
    __syncthreads();
  }
}

// The sum over the lanes of a row of the tile, whose columns are blocks of k.
__device__ __forceinline__ float sum_of_columns(float v) {
  v = add_rn(v, __shfl_xor_sync(~0u, v, 1));
  return add_rn(v, __shfl_xor_sync(~0u, v, 2));
}

__device__ __forceinline__ void store_element(void* out, DType dtype, int64_t i, float y) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<Bf16*>(out)[i] = from_float<Bf16>(y);
      break;
    case DType::kFloat16:
      static_cast<Fp16*>(out)[i] = from_float<Fp16>(y);
      break;
    default:
      static_cast<float*>(out)[i] = y;
  }
}

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

// Maps the rows of a group to rows of x.
struct GroupRows {
  const uint16_t* order;  // null if the rows of x are sorted
  Group group;
  int divisor;

  __device__ __forceinline__ int operator()(int row) const {
    if (row >= group.count()) return kNoRow;
    const int i = group.first() + row;
    return order == nullptr ? i : order[i] / divisor;
  }
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
  __device__ __forceinline__ bool few() const { return group().few(); }
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
    if constexpr (Way::kAfter) {
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
    const int block = blockIdx.x, tiles = (next.rows + kTile - 1) / kTile;
    const int begin = first_of_block<kEither>(tables, tiles, block);
    const int end = first_of_block<kEither>(tables, tiles, block + 1), group = begin / tiles;
    const int row = (begin - group * tiles) * kTile;
    const int most = min(next.rows - row, kAheadBytes / (next.cols / 2));
    const int rows = min((end - begin) * kTile, most);
    if (rows > 0) prefetch_rows(next, tables.groups[group].expert, row, rows);
  }

  template <LinearWay kWay>
  __device__ __forceinline__ void add_up(int from, int count) const {
    using Way = WayTraits<kWay>;
    const int lane = threadIdx.x & 31, n = lane & 15, warps = thread_count() >> 5;
    const Group group = this->group();
    if constexpr (!kOneToken) {
      if (thread_index() == 0 && from + count == block_words().end) prefetch_next();
    }
    const int first = kOneToken ? 0 : block_words().group * layout.tiles;
    const int rows_here = group.count(), pairs = (rows_here + 1) / 2;
    // Each warp adds up two rows of x of a tile.
    for (int i = thread_index() >> 5; i < count * pairs; i += warps) {
      const int which = i / pairs, row = (i - which * pairs) * 2 + (lane >> 4);
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
                        const __grid_constant__ ExpertPlan plan, const bool routed_before) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  const int warp = thread_index() >> 5, warps = thread_count() >> 5;
  Ring ring(tiles, warp, plan.stages);
  unsigned char* const after_rings = tiles + warps * plan.stages * kStage;
  const GroupTables tables = tables_at(after_rings + plan.tables_at, routing);
  float* const sums = reinterpret_cast<float*>(after_rings + plan.sums_at);

  // If routed_before, the previous kernel did not write the ids. It let this one begin only after
  // its own wait, so they can be read already, and no kernel writes weights.
  if (!routed_before) wait_for_previous();
  if constexpr (kOneToken) {
    for (int i = thread_index(); i < routing.count; i += thread_count()) {
      tables.groups[i] = {expert_of(routing, i), 1u << 1 | 1u};
    }
    if (thread_index() == 0) tables.total[0] = routing.count;
    __syncthreads();
  } else {
    sort_rows(routing, tables, tiles);  // the rings are not in use yet
  }
  using Job = GroupJob<Input, kOneToken>;
  const int begin = first_of_block<Job::kEither>(tables, layout.tiles, blockIdx.x);
  const int end = first_of_block<Job::kEither>(tables, layout.tiles, blockIdx.x + 1);
  volatile BlockWords& block = block_words();
  if (thread_index() == 0) {
    block.end = block.stop = end;
    block.from = begin;
    block.filled = 0;
  }
  __syncthreads();

  using Places = GroupPlaces<kOneToken>;
  const OwnWords words(after_rings + plan.words_at);
  TileStream<Places, kAligned> weights(Places(w, layout, plan, tables.groups, begin, words), words,
                                       w.cols, plan.passes, begin);
  if (routed_before) {
    weights.template next<0>(ring.at);
    wait_for_previous();
  }
  // Only after the wait: the next kernel relies on everything written before this one.
  let_next_begin();
  if (!routed_before) weights.template next<0>(ring.at);

  constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
  const Job job = {w, layout, routing, to, plan, tables, sums};
  if constexpr (kOneToken) {
    constexpr Ways kWays = kAfter ? Ways::kTwo : Ways::kEight;
    multiply_tiles<Input, kWays, kAligned>(weights, ring, words, x, plan, after_rings, job);
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
    constexpr Ways kWays = kAfter ? Ways::kEither : Ways::kEight;
    for (int group = begin / layout.tiles; block.from < block.end; ++group) {
      __syncthreads();
      if (thread_index() == 0) {
        block.group = group;
        block.stop = min(block.end, (group + 1) * layout.tiles);
      }
      __syncthreads();
      multiply_tiles<Input, kWays, kAligned>(weights, ring, words, x, plan, after_rings, job);
    }
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
  __device__ __forceinline__ int64_t second_codes() const { return apart_ * (w_.cols / 2); }
  __device__ __forceinline__ int64_t second_scales() const { return apart_ * (w_.cols / 16); }

 private:
  const ExpertWeights& w_;
  const ExpertPlan& plan_;
  const int* ids_;
  const int top_k_, k_units_;
  int64_t apart_ = 0;
};

struct PairRows {
  int one, two;

  __device__ __forceinline__ int operator()(int row) const {
    return row == 0 ? one : row == 1 ? two : kNoRow;
  }
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

  __device__ __forceinline__ bool few() const { return true; }
  __device__ __forceinline__ int unit(int pass) const { return places.unit(pass); }
  __device__ __forceinline__ int column(int pass) const { return places.column(pass); }
  __device__ __forceinline__ PairRows rows(int pass) const {
    const int choice = unit(pass) / k_units * 2;
    return {places.expert(choice) < 0 ? kNoRow : choice,
            places.expert(choice + 1) < 0 ? kNoRow : choice + 1};
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
  Ring ring(tiles, warp, plan.stages);
  unsigned char* const after_rings = tiles + warps * plan.stages * kStage;
  const int top_k = routing.count, k_units = (w.cols + kUnit - 1) / kUnit;

  // The previous kernel let this one begin only after its own wait, so the routing can be read.
  for (int i = thread_index(); i < top_k; i += thread_count()) ids[i] = expert_of(routing, i);
  __syncthreads();
  const int all = w.rows / 8;
  const int begin = static_cast<int>(static_cast<int64_t>(all) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<int64_t>(all) * (blockIdx.x + 1) / gridDim.x);
  volatile BlockWords& block = block_words();
  if (thread_index() == 0) {
    block.end = block.stop = end;
    block.from = begin;
    block.filled = 0;
  }
  __syncthreads();
  const OwnWords words(after_rings + plan.words_at);
  const PairPlaces places(w, plan, ids, top_k, k_units);
  TileStream<PairPlaces, kAligned> weights(places, words, w.cols, plan.passes, begin);
  weights.template next<0>(ring.at);
  wait_for_previous();
  let_next_begin();
  for (int i = thread_index(); i < top_k; i += thread_count()) {
    weights_of_choices[i] = float_at(choice_weights, weights_dtype, i);  // read after a barrier
  }

  constexpr bool kAfter = std::is_same<typename LinearInput<Input>::Operand, Bf16>::value;
  constexpr Ways kWays = kAfter ? Ways::kTwo : Ways::kEight;
  const PairJob<Input> job = {places, w,
                              plan,   weights_of_choices,
                              gsas,   reinterpret_cast<float*>(after_rings + plan.sums_at),
                              top_k,  k_units,
                              out,    dtype};
  multiply_tiles<Input, kWays, kAligned>(weights, ring, words, x, plan, after_rings, job);
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
  // The previous kernel let this one begin only after its own wait, so the routing can be read.
  if (threadIdx.x < top_k) {
    const int pair = row * top_k + static_cast<int>(threadIdx.x);
    there[threadIdx.x] = expert_of(routing, pair) >= 0;
    own_weights[threadIdx.x] = float_at(weights, weights_dtype, pair);
  }
  __syncthreads();
  wait_for_previous();
  let_next_begin();
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
                          const GroupRouting& routing, const GroupOutput& to, bool routed_before,
                          cudaStream_t stream) {
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
  const bool turned = aligned && !LinearInput<Input>::kCodes && !(kOneToken && kAfter);
  BlockShape shape = {};
  if (!plan_shape(shape, units, kOneToken ? static_cast<int64_t>(routing.count) * layout.tiles : 0,
                  sums, turned, table_bytes(routing.count, routing.experts))) {
    return cudaErrorInvalidConfiguration;
  }
  return aligned ? launch_shape<&nvfp4_groups_kernel<Input, true, kOneToken>>(
                       shape, stream, w, layout, x, routing, to, shape.plan, routed_before)
                 : launch_shape<&nvfp4_groups_kernel<Input, false, kOneToken>>(
                       shape, stream, w, layout, x, routing, to, shape.plan, routed_before);
}

template <class Input>
cudaError_t launch_one_down(const ExpertWeights& w, const LinearOperand& x,
                            const GroupRouting& routing, const ExpertLayer& layer,
                            cudaStream_t stream) {
  constexpr bool kAfter = std::is_same<Input, Bf16>::value;
  const bool aligned = is_aligned<Input>(w, x);
  const int units = (routing.count + 1) / 2 * ((w.cols + kUnit - 1) / kUnit);
  BlockShape shape = {};
  if (!plan_shape(shape, units, w.rows / 8, {4 * kPairSums, 4 * kPairSums}, aligned && !kAfter,
                  0)) {
    return cudaErrorInvalidConfiguration;
  }
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

template <class Input>
cudaError_t launch_grouped(const ExpertWeights& w, const LinearOperand& x, const Routing& given,
                           const LinearEpilogue& to, cudaStream_t stream) {
  const int64_t blocks = w.cols / 16;
  const int64_t row_bytes = LinearInput<Input>::kCodes ? blocks * 8 : x.stride * 2;
  const int64_t out_bytes = to.cols * (to.dtype == DType::kFloat32 ? 4 : 2);
  const int64_t window = most_sorted();
  for (int64_t first = 0; first < x.rows; first += window) {
    const int64_t rows = x.rows - first < window ? x.rows - first : window;
    LinearOperand part = x;
    part.rows = rows;
    part.data = static_cast<const uint8_t*>(x.data) + first * row_bytes;
    if (x.scales != nullptr) part.scales = x.scales + first * blocks;
    const GroupRouting routing = {given.offsets, nullptr,   given.wide, static_cast<int>(rows),
                                  first,         w.experts, 1,          false};
    const GroupOutput output = {static_cast<uint8_t*>(to.out) + first * out_bytes,
                                to.dtype,
                                w.rows,
                                false,
                                to.x_gsa == nullptr ? nullptr : to.x_gsa + first * to.x_gsa_stride,
                                to.x_gsa_stride,
                                {}};
    const cudaError_t error = launch_groups<Input, false>(w, part, routing, output, false, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class Input>
cudaError_t launch_layer(const ExpertLayer& layer, const LinearOperand& x, cudaStream_t stream) {
  const ExpertWeights &up = layer.gate_up, &down = layer.down;
  const int top_k = layer.routing.top_k, id_bytes = layer.routing.wide ? 8 : 4;
  const int64_t window = expert_window(x.rows, top_k);
  const int64_t out_bytes = down.rows * (layer.out_dtype == DType::kFloat32 ? 4 : 2);
  for (int64_t first = 0; first < x.rows; first += window) {
    const int64_t rows = x.rows - first < window ? x.rows - first : window, pairs = rows * top_k;
    ExpertLayer own = layer;
    own.weights = static_cast<const uint8_t*>(layer.weights) +
                  first * top_k * (layer.weights_dtype == DType::kFloat32 ? 4 : 2);
    own.out = static_cast<uint8_t*>(layer.out) + first * out_bytes;
    LinearOperand part = x;
    part.rows = rows;
    part.data = static_cast<const uint8_t*>(x.data) + first * x.stride * 2;
    GroupRouting routing = {
        nullptr,
        static_cast<const uint8_t*>(layer.routing.ids) + first * top_k * id_bytes,
        layer.routing.wide,
        static_cast<int>(pairs),
        0,
        up.experts,
        top_k,
        true};
    GroupOutput between = {layer.activations, x.dtype, down.cols, true, nullptr, 0, {}};
    // Bulk prefetches need this alignment.
    if (down.cols % kSegment == 0 && apart_by_16(down.codes, 0) && apart_by_16(down.scales, 0)) {
      between.next = down;
    }
    LinearOperand h = {layer.activations, nullptr, x.dtype, down.cols, pairs, down.cols};

    if (rows == 1) {
      cudaError_t error = launch_groups<Input, true>(up, part, routing, between, false, stream);
      if (error == cudaSuccess) error = launch_one_down<Input>(down, h, routing, own, stream);
      if (error != cudaSuccess) return error;
      continue;
    }
    cudaError_t error = launch_groups<Input, false>(up, part, routing, between, false, stream);
    if (error != cudaSuccess) return error;
    routing.of_tokens = false;
    const GroupOutput partials = {
        layer.partials, DType::kFloat32, down.rows, false, nullptr, 0, {}};
    error = launch_groups<Input, false>(down, h, routing, partials, true, stream);
    if (error != cudaSuccess) return error;
    const int64_t blocks = rows * ((down.rows / 4 + kSumThreads - 1) / kSumThreads);
    error = launch<&nvfp4_sum_experts_kernel>({blocks, kSumThreads, Start::kOverlapped}, stream,
                                              static_cast<const float*>(layer.partials), routing,
                                              own.weights, own.weights_dtype, own.out,
                                              own.out_dtype, down.rows);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

int64_t expert_window(int64_t rows, int64_t top_k) {
  const int64_t most = most_sorted() / top_k;
  return rows < most ? rows : most;
}

cudaError_t launch_nvfp4_grouped_linear(const ExpertWeights& w, const LinearOperand& x,
                                        const Routing& routing, const LinearEpilogue& to,
                                        cudaStream_t stream) {
  if (w.rows == 0 || x.rows == 0) return cudaSuccess;
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
