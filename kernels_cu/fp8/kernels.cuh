// The FP8 kernels with one scale per tensor or per row, as templates over the source of the values
// (sources.cuh). The row-by-row kernel is in rows.cuh.
//   amax_kernel (amax/partials.cuh)   launch 1 of a computed tensor scale
//   zero_amax_kernel                  launch 1 if the scale is given and the amax is requested
//   cast_kernel                       launch 2; contiguous tensors use flat_cast_kernel
//   cast_piece_kernel                 the only launch if the scale is given and no amax is
//                                     requested; contiguous tensors use flat_cast_kernel
//   cluster_cast_kernel               amax and cast in one launch, for what fits in a cluster
// Most launches have one thread block per piece of work: the hardware starts them in order, so that
// concurrent reads and writes are close together. On an H200 this takes 7% less time than a
// persistent grid. It is also why the requested amax of a tensor with a given scale comes from an
// atomic maximum, not from a barrier of the grid.
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

// Whether the tensor's scale is given and its amax is requested.
JITQUANT_HD bool watches_tensor(const Fp8Scale& scale) {
  return scale.kind != Fp8Scale::kAmax && !scale.by_row && scale.amax != nullptr;
}
// Launch 1 for such a tensor. Launch 2 raises the amax.
__global__ void zero_amax_kernel(float* amax) {
  let_next_begin();
  wait_for_previous();
  *amax = 0.0f;
}
// Called by one thread of each team. The maximum does not depend on the order of teams.
__device__ __forceinline__ void raise_tensor_amax(float amax, const Fp8Scale& scale) {
  atomicMax(reinterpret_cast<uint32_t*>(scale.amax), float_bits(amax));
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

// Where the scale of a contiguous tensor comes from: an argument, the same while the tensor's amax
// is requested, or launch 1.
enum class FlatCast : int { kGiven, kWatched, kAfterAmax };
// Thread blocks that reduce have larger pieces.
template <FlatCast kCast>
constexpr bool kReduces = kCast != FlatCast::kGiven;
template <class T, FlatCast kCast>
constexpr int kCastShare = sizeof(T) == 4 ? 1 : (kReduces<kCast> ? 4 : 2);

// cast_piece_kernel for a contiguous tensor. `backwards`: from the end to the beginning.
template <class T, FlatCast kCast>
__global__ void __launch_bounds__(kThreadsPerPiece<kReduces<kCast>>,
                                  (kReduces<kCast> ? 4 : 6) * kThreads /
                                      kThreadsPerPiece<kReduces<kCast>>)
    flat_cast_kernel(FlatSource<T> source, Fp8Scale scale, int partials, bool backwards, uint4* out,
                     EightBit format) {
  PieceBlocks<T, kCastShare<T, kCast>, kThreadsPerPiece<kReduces<kCast>>> blocks(source, backwards);
  begin_overlapped([&] { blocks.fetch(); },
                   [&] {
                     if (is_first()) blocks.prefetch();
                   });
  const auto cast = [&](float factor, auto&& watch) {
    blocks.each([&](int64_t block, const Block<T>& x) {
      watch(x);
      out[block] = cast_block(x, factor, format);
    });
  };
  if constexpr (kCast == FlatCast::kGiven) {
    cast(given_scale(scale, 0, blocks.first, format), [](const Block<T>&) {});
  } else {
    __shared__ BlockReduce::Scratch scratch;
    BlockReduce reduce(scratch);
    if constexpr (kCast == FlatCast::kAfterAmax) {
      cast(tensor_scale(scale, partials, format, reduce), [](const Block<T>&) {});
    } else {
      Amax<T, true> amax;
      cast(given_scale(scale, 0, blocks.first, format), [&](const Block<T>& x) { amax.add(x); });
      const float most = reduce.max(amax.result());
      if (threadIdx.x == 0) raise_tensor_amax(most, scale);
    }
  }
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
  if (watches) {
    const float most = reduce.max(amax.result());
    if (threadIdx.x == 0) raise_tensor_amax(most, scale);
  }
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
  const bool needed = !scale.by_row && scale.kind == Fp8Scale::kAmax;
  return needed && amax_plan(rows, cols).cluster == 0 ? kMaxPartials : 0;
}

inline cudaError_t launch_zero_amax(const Fp8Scale& scale, cudaStream_t stream) {
  return launch<&zero_amax_kernel>({1, 1, Start::kOverlapped}, stream, scale.amax);
}

// Casts; `partials` is the number that an earlier amax launch wrote.
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
  if (watches_tensor(scale)) {
    const cudaError_t error = launch_zero_amax(scale, stream);
    if (error != cudaSuccess) return error;
  }
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
  const auto start = [&](auto cast) {
    constexpr int kPieceOfThreads = kThreadsPerPiece<kReduces<cast>>;
    constexpr int kWork = kPieceOfThreads * kCastShare<T, cast>;
    const int64_t grid = source.blocks > 0 ? (source.blocks + kWork - 1) / kWork : 1;
    // If the tensor does not fit in the L2 cache, its end is what launch 1 left there.
    const bool backwards =
        cast == FlatCast::kAfterAmax && source.blocks > int64_t{sm_count()} * kMostCached<T>;
    return launch<&flat_cast_kernel<T, cast>>({grid, kPieceOfThreads, Start::kOverlapped}, stream,
                                              source, scale, partials, backwards, to, out.format);
  };
  if (scale.kind == Fp8Scale::kAmax) {
    return start(std::integral_constant<FlatCast, FlatCast::kAfterAmax>());
  }
  if (!watches_tensor(scale)) return start(std::integral_constant<FlatCast, FlatCast::kGiven>());
  const cudaError_t error = launch_zero_amax(scale, stream);
  if (error != cudaSuccess) return error;
  return start(std::integral_constant<FlatCast, FlatCast::kWatched>());
}
#endif

}  // namespace jitquant
