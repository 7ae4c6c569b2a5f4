// The FP8 kernels with one scale per tensor or per row, as templates over the source of the values
// (sources.cuh). The row-by-row kernel is in rows.cuh.
//   amax_kernel (amax/partials.cuh)   launch 1 of a computed tensor scale
//   cast_kernel                       launch 2, or the only launch if the scale is given and the
//                                     amax is requested; contiguous tensors use flat_cast_kernel
//                                     or flat_cast_watch_kernel
//   cast_piece_kernel                  the only launch if the scale is given and no amax is
//                                     requested; contiguous tensors use flat_cast_kernel
//   cluster_cast_kernel               amax and cast in one launch, for what fits in a cluster
// If the scale is given and the tensor's amax is requested, the launch is cooperative: its barrier
// lets block 0 see the maxima of the others. Launches that are not cooperative have one thread
// block per piece of work: the hardware starts them in order, so that concurrent reads and writes
// are close together. On an H200 this takes 7% less time than a persistent grid.
#pragma once

#include "../amax/partials.cuh"
#include "launch.h"

namespace jitquant {

template <EightBit kFormat>
__device__ __forceinline__ uint4 pack16(const float* v) {
  return make_uint4(pack4<kFormat>(v), pack4<kFormat>(v + 4), pack4<kFormat>(v + 8),
                    pack4<kFormat>(v + 12));
}

// A block times `factor` in 8 bits.
template <class T>
__device__ __forceinline__ uint4 cast_block(const Block<T>& x, float factor, EightBit format) {
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = mul_rn(value_of(x, i), factor);
  if (format == EightBit::kInt8) return pack16<EightBit::kInt8>(v);
  return format == EightBit::kE4m3 ? pack16<EightBit::kE4m3>(v) : pack16<EightBit::kE5m2>(v);
}

// The amax that a scale is computed from, where `amax` is that of the values.
__device__ __forceinline__ float bound_amax(float amax, const Fp8Scale& scale) {
  return bound_amax(amax, scale.least, scale.bound);
}

// The scale of the whole tensor. Called by every thread of the block.
__device__ __forceinline__ float tensor_scale(const Fp8Scale& scale, int partials, EightBit format,
                                              BlockReduce& reduce) {
  const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
  float factor, amax = -1.0f;
  if (scale.kind == Fp8Scale::kAmax) {
    amax = partials_amax(scale.partials, partials, reduce);
    if (writes && scale.amax != nullptr) *scale.amax = amax;
    amax = bound_amax(amax, scale);
    factor = fp8_scale_from_amax(amax, largest(format));
  } else {
    factor = scale.kind == Fp8Scale::kValue ? scale.value : *scale.given;
  }
  if (writes) *scale.scale_inv = scale_inv_of(factor, amax, format);
  return factor;
}

// The amax of a tensor with a given scale, from each thread's share. Called at the end by all
// threads of a grid that has one block or is cooperative.
__device__ __forceinline__ void finish_tensor_amax(float mine, const Fp8Scale& scale,
                                                   BlockReduce& reduce) {
  with_grid_amax(reduce.max(mine), scale.partials, reduce, [&](float amax) { *scale.amax = amax; });
}

// Whether the tensor's scale is given and its amax is requested.
JITQUANT_HD bool watches_tensor(const Fp8Scale& scale) {
  return scale.kind != Fp8Scale::kAmax && !scale.by_row && scale.amax != nullptr;
}

// A given scale, of the tensor or of a row, or the scale of a given amax. The first thread to use
// it writes scale_inv and amax.
__device__ __forceinline__ float given_scale(const Fp8Scale& scale, int64_t row, int64_t block,
                                             EightBit format) {
  const int64_t i = scale.by_row ? row : 0;
  float factor = scale.kind == Fp8Scale::kValue ? scale.value : scale.given[i], amax = -1.0f;
  if (scale.kind == Fp8Scale::kMaxima) {
    amax = bound_amax(factor, scale);
    factor = fp8_scale_from_amax(amax, largest(format));
  }
  if (block == 0 && (scale.by_row || row == 0)) {
    scale.scale_inv[i] = scale_inv_of(factor, amax, format);
  }
  return factor;
}

// One block of values per thread.
template <class Source>
__global__ void __launch_bounds__(kPieceThreads, pieces_per_sm(quantize_blocks_per_sm<Source>()))
    cast_piece_kernel(Source source, Fp8Scale scale, RowPointer<uint8_t> out, bool vector,
                      EightBit format) {
  const int64_t width = blocks_of(source.cols);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kPieceThreads + threadIdx.x;
  const int64_t row = divide_index(i, width), block = i - row * width;
  if (is_small_grid() && row < source.rows) source.prefetch(source.row(row), block);
  wait_for_previous();
  let_next_begin();
  if (row >= source.rows) {
    if (i == 0 && !scale.by_row) given_scale(scale, 0, 0, format);  // there are no rows
    return;
  }
  const typename Source::Row p = source.row(row);
  const typename Source::Fetched fetched = source.template fetch<false>(p, block);
  const float factor = given_scale(scale, row, block, format);
  store_bytes(out(row) + block * 16, source.cols - block * 16, vector,
              cast_block(source.template value<false>(fetched, p, block), factor, format));
}

// cast_piece_kernel for whole, aligned blocks of evenly strided rows (quantize_whole_kernel), in
// few instructions: with few rows, fetching them takes most of the time.
template <class Source, EightBit kFormat>
__global__ void __launch_bounds__(kPieceThreads, pieces_per_sm(quantize_blocks_per_sm<Source>()))
    cast_whole_kernel(Source source, Fp8Scale scale, uint8_t* data, uint32_t data_step,
                      uint32_t count, Divisor width) {
  source.activate = true;
  const uint32_t i = blockIdx.x * kPieceThreads + threadIdx.x;
  const uint32_t row = width.quotient_of(i), block = i - row * width.divisor;
  if (is_small_grid() && i < count) source.prefetch(source.row.even_row(row), block);
  wait_for_previous();
  let_next_begin();
  if (i >= count) return;
  const auto fetched = source.template fetch<true>(source.row.even_row(row), block);
  const float factor = given_scale(scale, row, block, kFormat);
  uint8_t* const to = data + static_cast<uint64_t>(row) * data_step;
  reinterpret_cast<uint4*>(to)[block] =
      cast_block(source.template value<true>(fetched, {}, 0), factor, kFormat);
}

// Blocks per thread, for a given scale and after an amax, where a thread block has more to do
// before its first element.
template <class T, bool kAfterAmax>
constexpr int kCastShare = sizeof(T) == 4 ? 1 : (kAfterAmax ? 4 : 2);

// cast_piece_kernel for a contiguous tensor. `backwards`: from the end to the beginning.
template <class T, bool kAfterAmax>
__global__ void __launch_bounds__(kThreadsPerPiece<kAfterAmax>,
                                  (kAfterAmax ? 4 : 6) * kThreads / kThreadsPerPiece<kAfterAmax>)
    flat_cast_kernel(FlatSource<T> source, Fp8Scale scale, int partials, bool backwards, uint4* out,
                     EightBit format) {
  PieceBlocks<T, kCastShare<T, kAfterAmax>, kThreadsPerPiece<kAfterAmax>> blocks(source, backwards);
  begin_overlapped([&] { blocks.fetch(); },
                   [&] {
                     if (is_first()) blocks.prefetch();
                   });
  float factor;
  if constexpr (kAfterAmax) {
    __shared__ BlockReduce::Scratch scratch;
    BlockReduce reduce(scratch);
    factor = tensor_scale(scale, partials, format, reduce);
  } else {
    factor = given_scale(scale, 0, blocks.first, format);
  }
  blocks.each(
      [&](int64_t block, const Block<T>& x) { out[block] = cast_block(x, factor, format); });
}

// One scale. Loads the next block while it computes the current one.
template <class Source>
__global__ void __launch_bounds__(kThreads, quantize_blocks_per_sm<Source>())
    cast_kernel(Source source, Fp8Scale scale, int partials, RowPointer<uint8_t> out, bool vector,
                EightBit format) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const bool after_amax = scale.kind == Fp8Scale::kAmax;
  BlockWalk walk(blocks_of(source.cols));
  typename Source::Fetched next;
  auto fetch = [&] {
    if (walk.row < source.rows) {
      next = source.template fetch<false>(source.row(walk.row), walk.block);
    }
  };
  begin_overlapped(fetch, [&] {
    if constexpr (Source::kReadsOnlyInputs) {
      if ((after_amax ? is_first() : is_small_grid()) && walk.row < source.rows) {
        source.prefetch(source.row(walk.row), walk.block);
      }
    }
  });

  const float factor = tensor_scale(scale, partials, format, reduce);
  const bool watches = watches_tensor(scale);
  Amax<typename Source::Value::Element, true> amax;
#pragma unroll 1
  while (walk.row < source.rows) {
    const typename Source::Fetched fetched = next;
    const int64_t row = walk.row, block = walk.block;
    walk.next();
    fetch();
    const typename Source::Value v = source.template value<false>(fetched, source.row(row), block);
    if (watches) amax.add(v);
    store_bytes(out(row) + block * 16, source.cols - block * 16, vector,
                cast_block(v, factor, format));
  }
  if (watches) finish_tensor_amax(amax.result(), scale, reduce);
}

// cast_kernel for a contiguous tensor whose scale is given and whose amax is requested.
template <class T>
__global__ void __launch_bounds__(kThreads, flat_blocks_per_sm<T>())
    flat_cast_watch_kernel(FlatSource<T> source, Fp8Scale scale, uint4* out, EightBit format) {
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Block<T> next;
  auto fetch = [&] {
    if (block < source.blocks) next = source.fetch(block);
  };
  begin_overlapped(fetch, [&] {
    if (is_small_grid() && block < source.blocks) source.prefetch(block);
  });
  const float factor = tensor_scale(scale, 0, format, reduce);
  Amax<T, true> amax;
#pragma unroll 1
  while (block < source.blocks) {
    const Block<T> x = next;
    const int64_t here = block;
    block += step;
    fetch();
    amax.add(x);
    out[here] = cast_block(x, factor, format);
  }
  finish_tensor_amax(amax.result(), scale, reduce);
}

// A tensor with one block of values per thread, in one cluster (or one thread block).
template <class Source>
__global__ void __launch_bounds__(kClusterThreads)
    cluster_cast_kernel(Source source, Fp8Scale scale, RowPointer<uint8_t> out, bool vector,
                        EightBit format) {
#if defined(JITQUANT_HAS_CLUSTERS)
  __shared__ BlockReduce::Scratch scratch;
  __shared__ ClusterMax::Scratch maxima;
  ClusterMax cluster(maxima);
  BlockReduce reduce(scratch);
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t width = static_cast<uint32_t>(blocks_of(source.cols));
  const uint32_t row = i / width, block = i - row * width;
  if (row < source.rows) source.prefetch(source.row(row), block);
  wait_for_previous();
  let_next_begin();

  typename Source::Value v = {};
  if (row < source.rows) {
    const typename Source::Row p = source.row(row);
    v = source.template value<false>(source.template fetch<false>(p, block), p, block);
  }
  Amax<typename Source::Value::Element, true> mine;
  mine.add(v);
  const float amax = cluster.max(reduce.max(mine.result()));
  float factor, known = -1.0f;
  if (scale.kind == Fp8Scale::kAmax) {
    known = bound_amax(amax, scale);
    factor = fp8_scale_from_amax(known, largest(format));
  } else {
    factor = scale.kind == Fp8Scale::kValue ? scale.value : *scale.given;
  }
  if (i == 0) {
    if (scale.amax != nullptr) *scale.amax = amax;
    *scale.scale_inv = scale_inv_of(factor, known, format);
  }
  if (row < source.rows) {
    store_bytes(out(row) + block * 16, source.cols - block * 16, vector,
                cast_block(v, factor, format));
  }
#endif
}

// Blocks per SM of a tensor that fits in the L2 cache: 256 KiB of an H200's 464, because the cache
// may hold data twice.
template <class T>
constexpr int kMostCached = (256 << 10) / sizeof(Block<T>);

#ifndef __CUDACC_RTC__
// Whether an amax has to be computed.
inline bool needs_amax(const Fp8Scale& scale) {
  return scale.kind == Fp8Scale::kAmax || scale.amax != nullptr;
}

// The workspace of a call: for maxima that pass between launches or through a barrier.
inline int64_t fp8_partials(const Fp8Scale& scale, int64_t rows, int64_t cols) {
  const bool needed = !scale.by_row && needs_amax(scale) && amax_plan(rows, cols).cluster == 0;
  return needed ? kMaxPartials : 0;
}

// For a grid whose thread blocks wait for each other.
inline void make_cooperative(LaunchShape& shape) {
  if (shape.grid > kMaxPartials) shape.grid = kMaxPartials;
  if (shape.grid > 1) shape.start = Start::kCooperative;
}

// A single casting launch; `partials` is the number that an earlier amax launch wrote.
template <class Source>
cudaError_t launch_cast(const Source& source, const Fp8Scale& scale, int partials,
                        const ElementRows& out, cudaStream_t stream) {
  const int64_t blocks = source.rows * blocks_of(source.cols);
  const RowPointer<uint8_t> to(out.rows);
  LaunchShape shape = {1, kThreads, Start::kOverlapped};
  if (!needs_amax(scale)) {
    if (blocks > 0) shape.grid = (blocks + kPieceThreads - 1) / kPieceThreads;
    shape.block = kPieceThreads;
    if constexpr (kHasWhole<Source>) {
      if (takes_whole(source) && source.activate && out.rows.vector && to.even) {
        return dispatch_format(out.format, [&](auto format) {
          return launch<&cast_whole_kernel<Source, format>>(
              shape, stream, source, scale, to.data, static_cast<uint32_t>(to.s2),
              static_cast<uint32_t>(blocks),
              Divisor(static_cast<uint32_t>(blocks_of(source.cols))));
        });
      }
    }
    return launch<&cast_piece_kernel<Source>>(shape, stream, source, scale, to, out.rows.vector,
                                              out.format);
  }
  shape.grid = persistent_grid((blocks + kThreads - 1) / kThreads,
                               blocks_per_sm<&cast_kernel<Source>>(kThreads, 0));
  if (watches_tensor(scale)) make_cooperative(shape);
  return launch<&cast_kernel<Source>>(shape, stream, source, scale, partials, to, out.rows.vector,
                                      out.format);
}

template <class Source>
cudaError_t launch_cluster_cast(const Source& source, int cluster, const Fp8Scale& scale,
                                const ElementRows& out, cudaStream_t stream) {
  return launch<&cluster_cast_kernel<Source>>(
      cluster_shape(cluster, source.rows * blocks_of(source.cols)), stream, source, scale,
      RowPointer<uint8_t>(out.rows), out.rows.vector, out.format);
}

// launch_cast on a plain tensor.
template <class T>
cudaError_t launch_cast_plain(const Matrix& x, const Fp8Scale& scale, int partials,
                              const ElementRows& out, cudaStream_t stream) {
  if (scale.by_row || !is_flat(x) || !is_flat(out.rows)) {
    return launch_cast(PlainSource<T>(x), scale, partials, out, stream);
  }
  const FlatSource<T> source = flat_source<T>(x);
  uint4* const to = static_cast<uint4*>(const_cast<void*>(out.rows.data));
  LaunchShape shape = {1, kThreads, Start::kOverlapped};
  if (watches_tensor(scale)) {
    constexpr auto kKernel = &flat_cast_watch_kernel<T>;
    shape.grid = persistent_grid((source.blocks + kThreads - 1) / kThreads,
                                 blocks_per_sm<kKernel>(kThreads, 0));
    make_cooperative(shape);
    return launch<kKernel>(shape, stream, source, scale, to, out.format);
  }
  const auto start = [&](auto after_amax) {
    constexpr int kWork = kThreadsPerPiece<after_amax> * kCastShare<T, after_amax>;
    shape.block = kThreadsPerPiece<after_amax>;
    if (source.blocks > 0) shape.grid = (source.blocks + kWork - 1) / kWork;
    // If the tensor does not fit in the L2 cache, its end is what launch 1 left there.
    const bool backwards = after_amax && source.blocks > int64_t{sm_count()} * kMostCached<T>;
    return launch<&flat_cast_kernel<T, after_amax>>(shape, stream, source, scale, partials,
                                                    backwards, to, out.format);
  };
  return scale.kind == Fp8Scale::kAmax ? start(std::true_type()) : start(std::false_type());
}
#endif

}  // namespace jitquant
