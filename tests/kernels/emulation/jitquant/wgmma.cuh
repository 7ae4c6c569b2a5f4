// What kernels_cu/include/jitquant/wgmma.cuh has of compute capability 9.0, in plain C++: found
// before it. Copies come as late as they may and products at once, or, descending, the other way
// round (machine.h).
#pragma once

#include <array>

#include "jitquant/memory.cuh"

#define JITQUANT_HAS_WARPGROUPS 1

namespace jitquant {

inline uint32_t shared_address(const void* p) {
  return emulation::shared_address(p);
}
inline void load_shared_16(uint32_t from, uint32_t (&words)[4]) {
  if (from % 16 != 0) emulation::fail_kernel("16 bytes of shared memory are not aligned");
  std::memcpy(words, emulation::shared_pointer(from), sizeof words);
}
inline void load_shared_8(uint32_t from, uint32_t (&words)[2]) {
  if (from % 8 != 0) emulation::fail_kernel("8 bytes of shared memory are not aligned");
  std::memcpy(words, emulation::shared_pointer(from), sizeof words);
}
inline uint32_t load_shared_4(uint32_t from) {
  if (from % 4 != 0) emulation::fail_kernel("4 bytes of shared memory are not aligned");
  return *reinterpret_cast<const uint32_t*>(emulation::shared_pointer(from));
}
template <int kThreads>
void meet() {
  emulation::named_barrier(kThreads);
}

// ---- barriers ----------------------------------------------------------------------------------

struct EmulatedBarrier {
  int32_t bytes;  // still to come
  int16_t pending;
  uint16_t expected : 15;
  uint16_t phase : 1;

  void check() {
    if (pending < 0) emulation::fail_kernel("more threads arrive at a barrier than it expects");
    if (pending == 0 && bytes == 0) phase ^= 1, pending = static_cast<int16_t>(expected);
  }
};
static_assert(sizeof(EmulatedBarrier) == 8, "as many bytes as an mbarrier");

inline EmulatedBarrier& barrier_at(uint32_t barrier) {
  return *reinterpret_cast<EmulatedBarrier*>(emulation::shared_pointer(barrier));
}
inline EmulatedBarrier& barrier_in(uint32_t barrier, uint32_t rank) {
  return *reinterpret_cast<EmulatedBarrier*>(
      emulation::in_block(emulation::shared_pointer(barrier), rank));
}
inline void init_barrier(uint32_t barrier, int arrivals) {
  EmulatedBarrier& b = barrier_at(barrier);
  b.bytes = 0, b.pending = static_cast<int16_t>(arrivals), b.expected = arrivals & 0x7fff,
  b.phase = 0;
}
inline void publish_barriers() {}
inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  EmulatedBarrier& b = barrier_at(barrier);
  b.bytes += static_cast<int32_t>(bytes), --b.pending;
  b.check();
}
inline void arrive(uint32_t barrier) {
  --barrier_at(barrier).pending;
  barrier_at(barrier).check();
}
inline void arrive_at(uint32_t barrier, uint32_t rank) {
  EmulatedBarrier& b = barrier_in(barrier, rank);
  --b.pending;
  b.check();
  emulation::give_way();  // what it allows others may come at once
}
inline void wait_for(uint32_t barrier, uint32_t parity) {
  emulation::wait_until([=] { return barrier_at(barrier).phase != parity; });
}

// ---- tensor copies -----------------------------------------------------------------------------

inline void copy_box(uint32_t to, const void* map, int column, int row, uint32_t barrier,
                     uint32_t blocks) {
  const CUtensorMap m = *static_cast<const CUtensorMap*>(map);
  if (to % 1024 != 0) emulation::fail_kernel("a swizzled tile does not begin at 1024 bytes");
  emulation::work_later([=] {
    const auto width = static_cast<uint32_t>(m.box[0] * m.element);
    for (uint32_t rank = 0; rank < 32; ++rank) {
      if ((blocks >> rank & 1) == 0) continue;
      for (uint32_t at = 0; at < width * m.box[1]; ++at) {
        const uint64_t x = column + at % width / m.element, y = row + at / width;
        const bool there = x < m.sizes[0] && y < m.sizes[1];
        const uint32_t plain = to + at, mask = width / 16 - 1;
        const uint32_t swizzled = plain ^ ((plain >> 7 & mask) << 4);
        *emulation::in_block(emulation::shared_pointer(swizzled), rank) =
            there ? m.data[y * m.stride + x * m.element + at % m.element] : '\0';
      }
      EmulatedBarrier& b = barrier_in(barrier, rank);
      b.bytes -= static_cast<int32_t>(width * m.box[1]);
      b.check();
    }
  });
}
inline void copy_tile(uint32_t to, const void* map, int column, int row, uint32_t barrier,
                      uint16_t blocks) {
  copy_box(to, map, column, row, barrier, blocks);
}
inline void copy_own_tile(uint32_t to, const void* map, int column, int row, uint32_t barrier) {
  copy_box(to, map, column, row, barrier, 1u << (blockIdx.x % 2));
}
template <int kWords>
void copy_words(uint32_t to, const uint8_t* from, bool there) {
  constexpr int kBytes = 4 * kWords;
  if (to % kBytes != 0 || reinterpret_cast<uintptr_t>(from) % kBytes != 0) {
    emulation::fail_kernel("addresses of a copy are not aligned to its bytes");
  }
  emulation::work_later([=, rank = blockIdx.x % 2] {
    char* const words = emulation::in_block(emulation::shared_pointer(to), rank);
    if (there) {
      std::memcpy(words, from, kBytes);
    } else {
      std::memset(words, 0, kBytes);
    }
  });
}
inline void arrive_after_copies(uint32_t barrier) {
  emulation::work_later([=, rank = blockIdx.x % 2] {
    EmulatedBarrier& b = barrier_in(barrier, rank);
    --b.pending;
    b.check();
  });
}
inline void prefetch_tile(const void* map, int column, int row) {
  const CUtensorMap& m = *static_cast<const CUtensorMap*>(map);
  const uint64_t x = column, y = row;
  if (x < m.sizes[0] && y < m.sizes[1]) emulation::prefetch(m.data + y * m.stride + x * m.element);
}
inline void prefetch_map(const void*) {}

template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

// ---- products ----------------------------------------------------------------------------------

inline void begin_products() {}
inline void end_products() {
  emulation::end_own_group();
}
template <int kBut>
void wait_for_products() {
  emulation::finish_own_work(kBut);
}
inline uint64_t tile_descriptor(uint32_t shared) {
  return shared >> 4;
}

template <class T>
double element(const void* from) {
  T x;
  std::memcpy(&x, from, sizeof x);
  return static_cast<double>(to_float(x));
}
// Element k of a row of what tile_descriptor describes.
template <class T>
double shared_element(uint64_t tile, int row, int k) {
  const auto plain = static_cast<uint32_t>((tile << 4) + row * 128 + k * sizeof(T));
  return element<T>(emulation::shared_pointer(plain ^ ((plain >> 7 & 7) << 4)));
}

template <class T, int kSums>
void multiply_step(float (&d)[kSums], const uint32_t* a, uint64_t b) {
  const auto pair = [](uint32_t low, uint32_t high) {
    return static_cast<uint64_t>(high) << 32 | low;
  };
  constexpr int kEach = 4 / sizeof(T), kDepth = 8 * kEach;  // elements of a word, and of a row of A
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  std::array<double, kDepth> rows[2];
  for (int from = 0; from < 4; ++from) {
    const uint64_t words[2] = {__shfl_sync(~0u, pair(a[0], a[2]), 4 * g + from),
                               __shfl_sync(~0u, pair(a[1], a[3]), 4 * g + from)};
    for (int i = 0; i < 2 * kEach; ++i) {
      const int k = kEach * from + i % kEach + i / kEach * (kDepth / 2);
      for (int h = 0; h < 2; ++h) {
        rows[h][k] = element<T>(reinterpret_cast<const char*>(&words[h]) + i * sizeof(T));
      }
    }
  }
  float* const sums = d;
  emulation::own_work_later([=] {
    for (int j = 0; j < kSums / 4; ++j) {
      for (int i = 0; i < 4; ++i) {
        double sum = sums[4 * j + i];
        for (int k = 0; k < kDepth; ++k) {
          sum += rows[i / 2][k] * shared_element<T>(b, 8 * j + 2 * t + i % 2, k);
        }
        sums[4 * j + i] = static_cast<float>(sum);
      }
    }
  });
}
template <class T, int kSums>
void multiply_tiles(float (&d)[kSums], const uint32_t (&a)[8], uint64_t b) {
  multiply_step<T>(d, a, b);
  multiply_step<T>(d, a + 4, b + 2);
}

}  // namespace jitquant
