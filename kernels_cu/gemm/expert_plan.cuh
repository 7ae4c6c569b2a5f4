// How the kernels of few rows of experts are launched: the warps and the shared memory of a block.
#pragma once

#include "expert_stream.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
namespace {

struct BlockShape {
  ExpertPlan plan;
  int along, beside;
  int64_t grid, shared;
};

// Bytes of sums per tile and unit, if an expert has at most two rows and if it has more.
struct SumBytes {
  int two, eight;
};

// Plans a block with `units` side by side, if blocks are divided among `tokens` tokens. `tiles` is
// how many tiles a token has, or 0 if unknown.
bool plan_shape(BlockShape& shape, int tokens, int units, int64_t tiles, SumBytes sums, bool turned,
                int tables) {
  const int sms = sm_count() < tokens ? 1 : sm_count() / tokens;
  const int64_t most_shared = most_shared_bytes() - 1024;
  const auto fits = [&](int most_warps, int stages) {
    ExpertPlan& plan = shape.plan;
    plan.units = units;
    plan.passes = (units + most_warps - 1) / most_warps;
    shape.along = (units + plan.passes - 1) / plan.passes;
    shape.beside = tiles > 0 ? 1 : most_warps / shape.along;
    // As many tiles side by side as take little longer than one after another: with few warps, the
    // latencies of decoding are not hidden.
    const auto rounds = [&](int64_t beside) {
      const int64_t own = (tiles + sms - 1) / sms;
      return (own + beside - 1) / beside * beside;
    };
    if (tiles > 0) {
      const int64_t most = most_warps / shape.along < tiles ? most_warps / shape.along : tiles;
      int64_t least = rounds(1);
      for (int more = 2; more <= most; ++more) {
        if (rounds(more) < least) least = rounds(more);
      }
      for (int more = 2; more <= most; ++more) {
        if (7 * rounds(more) <= 8 * least) shape.beside = more;
      }
    }
    const int warps = shape.along * shape.beside;
    plan.stages = stages;
    if (stages == kManyStages && warps > 8) return false;
    const int64_t ring = static_cast<int64_t>(warps) * (stages * kStage + kHeldX);
    const int64_t staged = turned ? warps * kStaged : 0;
    // A later pass stages x again, which must not overwrite the sums.
    plan.sums_at = static_cast<int>(plan.passes > 1 ? staged : 0);
    const int64_t words = static_cast<int64_t>(warps) * 32 * OwnWords::kCount * 4;
    const int64_t left = (most_shared - ring - tables - words - plan.sums_at) / 1024 * 1024;
    const int64_t step = static_cast<int64_t>(units) * shape.beside;
    const int64_t two = left / (step * sums.two), eight = left / (step * sums.eight);
    if (two < 1 || eight < 1 || left + plan.sums_at < staged) return false;
    constexpr int64_t kMostHeld = 64;
    plan.hold_two = static_cast<int>(two < kMostHeld ? two : kMostHeld);
    plan.hold_eight = static_cast<int>(eight < kMostHeld ? eight : kMostHeld);
    plan.words_at = static_cast<int>(left + plan.sums_at);
    plan.tables_at = static_cast<int>(plan.words_at + words);
    shape.shared = ring + plan.tables_at + tables;
    shape.grid =
        tokens *
        (tiles > 0 && tiles < sms * shape.beside ? (tiles + shape.beside - 1) / shape.beside : sms);
    return true;
  };
  return fits(kMostWarps, kManyStages) || fits(kMostWarps, kFewStages) ||
         fits(kMostWarps / 2, kFewStages);
}

// Tiles of `tile_rows` rows of W are alike unless the last one is cut off.
void plan_steps(BlockShape& shape, const ExpertWeights& w, int tile_rows) {
  const int64_t bytes = static_cast<int64_t>(shape.beside) * tile_rows * (w.cols / 2);
  const bool alike = w.rows % kTile == 0 || tile_rows < kTile;
  const bool fits = bytes <= std::numeric_limits<int>::max();
  shape.plan.step_codes = alike && fits ? static_cast<int>(bytes) : 0;
  shape.plan.step_scales = shape.plan.step_codes / 8;
  shape.plan.four_rows = static_cast<int64_t>(w.cols) * 2;
}

template <auto kKernel, class... Args>
cudaError_t launch_shape(const BlockShape& shape, cudaStream_t stream, const Args&... args) {
  const int threads = shape.along * shape.beside * 32;
  if (blocks_per_sm<kKernel>(threads, static_cast<size_t>(shape.shared)) < 1) {
    return cudaErrorInvalidConfiguration;
  }
  LaunchShape to = {shape.grid, shape.along * 32, Start::kOverlapped};
  to.block_y = shape.beside;
  to.shared = static_cast<size_t>(shape.shared);
  return launch<kKernel>(to, stream, args...);
}

// How many sorted rows or pairs a launch takes. Tables for more do not fit next to the rings.
int64_t most_sorted() {
  return most_shared_bytes() >= 160 << 10 ? 2048 : 1024;
}

}  // namespace
#endif

}  // namespace jitquant
