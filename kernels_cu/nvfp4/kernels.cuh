// The kernels that every NVFP4 pipeline is put together from, templates over where the values come
// from (sources.cuh); those that go row by row are in rows.cuh:
//   amax_kernel       launch 1 of tensor granularity: each block's amax into partials
//   quantize_kernel   launch 2, or the only one where gsa is given: for any source; its kin are
//                     quantize_whole_kernel and quantize_pieces_kernel for whole, aligned blocks,
//                     and those of flat.cuh (a contiguous tensor) and tiles.cuh
//                     (swizzled scales)
//   cluster_kernel    both in one launch, for what a cluster holds in its registers
// The amax goes from launch to launch as partial maxima in a workspace of the call's own, which
// every block of launch 2 reduces for itself: no counter, no memset, nothing that has to be put
// back, so concurrent calls, replayed graphs and launches that never ran cannot disturb each other.
#pragma once

#include "jitquant/cluster.cuh"
#include "tiles.cuh"

namespace jitquant {

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

// Of what walked_amax loads first.
template <class Source>
__device__ __forceinline__ void prefetch_walked(const Source& source) {
  const BlockWalk walk(blocks_of(source.cols));
  if (walk.row < source.rows) source.prefetch(source.row(walk.row), walk.block);
}
template <class T>
__device__ __forceinline__ void prefetch_walked(const FlatSource<T>& source) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (block + i * step < source.blocks) source.prefetch(block + i * step);
  }
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
  prefetch_walked(source);
  wait_for_previous();
  let_next_begin();
  const float amax = walked_amax<kNan>(source, reduce);
  if (threadIdx.x == 0) partials[blockIdx.x] = amax;
}

// The next block is loaded while one is computed: without that the loads of a multiprocessor's
// threads do not cover the latency of the memory.
template <class Source>
__global__ void __launch_bounds__(kThreads, quantize_blocks_per_sm<Source>())
    quantize_kernel(Source source, GlobalScale scale, Nvfp4Recipe recipe, Nvfp4Output out) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  BlockWalk walk(out.blocks);
  typename Source::Fetched next;
  auto fetch = [&] {
    if (walk.row < out.rows) {
      next = source.template fetch<false>(source.row(walk.row), walk.block);
    }
  };
  begin_overlapped(fetch, [&] {
    if constexpr (Source::kReadsOnlyInputs) {
      if (prefetches_first(scale) && walk.row < out.rows) {
        source.prefetch(source.row(walk.row), walk.block);
      }
    }
  });

  const bool by_row = is_by_row(scale);
  Nvfp4Encoding encoding = by_row ? Nvfp4Encoding{} : tensor_encoding(scale, recipe, reduce);
#pragma unroll 1
  while (walk.row < out.rows) {
    const typename Source::Fetched fetched = next;
    const int64_t row = walk.row, block = walk.block;
    walk.next();
    fetch();
    if (by_row) encoding = row_encoding(scale, row, block, recipe);
    const typename Source::Row p = source.row(row);
    const typename Source::Value v = source.template value<false>(fetched, p, block);
    OutputRow(out, row).store(block, scale_place(out, block),
                              quantize_value(source, p, v, encoding));
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
  begin_overlapped(fetch, [&] {
    if constexpr (Source::kReadsOnlyInputs) {
      if (prefetches_first(scale) && walk.row < out.rows && block_here() < width) {
        source.prefetch(source.row(walk.row), block_here());
      }
    }
  });

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
    const typename Source::Row p = source.row(row);
    const typename Source::Value v = source.template value<true>(fetched, p, block);
    OutputRow(out, row).store(block, scale_place(out, block),
                              quantize_value(source, p, v, encoding));
  }
  zero_padding(out);
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
// Calls f(Element{}) with the element type of `dtype`. -DJITQUANT_DTYPE=<number> makes a library
// for that dtype alone, which compiles in less time.
template <class F>
cudaError_t dispatch(DType dtype, F&& f) {
#ifdef JITQUANT_DTYPE
  constexpr DType kOnly = static_cast<DType>(JITQUANT_DTYPE);
  using Only = std::conditional_t<kOnly == DType::kFloat32, float,
                                  std::conditional_t<kOnly == DType::kFloat16, Fp16, Bf16>>;
  return dtype == kOnly ? f(Only{}) : cudaErrorInvalidValue;
#else
  switch (dtype) {
    case DType::kBFloat16:
      return f(Bf16{});
    case DType::kFloat16:
      return f(Fp16{});
    case DType::kFloat32:
      return f(float{});
  }
  return cudaErrorInvalidValue;
#endif
}

// Calls f(source) with the source of a gate-and-up projection.
template <class F>
cudaError_t deinterleaved(const Matrix& fused, int64_t run, bool activate, F&& f) {
  return dispatch(fused.dtype, [&](auto element) {
    using T = decltype(element);
    return f(DeinterleaveSource<T>(fused, run, activate));
  });
}

// How a tensor of rows x cols values gets its own gsa, from its size and the device alone:
//   one launch    from compute capability 9.0 on, up to 8 x 512 blocks of 16 values: a cluster of
//                 blocks, one block of values a thread
//   two launches  anything else, with a workspace of `partials` floats
// On an H200 the cluster takes 1.5 to 2.3 us where two launches take 2.5. A cluster of 16 blocks
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

// Whether such a source is of whole, aligned blocks, there are any, and a grid of as many threads
// counts them in 31 bits.
template <class Source>
bool takes_whole(const Source& source) {
  const int64_t blocks = source.rows * blocks_of(source.cols);
  return source.whole() && source.row.even && blocks > 0 && blocks <= (int64_t{1} << 31) - kThreads;
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

// Up to so many pieces of work for each block of threads a grid that stays is the faster one: 1100
// rows of 7168 in 16 bits on an H200.
template <class T>
constexpr int kStayingTurns = sizeof(T) == 2 ? 3 : 1;

// kAfterAmax: `scale` is that of partials which the launch before writes.
template <class T, bool kAfterAmax>
cudaError_t launch_quantize_plain(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream) {
  const bool tiles = by_tiles(scale, out);
  if (is_by_row(scale) || (out.swizzled && !tiles) || !is_flat(x)) {
    return launch_quantize(PlainSource<T>(x), scale, recipe, out, stream);
  }
  const FlatSource<T> source = flat_source<T>(x);
  const int64_t items = tiles ? sectors(out) / kWarps : (source.blocks + kThreads - 1) / kThreads;
  const bool stays = items <= persistent_grid(items, flat_blocks_per_sm<T>()) * kStayingTurns<T>;
  if (tiles && stays) {
    const FlatRows<T> rows = {source, static_cast<uint32_t>(out.blocks)};
    return launch_tiles(rows, scale, recipe, out, stream);
  }
  if (stays) {
    return launch<&flat_quantize_kernel<T>>(
        {persistent_grid(items, flat_blocks_per_sm<T>()), kThreads, Start::kOverlapped}, stream,
        source, scale, recipe, out);
  }
  constexpr int kBlock = kOnceThreads<kAfterAmax>, kWork = kBlock * kOnceShare<T>;
  LaunchShape shape = {(source.blocks + kWork - 1) / kWork, kBlock, Start::kOverlapped};
  if (tiles) {
    static_assert(kSectorsOfTile % (kWork / 32) == 0, "there are whole pieces of work");
    shape.grid = sectors(out) / (kWork / 32);
    return launch<&tiles_once_kernel<T, kAfterAmax>>(shape, stream, source, scale, recipe, out,
                                                     sector_walk(out, shape.grid));
  }
  return launch<&flat_quantize_once_kernel<T, kAfterAmax>>(shape, stream, source, scale, recipe,
                                                           out);
}
#endif

}  // namespace jitquant
