// The kernels that every NVFP4 pipeline is put together from, templates over where the values come
// from (sources.cuh); those that go row by row are in nvfp4_rows.cuh:
//   amax_kernel       launch 1 of tensor granularity: each block's amax into partials
//   quantize_kernel   launch 2, or the only one where gsa is given: for any source; its kin are
//                     quantize_pieces_kernel for whole, aligned blocks, flat_quantize_kernel for a
//                     contiguous tensor, quantize_tiles_kernel for swizzled scales
//   cluster_kernel    both in one launch, for what a cluster holds in its registers
// The amax goes from launch to launch as partial maxima in a workspace of the call's own, which
// every block of launch 2 reduces for itself: no counter, no memset, nothing that has to be put
// back, so concurrent calls, replayed graphs and launches that never ran cannot disturb each other.
#pragma once

#include "jitquant/cluster.cuh"
#include "jitquant/device.cuh"
#include "jitquant/launch.h"
#include "jitquant/reduce.cuh"
#include "jitquant/sources.cuh"

namespace jitquant {

constexpr int kThreads = 256;

JITQUANT_HD int64_t blocks_of(int64_t cols) {
  return (cols + 15) / 16;
}

// (row, block) of a flat walk over rows * width blocks, without a division a step.
struct BlockWalk {
  int64_t row, block;
  int64_t step_rows, step_blocks, width;

  __device__ __forceinline__ BlockWalk(int64_t width) : width(width) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    row = first / width;
    block = first - row * width;
    step_rows = step / width;
    step_blocks = step - step_rows * width;
  }
  __device__ __forceinline__ void next() {
    row += step_rows;
    block += step_blocks;
    if (block >= width) {
      block -= width;
      ++row;
    }
  }
};

JITQUANT_HD int64_t padded_blocks(const Nvfp4Output& out) {
  return out.swizzled ? (out.blocks + 3) & ~int64_t{3} : out.blocks;
}

// Where the scale of a block is, counted from that of the row's first.
__device__ __forceinline__ int64_t scale_place(const Nvfp4Output& out, int64_t block) {
  return out.swizzled ? swizzle_128x4(0, block, 0) : block;
}

// Where a row's codes and scales go.
struct OutputRow {
  uint2* codes;
  uint8_t* scales;

  __device__ __forceinline__ OutputRow(const Nvfp4Output& out, int64_t row)
      : codes(reinterpret_cast<uint2*>(out.codes) + row * out.blocks),
        scales(out.scales +
               (out.swizzled ? swizzle_128x4(row, 0, padded_blocks(out)) : row * out.blocks)) {}
  // `place` is the block's scale_place.
  __device__ __forceinline__ void store(int64_t block, int64_t place, const Nvfp4Codes& x) const {
    codes[block] = make_uint2(x.low, x.high);
    scales[place] = x.scale;
  }
};

// The swizzled layout is padded to whole tiles of 128 rows by 4 blocks. All threads of the grid.
__device__ __forceinline__ void zero_padding(const Nvfp4Output& out) {
  if (!out.swizzled) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t tiles = padded_blocks(out) >> 2;
  if (out.rows & 127) {
    // Sixteen bytes of a tile belong to four rows, 32 apart.
    const int64_t tile_row = out.rows >> 7;
    for (int64_t i = first; i < tiles * 32; i += step) {
      uint8_t* p = out.scales + (tile_row * tiles + (i >> 5)) * 512 + (i & 31) * 16;
      const int64_t row = (tile_row << 7) + (i & 31);
      if (row >= out.rows) {
        reinterpret_cast<uint2*>(p)[0] = reinterpret_cast<uint2*>(p)[1] = make_uint2(0, 0);
      } else {
        for (int quarter = 1; quarter < 4; ++quarter) {
          if (row + 32 * quarter >= out.rows) reinterpret_cast<uint32_t*>(p)[quarter] = 0;
        }
      }
    }
  }
  if (out.blocks & 3) {
    for (int64_t row = first; row < out.rows; row += step) {
      const OutputRow to(out, row);
      for (int64_t b = out.blocks; b < padded_blocks(out); ++b) to.scales[scale_place(out, b)] = 0;
    }
  }
}

// The encoding of a tensor whose gsa is kValue or kTensor.
__device__ __forceinline__ Nvfp4Encoding given_encoding(const GlobalScale& scale,
                                                        Nvfp4Recipe recipe) {
  const float gsa = scale.kind == GlobalScale::kValue ? scale.value : *scale.gsa;
  if (scale.gsa_out != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *scale.gsa_out = gsa;
  return nvfp4_encoding_from_gsa(gsa, recipe);
}

// The encoding of the whole tensor; every thread of the block calls it. Not where it is a row's.
__device__ __forceinline__ Nvfp4Encoding tensor_encoding(const GlobalScale& scale,
                                                         Nvfp4Recipe recipe, BlockReduce& reduce) {
  if (scale.kind != GlobalScale::kPartials && scale.kind != GlobalScale::kAmax) {
    return given_encoding(scale, recipe);
  }
  float amax = 0.0f;
  for (int i = threadIdx.x; i < scale.count; i += blockDim.x) {
    amax = fmaxf(amax, scale.partials[i]);
  }
  amax = reduce.max(amax);
  if (scale.gsa_out != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    *scale.gsa_out = div_rn(amax, scale.divisor);
  }
  return nvfp4_encoding_from_amax(amax, scale.divisor, recipe);
}

JITQUANT_HD bool is_by_row(const GlobalScale& scale) {
  return scale.kind == GlobalScale::kRows || scale.kind == GlobalScale::kRowAmax;
}

// The encoding of a row; the thread that has its first block writes what is told of it.
__device__ __forceinline__ Nvfp4Encoding row_encoding(const GlobalScale& scale, int64_t row,
                                                      int64_t block, Nvfp4Recipe recipe) {
  const float given = scale.gsa[row * scale.stride];
  if (scale.kind == GlobalScale::kRows) return nvfp4_encoding_from_gsa(given, recipe);
  if (block == 0) scale.gsa_out[row] = div_rn(given, scale.divisor);
  return nvfp4_encoding_from_amax(given, scale.divisor, recipe);
}

// The amax of what this block's threads walk over; every thread of the block gets it.
template <bool kNan = false, class Source>
__device__ __forceinline__ float walked_amax(const Source& source, BlockReduce& reduce) {
  constexpr int kAtOnce = sizeof(typename Source::Fetched) <= 32 ? 2 : 1;
  Amax<typename Source::Value::Element, kNan> amax;
  BlockWalk walk(blocks_of(source.cols));
#pragma unroll 1
  while (walk.row < source.rows) {
    typename Source::Fetched fetched[kAtOnce];
    int64_t rows[kAtOnce], blocks[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      rows[i] = walk.row, blocks[i] = walk.block;
      if (walk.row < source.rows) {
        fetched[i] = source.template fetch<false>(source.row(walk.row), walk.block);
      }
      walk.next();
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (rows[i] < source.rows) {
        amax.add(source.template value<false>(fetched[i], source.row(rows[i]), blocks[i]));
      }
    }
  }
  return reduce.max(amax.result());
}
template <bool kNan = false, class T>
__device__ __forceinline__ float walked_amax(const FlatSource<T>& source, BlockReduce& reduce) {
  constexpr int kAtOnce = sizeof(T) == 2 ? 2 : 1;
  Amax<T, kNan> amax;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t block = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (; block + (kAtOnce - 1) * step < source.blocks; block += kAtOnce * step) {
    Block<T> x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = source.fetch(block + i * step);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) amax.add(x[i]);
  }
  if (block < source.blocks) amax.add(source.fetch(block));
  return reduce.max(amax.result());
}

template <class Source>
constexpr int amax_blocks_per_sm() {
  return sizeof(typename Source::Element) == 2 ? 2 : 1;
}

template <class Source, bool kNan>
__global__ void __launch_bounds__(2 * kThreads, amax_blocks_per_sm<Source>())
    amax_kernel(Source source, float* partials) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  // In this order: quantize_kernel fetches before it waits, so what came before this kernel has to
  // be done when it begins.
  wait_for_previous();
  let_next_begin();
  const float amax = walked_amax<kNan>(source, reduce);
  if (threadIdx.x == 0) partials[blockIdx.x] = amax;
}

template <class T>
constexpr int flat_blocks_per_sm() {
  return sizeof(T) == 2 ? 5 : 4;
}

// Blocks of quantize_kernel that a multiprocessor has to hold: bounds its registers.
template <class Source>
constexpr int quantize_blocks_per_sm() {
  constexpr size_t kFetched = sizeof(typename Source::Fetched);
  return kFetched <= 32 ? 4 : (kFetched <= 64 ? 3 : 1);
}

// The next block is loaded while one is computed: without that the loads of a multiprocessor's
// threads do not cover the latency of the memory.
template <class Source>
__global__ void __launch_bounds__(kThreads, quantize_blocks_per_sm<Source>())
    quantize_kernel(Source source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const bool early = scale.kind == GlobalScale::kPartials && Source::kReadsOnlyInputs;
  BlockWalk walk(out.blocks);
  typename Source::Fetched next;
  auto fetch = [&] {
    if (walk.row < out.rows) {
      next = source.template fetch<false>(source.row(walk.row), walk.block);
    }
  };
  if (early) fetch();
  wait_for_previous();
  let_next_begin();
  if (!early) fetch();

  const bool by_row = is_by_row(scale);
  Nvfp4Encoding encoding = by_row ? Nvfp4Encoding{} : tensor_encoding(scale, recipe, reduce);
#pragma unroll 1
  while (walk.row < out.rows) {
    const typename Source::Fetched fetched = next;
    const int64_t row = walk.row, block = walk.block;
    walk.next();
    fetch();
    if (by_row) encoding = row_encoding(scale, row, block, recipe);
    const typename Source::Value v = source.template value<false>(fetched, source.row(row), block);
    OutputRow(out, row).store(block, scale_place(out, block),
                              nvfp4_quantize_block(v, block_amax(v), encoding));
  }
  zero_padding(out);
}

// The same for whole, aligned blocks of rows that are as far apart as any others, and linear
// scales: all of it is counted in 32 bits.
struct WholeWalk {
  uint32_t count;  // of all blocks, below 2^31
  Divisor width;   // of a row
  uint32_t step, step_rows, step_blocks;

  WholeWalk(int64_t rows, int64_t width, int64_t grid)
      : count(static_cast<uint32_t>(rows * width)),
        width(static_cast<uint32_t>(width)),
        step(static_cast<uint32_t>(grid) * kThreads) {
    step_rows = this->width.quotient_of(step);
    step_blocks = step - step_rows * this->width.divisor;
  }
};

template <class Source, bool kActivates>
__global__ void __launch_bounds__(kThreads, quantize_blocks_per_sm<Source>())
    quantize_whole_kernel(Source source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out,
                          WholeWalk walk) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const bool early = scale.kind == GlobalScale::kPartials && Source::kReadsOnlyInputs;
  source.activate = kActivates;
  uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  uint32_t row = walk.width.quotient_of(i), block = i - row * walk.width.divisor;
  typename Source::Fetched next;
  auto fetch = [&] {
    if (i < walk.count) next = source.template fetch<true>(source.row.even_row(row), block);
  };
  if (early) fetch();
  wait_for_previous();
  let_next_begin();
  if (!early) fetch();

  const bool by_row = is_by_row(scale);
  Nvfp4Encoding encoding = by_row ? Nvfp4Encoding{} : tensor_encoding(scale, recipe, reduce);
#pragma unroll 1
  while (i < walk.count) {
    const typename Source::Fetched fetched = next;
    const uint32_t here = i;
    if (by_row) encoding = row_encoding(scale, row, block, recipe);
    i += walk.step;
    row += walk.step_rows;
    block += walk.step_blocks;
    if (block >= walk.width.divisor) {
      block -= walk.width.divisor;
      ++row;
    }
    fetch();
    const typename Source::Value v = source.template value<true>(fetched, {}, 0);
    const float amax = block_amax(v);
    const Nvfp4Codes codes = kActivates ? nvfp4_quantize_computed(v, amax, encoding)
                                        : nvfp4_quantize_block(v, amax, encoding);
    reinterpret_cast<uint2*>(out.codes)[here] = make_uint2(codes.low, codes.high);
    out.scales[here] = codes.scale;
  }
}

// The same for rows of whole, aligned blocks, a piece of a row at a time: where it is is computed
// once for a block of threads, not for each.
struct PieceWalk {
  int64_t row, step_rows;
  int piece, pieces, step_pieces;

  __device__ __forceinline__ PieceWalk(int pieces) : pieces(pieces) {
    row = blockIdx.x / pieces;
    piece = blockIdx.x - static_cast<int>(row) * pieces;
    step_rows = gridDim.x / pieces;
    step_pieces = gridDim.x - static_cast<int>(step_rows) * pieces;
  }
  __device__ __forceinline__ void next() {
    row += step_rows;
    piece += step_pieces;
    if (piece >= pieces) {
      piece -= pieces;
      ++row;
    }
  }
};

template <class Source>
__global__ void __launch_bounds__(kThreads, quantize_blocks_per_sm<Source>())
    quantize_pieces_kernel(Source source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out,
                           int pieces) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const bool early = scale.kind == GlobalScale::kPartials && Source::kReadsOnlyInputs;
  PieceWalk walk(pieces);
  typename Source::Fetched next;
  const int width = static_cast<int>(out.blocks);
  auto block_here = [&] { return walk.piece * static_cast<int>(blockDim.x) + threadIdx.x; };
  auto fetch = [&] {
    const int block = block_here();
    if (walk.row < out.rows && block < width) {
      next = source.template fetch<true>(source.row(walk.row), block);
    }
  };
  if (early) fetch();
  wait_for_previous();
  let_next_begin();
  if (!early) fetch();

  const bool by_row = is_by_row(scale);
  Nvfp4Encoding encoding = by_row ? Nvfp4Encoding{} : tensor_encoding(scale, recipe, reduce);
#pragma unroll 1
  while (walk.row < out.rows) {
    const typename Source::Fetched fetched = next;
    const int64_t row = walk.row;
    const int block = block_here();
    walk.next();
    fetch();
    if (block >= width) continue;
    if (by_row) encoding = row_encoding(scale, row, block, recipe);
    const typename Source::Value v = source.template value<true>(fetched, source.row(row), block);
    OutputRow(out, row).store(block, scale_place(out, block),
                              nvfp4_quantize_block(v, block_amax(v), encoding));
  }
  zero_padding(out);
}

// The same for a contiguous tensor and scales that are as the blocks are.
template <class T>
__global__ void __launch_bounds__(kThreads, flat_blocks_per_sm<T>())
    flat_quantize_kernel(FlatSource<T> source, GlobalScale scale, Nvfp4Recipe recipe,
                         Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const bool early = scale.kind == GlobalScale::kPartials;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Block<T> next;
  if (early && block < source.blocks) next = source.fetch(block);
  wait_for_previous();
  let_next_begin();
  if (!early && block < source.blocks) next = source.fetch(block);
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
#pragma unroll 1
  while (block < source.blocks) {
    const Block<T> x = next;
    const int64_t here = block;
    block += step;
    if (block < source.blocks) next = source.fetch(block);
    const Nvfp4Codes codes = nvfp4_quantize_block(x, block_amax(x), encoding);
    reinterpret_cast<uint2*>(out.codes)[here] = make_uint2(codes.low, codes.high);
    out.scales[here] = codes.scale;
  }
}

// The same for many blocks, by a block of threads for each piece of work: the hardware starts them
// in order, so that what is read and written at a time lies together. After an amax it begins at
// the end, which is in the L2 cache still.
template <class T>
constexpr int kOnceShare = sizeof(T) == 2 ? 2 : 1;  // blocks of a thread
template <class T>
__global__ void __launch_bounds__(kThreads, flat_blocks_per_sm<T>())
    flat_quantize_once_kernel(FlatSource<T> source, GlobalScale scale, Nvfp4Recipe recipe,
                              Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  constexpr int kShare = kOnceShare<T>;
  const bool early = scale.kind == GlobalScale::kPartials;
  const uint32_t turn = early ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t first = static_cast<int64_t>(turn) * (kThreads * kShare) + threadIdx.x;
  Block<T> x[kShare];
  auto fetch = [&] {
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      if (first + k * kThreads < source.blocks) x[k] = source.fetch(first + k * kThreads);
    }
  };
  if (early) fetch();
  wait_for_previous();
  let_next_begin();
  if (!early) fetch();
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
#pragma unroll
  for (int k = 0; k < kShare; ++k) {
    const int64_t block = first + k * kThreads;
    if (block >= source.blocks) break;
    const Nvfp4Codes codes = nvfp4_quantize_block(x[k], block_amax(x[k]), encoding);
    reinterpret_cast<uint2*>(out.codes)[block] = make_uint2(codes.low, codes.high);
    out.scales[block] = codes.scale;
  }
}

// A walk over swizzled scales by sectors, the 32 bytes that memory is written in: those of 4 blocks
// of the rows {r, r + 1} + {0, 32, 64, 96} for an even r. A warp takes one, a lane a byte of it,
// and the next warp the same rows of the next blocks. What all threads have in common is worked out
// on the host, divisions above all.
struct SectorWalk {
  Divisor tiles;   // of four blocks, in a row
  uint32_t pitch;  // from the scales of 128 rows to those of the next, less those of a tile
  uint32_t step_rows, step_tiles;

  // For as many warps.
  SectorWalk(uint32_t tiles, int64_t warps) : tiles(tiles), pitch((tiles - 1) * 512) {
    step_rows = this->tiles.quotient_of(static_cast<uint32_t>(warps));
    step_tiles = static_cast<uint32_t>(warps) - step_rows * tiles;
  }
};

// Where a lane of such a walk is.
struct SectorPlace {
  uint32_t rows, tile;  // eight rows and four blocks, counted

  __device__ __forceinline__ SectorPlace(const SectorWalk& walk, uint32_t sector) {
    rows = walk.tiles.quotient_of(sector);
    tile = sector - rows * walk.tiles.divisor;
  }
  __device__ __forceinline__ void next(const SectorWalk& walk) {
    tile += walk.step_tiles;
    const bool past = tile >= walk.tiles.divisor;
    tile -= past ? walk.tiles.divisor : 0;
    rows += walk.step_rows + (past ? 1 : 0);
  }
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ uint32_t row() const {
    return rows * 2 + (rows >> 4) * 96 + (lane() >> 4) + (lane() & 12) * 8;
  }
  __device__ __forceinline__ uint32_t block() const { return tile * 4 + (lane() & 3); }
  // swizzle_128x4 of the two.
  __device__ __forceinline__ uint32_t scale(const SectorWalk& walk) const {
    return rows * 32 + (rows >> 4) * walk.pitch + tile * 512 + lane();
  }
};

// The blocks of a FlatSource by row, of which there are less than 2^32.
template <class T>
struct FlatRows {
  using Value = Block<T>;
  using Fetched = Block<T>;
  using Row = uint32_t;  // its first block
  static constexpr bool kReadsOnlyInputs = true;
  FlatSource<T> source;
  uint32_t width;

  __device__ __forceinline__ Row row(uint32_t r) const { return r * width; }
  template <bool kWhole>
  __device__ __forceinline__ Fetched fetch(Row first, uint32_t block) const {
    return source.fetch(first + block);
  }
  template <bool kWhole>
  __device__ __forceinline__ Value value(const Fetched& x, Row, uint32_t) const {
    return x;
  }
};

// As of quantize_kernel, but for a plain tensor as of flat_quantize_kernel.
template <class Source>
constexpr int tiles_blocks_per_sm = quantize_blocks_per_sm<Source>();
template <class T>
constexpr int tiles_blocks_per_sm<PlainSource<T>> = sizeof(T) == 2 ? 5 : 3;
template <class T>
constexpr int tiles_blocks_per_sm<FlatRows<T>> = flat_blocks_per_sm<T>();

// The same for swizzled scales of whole, aligned blocks. Along a row these are 4 bytes here and
// there, of which memory writes no less than 32: so a warp takes what shares a sector. Padding is
// what has no row or block, and is written with the rest.
template <class Source>
__global__ void __launch_bounds__(kThreads, tiles_blocks_per_sm<Source>)
    quantize_tiles_kernel(Source source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out,
                          SectorWalk walk) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const bool early = scale.kind == GlobalScale::kPartials && Source::kReadsOnlyInputs;
  const uint32_t row_count = static_cast<uint32_t>(out.rows);
  const uint32_t width = static_cast<uint32_t>(out.blocks);
  SectorPlace place(walk, blockIdx.x * (kThreads / 32) + threadIdx.x / 32);
  typename Source::Fetched next;
  uint32_t row, block;  // of `next`
  bool exists;
  auto find = [&] {
    row = place.row(), block = place.block();
    exists = row < row_count && block < width;
  };
  auto fetch = [&] {
    if (exists) next = source.template fetch<true>(source.row(row), block);
  };
  find();
  if (early) fetch();
  wait_for_previous();
  let_next_begin();
  if (!early) fetch();
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
#pragma unroll 1
  while (place.rows * 8 < ((row_count + 127) & ~127u)) {
    const typename Source::Fetched fetched = next;
    const uint32_t here = row, here_block = block;
    const bool existed = exists;
    const uint32_t to = place.scale(walk);
    place.next(walk);
    find();
    fetch();
    uint8_t stored = 0;
    if (existed) {
      const typename Source::Value v =
          source.template value<true>(fetched, source.row(here), here_block);
      const Nvfp4Codes codes = nvfp4_quantize_block(v, block_amax(v), encoding);
      reinterpret_cast<uint2*>(out.codes)[here * width + here_block] =
          make_uint2(codes.low, codes.high);
      stored = codes.scale;
    }
    out.scales[to] = stored;
  }
}

// The same as flat_quantize_once_kernel, of as many sectors as a warp has in blocks there: those of
// a block of threads are of the same 128 rows.
template <class T>
__global__ void __launch_bounds__(kThreads, flat_blocks_per_sm<T>())
    tiles_once_kernel(FlatSource<T> source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out,
                      SectorWalk walk) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  constexpr int kShare = kOnceShare<T>;
  const bool early = scale.kind == GlobalScale::kPartials;
  const uint32_t row_count = static_cast<uint32_t>(out.rows);
  const uint32_t width = static_cast<uint32_t>(out.blocks);
  const uint32_t turn = early ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t sector = turn * (kThreads / 32 * kShare) + threadIdx.x / 32;
  Block<T> x[kShare];
  uint32_t at[kShare], to[kShare];
  constexpr uint32_t kNone = ~0u;  // what is no block
#pragma unroll
  for (int k = 0; k < kShare; ++k) {
    const SectorPlace place(walk, sector + k * (kThreads / 32));
    const uint32_t row = place.row(), block = place.block();
    at[k] = row < row_count && block < width ? row * width + block : kNone;
    to[k] = place.scale(walk);
  }
  auto fetch = [&] {
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      if (at[k] != kNone) x[k] = source.fetch(at[k]);
    }
  };
  if (early) fetch();
  wait_for_previous();
  let_next_begin();
  if (!early) fetch();
  const Nvfp4Encoding encoding = tensor_encoding(scale, recipe, reduce);
#pragma unroll
  for (int k = 0; k < kShare; ++k) {
    uint8_t stored = 0;
    if (at[k] != kNone) {
      const Nvfp4Codes codes = nvfp4_quantize_block(x[k], block_amax(x[k]), encoding);
      reinterpret_cast<uint2*>(out.codes)[at[k]] = make_uint2(codes.low, codes.high);
      stored = codes.scale;
    }
    out.scales[to[k]] = stored;
  }
}

// A tensor of one block of values a thread, in one cluster (or one block).
template <class Source>
__global__ void __launch_bounds__(kClusterThreads)
    cluster_kernel(Source source, float divisor, float* gsa, Nvfp4Recipe recipe, Nvfp4Output out) {
#if defined(JITQUANT_HAS_CLUSTERS)
  __shared__ BlockReduce::Scratch scratch;
  __shared__ ClusterMax::Scratch maxima;
  ClusterMax cluster(maxima);
  BlockReduce reduce(scratch);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = i / out.blocks, block = i - row * out.blocks;
  wait_for_previous();
  let_next_begin();

  typename Source::Value v = {};
  if (row < out.rows) {
    const typename Source::Row p = source.row(row);
    v = source.template value<false>(source.template fetch<false>(p, block), p, block);
  }
  Amax<typename Source::Value::Element> mine;
  mine.add(v);
  const float amax = cluster.max(reduce.max(mine.result()));
  if (i == 0) *gsa = div_rn(amax, divisor);
  if (row < out.rows) {
    const Nvfp4Encoding encoding = nvfp4_encoding_from_amax(amax, divisor, recipe);
    OutputRow(out, row).store(block, scale_place(out, block),
                              nvfp4_quantize_block(v, block_amax(v), encoding));
  }
  zero_padding(out);
#endif
}

// Calls f(Element{}) with the element type of `dtype`.
template <class F>
cudaError_t dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(Bf16{});
    case DType::kFloat16:
      return f(Fp16{});
    case DType::kFloat32:
      return f(float{});
  }
  return cudaErrorInvalidValue;
}

// Calls f(source) with the source of a gate-and-up projection.
template <class F>
cudaError_t deinterleaved(const Matrix& fused, int64_t run, bool activate, F&& f) {
  return dispatch(fused.dtype, [&](auto element) {
    using T = decltype(element);
    return f(DeinterleaveSource<T>(fused, run, activate));
  });
}

// Whether a matrix is whole blocks that follow each other without a gap.
inline bool is_flat(const Matrix& m) {
  return m.cols % 16 == 0 && m.vector && m.n2 == m.rows && (m.s2 == m.cols || m.rows < 2);
}
template <class T>
FlatSource<T> flat_source(const Matrix& m) {
  return {static_cast<const T*>(m.data), m.rows * (m.cols / 16)};
}

// How a tensor of rows x cols values gets its own gsa, from its size and the device alone:
//   one launch    from compute capability 9.0 on, up to 8 x 512 blocks of 16 values: a cluster of
//                 blocks, one block of values a thread
//   two launches  anything else, with a workspace of `partials` floats
// On an H200 the cluster takes 1.9 to 2.4 us where two launches take 2.5. A cluster of 16 blocks
// would save 0.2 us for twice as many values and is not sure to fit; a cooperative launch that
// keeps up to 29 MB on the chip was slower than two overlapped launches at every size
// (docs/performance.md).
struct AmaxPlan {
  int cluster;   // blocks of the one launch; 0: two launches
  int partials;  // of two launches
};

inline int amax_grid(int64_t rows, int64_t cols) {
  // Launch 1 leaves room on a multiprocessor for the blocks of launch 2.
  const int64_t items = (rows * blocks_of(cols) + 4 * kThreads - 1) / (4 * kThreads);
  const int64_t grid = persistent_grid(items, 2);
  return static_cast<int>(grid < kMaxPartials ? grid : kMaxPartials);
}

inline AmaxPlan amax_plan(int64_t rows, int64_t cols) {
  const int64_t blocks = rows * blocks_of(cols);
  const DeviceTraits device = device_traits();
  if (device.major >= 9 && blocks <= kClusterBlocks * kClusterThreads) {
    int cluster = 1;
    while (cluster * kClusterThreads < blocks) cluster *= 2;
    return {cluster, 0};
  }
  return {0, amax_grid(rows, cols)};
}

template <bool kNan = false, class Source>
cudaError_t launch_amax(const Source& source, float* partials, int count, cudaStream_t stream) {
  return launch<&amax_kernel<Source, kNan>>({count, 2 * kThreads, Start::kOverlapped}, stream,
                                            source, partials);
}

constexpr int64_t kPiece = 96;  // blocks of a row that are worth a block of threads of their own

// Where a block of values is more to load, the walk is little of the time, and blocks of threads
// that do not fill a multiprocessor cost more than it does.
template <class Source>
constexpr bool kByPieces = sizeof(typename Source::Fetched) <= 32;

// Sources of which quantize_whole_kernel is compiled, whose values are what is loaded alone.
template <class Source>
constexpr bool kHasWhole = false;
template <class T>
constexpr bool kHasWhole<DeinterleaveSource<T>> = true;

// The same for what the stores of scales cost.
template <class Source>
constexpr bool kByTiles = sizeof(typename Source::Fetched) <= 64;

// Whether scales are those of the kernels that take sectors: swizzled, of one gsa, and so many that
// their places fit in 32 bits.
inline bool by_tiles(const GlobalScale& scale, const Nvfp4Output& out) {
  const int64_t rows = (out.rows + 127) / 128 * 128;
  return out.swizzled && !is_by_row(scale) && rows <= UINT32_MAX / padded_blocks(out);
}

constexpr int kWarps = kThreads / 32;

// Of the scales, padding included: 16 for each tile of 128 rows by 4 blocks.
inline int64_t sectors(const Nvfp4Output& out) {
  return (out.rows + 127) / 128 * (padded_blocks(out) / 4) * (512 / 32);
}
inline SectorWalk sector_walk(const Nvfp4Output& out, int64_t grid) {
  return SectorWalk(static_cast<uint32_t>(padded_blocks(out) / 4), grid * kWarps);
}

template <class Source>
cudaError_t launch_tiles(const Source& source, const GlobalScale& scale, Nvfp4Recipe recipe,
                         const Nvfp4Output& out, cudaStream_t stream) {
  const int64_t grid = persistent_grid(sectors(out) / kWarps, tiles_blocks_per_sm<Source>);
  return launch<&quantize_tiles_kernel<Source>>({grid, kThreads, Start::kOverlapped}, stream,
                                                source, scale, recipe, out, sector_walk(out, grid));
}

// The kernel for one gsa (or a given one for each row), from the source, its shape and the device:
//   quantize_tiles_kernel   swizzled scales of whole, aligned blocks, of one gsa
//   quantize_pieces_kernel  other rows of whole, aligned blocks, of 1536 columns and more
//   quantize_kernel         anything else
// A plain tensor without a gap has flat_quantize_kernel before these (launch_quantize_plain).
template <class Source>
cudaError_t launch_quantize(const Source& source, const GlobalScale& scale, Nvfp4Recipe recipe,
                            const Nvfp4Output& out, cudaStream_t stream) {
  if constexpr (kByTiles<Source>) {
    if (source.whole() && by_tiles(scale, out)) {
      return launch_tiles(source, scale, recipe, out, stream);
    }
  }
  if constexpr (kByPieces<Source>) {
    if (source.whole() && out.blocks >= kPiece) {
      const int64_t pieces = (out.blocks + kThreads - 1) / kThreads;
      const int threads = static_cast<int>(((out.blocks + pieces - 1) / pieces + 31) / 32 * 32);
      const int64_t grid = persistent_grid(
          out.rows * pieces, blocks_per_sm<&quantize_pieces_kernel<Source>>(threads, 0));
      return launch<&quantize_pieces_kernel<Source>>({grid, threads, Start::kOverlapped}, stream,
                                                     source, scale, recipe, out,
                                                     static_cast<int>(pieces));
    }
  }
  const int64_t items = (out.rows * out.blocks + kThreads - 1) / kThreads;
  if constexpr (kHasWhole<Source>) {
    if (source.whole() && source.row.even && !out.swizzled && items > 0 &&
        items < (int64_t{1} << 31) / kThreads) {
      const auto start = [&](auto activates) {
        constexpr auto kKernel = &quantize_whole_kernel<Source, activates>;
        const int64_t grid = persistent_grid(items, blocks_per_sm<kKernel>(kThreads, 0));
        return launch<kKernel>({grid, kThreads, Start::kOverlapped}, stream, source, scale, recipe,
                               out, WholeWalk(out.rows, out.blocks, grid));
      };
      return source.activate ? start(std::true_type()) : start(std::false_type());
    }
  }
  const int64_t grid = persistent_grid(items, blocks_per_sm<&quantize_kernel<Source>>(kThreads, 0));
  return launch<&quantize_kernel<Source>>({grid, kThreads, Start::kOverlapped}, stream, source,
                                          scale, recipe, out);
}

template <class Source>
cudaError_t launch_cluster(const Source& source, int cluster, float divisor, float* gsa,
                           Nvfp4Recipe recipe, const Nvfp4Output& out, cudaStream_t stream) {
  return launch<&cluster_kernel<Source>>(cluster_shape(cluster, out.rows * out.blocks), stream,
                                         source, divisor, gsa, recipe, out);
}

// The same of a plain tensor.
template <class T, bool kNan = false>
cudaError_t launch_amax_plain(const Matrix& x, float* partials, int count, cudaStream_t stream) {
  return is_flat(x) ? launch_amax<kNan>(flat_source<T>(x), partials, count, stream)
                    : launch_amax<kNan>(PlainSource<T>(x), partials, count, stream);
}

// Up to so many pieces of work for each block of threads a grid that stays is the faster one: 2300
// rows of 7168 in 16 bits on an H200.
template <class T>
constexpr int kStayingTurns = sizeof(T) == 2 ? 6 : 1;

template <class T>
cudaError_t launch_quantize_plain(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream) {
  const bool tiles = by_tiles(scale, out);
  if (is_by_row(scale) || (out.swizzled && !tiles) || !is_flat(x)) {
    return launch_quantize(PlainSource<T>(x), scale, recipe, out, stream);
  }
  const FlatSource<T> source = flat_source<T>(x);
  const int64_t items = tiles ? sectors(out) / kWarps : (source.blocks + kThreads - 1) / kThreads;
  const LaunchShape once = {(items + kOnceShare<T> - 1) / kOnceShare<T>, kThreads,
                            Start::kOverlapped};
  const bool stays = items <= persistent_grid(items, flat_blocks_per_sm<T>()) * kStayingTurns<T>;
  if (tiles) {
    if (stays) {
      const FlatRows<T> rows = {source, static_cast<uint32_t>(out.blocks)};
      return launch_tiles(rows, scale, recipe, out, stream);
    }
    return launch<&tiles_once_kernel<T>>(once, stream, source, scale, recipe, out,
                                         sector_walk(out, once.grid));
  }
  if (stays) {
    return launch<&flat_quantize_kernel<T>>(
        {persistent_grid(items, flat_blocks_per_sm<T>()), kThreads, Start::kOverlapped}, stream,
        source, scale, recipe, out);
  }
  return launch<&flat_quantize_once_kernel<T>>(once, stream, source, scale, recipe, out);
}

}  // namespace jitquant
