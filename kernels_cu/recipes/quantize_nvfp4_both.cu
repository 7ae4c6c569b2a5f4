// NVFP4 of a matrix and of its transpose, which may be rotated, from one read; and the amaxes of
// both, from another.
#include "jitquant/transposed_tiles.cuh"
#include "kernels.cuh"

namespace jitquant {

// The partials of a matrix and of its transpose: kBothPartials each, of which those without a
// thread block are zero.
struct BothPartials {
  static __device__ __forceinline__ void put(float* partials, float first, float second) {
    if (threadIdx.x == 0) {
      partials[blockIdx.x] = first, partials[kBothPartials + blockIdx.x] = second;
    }
    if (blockIdx.x != 0) return;
    for (int i = gridDim.x + threadIdx.x; i < kBothPartials; i += blockDim.x) {
      partials[i] = partials[kBothPartials + i] = 0.0f;
    }
  }
  // For both, which have the same amax without a rotation.
  static __device__ __forceinline__ void put(float* partials, float amax) {
    put(partials, amax, amax);
  }
};

// The amax of a matrix, and of its transpose after rotation, into the same number of partials each.
// Each thread has 16 rows of the columns in eight bytes.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads, 3)
    both_amax_kernel(TileSource<T> source, Rotation rotation, Divisor wide, uint32_t count,
                     float* maxima) {
  constexpr int kLines = TileMemory<T>::kLines;
  __shared__ BlockReduce::Scratch scratch;
  BlockReduce reduce(scratch);
  wait_for_previous();
  let_next_begin();
  const uint32_t minus = minus_signs(rotation, 0);
  Amax<T> plain, turned;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const uint32_t down = wide.quotient_of(i);
    const int64_t row = int64_t{16} * down, column = int64_t{i - down * wide.divisor} * kLines;
    const T* const p = source.data + row * source.stride + column;
    uint2 rows[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      rows[k] = make_uint2(0, 0);
      if (row + k >= source.rows) continue;
      rows[k] = load_columns<kWhole>(p + k * source.stride, source.cols - column);
    }
    Block<T> x[kLines];
    transpose_words(rows, x);
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      plain.add(x[k]);
      turned.add(rotated<Rotate::kTe>(x[k], rotation, minus));
    }
  }
  const float first = reduce.max(plain.result()), second = reduce.max(turned.result());
  BothPartials::put(maxima, first, second);
}

struct BothOutput {
  Nvfp4Output side[2];
  float* gsa[2];
};

// An amax, or a given gsa.
__device__ __forceinline__ float one_scale(const BothScale& scale, int side, BlockReduce& reduce) {
  const float amax = partials_amax(scale.side[side], scale.count, reduce);
  return scale.from_gsa ? *scale.side[side] : amax;
}

// Combines sixteen rows.
__device__ __forceinline__ float2 error_of_rows(const float2 (&rows)[kSide][kLanes], int first,
                                                int along, bool largest) {
  float2 e[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) e[i] = rows[first + i][along];
#pragma unroll
  for (int half = 8; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float2 other = e[i + half];
      e[i].x = largest ? amax_keep_nan(e[i].x, other.x) : add_rn(e[i].x, other.x);
      e[i].y = largest ? amax_keep_nan(e[i].y, other.y) : add_rn(e[i].y, other.y);
    }
  }
  return e[0];
}

// Whether the scale that maps the amax b to 4 is the better one for a lane's 16x16 values: 16 rows
// of the warp, whose lanes share them.
template <Error kError, class T>
__device__ __forceinline__ bool tile_takes_four(const unsigned char* tiles, float b,
                                                TwoScales scales, const Selection& s, bool scaled,
                                                float2 (&rows)[kSide][kLanes]) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, along = lane & (kLanes - 1);
  const Choice choice(b, scales, s, scaled);
  const auto errors = [&](auto of) {
#pragma unroll 1
    for (int line = 0; line < 4; ++line) {
      const int row = 16 * warp + 4 * (lane >> 3) + line;
      const Block<T> x = read_row<T>(tiles, row, along);
      rows[row][along] = of(x);
    }
    __syncwarp();
    const float2 e = error_of_rows(rows, 16 * warp, along, kError == Error::kLargest);
    __syncwarp();
    return e;
  };
  float2 e = errors([&](const Block<T>& x) { return choice.near_errors<kError>(x); });
  const bool decided = b == 0.0f || (!choice.exact && choice.decided<kError>(e));
  bool four = b != 0.0f && e.y < e.x;
  if (__any_sync(0xffffffffu, !decided)) {
    e = errors([&](const Block<T>& x) { return exact_errors<kError>(x, b, scales, s, scaled); });
    if (!decided) four = e.y < e.x;
  }
  return four;
}

// Minimum thread blocks per SM. Without a limit the fp32 kernels take 68 to 128 registers, so two
// blocks fit.
template <class T>
constexpr int both_blocks_per_sm() {
  return sizeof(T) == 4 ? 1 : 3;
}

// One thread block per tile. A warp takes 16 rows of it and then 16 columns, eight lanes per line.
template <class T, Rotate kRotate, Scaling kScaling, bool kStochastic>
__global__ void __launch_bounds__(kThreads, both_blocks_per_sm<T>())
    nvfp4_both_kernel(TileSource<T> source, BothScale scale, Recipe recipe, BothBytes given,
                      const __grid_constant__ BothOutput out, uint32_t wide) {
  using Memory = TileMemory<T>;
  constexpr int kLines = Memory::kLines;
  // Stochastic rounding goes with the static selections alone, which compare nothing.
  constexpr bool kSelects = kScaling == Scaling::kSelect && !kStochastic;
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ BlockReduce::Scratch scratch;
  __shared__ float2 row_errors[kSelects ? kSide : 1][kLanes];
  __shared__ uint8_t tile_scales[kLanes][kLanes];
  __shared__ float tile_maxima[kLanes][kLanes];
  BlockReduce reduce(scratch);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, along = lane & (kLanes - 1);
  wait_for_previous();
  let_next_begin();
  // From the end, which the launch before has left in the L2 cache.
  const uint32_t tile = gridDim.x - 1 - blockIdx.x;
  const uint32_t down = tile / wide, across = tile - down * wide;
  // A uniform branch per thread block instead of another kernel: there are enough to compile.
  if (source.vector && source.cols % 16 == 0) {
    fetch_tile<true>(source, kSide * down, kLanes * across, tiles);
  } else {
    fetch_tile<false>(source, kSide * down, kLanes * across, tiles);
  }
  const uint32_t minus = minus_signs(recipe.rotation, part_of(recipe.rotation));
  const float amax = one_scale(scale, 0, reduce);
  // Without a rotation, both have the same amax, but not the same given gsa.
  float amax_t = kRotate == Rotate::kNone ? amax : one_scale(scale, 1, reduce);
  if (kRotate == Rotate::kNone && scale.from_gsa) amax_t = *scale.side[1];
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *out.gsa[0] = scale.from_gsa ? amax : div_rn(amax, scale.divisor);
    *out.gsa[1] = scale.from_gsa ? amax_t : div_rn(amax_t, scale.divisor);
  }
  Selection s = selection_of(amax, scale.divisor, scale.from_gsa);
  wait_for_copies();
  __syncthreads();

  if (recipe.tile) {
    const float b = square_amax<T>(tiles, warp, lane);
    uint16_t stored = nvfp4_block_scale(b, s.encoding);
    if constexpr (kSelects) {
      const TwoScales scales = two_scales(b, s, recipe.select);
      stored = scales.six;
      if (!recipe.select.single && with_error_of(recipe.select, [&](auto error) {
            return tile_takes_four<decltype(error)::value, T>(tiles, b, scales, s,
                                                              recipe.select.scaled, row_errors);
          })) {
        stored = scales.four;
      }
    }
    if (lane < kLanes) {
      tile_scales[warp][along] = static_cast<uint8_t>(stored);
      tile_maxima[warp][along] = b;
    }
    __syncthreads();
  }
  if constexpr (kSelects) {
    // One loop for rows and columns, so that its large body exists once.
#pragma unroll 1
    for (int i = 0; i < 2 * Memory::kPasses; ++i) {
      const bool columns = i >= Memory::kPasses;
      const int pass = columns ? i - Memory::kPasses : i;
      const Nvfp4Output& to = out.side[columns];
      if (i == Memory::kPasses) s = selection_of(amax_t, scale.divisor, scale.from_gsa);
      const int in_tile = 16 * warp + kLines * (4 * pass + (lane >> 3));
      const uint32_t line = kSide * (columns ? across : down) + in_tile;
      const uint32_t block = kLanes * (columns ? down : across) + along;
      Block<T> x[kLines];
      if (columns) {
        read_columns<T>(tiles, in_tile, along, x);
      } else {
        read_rows<T>(tiles, in_tile, along, x);
      }
      const auto encoded = [&](const auto& y) {
        if (recipe.tile) {
          const int p = columns ? along : warp, q = columns ? warp : along;
          return nvfp4_encode_with(y, tile_maxima[p][q], tile_scales[p][q], s.encoding);
        }
        return selected_block(y, block_amax(y), s, recipe.select, [](float e, bool) { return e; });
      };
#pragma unroll 1
      for (int k = 0; k < kLines; ++k) {
        Block<T> y = x[0];  // a copy in local memory, for the noinline function
        if (kRotate != Rotate::kNone && columns) y = rotated<kRotate>(y, recipe.rotation, minus);
        const Nvfp4Codes codes = encoded(y);
        if (line + k < to.rows && block < to.blocks) {
          const OutputRow row(to, line + k);
          row.store(block, scale_place(to, block), codes);
        }
#pragma unroll
        for (int j = 0; j + 1 < kLines; ++j) x[j] = x[j + 1];
      }
    }
  } else {
    Draws draws;
    if (kStochastic) draws = Draws(recipe.rounding.rng_state);
    // Rows of the tile, or columns.
    const auto quantize = [&](auto side) {
      constexpr int kColumns = decltype(side)::value;
      constexpr int kAtOnce = kColumns ? 2 : 1;
      const Nvfp4Output& to = out.side[kColumns];
      const uint32_t block = kLanes * (kColumns ? down : across) + along;
      const int64_t step = to.swizzled ? row_in_tile(1) : to.blocks;  // to the next line's scale
#pragma unroll 1
      for (int pass = 0; pass < Memory::kPasses; ++pass) {
        const int in_tile = 16 * warp + kLines * (4 * pass + (lane >> 3));
        const uint32_t line = kSide * (kColumns ? across : down) + in_tile;
        const int64_t there = block < to.blocks ? to.rows - line : 0;
        const OutputRow row(to, line);
        uint2* codes_to = row.codes + block;
        uint8_t* scales_to = row.scales + scale_place(to, block);
        Block<T> x[kLines];
        if constexpr (kColumns) read_columns<T>(tiles, in_tile, along, x);
        const auto one = [&](const Block<T>& line_of, int k) {
          const auto encoded = [&](const auto& y) {
            if (recipe.tile) {
              const int p = kColumns ? along : warp, q = kColumns ? warp : along;
              return nvfp4_encode_with(y, tile_maxima[p][q], tile_scales[p][q], s.encoding);
            }
            return recipe_block<kScaling, kStochastic>(
                y, block_amax(y), s, recipe,
                [&] {
                  const uint8_t* const bytes = given.side[kColumns];
                  return bytes == nullptr || k >= there
                             ? draws.of(line + k, block)
                             : given_bytes(bytes, line + k, block,
                                           kColumns ? source.rows : source.cols);
                },
                [](float e, bool) { return e; });
          };
          // All lanes rotate, because they do it together.
          constexpr Rotate kTurn = kColumns ? kRotate : Rotate::kNone;
          const Nvfp4Codes codes = encoded(rotated<kTurn>(line_of, recipe.rotation, minus));
          if (k < there) {
            *codes_to = make_uint2(codes.low, codes.high);
            *scales_to = codes.scale;
          }
          codes_to += to.blocks;
          scales_to += step;
        };
#pragma unroll 1
        for (int k = 0; k < kLines; k += kAtOnce) {
          if constexpr (kColumns) {
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
              const Block<T> y = x[j];  // a copy in local memory, for the noinline function
              one(y, k + j);
            }
#pragma unroll
            for (int j = 0; j + kAtOnce < kLines; ++j) x[j] = x[j + kAtOnce];
          } else {
            one(read_row<T>(tiles, in_tile + k, along), k);
          }
        }
      }
    };
    quantize(std::integral_constant<int, 0>());
    s = selection_of(amax_t, scale.divisor, scale.from_gsa);
    draws = draws.of_columns();
    quantize(std::integral_constant<int, 1>());
  }
  zero_padding(out.side[0]);
  zero_padding(out.side[1]);
}

#ifndef __CUDACC_RTC__
namespace {

template <class T>
TileSource<T> tile_source(const Matrix& x) {
  return {static_cast<const T*>(x.data), x.s2, x.rows, x.cols, x.vector};
}

int64_t tiles_of(int64_t size) {
  return (size + kSide - 1) / kSide;
}

template <class F>
cudaError_t with_whole(const Matrix& x, F&& f) {
  return x.vector && x.cols % 16 == 0 ? f(std::true_type()) : f(std::false_type());
}

template <Scaling kScaling, bool kStochastic>
cudaError_t launch_both(const Matrix& x, const BothScale& scale, const Recipe& recipe,
                        const BothBytes& given, const BothOutput& out, cudaStream_t stream) {
  const int64_t wide = tiles_of(x.cols), count = tiles_of(x.rows) * wide;
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    return with_rotation<false>(recipe.rotation, {}, [&](auto rotate) {
      constexpr auto kKernel = &nvfp4_both_kernel<T, rotate, kScaling, kStochastic>;
      constexpr size_t kShared = TileMemory<T>::kBytes;
      if (blocks_per_sm<kKernel>(kThreads, kShared) == 0) return cudaErrorInvalidConfiguration;
      return launch<kKernel>({count, kThreads, Start::kOverlapped, 1, kShared}, stream,
                             tile_source<T>(x), scale, recipe, given, out,
                             static_cast<uint32_t>(wide));
    });
  });
}

}  // namespace

cudaError_t launch_nvfp4_both_amax(const CountedMatrix& x, const Rotation& rotation, float* maxima,
                                   cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    if (rotation.lanes == 0) {
      const int most = amax_grid(x.rows, x.cols),
                count = most < kBothPartials ? most : kBothPartials;
      return launch_amax_plain<T, false, BothPartials>(x, maxima, count, stream);
    }
    return with_whole(x, [&](auto whole) {
      constexpr auto kKernel = &both_amax_kernel<T, whole>;
      constexpr int kLines = TileMemory<T>::kLines;
      const int64_t wide = (x.cols + kLines - 1) / kLines, count = (x.rows + 15) / 16 * wide;
      const int64_t grid =
          persistent_grid((count + kThreads - 1) / kThreads, blocks_per_sm<kKernel>(kThreads, 0));
      return launch<kKernel>(
          {grid < kBothPartials ? grid : kBothPartials, kThreads, Start::kOverlapped}, stream,
          tile_source<T>(x), rotation, Divisor(static_cast<uint32_t>(wide)),
          static_cast<uint32_t>(count), maxima);
    });
  });
}

cudaError_t launch_quantize_nvfp4_both(const CountedMatrix& x, const BothScale& scale,
                                       const Recipe& recipe, const BothBytes& given,
                                       const Nvfp4Output& out, float* gsa, const Nvfp4Output& out_t,
                                       float* gsa_t, cudaStream_t stream) {
  const BothOutput both = {{out, out_t}, {gsa, gsa_t}};
  return with_rule(recipe, [&](auto scaling, auto stochastic) {
    return launch_both<scaling, stochastic>(x, scale, recipe, given, both, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
