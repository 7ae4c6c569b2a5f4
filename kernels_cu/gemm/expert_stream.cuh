// The stages of weights of a warp's tiles, and their products with x in registers.
#pragma once

#include "expert_bundles.cuh"

namespace jitquant {

constexpr int kUnit = 2 * kSegment;
constexpr int kHeldX = 2 * TwoRowFragments<Bf16, true>::kRowBytes;  // bytes of x of a warp

// Where tiles are in memory. The second 8 rows of a tile start `second_*` bytes after the first 8.
struct TileLayout {
  int64_t second_codes, second_scales;
  int tile_rows;  // rows from one tile to the next: 16, or 8 if both halves advance
  int tiles;      // per expert
};

struct ExpertPlan {
  int passes, units;
  int stages;
  int step_codes, step_scales;  // bytes from a warp's tile to its next; 0 if tiles are not alike
  int64_t four_rows;            // bytes of codes
  int hold_two, hold_eight;     // steps of tiles whose sums a block collects before adding up
  int sums_at, tables_at, words_at;  // byte offsets after the rings
};

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
  // For the stream of stages: its pass, its batch of tiles, its bundle and the bundle's first tile.
  // For the product: the unit and how many of its segments are in range.
  enum Word { kPass, kFrom, kTo, kBundle, kFirst, kUnit, kPresent };

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
  int bundle;  // whose tiles the block multiplies
  int from;    // the first tile whose sums are not added up yet
  int stop;    // past the last tile with these rows of x
  int filled;  // whether the rings are filled
  float gsa;   // of the bundle's expert, unless every row has its own
};
__device__ __forceinline__ volatile BlockWords& block_words() {
  __shared__ BlockWords words;
  return words;
}

// One thread calls it.
__device__ __forceinline__ void begin_block(TileRange tiles) {
  volatile BlockWords& block = block_words();
  block.end = block.stop = tiles.end;
  block.from = tiles.begin;
  block.filled = 0;
}
// The tiles of all bundles, one bundle after another. If kOneToken, a bundle is a choice of the
// token.
template <bool kOneToken>
class BundlePlaces {
 public:
  __device__ __forceinline__ BundlePlaces(const ExpertWeights& w, const TileLayout& layout,
                                          const ExpertPlan& plan, const Bundle* bundles, int begin,
                                          OwnWords words)
      : w_(w), layout_(layout), plan_(plan), bundles_(bundles), words_(words) {
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
    const bool few = bundles_[words_.get(OwnWords::kBundle)].few();
    const int hold = few ? plan_.hold_two : plan_.hold_eight;
    return min(min(from + hold * beside, end), first + layout_.tiles);
  }
  __device__ __forceinline__ void locate(int tile, int pass, Place& place) {
    int first = words_.get(OwnWords::kFirst);
    // Tiles side by side may belong to two bundles.
    if (kOneToken && (tile < first || tile - first >= layout_.tiles)) {
      move_to(tile);
      first = words_.get(OwnWords::kFirst);
    }
    const int expert = bundles_[words_.get(OwnWords::kBundle)].expert;
    const int row = (tile - first) * layout_.tile_rows, k = column(pass);
    const int64_t at = static_cast<int64_t>(max(expert, 0)) * w_.rows + row;
    place.codes = w_.codes + at * (w_.cols / 2) + k / 2;
    place.scales = w_.scales + at * (w_.cols / 16) + k / 16;
    place.low = 0;
    // Gates and ups always fill their tiles.
    place.high = expert < 0 ? 0 : layout_.tile_rows == kTile ? min(w_.rows - row, kTile) : kTile;
  }
  // Of a batch that ends at `to`, where the tiles end that follow each other in memory.
  __device__ __forceinline__ int steps_end(int to) const {
    return kOneToken ? min(to, words_.get(OwnWords::kFirst) + layout_.tiles) : to;
  }
  __device__ __forceinline__ int64_t second_codes() const { return layout_.second_codes; }
  __device__ __forceinline__ int64_t second_scales() const { return layout_.second_scales; }

 private:
  __device__ __forceinline__ void move_to(int tile) {
    const int bundle = tile / layout_.tiles;
    words_.set(OwnWords::kBundle, bundle);
    words_.set(OwnWords::kFirst, bundle * layout_.tiles);
  }

  const ExpertWeights& w_;
  const TileLayout& layout_;
  const ExpertPlan& plan_;
  const Bundle* bundles_;
  OwnWords words_;
};

// The stages of a warp, in the order in which it multiplies them: both segments of a tile, the
// tiles of a batch, the same tiles in each further pass, then the next batch.
template <class Places, bool kAligned>
class TileStream {
 public:
  __device__ __forceinline__ TileStream(const Places& places, OwnWords words, int cols,
                                        const ExpertPlan& plan, int begin)
      : places_(places), words_(words), cols_(cols), plan_(plan), tile_(begin) {
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
        copy_parts(
            stage, cols_, cols_ - begin, [&](int row) { return there(row); },
            [&](int row) { return codes_at(row) + kWhich * kSegment / 2; },
            [&](int row) { return scales_at(row) + kWhich * (kSegment / 16); });
      }
    }
    __pipeline_commit();
    if constexpr (kWhich == 1) advance();
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ int lane_row() { return lane() >> 3; }

  __device__ __forceinline__ void advance() {
    tile_ += blockDim.y;
    // locate() would take a tenth of all instructions.
    if (tile_ + static_cast<int>(threadIdx.y) < steps_end_) {
      place_.codes += plan_.step_codes;
      place_.scales += plan_.step_scales;
      return;
    }
    int to = words_.get(OwnWords::kTo), pass = words_.get(OwnWords::kPass);
    if (tile_ >= to) {
      tile_ = words_.get(OwnWords::kFrom);
      if (++pass >= plan_.passes) {
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
    steps_end_ = 0;
    if (own >= to) return;
    places_.locate(own, pass, place_);
    if (plan_.step_codes != 0) steps_end_ = places_.steps_end(to);
    if constexpr (kAligned) {
      // What this lane copies first.
      place_.codes += static_cast<int64_t>(lane_row()) * (cols_ / 2) + (lane() & 7) * 16;
      const int row = lane() & 15;
      place_.scales +=
          (row < 8 ? 0 : places_.second_scales()) + static_cast<int64_t>(row & 7) * (cols_ / 16);
    }
  }
  __device__ __forceinline__ bool there(int row) const {
    return row >= place_.low && row < place_.high;
  }

  template <int kWhich>
  __device__ __forceinline__ void copy(Shared stage) {
    const uint8_t* from = place_.codes + kWhich * (kSegment / 2);
    const Shared to = stage + codes_to_;
    const auto copy_rows = [&](auto&& there) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i == 2) from += places_.second_codes();
        if (there(4 * i + lane_row())) {
          copy_16(to + i * 4 * kStageRow, from + i % 2 * plan_.four_rows);
        }
      }
      if (lane() < kTile && there(lane())) {
        copy_16(stage + scales_to_, place_.scales + kWhich * (kSegment / 16));
      }
    };
    // Nearly all tiles are whole. They have no row to ask about.
    if (place_.high - place_.low == kTile) {
      copy_rows([](int) { return true; });
    } else {
      copy_rows([&](int row) { return there(row); });
    }
  }
  // For unaligned weights.
  __device__ __forceinline__ const uint8_t* codes_at(int row) const {
    return place_.codes + (row < 8 ? 0 : places_.second_codes()) +
           static_cast<int64_t>(row & 7) * (cols_ / 2);
  }
  __device__ __forceinline__ const uint8_t* scales_at(int row) const {
    return place_.scales + (row < 8 ? 0 : places_.second_scales()) +
           static_cast<int64_t>(row & 7) * (cols_ / 16);
  }

  Places places_;
  OwnWords words_;
  const int cols_;
  const ExpertPlan& plan_;
  int tile_, k_;
  int steps_end_;  // to tiles before this one, the next is a step away
  Place place_;
  // Where a lane's parts go in a stage. Kept, because they would be computed each time.
  const uint32_t codes_to_ =
      kept(uint32_t{threadIdx.x % 32 / 8 * kStageRow + threadIdx.x % 8 * 16});
  const uint32_t scales_to_ = kept(uint32_t{threadIdx.x % 32 * kStageRow + kScalesAt});
};

// A warp's ring of stages.
struct WarpRing {
  Shared at;
  int stages;
  // The stage to multiply next, and the one that was multiplied last.
  Shared read, free;

  __device__ __forceinline__ WarpRing(unsigned char* shared, int warp, int stages)
      : at(shared_at(shared) + warp * stages * kStage),
        stages(stages),
        read(at),
        free(at + (stages - 1) * kStage) {}
  // Requests the second or the third stage of four. The first is already on its way.
  template <int kStageIndex, class Stream>
  __device__ __forceinline__ void fill(Stream& weights) const {
    if (stages == kManyStages) {
      weights.template next<kStageIndex % 2>(at + kStageIndex * kStage);
    }
  }
};

// Multiplies the block's tiles up to block.stop, which all have the same rows of x. Job says which
// columns and rows of x a warp has in a pass, and what to do with the sums. With one pass, x is
// loaded once. It is not carried around the loops: the compiler would wait for each of its loads.
template <class Input, LinearWay kWay, bool kAligned, class Stream, class Job>
__device__ __forceinline__ void multiply_own_tiles(Stream& weights, WarpRing& ring, OwnWords words,
                                                   const LinearOperand& x, const ExpertPlan& plan,
                                                   unsigned char* after_rings, const Job& job) {
  const int beside = blockDim.y, warp = thread_index() >> 5;
  const int hold = (WayTraits<kWay>::kAfter ? plan.hold_two : plan.hold_eight) * beside;
  const Shared last = ring.at + (ring.stages - 1) * kStage;
  // What a lane reads of a stage. Kept, as it would be computed each time.
  const uint32_t codes_from = kept(lane_codes_at(threadIdx.x & 31)),
                 scales_from = kept(lane_scales_at(threadIdx.x & 31));
  const bool many = ring.stages == kManyStages;
  const int warps = static_cast<int>(blockDim.x >> 5) * beside;
  const Shared own_x = shared_at(after_rings - (warps - warp) * kHeldX);
  volatile BlockWords& block = block_words();
#pragma unroll 1
  while (block.from < block.stop) {
#pragma unroll 1
    for (int pass = 0; pass < plan.passes; ++pass) {
      constexpr bool kAfter = WayTraits<kWay>::kAfter;
      Fragments<Input, kWay, kAligned> fragments;
      fragments.request(x, job.column(pass), job.rows(pass));
      // Loaded together with x, because later loads queue behind the copies of weights.
      const float gsa = job.request_gsa();
      __syncwarp();
      const bool fills = pass == 0 && block.filled == 0;
      // Eight rows leave no registers for that before they are in place.
      if (kAfter && fills) ring.template fill<1>(weights);
      if constexpr (kAfter) {
        fragments.arrange(own_x, 2);
      } else {
        fragments.arrange(shared_at(after_rings) + warp * kStaged);
      }
      if (!kAfter && fills) ring.template fill<1>(weights);
      if (fills) ring.template fill<2>(weights);
      if constexpr (fragments.kTurned) __syncthreads();  // sums may reuse the memory that staged x
      job.keep_gsa(gsa);
      const int left = (x.cols - job.column(pass) + kSegment - 1) / kSegment;
      words.set(OwnWords::kUnit, job.unit(pass));
      words.set(OwnWords::kPresent, job.unit(pass) < plan.units ? min(max(left, 0), 2) : 0);
#pragma unroll 1
      do {
        const int count = min(block.stop - block.from, hold);
        for (int step = 0; step < count; step += beside) {
          float acc[1][4] = {};
          const int tile = step + static_cast<int>(threadIdx.y);
          const int own = tile < count ? words.get(OwnWords::kPresent) : 0;
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            wait_for_stage(many);
            __syncwarp();
            if (s == 0) {
              weights.template next<1>(ring.free);
            } else {
              weights.template next<0>(ring.free);
            }
            if (s < own) {
              LaneWords words({ring.read + codes_from, ring.read + scales_from});
              multiply_segment<Input, kWay>(
                  words, [&](int c, int i) { return fragments.words(s, c, i); }, acc);
            }
            ring.free = ring.read;
            ring.read = ring.read == last ? ring.at : ring.read + kStage;
          }
          job.template keep<kWay>(acc[0], fragments.undo, tile, words.get(OwnWords::kUnit));
        }
        if (pass + 1 < plan.passes) break;
        __syncthreads();
        job.template add_up<kWay>(block.from, count);
        __syncthreads();
        if (thread_index() == 0) block.from = block.from + count, block.filled = 1;
        __syncthreads();
      } while (plan.passes == 1 && block.from < block.stop);
    }
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

}  // namespace jitquant
