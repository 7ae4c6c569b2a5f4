// 8 bits with one scale per group of a row: neighboring threads take a block of 16 values each and
// share the group's amax through shuffles. Templates over the source of the values (sources.cuh).
// launch_groups picks one of three kernels:
//   few_groups_kernel  few groups of 128 without gaps, with scales in fp32 (few.cuh)
//   group_kernel       tensors of whole blocks, all rows of which are written
//   group_walk_kernel  anything else
#pragma once

#include "few.cuh"

namespace jitquant {

// Whether the loaded data are the values.
template <class Source>
constexpr bool kIsPlain = std::is_same<typename Source::Fetched, typename Source::Value>::value;

// A row, if rows are `step` elements apart.
template <class Source>
__device__ __forceinline__ typename Source::Row row_of(const Source& source, uint32_t row,
                                                       uint32_t step) {
  const auto* const p = source.row.data + static_cast<uint64_t>(row) * step;
  if constexpr (std::is_pointer<typename Source::Row>::value) {
    return p;
  } else {
    return source.row.with(p, row);
  }
}

// ---- whole blocks ------------------------------------------------------------------------------

// Consecutive rows of blocks, padded to whole groups.
struct GroupPieces {
  uint32_t count;   // blocks of all rows including padding; whole groups
  uint32_t blocks;  // per row, without padding
  Divisor width;    // blocks per row, with padding
  int log_lanes;    // log2 of the blocks per group
  bool padded;
  uint32_t source_step, data_step;  // from one row to the next, in elements
  ScalePlaces scales;
};

__device__ __forceinline__ int64_t rows_there(const RowCounts& c, int64_t batch, int64_t rows) {
  if (c.counts == nullptr) return rows;
  const int64_t count = integer_at<true>(c.counts, c.wide, batch);
  return count < rows ? count : rows;
}

// The amaxes of the groups of a thread's blocks.
template <class Value>
__device__ __forceinline__ void group_amaxes(const Value (&x)[1], int lanes, float (&b)[1]) {
  b[0] = lanes_amax(block_amax(x[0]), lanes);
}
// 16 bits each: both in one word.
template <class T>
__device__ __forceinline__ void group_amaxes(const Block<T> (&x)[2], int lanes, float (&b)[2]) {
  uint32_t pairs[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) pairs[k] = block_amax_pair(x[k]);
  const uint32_t both = pair_max<T, true>(byte_permute(pairs[0], pairs[1], 0x5410),
                                          byte_permute(pairs[0], pairs[1], 0x7632));
  const Block<T> maxima = {{lanes_amax_pair<T>(both, lanes)}};
#pragma unroll
  for (int k = 0; k < 2; ++k) b[k] = magnitude_of(maxima, k);
}

// Zeroes the padding of scales that are not swizzled. Called by all threads of the launch.
__device__ __forceinline__ void zero_grid_padding(const GroupScales& s, const GroupPieces& pieces) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  if (s.format == ScaleFormat::kPacked) {
    const uint32_t rows = static_cast<uint32_t>(s.batches * s.rows);
#pragma unroll 1
    for (int64_t row = first; row < rows; row += step) {
#pragma unroll 1
      for (uint32_t group = static_cast<uint32_t>(s.groups); group & 3; ++group) {
        place_scale<ScaleKind::kOther>(s, pieces.scales, static_cast<uint32_t>(row), group, {});
      }
    }
  }
  if (s.grid.stored_rows == s.rows) return;
  uint32_t* const scales = static_cast<uint32_t*>(s.data);  // or floats
#pragma unroll 1
  for (int64_t col = first; col < s.batches * s.grid.stored_cols; col += step) {
#pragma unroll 1
    for (int64_t row = s.rows; row < s.grid.stored_rows; ++row) {
      scales[col * s.grid.stored_rows + row] = 0;
    }
  }
}

// Minimum thread blocks of group_kernel per SM: limits the registers.
template <class Source>
constexpr int group_blocks_per_sm(int at_once) {
  if (wants_registers<Source>(0)) return pieces_per_sm(3);
  if (at_once == 2 && kInPairs<Source>) {
    return std::is_same<typename Source::Element, Fp16>::value ? 5 : 6;  // 96 or 80 registers
  }
  return pieces_per_sm(at_once == 2 || sizeof(typename Source::Fetched) <= 32 ? 5 : 4);
}

// Each thread has kAtOnce blocks of values, kPieceThreads apart or where the source has a pair. One
// thread block per piece of work: the hardware starts them in order, so that concurrent reads and
// writes are close together. With few rows, fetching instructions takes most of the time, so there
// are few of them. kCounted: invalid rows are written with zeros. kMxfp8: MXFP8; otherwise scales
// are not single bytes.
template <class Source, EightBit kFormat, int kAtOnce, bool kCounted, bool kMxfp8>
__global__ void __launch_bounds__(kPieceThreads, group_blocks_per_sm<Source>(kAtOnce))
    group_kernel(Source source, uint8_t* data, GroupNumerics numerics, GroupScales scales,
                 RowCounts counts, GroupPieces pieces) {
  numerics.format = kFormat;
  numerics.bounded = false;
  if (kMxfp8) numerics.recipe = GroupRecipe::kDeepGemm, numerics.scale_format = ScaleFormat::kE8m0;
  const int lanes = 1 << pieces.log_lanes;
  const uint32_t first = blockIdx.x * (kPieceThreads * kAtOnce) + threadIdx.x;
  constexpr bool kPairs = kAtOnce == 2 && kInPairs<Source>;
  uint32_t index[kAtOnce], row[kAtOnce], block[kAtOnce];
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    index[k] = first + k * kPieceThreads;
    if constexpr (kPairs) {
      index[k] = source.pair_block(blockIdx.x * kPieceThreads + threadIdx.x, k);
    }
    const uint32_t i = min(index[k], pieces.count - 1);
    row[k] = pieces.width.quotient_of(i);
    block[k] = i - row[k] * pieces.width.divisor;
  }
  // Padding repeats the last block: it belongs to the same group.
  const auto row_at = [&](int k) { return row_of(source, row[k], pieces.source_step); };
  const auto block_at = [&](int k) { return min(block[k], pieces.blocks - 1); };
  if (!kCounted && (kIsPlain<Source> ? is_first() : is_small_grid())) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) source.template prefetch<true>(row_at(k), block_at(k));
  }
  wait_for_previous();
  let_next_begin();
  bool there[kAtOnce];
  typename Source::Fetched fetched[kAtOnce];
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    there[k] = true;
    if constexpr (kCounted) {
      const uint32_t batch = pieces.scales.batch_rows.quotient_of(row[k]);
      there[k] = row[k] - batch * pieces.scales.batch_rows.divisor <
                 rows_there(counts, batch, scales.rows);
    }
    if constexpr (kTogether<Source> || (kCounted && !kIsPlain<Source>)) fetched[k] = {};
    if (there[k] && (!kTogether<Source> || block[k] < pieces.blocks))
      fetched[k] = source.template fetch<true>(row_at(k), block_at(k));
  }
  typename Source::Value x[kAtOnce];
  float amax[kAtOnce];
  int group_lanes = lanes, groups = kAtOnce;  // of a thread
  if constexpr (kPairs) {
    const int64_t blocks[2] = {block[0], block[1]};
    source.template values<2>(fetched, blocks, x);
    amax[0] = block_amax(x[0]), amax[1] = block_amax(x[1]);
    // The lanes up to a thread's second block have all of a smaller group.
    if (lanes > static_cast<int>(index[1] - index[0])) {
      amax[0] = amax_keep_nan(amax[0], amax[1]);
      group_lanes = lanes / 2, groups = 1;
    }
    amax[0] = lanes_amax(amax[0], group_lanes);
    amax[1] = groups == 1 ? amax[0] : lanes_amax(amax[1], group_lanes);
  } else {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      x[k] = source.template value<true>(fetched[k], nullptr, block[k]);
    }
    group_amaxes(x, lanes, amax);
  }
  GroupScale g[kAtOnce];
  group_scales(numerics, amax, g);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    if (!there[k]) g[k] = {};
  }
  // The lanes of a group take turns storing the scales of its blocks.
#pragma unroll 1
  for (int turn = threadIdx.x & (group_lanes - 1); turn < groups; turn += group_lanes) {
    constexpr int kLast = kAtOnce - 1;
    const bool is_first = turn == 0;
    const GroupScale scale = {is_first ? g[0].scale_inv : g[kLast].scale_inv, 0.0f,
                              is_first ? g[0].exponent : g[kLast].exponent};
    if ((is_first ? index[0] : index[kLast]) < pieces.count) {
      place_scale<kMxfp8 ? ScaleKind::kE8m0 : ScaleKind::kOther>(
          scales, pieces.scales, is_first ? row[0] : row[kLast],
          (is_first ? block[0] : block[kLast]) >> pieces.log_lanes, scale);
    }
  }
  const bool by_division = divides(numerics);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const float factor = by_division ? group_reciprocal(g[k].scale_inv) : g[k].factor;
    uint4 codes = encode_block<kFormat>(x[k], numerics, by_division, factor, g[k].scale_inv);
    if (!there[k]) codes = make_uint4(0, 0, 0, 0);
    if (index[k] < pieces.count && block[k] < pieces.blocks) {
      uint8_t* const to = data + static_cast<uint64_t>(row[k]) * pieces.data_step;
      reinterpret_cast<uint4*>(to)[block[k]] = codes;
    }
  }
  if (pieces.padded) {
    if constexpr (kMxfp8) {
      zero_scale_padding(scales);  // only swizzled scales have any
    } else {
      zero_grid_padding(scales, pieces);
    }
  }
}

// ---- anything else -----------------------------------------------------------------------------

constexpr int kWalkThreads = 128;

// How the lanes of a warp divide a tile: 2^log_lanes neighbors take neighboring blocks of a row,
// and the same number of next lanes takes the next row.
struct WarpShape {
  int log_lanes, log_rows;
  int group_lanes;  // how many of these share a scale
};

// `together`: blocks of a row that a warp takes together.
inline WarpShape warp_shape(const GroupOutput& out, int64_t group_blocks, int64_t together) {
  const int64_t blocks =
      (blocks_of(out.data.cols) + group_blocks - 1) / group_blocks * group_blocks;
  const GroupScales& s = out.scales;
  // If the scales of neighboring rows are adjacent, four rows store them together.
  int log_rows = s.swizzled || s.grid.order == ScaleOrder::kColumn ? 2 : 0;
  const int64_t least = group_blocks > together ? group_blocks : together;
  auto fits = [&](int log) { return (32 >> log) >= least; };
  while (!fits(log_rows)) --log_rows;
  while (log_rows < 5 && fits(log_rows + 1) && (32 >> (log_rows + 1)) >= blocks) ++log_rows;
  while (log_rows > 0 && (int64_t{1} << (log_rows - 1)) >= s.rows) --log_rows;
  return {5 - log_rows, log_rows, static_cast<int>(group_blocks)};
}

template <class Source>
constexpr int walk_blocks_per_sm() {
  if (sizeof(typename Source::Element) == 4) return 4;
  if (wants_registers<Source>(0)) return 4;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 5;  // nvcc needs more registers for this architecture
#endif
  return 6;
}

// One warp per tile. Loads the next tile while it computes the current one.
template <class Source>
__global__ void __launch_bounds__(kWalkThreads, walk_blocks_per_sm<Source>())
    group_walk_kernel(Source source, RowPointer<uint8_t> data, bool vector, GroupNumerics numerics,
                      GroupScales scales, RowCounts counts, WarpShape shape, TileGrid grid,
                      bool uneven) {
  const int lane = threadIdx.x & 31;
  const int lane_row = lane >> shape.log_lanes;
  const int lane_block = lane & ((1 << shape.log_lanes) - 1);
  const uint32_t blocks = static_cast<uint32_t>(blocks_of(source.cols));
  const auto tiles_of = [&](uint32_t batch) {
    const int64_t there = rows_there(counts, batch, scales.rows);
    const int64_t rest = (int64_t{1} << shape.log_rows) - 1;
    return static_cast<uint32_t>(there > 0 ? (there + rest) >> shape.log_rows : 0);
  };
  struct Item {
    uint32_t batch, block;
    int64_t row;
    bool there;
    typename Source::Fetched fetched;
  };
  wait_for_previous();
  let_next_begin();
  TileWalk walk(grid, blockIdx.x * (kWalkThreads / 32) + (threadIdx.x >> 5), uneven, tiles_of);
  const auto take = [&] {
    Item item = {walk.batch,
                 (walk.chunk << shape.log_lanes) + lane_block,
                 (static_cast<int64_t>(walk.tile) << shape.log_rows) + lane_row,
                 false,
                 {}};
    if (walk.batch < grid.batches) {
      item.there = item.row < rows_there(counts, walk.batch, scales.rows);
      if (item.there && item.block < blocks) {
        item.fetched = source.template fetch<false>(source.row(walk.batch * scales.rows + item.row),
                                                    item.block);
      }
    }
    return item;
  };
  Item next = take();
#pragma unroll 1
  while (next.batch < grid.batches) {
    const Item item = next;
    walk.next(grid, uneven, tiles_of);
    next = take();
    const auto x = source.template value<false>(item.fetched, nullptr, item.block);
    const GroupScale g = group_scale(numerics, lanes_amax(block_amax(x), shape.group_lanes));
    if (item.row >= scales.rows) continue;
    const bool write = item.there || counts.zero_padding;
    const uint32_t group = item.block / shape.group_lanes;
    if ((lane_block & (shape.group_lanes - 1)) == 0 && group < scales.groups) {
      store_scale(scales, item.batch, item.row, group, g, !item.there, write);
    }
    if (write && item.block < blocks) {
      const int64_t column = int64_t{16} * item.block;
      store_bytes<false>(data(item.batch * scales.rows + item.row) + column, source.cols - column,
                         vector,
                         item.there ? encode_block(x, numerics, g) : make_uint4(0, 0, 0, 0));
    }
  }
  zero_scale_padding(scales);
}

// ---- launching ---------------------------------------------------------------------------------

#ifndef __CUDACC_RTC__
template <class Source>
cudaError_t launch_group_walk(const Source& source, const GroupNumerics& numerics,
                              const GroupOutput& out, const RowCounts& counts, int64_t group_size,
                              cudaStream_t stream) {
  const GroupScales& s = out.scales;
  const WarpShape shape = warp_shape(out, group_size / 16, lanes_together(source));
  // Skips rows that are left unchanged, if no padding follows them.
  const bool uneven =
      counts.counts != nullptr && !counts.zero_padding && s.grid.stored_rows == s.rows;
  TileGrid grid = {};
  grid.batches = static_cast<uint32_t>(s.batches);
  const int64_t rest = (int64_t{1} << shape.log_rows) - 1;
  grid.tiles = static_cast<uint32_t>((s.rows + rest) >> shape.log_rows);
  grid.chunks = static_cast<uint32_t>((blocks_of(source.cols) + (1 << shape.log_lanes) - 1) >>
                                      shape.log_lanes);
  constexpr int kWarps = kWalkThreads / 32;
  const int per_sm = blocks_per_sm<&group_walk_kernel<Source>>(kWalkThreads, 0);
  const int64_t ctas = persistent_grid((grid.items() + kWarps - 1) / kWarps, per_sm);
  grid.set_step(ctas * kWarps, uneven);
  return launch<&group_walk_kernel<Source>>({ctas, kWalkThreads, Start::kOverlapped}, stream,
                                            source, RowPointer<uint8_t>(out.data), out.data.vector,
                                            numerics, s, counts, shape, grid, uneven);
}

// Up to this many blocks of values per SM, a thread of group_kernel has one block.
constexpr int64_t kFewBlocks = 5 * kThreads;

// Whether rows are evenly strided with a stride that fits in 32 bits.
inline bool is_even(bool even, int64_t step) {
  return even && step >= 0 && step < (int64_t{1} << 32);
}

// Runs group_kernel if every row is written, consists of whole blocks and is evenly strided, and
// the format alone bounds elements; otherwise group_walk_kernel, which skips rows that are left
// unchanged. kMxfp8: elements are FP8
// and there are no counts, so that no kernels are compiled for these.
template <bool kMxfp8 = false, class Source>
cudaError_t launch_groups(const Source& source, const GroupNumerics& numerics,
                          const GroupOutput& out, const RowCounts& counts, int64_t group_size,
                          cudaStream_t stream) {
  const GroupScales& s = out.scales;
  const RowPointer<uint8_t> data(out.data);
  int log_lanes = 0;
  while ((int64_t{16} << log_lanes) < group_size) ++log_lanes;
  int64_t width = s.groups << log_lanes, blocks = blocks_of(source.cols);
  const int64_t count = source.rows * width;
  if (!source.whole() || !out.data.vector || !counts.zero_padding || numerics.bounded ||
      !is_even(source.row.even, source.row.s2) || !is_even(data.even, data.s2) ||
      count >= (int64_t{1} << 31) - 2 * kThreads) {
    return launch_group_walk(source, numerics, out, counts, group_size, stream);
  }
  const bool by_row = s.grid.order == ScaleOrder::kRow;
  const bool padded = s.swizzled ? s.rows % 128 != 0 || s.groups % 4 != 0
                                 : s.grid.stored_rows != s.rows ||
                                       (s.format == ScaleFormat::kPacked && s.groups % 4 != 0);
  const bool dense = counts.counts == nullptr && width == blocks && by_row && !padded &&
                     !s.swizzled && (source.rows == 1 || data.s2 == source.cols);
  if constexpr (!kMxfp8 && !std::is_same<decltype(eights_of(source)), NoEights>::value) {
    const auto few = eights_of(source);
    if (dense && few.some && group_size == 128 && 2 * count <= kFewEights * sm_count() &&
        s.format <= ScaleFormat::kPowerOfTwo && !divides(numerics)) {
      return launch_few_groups(few.eights, data.data, static_cast<float*>(s.data), 2 * count,
                               numerics, stream);
    }
  }
  if (kIsPlain<Source> && dense && (source.rows == 1 || source.row.s2 == source.cols)) {
    width = blocks = count;  // treats all rows as one
  }
  const GroupPieces pieces = {static_cast<uint32_t>(count),
                              static_cast<uint32_t>(blocks),
                              Divisor(static_cast<uint32_t>(width)),
                              log_lanes,
                              padded,
                              static_cast<uint32_t>(source.row.s2),
                              static_cast<uint32_t>(data.s2),
                              ScalePlaces(s)};
  constexpr int kMost =
      kInPairs<Source> || (kIsPlain<Source> && sizeof(typename Source::Fetched) <= 32) ? 2 : 1;
  const auto launch_blocks = [&](auto format, auto at_once, auto counted) {
    constexpr int kWork = kPieceThreads * at_once;
    LaunchShape shape = {(count + kWork - 1) / kWork, kPieceThreads, Start::kOverlapped};
    // With few rows, most of the scale tiles are padding.
    if (s.swizzled && shape.grid < s.groups / 32) shape.grid = s.groups / 32;
    return launch<&group_kernel<Source, format, at_once, counted, kMxfp8>>(
        shape, stream, source, data.data, numerics, s, counts, pieces);
  };
  return dispatch_format(numerics.format, [&](auto format) {
    constexpr std::integral_constant<int, kMost> most = {};
    if constexpr (kMxfp8 && format == EightBit::kInt8) {
      return cudaErrorInvalidValue;
    } else {
      if constexpr (!kMxfp8) {
        if (counts.counts != nullptr) return launch_blocks(format, most, std::true_type());
      }
      if (count > kFewBlocks * sm_count()) return launch_blocks(format, most, std::false_type());
      return launch_blocks(format, std::integral_constant<int, 1>(), std::false_type());
    }
  });
}
#endif

}  // namespace jitquant
