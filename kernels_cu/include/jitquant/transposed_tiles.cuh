// Tiles of a matrix in shared memory, which are read by rows and by columns.
#pragma once

#include "jitquant/device.cuh"
#include "jitquant/memory.cuh"
#include "jitquant/walk.cuh"

namespace jitquant {

constexpr int kSide = 128;          // of a tile
constexpr int kLanes = kSide / 16;  // that share a line of a tile, a block of 16 values each

// What is read: rows that are `stride` elements apart.
template <class T>
struct TileSource {
  const T* data;
  int64_t stride, rows, cols;
  bool vector;
};

// A tile in shared memory. The blocks of a row are in another order (XOR) for every 16 rows, and so
// are the pieces of 16 bytes within a block: what eight lanes read at once, along a row or, 16 rows
// apart, down a column, is in different banks. But 32 bytes stay 32 bytes, as pieces of them would
// be copied as many times.
template <class T>
struct TileMemory {
  static constexpr int kParts = sizeof(T);  // of a block, 16 bytes each
  static constexpr int kRowBytes = kSide * sizeof(T);
  static constexpr int kBytes = kSide * kRowBytes;
  static constexpr int kLines = 8 / sizeof(T);  // columns in eight bytes; rows, columns of a lane
  static constexpr int kPasses = 16 / (4 * kLines);  // of a warp over its 16 rows or columns

  // Of a part within its row. It is linear over XOR.
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

// The tile at (row, 16 * block) of the source on its way to shared memory, zeros around the matrix.
template <bool kWhole, class T>
__device__ __forceinline__ void fetch_tile(const TileSource<T>& source, uint32_t row,
                                           uint32_t block, unsigned char* tile) {
  using Memory = TileMemory<T>;
  constexpr int kWidth = kWhole ? kLanes * Memory::kParts : kLanes;  // threads side by side
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

// Of rows `row` and the following, the blocks at column 16 * block.
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

// Of columns `column` and the following, the blocks at row 16 * block.
template <class T>
__device__ __forceinline__ void read_columns(const unsigned char* tile, int column, int block,
                                             Block<T> (&x)[TileMemory<T>::kLines]) {
  using Memory = TileMemory<T>;
  const int byte = (column & 15) * static_cast<int>(sizeof(T));
  const unsigned char* p = tile + Memory::offset(16 * block, column >> 4, byte >> 4) + (byte & 15);
  const auto words = [&](int row) {
    return *reinterpret_cast<const uint2*>(p + row * Memory::kRowBytes);
  };
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 even = words(2 * i), odd = words(2 * i + 1);
      x[0].words[i] = byte_permute(even.x, odd.x, 0x5410);
      x[1].words[i] = byte_permute(even.x, odd.x, 0x7632);
      x[2].words[i] = byte_permute(even.y, odd.y, 0x5410);
      x[3].words[i] = byte_permute(even.y, odd.y, 0x7632);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint2 two = words(i);
      x[0].words[i] = two.x, x[1].words[i] = two.y;
    }
  }
}

// Blocks of threads that a multiprocessor has to hold, which bounds the registers: three where they
// fit with their tiles.
template <class T, bool kWhole>
constexpr int tiles_per_sm() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (sizeof(T) == 4) return 2;
#endif
  return kWhole || sizeof(T) == 4 ? 3 : 2;
}

}  // namespace jitquant
