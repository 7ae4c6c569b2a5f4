// The walks of quantize_kernel: which blocks of values a thread takes in turn, and where their
// codes and scales go. A walk is constructed from the source, the output and a Plan from the host.
// It has
//   blocks_per_sm<Source>()      minimum thread blocks per SM: limits the registers
//   kWhole                       all blocks are whole and aligned
//   kByRow                       rows may have a gsa each
//   kPads                        the padding of scales is written at the end
//   more(), next()               whether the thread block has more to do; advances by a grid step
//   there(), row(), block()      whether this thread has a block of values, and which
//   place()                      the same for later use: there(), row, block, and store(out,
//                                codes), which without kPads stores padding if there is no block
#pragma once

#include "jitquant/flat.cuh"
#include "sectors.cuh"

namespace jitquant::walks {

// Any source, row by row.
struct Matrix {
  struct Plan {};
  static constexpr bool kWhole = false, kByRow = true, kPads = true;
  template <class Source>
  static constexpr int blocks_per_sm() {
    return quantize_blocks_per_sm<Source>();
  }

  struct Place {
    int64_t row, block;

    __device__ __forceinline__ bool there() const { return true; }
    __device__ __forceinline__ void store(const Nvfp4Output& out, const Nvfp4Codes& codes) const {
      OutputRow(out, row).store(block, scale_place(out, block), codes);
    }
  };

  BlockWalk walk;
  int64_t rows;

  template <class Source>
  __device__ __forceinline__ Matrix(const Source&, const Nvfp4Output& out, const Plan&)
      : walk(out.blocks), rows(out.rows) {}
  __device__ __forceinline__ int64_t row() const { return walk.row; }
  __device__ __forceinline__ int64_t block() const { return walk.block; }
  __device__ __forceinline__ bool more() const { return walk.row < rows; }
  __device__ __forceinline__ bool there() const { return more(); }
  __device__ __forceinline__ void next() { walk.next(); }
  __device__ __forceinline__ Place place() const { return {walk.row, walk.block}; }
};

// Rows of whole, aligned blocks, one piece of a row at a time, of which there are `pieces`. The
// position is computed once per thread block, not per thread.
struct Pieces {
  using Plan = int;
  static constexpr bool kWhole = true, kByRow = true, kPads = true;
  template <class Source>
  static constexpr int blocks_per_sm() {
    return quantize_blocks_per_sm<Source>();
  }

  struct Place {
    int64_t row;
    int block, width;

    __device__ __forceinline__ bool there() const { return block < width; }
    __device__ __forceinline__ void store(const Nvfp4Output& out, const Nvfp4Codes& codes) const {
      if (there()) OutputRow(out, row).store(block, scale_place(out, block), codes);
    }
  };

  int64_t rows, at_row, step_rows;
  int width, piece, pieces, step_pieces;

  template <class Source>
  __device__ __forceinline__ Pieces(const Source&, const Nvfp4Output& out, int pieces)
      : rows(out.rows), width(static_cast<int>(out.blocks)), pieces(pieces) {
    at_row = blockIdx.x / pieces;
    piece = blockIdx.x - static_cast<int>(at_row) * pieces;
    step_rows = gridDim.x / pieces;
    step_pieces = gridDim.x - static_cast<int>(step_rows) * pieces;
  }
  __device__ __forceinline__ int64_t row() const { return at_row; }
  __device__ __forceinline__ int block() const {
    return piece * static_cast<int>(blockDim.x) + threadIdx.x;
  }
  __device__ __forceinline__ bool more() const { return at_row < rows; }
  __device__ __forceinline__ bool there() const { return more() && block() < width; }
  __device__ __forceinline__ void next() {
    at_row += step_rows;
    piece += step_pieces;
    if (piece >= pieces) {
      piece -= pieces;
      ++at_row;
    }
  }
  __device__ __forceinline__ Place place() const { return {at_row, block(), width}; }
};

// A contiguous tensor of whole blocks with linear scales, indexed linearly as one row.
struct Flat {
  struct Plan {};
  static constexpr bool kWhole = true, kByRow = false, kPads = false;
  template <class Source>
  static constexpr int blocks_per_sm() {
    return flat_blocks_per_sm<typename Source::Element>();
  }

  struct Place {
    int64_t block;
    static constexpr int row = 0;

    __device__ __forceinline__ bool there() const { return true; }
    __device__ __forceinline__ void store(const Nvfp4Output& out, const Nvfp4Codes& codes) const {
      reinterpret_cast<uint2*>(out.codes)[block] = make_uint2(codes.low, codes.high);
      out.scales[block] = codes.scale;
    }
  };

  int64_t blocks, step, at;

  template <class Source>
  __device__ __forceinline__ Flat(const Source& source, const Nvfp4Output&, const Plan&)
      : blocks(source.blocks),
        step(static_cast<int64_t>(gridDim.x) * kThreads),
        at(static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) {}
  __device__ __forceinline__ int row() const { return 0; }
  __device__ __forceinline__ int64_t block() const { return at; }
  __device__ __forceinline__ bool more() const { return at < blocks; }
  __device__ __forceinline__ bool there() const { return more(); }
  __device__ __forceinline__ void next() { at += step; }
  __device__ __forceinline__ Place place() const { return {at}; }
};

// Swizzled scales of whole, aligned blocks, in the order of the scales. Along a row they are
// scattered 4 bytes at a time, but memory writes 32. So a warp takes the blocks that share a
// sector. Padding, which has no row or block, is written along with the rest.
template <class Source>
constexpr int kSectorBlocksPerSm = quantize_blocks_per_sm<Source>();
template <class T>
constexpr int kSectorBlocksPerSm<PlainSource<T>> = sizeof(T) == 2 ? 5 : 3;
template <class T>
constexpr int kSectorBlocksPerSm<FlatRows<T>> = flat_blocks_per_sm<T>();
template <>
inline constexpr int kSectorBlocksPerSm<NormalizedSource<PlainSource<float>>> = 2;

struct Sectors {
  using Plan = SectorWalk;
  static constexpr bool kWhole = true, kByRow = false, kPads = false;
  template <class Source>
  static constexpr int blocks_per_sm() {
    return kSectorBlocksPerSm<Source>;
  }

  struct Place {
    bool exists;
    uint32_t row, block, scale, width;

    __device__ __forceinline__ bool there() const { return exists; }
    __device__ __forceinline__ void store(const Nvfp4Output& out, const Nvfp4Codes& codes) const {
      if (exists) {
        reinterpret_cast<uint2*>(out.codes)[row * width + block] =
            make_uint2(codes.low, codes.high);
      }
      out.scales[scale] = codes.scale;
    }
  };

  const SectorWalk& plan;
  uint32_t rows, width;
  SectorPlace at;
  Place here;

  template <class Source>
  __device__ __forceinline__ Sectors(const Source&, const Nvfp4Output& out, const SectorWalk& plan)
      : plan(plan),
        rows(static_cast<uint32_t>(out.rows)),
        width(static_cast<uint32_t>(out.blocks)),
        at(plan, blockIdx.x * (kThreads / 32) + threadIdx.x / 32) {
    find();
  }
  __device__ __forceinline__ void find() {
    const uint32_t row = at.row(), block = at.block();
    here = {row < rows && block < width, row, block, 0, width};
  }
  __device__ __forceinline__ uint32_t row() const { return here.row; }
  __device__ __forceinline__ uint32_t block() const { return here.block; }
  __device__ __forceinline__ bool more() const { return at.rows * 8 < ((rows + 127) & ~127u); }
  __device__ __forceinline__ bool there() const { return here.exists; }
  __device__ __forceinline__ void next() {
    at.next(plan);
    find();
  }
  __device__ __forceinline__ Place place() const {
    return {here.exists, here.row, here.block, at.scale(plan), width};
  }
};

}  // namespace jitquant::walks
