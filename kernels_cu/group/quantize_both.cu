// A matrix and its transpose in 8 bits from one read: groups along the rows of each, squares that
// both share, or MXFP8. Tiles go through shared memory.
#include "jitquant/transposed_tiles.cuh"
#include "kernels.cuh"

namespace jitquant {

// One output, of the matrix or of its transpose: `lines` rows of `length` bytes.
struct Side {
  uint8_t* data;
  int64_t stride;
  bool vector;  // every row is aligned to 16 bytes, and its length is a multiple of 16
  uint32_t lines, length;
  GroupScales all_scales;
  // The scales if they are floats without padding.
  float* scales;
  int64_t line_step, group_step;
  uint32_t groups;
};
struct Sides {
  Side side[2];
};

// The values that share a scale: 2^log neighbors of a line, or a square of as many lines.
struct Extent {
  int log;
  bool square;
};

template <class T>
__device__ __forceinline__ uint32_t amax_word(const Block<T>& x) {
  if constexpr (sizeof(T) == 2) return block_amax_pair(x);
  return float_bits(block_amax(x));
}

// `lanes` neighboring lanes have blocks of kCount lines. Returns for how many lines each lane
// computes the group scales: line lane % (kCount / that), and every (kCount / that)-th after it.
template <int kCount>
__device__ __forceinline__ int lines_of_lane(int lanes) {
  return lanes < kCount ? kCount / lanes : 1;
}

// Reduces the amaxes over the blocks of `lanes` neighboring lanes. b[0] and following get those of
// the lines that this lane owns.
template <class T, int kCount>
__device__ __forceinline__ void lines_amax(const Block<T> (&x)[kCount], int lanes, int lane,
                                           float (&b)[kCount]) {
  uint32_t m[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) m[k] = amax_word(x[k]);
  // Sends half of the blocks to the other lane.
#pragma unroll
  for (int offset = 1; offset < kCount; offset *= 2) {
    if (offset >= lanes) break;
    // Bit operations instead of a select, which some compilers turn into an address in local
    // memory.
    const uint32_t odd = (lane & offset) != 0 ? ~0u : 0u;
#pragma unroll
    for (int k = 0; k < kCount / (2 * offset); ++k) {
      const uint32_t change = (m[2 * k] ^ m[2 * k + 1]) & odd;
      const uint32_t sent = __shfl_xor_sync(0xffffffffu, m[2 * k + 1] ^ change, offset);
      m[k] = larger<T>(m[2 * k] ^ change, sent);
    }
  }
#pragma unroll
  for (int offset = kCount; offset < kLanes; offset *= 2) {
    if (offset < lanes) m[0] = larger<T>(m[0], __shfl_xor_sync(0xffffffffu, m[0], offset));
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) b[k] = amax_of_word<T>(m[k]);
}

// Shares what each lane knows of its lines, from the end of b, with all lanes: b[k] gets line k.
template <int kCount>
__device__ __forceinline__ void share_lines(int sharers, int lane, float (&b)[kCount]) {
  static_assert(kCount == 2 || kCount == 4);
  if (sharers == 1) return;
  // If two lanes share four lines, those of the first half are at b[kCount - 2].
  const uint32_t last = float_bits(b[kCount - 1]), halves = sharers < kCount ? ~0u : 0u;
  const uint32_t first = last ^ ((last ^ float_bits(b[kCount - 2])) & halves);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    b[k] = __shfl_sync(0xffffffffu, bits_float(k < kCount / 2 ? first : last),
                       (lane & ~(sharers - 1)) | (k & (sharers - 1)));
  }
}

// ---- lines of the transpose at any address -----------------------------------------------------

// Such lines wait in shared memory until all 128 bytes of an aligned piece are known: 256 bytes for
// each line of a tile, where those of two tiles below each other take turns.
constexpr int kLineRing = 2 * kSide;
constexpr int kRingBytes = kSide * kLineRing;
// The most tiles below each other that a thread block then has, and how often all thread blocks
// that fit at once must find as many.
constexpr int kMostStrip = 4;
constexpr int kStripWaves = 2;

// Stores the first or the last `count` of 16 bytes, 1 to 15, to their place in the aligned `to`.
__device__ __forceinline__ void store_end(uint8_t* to, const uint32_t (&w)[4], int count,
                                          bool first) {
#pragma unroll
  for (int size = 8; size > 0; size /= 2) {
    if ((count & size) == 0) continue;
    const int at = first ? count & (-2 * size) : 16 - (count & -size);
    const uint32_t low = at & 8 ? w[2] : w[0], high = at & 8 ? w[3] : w[1];
    const uint32_t word = at & 4 ? high : low, rest = word >> (8 * (at & 3));
    if (size == 8) *reinterpret_cast<uint2*>(to + at) = make_uint2(low, high);
    if (size == 4) *reinterpret_cast<uint32_t*>(to + at) = word;
    if (size == 2) *reinterpret_cast<uint16_t*>(to + at) = static_cast<uint16_t>(rest);
    if (size == 1) to[at] = static_cast<uint8_t>(rest);
  }
}

// One of kLanes lanes with a line of a tile, whose bytes belong at `line`. They are in the ring
// from `turn` on. Stores what is known of aligned 128 bytes: of the bytes from `first` on, which is
// 0 or in the tile before, those before `end`, and with `last` those after an aligned piece too.
__device__ __forceinline__ void store_aligned(uint8_t* line, const uint8_t* ring, int turn,
                                              int along, int first, int end, bool last) {
  int at = 16 * along - static_cast<int>(reinterpret_cast<uintptr_t>(line) & (kSide - 1));
#pragma unroll 1
  for (int window = 0; window < (last ? 2 : 1); ++window, at += kSide) {
    if (at + 16 <= first || at >= end) continue;
    const int from = turn + at;
    uint32_t raw[5], w[4];
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      raw[i] = *reinterpret_cast<const uint32_t*>(ring + ((from & ~3) + 4 * i & (kLineRing - 1)));
    }
    const uint32_t order = 0x3210 + 0x1111 * (from & 3);
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = byte_permute(raw[i], raw[i + 1], order);
    const int before = max(first - at, 0), until = min(end - at, 16);
    if (until - before == 16) {
      *reinterpret_cast<uint4*>(line + at) = make_uint4(w[0], w[1], w[2], w[3]);
    } else if (before == 0 || until == 16) {
      store_end(line + at, w, until - before, before == 0);
    } else {
#pragma unroll 1
      for (int i = before; i < until; ++i) {
        line[at + i] = ring[(from + i) & (kLineRing - 1)];
      }
    }
  }
}

// The cases with kernels of their own. kPlain: groups or squares of 128 have scales that are
// unpadded floats, without division. kMxfp8: MXFP8. kAny: everything else, and a matrix whose
// blocks are not whole and aligned.
enum class Both : int { kPlain, kMxfp8, kAny };

// One thread block per tile or, for groups of 256, per square of four tiles, which is read twice:
// for the amaxes, then for the cast. There are `count` of these, `wide` side by side. The hardware
// starts them in order, so that concurrent reads and writes are close together. A warp takes 16
// rows of a tile and then 16 columns of it, eight lanes per line, so that it can reduce the amaxes
// of its groups alone. kWhole: all blocks of the matrix are whole and aligned to 16 bytes. If lines
// of the transpose are not aligned to 16 bytes, `strip` tiles below each other are a thread
// block's, so that it writes most sectors whole; otherwise it is 0.
template <class T, bool kWhole, Both kWhat>
__global__ void __launch_bounds__(kThreads, tiles_per_sm<T, kWhole>())
    both_kernel(TileSource<T> source, const __grid_constant__ Sides sides, GroupNumerics numerics,
                Extent extent, uint32_t wide, uint32_t count, int strip) {
  using Memory = TileMemory<T>;
  constexpr int kLines = Memory::kLines;
  extern __shared__ __align__(1024) unsigned char tiles[];
  constexpr bool kAny = kWhat == Both::kAny;
  __shared__ float line_maxima[2][2][kAny ? 2 * kSide : 1];  // by side: for half a group of 256
  __shared__ float square_maxima[kLanes][kLanes + 1];        // of 16 x 16 values
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, along = lane & (kLanes - 1);
  if (!kAny) numerics.bounded = false;
  if (kWhat == Both::kMxfp8) numerics.recipe = GroupRecipe::kDeepGemm;
  if (kWhat == Both::kMxfp8) numerics.scale_format = ScaleFormat::kE8m0;
  const bool square_scales = kWhat != Both::kMxfp8 && extent.square;
  const int log = kAny ? extent.log : (kWhat == Both::kPlain ? 7 : 5);
  const bool large = log > 7;
  const bool loose = !kAny && strip > 0;
  const int span = large ? 2 : (loose ? strip : 1), parts = large ? 8 : span;
  const int group_lanes = large ? kLanes : 1 << (log - 4);
  // The lanes of a group divide the scales of its lines among them.
  const int scales_of_lane = lines_of_lane<kLines>(group_lanes), sharers = kLines / scales_of_lane;
  const int own = lane & (sharers - 1);
  const bool by_division = kAny && divides(numerics);

  wait_for_previous();
  let_next_begin();
  const uint32_t down = blockIdx.x / wide, across = blockIdx.x - down * wide;
#pragma unroll 1
  for (int part = 0; part < parts && blockIdx.x < count; ++part) {
    const uint2 at = kAny ? make_uint2(kSide * (down * span + ((part >> 1) & 1)),  // row and block
                                       kLanes * (across * span + (part & 1)))
                          : make_uint2(kSide * (down * span + part), kLanes * across);
    if (!kAny && at.x >= source.rows) break;
    if (part > 0) __syncthreads();
    fetch_tile<kWhole>(source, at.x, at.y, tiles);
    wait_for_copies();
    __syncthreads();

    if (square_scales) {
      const float b = square_amax<T>(tiles, warp, lane);
      if (lane < kLanes) square_maxima[warp][along] = b;
      __syncthreads();
    }
#pragma unroll 1
    for (int i = 0; i < 2 * Memory::kPasses; ++i) {
      const int which = i / Memory::kPasses, pass = i % Memory::kPasses;
      const Side& side = sides.side[which];
      const int in_tile = 16 * warp + kLines * (4 * pass + (lane >> 3));
      const uint32_t line = (which == 0 ? at.x : 16 * at.y) + in_tile;
      const uint32_t block = (which == 0 ? at.y : at.x / 16) + along;
      Block<T> x[kLines];
      if (which == 0) {
        read_rows<T>(tiles, in_tile, along, x);
      } else {
        read_columns<T>(tiles, in_tile, along, x);
      }

      float b[kLines];
      if (square_scales) {
        float square = 0.0f;
        const int first = warp & -group_lanes;
#pragma unroll 1
        for (int j = first; j < first + group_lanes; ++j) {
          square =
              amax_keep_nan(square, which == 0 ? square_maxima[j][along] : square_maxima[along][j]);
        }
        square = lanes_amax(square, group_lanes);
#pragma unroll
        for (int k = 0; k < kLines; ++k) b[k] = square;
      } else {
        lines_amax(x, group_lanes, lane, b);
      }
      bool first_half = true;
      if (large) {
        const int down = (part >> 1) & 1, right = part & 1;
        const int half = which == 0 ? right : down;
        const int l = kSide * (which == 0 ? down : right) + in_tile + own;
        first_half = half == 0;
        if (part < 4) {
          if (along < kLines) line_maxima[which][half][l] = b[0];
          continue;
        }
        b[0] = amax_keep_nan(line_maxima[which][0][l], line_maxima[which][1][l]);
      }

      const uint32_t group = block >> (log - 4);
      // Of MXFP8. The lines of a lane are in the same 32 rows of a tile of 128x4.
      const GroupScales& all = side.all_scales;
      uint8_t* const exponents =
          kWhat != Both::kMxfp8
              ? nullptr
              : static_cast<uint8_t*>(all.data) +
                    scale_offset(all.swizzled, line, group, side.groups, side.line_step);
      const int64_t exponent_step = all.swizzled ? row_in_tile(1) : side.line_step;
      const auto store = [&](int k, const GroupScale& g) {
        const uint32_t l = line + k;
        const uint32_t row = square_scales ? l >> log : l;
        const bool first = first_half && (!square_scales || row << log == l);
        if (l >= side.lines || group >= side.groups || !first) return;
        if (kWhat == Both::kPlain) {
          side.scales[row * side.line_step + group * side.group_step] = g.scale_inv;
        } else if (kWhat == Both::kMxfp8) {
          exponents[k * exponent_step] = static_cast<uint8_t>(g.exponent);
        } else {
          store_scale(all, 0, row, group, g, false, true);
        }
      };
      // The factors or divisors of the elements replace the amaxes.
#pragma unroll(kWhat == Both::kMxfp8 ? 2 : 1)
      for (int j = 0; j < scales_of_lane; ++j) {
        const GroupScale g = group_scale(numerics, b[0]);
        if ((along & (group_lanes - 1)) < sharers) store(j * sharers + own, g);
#pragma unroll
        for (int k = 0; k + 1 < kLines; ++k) b[k] = b[k + 1];
        b[kLines - 1] = by_division ? g.scale_inv : g.factor;
      }
      share_lines(sharers, lane, b);
      const int64_t first_byte = int64_t{16} * block, rest = side.length - first_byte;
      const bool rings = loose && which == 1;
      const uint32_t lines = (rest > 0 || rings) && line < side.lines ? side.lines - line : 0;
      uint8_t* to = side.data + line * side.stride + first_byte;
      int64_t step = side.stride;
      uint8_t* const whole_line = to - 16 * along;
      uint8_t* const ring = tiles + Memory::kBytes + in_tile * kLineRing;
      const int turn = kSide * (part & 1);
      if (rings) to = ring + turn + 16 * along, step = kLineRing;
      with_format(numerics.format, [&](auto format) {
#pragma unroll
        for (int k = 0; k < kLines; ++k) {
          if (k >= lines) break;
          const float factor = by_division ? group_reciprocal(b[k]) : b[k];
          store_bytes<!kAny>(to, rest, side.vector,
                             encode_block<format>(x[k], numerics, by_division, factor, b[k]));
          to += step;
        }
      });
      if (!rings) continue;
      __syncwarp();
      const uint32_t left = side.length - at.x;
      const bool last = part + 1 == parts || left <= kSide;
#pragma unroll 1
      for (int k = 0; k < kLines && k < lines; ++k) {
        store_aligned(whole_line + k * side.stride, ring + k * kLineRing, turn, along,
                      part == 0 ? 0 : -kSide, min(left, uint32_t{kSide}), last);
      }
    }
  }
  if (kWhat != Both::kPlain) {
    zero_scale_padding(sides.side[0].all_scales);
    zero_scale_padding(sides.side[1].all_scales);
  }
}

namespace {

#ifndef __CUDACC_RTC__
Side side_of(const GroupOutput& out) {
  const ScaleGrid& grid = out.scales.grid;
  const bool by_row = grid.order == ScaleOrder::kRow;
  return {static_cast<uint8_t*>(const_cast<void*>(out.data.data)),
          out.data.s2,
          out.data.vector,
          static_cast<uint32_t>(out.data.rows),
          static_cast<uint32_t>(out.data.cols),
          out.scales,
          static_cast<float*>(out.scales.data),
          by_row ? grid.stored_cols : 1,
          by_row ? 1 : grid.stored_rows,
          static_cast<uint32_t>(out.scales.groups)};
}

// Whether scales are floats without padding.
bool is_plain(const GroupScales& s) {
  return s.format <= ScaleFormat::kPowerOfTwo && s.grid.stored_rows == s.rows &&
         s.grid.stored_cols == s.groups;
}

template <class T, bool kWhole, Both kWhat>
cudaError_t launch_tiles(const Matrix& x, const Extent& extent, const GroupNumerics& numerics,
                         const GroupOutput& out, const GroupOutput& out_t, cudaStream_t stream) {
  const int64_t side = extent.log > 7 ? 2 * kSide : kSide;
  int64_t tall = (x.rows + side - 1) / side;
  const int64_t wide = (x.cols + side - 1) / side;
  // Rows of the transpose that are aligned to 16 bytes are faster without rings, though two tiles
  // then write parts of the same sectors.
  const bool loose = kWhat != Both::kAny &&
                     (reinterpret_cast<uintptr_t>(out_t.data.data) | out_t.data.s2) % 16 != 0;
  const size_t shared = TileMemory<T>::kBytes + (loose ? kRingBytes : 0);
  const int per_sm = blocks_per_sm<&both_kernel<T, kWhole, kWhat>>(kThreads, shared);
  if (per_sm == 0) return cudaErrorInvalidConfiguration;
  int strip = loose ? kMostStrip : 0;
  const int64_t wave = int64_t{kStripWaves} * per_sm * sm_count();
  while (strip > 1 && tall * wide < wave * strip) strip /= 2;
  if (loose) tall = (tall + strip - 1) / strip;
  const int64_t count = tall * wide;
  return launch<&both_kernel<T, kWhole, kWhat>>(
      {count < 1 ? 1 : count, kThreads, Start::kOverlapped, 1, shared}, stream,
      TileSource<T>{static_cast<const T*>(x.data), x.s2, x.rows, x.cols, x.vector},
      Sides{{side_of(out), side_of(out_t)}}, numerics, extent, static_cast<uint32_t>(wide),
      static_cast<uint32_t>(count), strip);
}
#endif

}  // namespace

#ifndef __CUDACC_RTC__
namespace {

// Groups of `size` elements, or squares with that side, of the matrix and of its transpose.
// -DJITQUANT_BOTH=<number> builds a library for one kind of scales and whole blocks alone.
cudaError_t launch_both(const Matrix& x, int64_t size, bool square, const GroupNumerics& numerics,
                        const GroupOutput& out, const GroupOutput& out_t, cudaStream_t stream) {
  Extent extent = {4, square};
  while ((int64_t{1} << extent.log) < size) ++extent.log;
  const bool whole = is_whole(x, out.data);
  const bool plain = whole && size == kSide && !divides(numerics) && !numerics.bounded &&
                     is_plain(out.scales) && is_plain(out_t.scales);
  const Both kind = plain                                         ? Both::kPlain
                    : numerics.scale_format == ScaleFormat::kE8m0 ? Both::kMxfp8
                                                                  : Both::kAny;
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    const auto launch = [&](auto is_whole, auto what) {
      return launch_tiles<T, is_whole, what>(x, extent, numerics, out, out_t, stream);
    };
    constexpr std::true_type yes = {};
#ifdef JITQUANT_BOTH
    constexpr Both kOnly = static_cast<Both>(JITQUANT_BOTH);
    return whole && kind == kOnly ? launch(yes, std::integral_constant<Both, kOnly>())
                                  : kLacksKernels;
#else
    constexpr std::integral_constant<Both, Both::kAny> any = {};
    if (!whole) return launch(std::false_type(), any);
    if (kind == Both::kPlain) return launch(yes, std::integral_constant<Both, Both::kPlain>());
    if (kind == Both::kMxfp8) return launch(yes, std::integral_constant<Both, Both::kMxfp8>());
    return launch(yes, any);
#endif
  });
}

}  // namespace

cudaError_t launch_quantize_per_token_group_both(const CountedMatrix& x, int64_t group_size,
                                                 const GroupNumerics& numerics,
                                                 const GroupOutput& out, const GroupOutput& out_t,
                                                 cudaStream_t stream) {
  return launch_both(x, group_size, false, numerics, out, out_t, stream);
}

cudaError_t launch_quantize_block_both(const CountedMatrix& w, int64_t block_rows,
                                       const GroupNumerics& numerics, const GroupOutput& out,
                                       const GroupOutput& out_t, cudaStream_t stream) {
  return launch_both(w, block_rows, true, numerics, out, out_t, stream);
}

cudaError_t launch_quantize_mxfp8_both(const CountedMatrix& x, const GroupNumerics& numerics,
                                       const GroupOutput& out, const GroupOutput& out_t,
                                       cudaStream_t stream) {
  return launch_both(x, kMxfp8Block, false, numerics, out, out_t, stream);
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
