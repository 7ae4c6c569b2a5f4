// Rows of x as the tile kernels copy them: in bf16 or fp16, decoded from NVFP4 if need be, which is
// exact, and either as they are or in the order in which a lane decodes W: of 64 columns, word i of
// a lane's two words of eight codes goes to k-steps 2i and 2i + 1. There, lane t has columns 2t,
// 2t + 1, 2t + 8 and 2t + 9 of the operand.
#pragma once

#include "product.cuh"

namespace jitquant {

constexpr int kPiecesEach = 4;  // of eight neighboring columns, per thread
// Thread blocks per SM. Only products on compute capability 9.0 take what this kernel makes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kOrderBlocks = 2048 / kPieceThreads;
#else
constexpr int kOrderBlocks = 1;
#endif

// A thread block has a part of a row. Columns that x lacks are zero. The results stay in the L2
// cache if they fit, because the next kernel reads them. With at most 32 registers, thread blocks
// are resident beside those of an earlier product of few rows. They let the next kernel begin at
// once: it is a product, which reads nothing before its own wait.
template <class Input, bool kOrders>
__global__ void __launch_bounds__(kPieceThreads, kOrderBlocks)
    order_rows_kernel(const __grid_constant__ LinearOperand x,
                      typename LinearInput<Input>::Operand* values, int cols, int parts) {
  let_next_begin();
  wait_for_previous();
  const int row = static_cast<int>(blockIdx.x / parts);
  const int part = static_cast<int>(blockIdx.x - row * parts);
  const int first = (part * kPiecesEach * kPieceThreads + threadIdx.x) * 8;
  uint32_t words[kPiecesEach][4];
#pragma unroll
  for (int i = 0; i < kPiecesEach; ++i) {
    load_x8_whole<Input>(x, row, first + i * kPieceThreads * 8, words[i]);
  }
  auto* const to = values + static_cast<int64_t>(row) * cols;
  const auto store = [&](int column, uint32_t (&w)[4]) {
    value_x8<Input>(w);
    if constexpr (kOrders) {
      const int t = column / 16 % 4, word = column / 8 % 2;
      uint32_t* const at = reinterpret_cast<uint32_t*>(to + column / 64 * 64) + word * 16 + t;
#pragma unroll
      for (int q = 0; q < 4; ++q) at[q * 4] = w[q];
    } else {
      const uint32_t plain[4] = {byte_permute(w[0], w[1], 0x5410), byte_permute(w[2], w[3], 0x5410),
                                 byte_permute(w[0], w[1], 0x7632),
                                 byte_permute(w[2], w[3], 0x7632)};
      store_words<4>(to + column, plain);
    }
  };
  // Where x ends, if not after eight columns. One thread takes that apart.
  const int partial = x.cols % 8 == 0 ? cols : x.cols / 8 * 8;
#pragma unroll
  for (int i = 0; i < kPiecesEach; ++i) {
    const int column = first + i * kPieceThreads * 8;
    if (column < cols && column != partial) store(column, words[i]);
  }
  if (partial < cols && part == 0 && threadIdx.x == 0) {
    load_x8<Input, false>(x, row, partial, words[0]);
    store(partial, words[0]);
  }
}

#ifndef __CUDACC_RTC__
namespace {

// `values` has room for x.rows * cols elements and is aligned to 16 bytes, and so are the rows of
// x. cols is a multiple of 64.
template <class Input, bool kOrders>
cudaError_t launch_order_rows(const LinearOperand& x, typename LinearInput<Input>::Operand* values,
                              int cols, cudaStream_t stream) {
  constexpr int kColumns = kPieceThreads * kPiecesEach * 8;
  const int parts = (cols + kColumns - 1) / kColumns;
  const LaunchShape shape = {x.rows * parts, kPieceThreads, Start::kOverlapped};
  return launch<&order_rows_kernel<Input, kOrders>>(shape, stream, x, values, cols, parts);
}

}  // namespace
#endif

}  // namespace jitquant
