// Tiles of a matrix in shared memory that are read by rows and by columns.
#pragma once

#include "jitquant/device.cuh"
#include "jitquant/memory.cuh"
#include "jitquant/reduce.cuh"
#include "jitquant/walk.cuh"

namespace jitquant {

constexpr int kSide = 128;          // of a tile
constexpr int kLanes = kSide / 16;  // per line of a tile, a block of 16 values each

// The input matrix: rows are `stride` elements apart.
template <class T>
struct TileSource {
  const T* data;
  int64_t stride, rows, cols;
  bool vector;
};

// A tile in shared memory. Every 16 rows permute the blocks of a row (XOR), and each block permutes
// its 16-byte pieces, so that eight lanes reading along a row, or down a column 16 rows apart, use
// different banks. 32-byte units stay together: splitting them would double the number of copies.
template <class T>
struct TileMemory {
  static constexpr int kParts = sizeof(T);  // 16-byte parts per block
  static constexpr int kRowBytes = kSide * sizeof(T);
  static constexpr int kBytes = kSide * kRowBytes;
  static constexpr int kLines = 8 / sizeof(T);  // columns in eight bytes; rows or columns per lane
  static constexpr int kPasses = 16 / (4 * kLines);  // of a warp over its 16 rows or columns

  // The byte offset of a part within its row; linear over XOR.
  __device__ static int in_row(int block, int part) {
    return (block * kParts + (part ^ (block >> (kParts == 2 ? 2 : 1)))) * 16;
  }
  __device__ static int offset(int row, int block, int part) {
    return row * kRowBytes + in_row(block ^ (row >> 4), part);
  }
};

__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool there) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
#else
  const uint4 zeros = {};
  std::memcpy(__cvta_shared_to_generic(to), there ? from : &zeros, 16);
#endif
}
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Starts to copy the tile at (row, 16 * block) to shared memory, zero-filled outside the matrix.
template <bool kWhole, class T>
__device__ __forceinline__ void fetch_tile(const TileSource<T>& source, uint32_t row,
                                           uint32_t block, unsigned char* tile) {
  using Memory = TileMemory<T>;
  constexpr int kWidth = kWhole ? kLanes * Memory::kParts : kLanes;  // threads per row
  constexpr int kStep = kThreads / kWidth;
  const int column = threadIdx.x % kWidth, first = threadIdx.x / kWidth;
  const int64_t left = int64_t{16} * block + (kWhole ? 16 / sizeof(T) : 16) * column;
  const T* p = source.data + (row + first) * source.stride + left;
  const int64_t step = kStep * source.stride;
  if constexpr (kWhole) {
    uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(tile)) +
                  Memory::offset(first, column / Memory::kParts, column % Memory::kParts);
    if (row + kSide <= source.rows && 16 * int64_t{block} + kSide <= source.cols) {
#pragma unroll
      for (int i = 0; i < kSide / kStep; ++i) {
        copy_async((to ^ Memory::in_row(i * kStep / 16, 0)) + i * kStep * Memory::kRowBytes, p,
                   true);
        p += step;
      }
    } else {
      const int64_t below = left < source.cols ? source.rows - row - first : 0;
#pragma unroll 1
      for (int i = 0; i < kSide / kStep; ++i) {
        const bool there = i * kStep < below;
        copy_async((to ^ Memory::in_row(i * kStep / 16, 0)) + i * kStep * Memory::kRowBytes,
                   there ? p : source.data, there);
        p += step;
      }
    }
  } else {
    const int64_t right = source.cols - left;
    const int64_t below = right > 0 ? source.rows - row - first : 0;
#pragma unroll 1
    for (int i = 0; i < kSide / kStep; ++i) {
      Block<T> x = {};
      if (i * kStep < below) x = load_block<false>(p, right, source.vector);
      p += step;
#pragma unroll
      for (int part = 0; part < Memory::kParts; ++part) {
        *reinterpret_cast<uint4*>(tile + Memory::offset(first + i * kStep, column, part)) =
            make_uint4(x.words[4 * part], x.words[4 * part + 1], x.words[4 * part + 2],
                       x.words[4 * part + 3]);
      }
    }
  }
}

// Reads the blocks at column 16 * block of row `row` and following.
template <class T>
__device__ __forceinline__ void read_rows(const unsigned char* tile, int row, int block,
                                          Block<T> (&x)[TileMemory<T>::kLines]) {
  using Memory = TileMemory<T>;
#pragma unroll
  for (int part = 0; part < Memory::kParts; ++part) {
    const unsigned char* p = tile + Memory::offset(row, block, part);
#pragma unroll
    for (int k = 0; k < Memory::kLines; ++k) {
      load_words<4>(p + k * Memory::kRowBytes, x[k].words + 4 * part);
    }
  }
}

// The amax of 16 x 16 values: the 16 rows of warp `warp`, at the block of this lane, lane % kLanes.
template <class T>
__device__ __forceinline__ float square_amax(const unsigned char* tile, int warp, int lane) {
  using Memory = TileMemory<T>;
  float b = 0.0f;
#pragma unroll 1
  for (int pass = 0; pass < Memory::kPasses; ++pass) {
    Block<T> x[Memory::kLines];
    read_rows<T>(tile, 16 * warp + Memory::kLines * (4 * pass + (lane >> 3)), lane & (kLanes - 1),
                 x);
#pragma unroll
    for (int k = 0; k < Memory::kLines; ++k) b = amax_keep_nan(b, block_amax(x[k]));
  }
  return spread_lanes_amax<kLanes>(b);
}

// Eight bytes of a row from p, which is aligned to them if kWhole; otherwise the first `count`
// elements, and zeros.
template <bool kWhole, class T>
__device__ __forceinline__ uint2 load_columns(const T* p, int64_t count) {
  if constexpr (kWhole) return *reinterpret_cast<const uint2*>(p);
  constexpr int kLines = TileMemory<T>::kLines, kPerWord = kLines / 2;
  uint32_t words[2] = {};
#pragma unroll
  for (int k = 0; k < kLines; ++k) {
    if (k < count) words[k / kPerWord] |= bits_of(p[k]) << (16 * (k % kPerWord));
  }
  return make_uint2(words[0], words[1]);
}

// Turns eight bytes of 16 rows into as many blocks along the columns.
template <class T, int kLines>
__device__ __forceinline__ void transpose_words(const uint2 (&rows)[16], Block<T> (&x)[kLines]) {
  static_assert(kLines == 8 / sizeof(T));
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 even = rows[2 * i], odd = rows[2 * i + 1];
      x[0].words[i] = byte_permute(even.x, odd.x, 0x5410);
      x[1].words[i] = byte_permute(even.x, odd.x, 0x7632);
      x[2].words[i] = byte_permute(even.y, odd.y, 0x5410);
      x[3].words[i] = byte_permute(even.y, odd.y, 0x7632);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[0].words[i] = rows[i].x, x[1].words[i] = rows[i].y;
  }
}

template <class T>
__device__ __forceinline__ Block<T> read_row(const unsigned char* tile, int row, int block) {
  using Memory = TileMemory<T>;
  Block<T> x;
#pragma unroll
  for (int part = 0; part < Memory::kParts; ++part) {
    load_words<4>(tile + Memory::offset(row, block, part), x.words + 4 * part);
  }
  return x;
}

// Reads the blocks at row 16 * block of column `column` and following.
template <class T>
__device__ __forceinline__ void read_columns(const unsigned char* tile, int column, int block,
                                             Block<T> (&x)[TileMemory<T>::kLines]) {
  using Memory = TileMemory<T>;
  const int byte = (column & 15) * static_cast<int>(sizeof(T));
  const unsigned char* p = tile + Memory::offset(16 * block, column >> 4, byte >> 4) + (byte & 15);
  uint2 rows[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    rows[i] = *reinterpret_cast<const uint2*>(p + i * Memory::kRowBytes);
  }
  transpose_words(rows, x);
}

// Minimum thread blocks per SM, which limits the registers: three if they fit with their tiles.
template <class T, bool kWhole>
constexpr int tiles_per_sm() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (sizeof(T) == 4) return 2;
#endif
  return kWhole || sizeof(T) == 4 ? 3 : 2;
}

}  // namespace jitquant
