// The kernels of all NVFP4 pipelines, as templates over the source of the values (sources.cuh). The
// row-by-row kernels are in rows.cuh.
//   amax_kernel       launch 1 for tensor granularity (amax/partials.cuh)
//   quantize_kernel   launch 2, or the only launch if gsa is given. Takes any source and one of the
//                     walks in walks.cuh. quantize_whole_kernel handles gate and up of whole,
//                     aligned blocks; pieces.cuh handles contiguous tensors of many blocks, and
//                     norms of whole, aligned ones.
//   cluster_kernel    both in one launch, for tensors that fit in the registers of a cluster
#pragma once

#include "../amax/partials.cuh"
#include "jitquant/cluster.cuh"
#include "pieces.cuh"
#include "walks.cuh"

namespace jitquant {

// A persistent grid. Loads the next block while it computes the current one: otherwise there are
// not enough loads in flight on an SM to hide memory latency.
template <class Source, class Walk>
__global__ void __launch_bounds__(kThreads, Walk::template blocks_per_sm<Source>())
    quantize_kernel(Source source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out,
                    typename Walk::Plan plan) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  Walk walk(source, out, plan);
  typename Source::Fetched next;
  auto fetch = [&] {
    if (walk.there()) {
      next = source.template fetch<Walk::kWhole>(source.row(walk.row()), walk.block());
    }
  };
  begin_overlapped(fetch, [&] {
    if constexpr (Source::kReadsOnlyInputs) {
      if (prefetches_first(scale) && walk.there()) {
        source.prefetch(source.row(walk.row()), walk.block());
      }
    }
  });

  const bool by_row = Walk::kByRow && is_by_row(scale);
  Nvfp4Encoding encoding = by_row ? Nvfp4Encoding{} : tensor_encoding(scale, recipe, reduce);
#pragma unroll 1
  while (walk.more()) {
    const typename Source::Fetched fetched = next;
    const typename Walk::Place here = walk.place();
    walk.next();
    fetch();
    Nvfp4Codes codes = {};
    if (here.there()) {
      if (by_row) encoding = row_encoding(scale, here.row, here.block, recipe);
      const typename Source::Row p = source.row(here.row);
      const typename Source::Value v = source.template value<Walk::kWhole>(fetched, p, here.block);
      codes = quantize_value(source, p, v, encoding);
    }
    here.store(out, codes);
  }
  if (Walk::kPads) zero_padding(out);
}

// quantize_kernel for whole, aligned blocks of evenly strided rows with linear scales. All indices
// have 32 bits.
struct WholeWalk {
  uint32_t count;  // of all blocks, below 2^31
  Divisor width;   // blocks per row
  uint32_t step, step_rows, step_blocks;

  WholeWalk(int64_t rows, int64_t width, int64_t grid)
      : count(static_cast<uint32_t>(rows * width)),
        width(static_cast<uint32_t>(width)),
        step(static_cast<uint32_t>(grid) * kPieceThreads) {
    step_rows = this->width.quotient_of(step);
    step_blocks = step - step_rows * this->width.divisor;
  }
};

template <class Source, bool kActivates>
__global__ void __launch_bounds__(kPieceThreads,
                                  pieces_per_sm(sizeof(typename Source::Element) == 2
                                                    ? 4
                                                    : quantize_blocks_per_sm<Source>()))
    quantize_whole_kernel(Source source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out,
                          WholeWalk walk) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  source.activate = kActivates;
  uint32_t i = blockIdx.x * kPieceThreads + threadIdx.x;
  uint32_t row = walk.width.quotient_of(i), block = i - row * walk.width.divisor;
  typename Source::Fetched next;
  auto fetch = [&] {
    if (i < walk.count) next = source.template fetch<true>(source.row.even_row(row), block);
  };
  begin_overlapped(fetch, [&] {
    if (prefetches_first(scale) && i < walk.count) {
      source.prefetch(source.row.even_row(row), block);
    }
  });

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
    const Nvfp4Codes codes = nvfp4_quantize_block<kActivates>(v, amax, encoding);
    reinterpret_cast<uint2*>(out.codes)[here] = make_uint2(codes.low, codes.high);
    out.scales[here] = codes.scale;
  }
}

// A tensor with one block of values per thread, in one cluster (or one thread block).
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
  if (row < out.rows) source.prefetch(source.row(row), block);
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

#ifndef __CUDACC_RTC__
constexpr int64_t kPiece = 96;  // blocks per row that justify thread blocks for pieces of rows

// Normalized rows have a kernel of their own for pieces.
template <class Source>
constexpr bool kIsNormalized = false;
template <class T>
constexpr bool kIsNormalized<NormalizedSource<PlainSource<T>>> = true;

// If a block of values needs more loads, the walk takes little of the time. Then thread blocks that
// do not fill an SM cost more than they save.
template <class Source>
constexpr bool kByPieces = !kIsNormalized<Source> && sizeof(typename Source::Fetched) <= 32;

template <class Source>
cudaError_t launch_sectors(const Source& source, const GlobalScale& scale, Nvfp4Recipe recipe,
                           const Nvfp4Output& out, cudaStream_t stream) {
  using Walk = walks::Sectors;
  const int64_t grid = persistent_grid(sectors(out) / kWarps, Walk::blocks_per_sm<Source>());
  return launch<&quantize_kernel<Source, Walk>>({grid, kThreads, Start::kOverlapped}, stream,
                                                source, scale, recipe, out, sector_walk(out, grid));
}

// Picks the walk for one gsa (or a given gsa per row) by source, shape and device:
//   walks::Sectors   swizzled scales of whole, aligned blocks, with one gsa
//   walks::Pieces    other rows of whole, aligned blocks, with 1536 columns or more
//   walks::Matrix    anything else
// Gate and up, and norms, have kernels of their own for whole, aligned blocks.
// launch_quantize_plain adds walks::Flat for contiguous plain tensors.
template <class Source>
cudaError_t launch_quantize(const Source& source, const GlobalScale& scale, Nvfp4Recipe recipe,
                            const Nvfp4Output& out, cudaStream_t stream) {
  if constexpr (kBySectors<Source>) {
    if (source.whole() && by_sectors(scale, out)) {
      return launch_sectors(source, scale, recipe, out, stream);
    }
  }
  if constexpr (kByPieces<Source>) {
    if (source.whole() && out.blocks >= kPiece) {
      const int64_t pieces = (out.blocks + kThreads - 1) / kThreads;
      const int threads = static_cast<int>(((out.blocks + pieces - 1) / pieces + 31) / 32 * 32);
      const int64_t grid = persistent_grid(
          out.rows * pieces, blocks_per_sm<&quantize_kernel<Source, walks::Pieces>>(threads, 0));
      return launch<&quantize_kernel<Source, walks::Pieces>>({grid, threads, Start::kOverlapped},
                                                             stream, source, scale, recipe, out,
                                                             static_cast<int>(pieces));
    }
  }
  const int64_t blocks = out.rows * out.blocks, items = (blocks + kThreads - 1) / kThreads;
  if constexpr (kIsNormalized<Source>) {
    using T = typename Source::Element;
    if (source.whole() && source.source.row.even && !out.swizzled && blocks > 0 &&
        blocks < int64_t{1} << 31) {
      // Smaller thread blocks where those would not be on all SMs.
      constexpr int kShare = kBlocksPerThread<T>;
      const int threads = items <= kShare * sm_count() ? kPieceThreads : kThreads;
      const int work = threads * kShare;
      return launch<&norm_piece_kernel<T>>(
          {(blocks + work - 1) / work, threads, Start::kOverlapped}, stream, source, scale, recipe,
          out, static_cast<uint32_t>(blocks), Divisor(static_cast<uint32_t>(out.blocks)));
    }
  }
  if constexpr (kHasWhole<Source>) {
    if (takes_whole(source) && !out.swizzled) {
      const auto start = [&](auto activates) {
        constexpr auto kKernel = &quantize_whole_kernel<Source, activates>;
        const int64_t grid =
            persistent_grid((out.rows * out.blocks + kPieceThreads - 1) / kPieceThreads,
                            blocks_per_sm<kKernel>(kPieceThreads, 0));
        return launch<kKernel>({grid, kPieceThreads, Start::kOverlapped}, stream, source, scale,
                               recipe, out, WholeWalk(out.rows, out.blocks, grid));
      };
      return source.activate ? start(std::true_type()) : start(std::false_type());
    }
  }
  constexpr auto kKernel = &quantize_kernel<Source, walks::Matrix>;
  const int64_t grid = persistent_grid(items, blocks_per_sm<kKernel>(kThreads, 0));
  return launch<kKernel>({grid, kThreads, Start::kOverlapped}, stream, source, scale, recipe, out,
                         walks::Matrix::Plan());
}

template <class Source>
cudaError_t launch_cluster(const Source& source, int cluster, float divisor, float* gsa,
                           Nvfp4Recipe recipe, const Nvfp4Output& out, cudaStream_t stream) {
  return launch<&cluster_kernel<Source>>(cluster_shape(cluster, out.rows * out.blocks), stream,
                                         source, divisor, gsa, recipe, out);
}

// Up to this many pieces of work per thread block a persistent grid is faster: 1100 rows of 7168 in
// 16 bits on an H200.
template <class T>
constexpr int kStayingTurns = sizeof(T) == 2 ? 3 : 1;

// kAfterAmax: `scale` refers to partials that the previous launch writes.
template <class T, bool kAfterAmax>
cudaError_t launch_quantize_plain(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream) {
  const bool in_sectors = by_sectors(scale, out);
  if (is_by_row(scale) || (out.swizzled && !in_sectors) || !is_flat(x)) {
    return launch_quantize(PlainSource<T>(x), scale, recipe, out, stream);
  }
  const FlatSource<T> source = flat_source<T>(x);
  const int64_t items =
      in_sectors ? sectors(out) / kWarps : (source.blocks + kThreads - 1) / kThreads;
  const bool stays = items <= persistent_grid(items, flat_blocks_per_sm<T>()) * kStayingTurns<T>;
  if (in_sectors && stays) {
    const FlatRows<T> rows = {source, static_cast<uint32_t>(out.blocks)};
    return launch_sectors(rows, scale, recipe, out, stream);
  }
  if (stays) {
    return launch<&quantize_kernel<FlatSource<T>, walks::Flat>>(
        {persistent_grid(items, flat_blocks_per_sm<T>()), kThreads, Start::kOverlapped}, stream,
        source, scale, recipe, out, walks::Flat::Plan());
  }
  constexpr int kBlock = kThreadsPerPiece<kAfterAmax>, kWork = kBlock * kBlocksPerThread<T>;
  LaunchShape shape = {(source.blocks + kWork - 1) / kWork, kBlock, Start::kOverlapped};
  if (in_sectors) {
    static_assert(kSectorsOfTile % (kWork / 32) == 0, "there are whole pieces of work");
    shape.grid = sectors(out) / (kWork / 32);
    return launch<&sector_piece_kernel<T, kAfterAmax>>(shape, stream, source, scale, recipe, out,
                                                       sector_walk(out, shape.grid));
  }
  return launch<&flat_piece_kernel<T, kAfterAmax>>(shape, stream, source, scale, recipe, out);
}
#endif

}  // namespace jitquant
