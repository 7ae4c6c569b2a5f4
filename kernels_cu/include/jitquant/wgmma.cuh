// Instructions that only compute capability 9.0 has (sm_90a): mbarriers, TMA copies, and warpgroup
// products (wgmma) of 64 rows of A with up to 256 rows of B in shared memory.
#pragma once

#include <cuda_runtime.h>

#include "jitquant/memory.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define JITQUANT_HAS_WARPGROUPS 1

namespace jitquant {

// Shared-memory addresses are 32-bit numbers.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void load_shared_16(uint32_t from, uint32_t (&words)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_shared_8(uint32_t from, uint32_t (&words)[2]) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
// A barrier of kThreads threads of the block.
template <int kThreads>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// ---- barriers ----------------------------------------------------------------------------------

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the same barrier in another block of the cluster.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      " .reg .b32 there;\n"
      " mapa.shared::cluster.u32 there, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Arrives once all asynchronous copies that the thread has issued so far are complete.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      " .reg .pred done;\n"
      "again:\n"
      " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Copies a tile to the same address in each block of the bit mask `blocks`, and signals the same
// barrier in each of them.
__device__ __forceinline__ void copy_tile(uint32_t shared, const void* map, int column, int row,
                                          uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}
__device__ __forceinline__ void copy_own_tile(uint32_t shared, const void* map, int column, int row,
                                              uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// Into L2 only.
__device__ __forceinline__ void prefetch_tile(const void* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(column),
               "r"(row)
               : "memory");
}
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- products ----------------------------------------------------------------------------------

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kBut>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kBut) : "memory");
}

// Describes an operand in shared memory: rows of 128 bytes, swizzled in groups of 8 rows as TMA
// stores them.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t shared) {
  return (uint64_t{1} << 62) | (uint64_t{64} << 32) | (uint64_t{1} << 16) |
         static_cast<uint64_t>((shared & 0x3ffff) >> 4);
}

// The sums as operands of asm, and their names there.
#define JITQUANT_SUMS(i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]),        \
      "+f"(d[i + 11]), "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define JITQUANT_SUMS_16 JITQUANT_SUMS(0)
#define JITQUANT_SUMS_32 JITQUANT_SUMS_16, JITQUANT_SUMS(16)
#define JITQUANT_SUMS_48 JITQUANT_SUMS_32, JITQUANT_SUMS(32)
#define JITQUANT_SUMS_64 JITQUANT_SUMS_48, JITQUANT_SUMS(48)
#define JITQUANT_SUMS_80 JITQUANT_SUMS_64, JITQUANT_SUMS(64)
#define JITQUANT_SUMS_96 JITQUANT_SUMS_80, JITQUANT_SUMS(80)
#define JITQUANT_SUMS_128 JITQUANT_SUMS_96, JITQUANT_SUMS(96), JITQUANT_SUMS(112)
#define JITQUANT_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JITQUANT_NAMES_32 \
  JITQUANT_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JITQUANT_NAMES_48 \
  JITQUANT_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define JITQUANT_NAMES_64 \
  JITQUANT_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JITQUANT_NAMES_80 \
  JITQUANT_NAMES_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define JITQUANT_NAMES_96 \
  JITQUANT_NAMES_80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JITQUANT_NAMES_128                                                                       \
  JITQUANT_NAMES_96                                                                              \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define JITQUANT_STEP(sums, columns, types, a, b)                                           \
  " wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." types " {" JITQUANT_NAMES_##sums \
      "}, {" a "}, " b ", add, 1, 1, 0;\n"
#define JITQUANT_STEPS(sums, columns, types, a0, a1, b0, b1)                                     \
  asm volatile("{\n .reg .pred add;\n setp.eq.b32 add, 0, 0;\n" JITQUANT_STEP(                   \
                   sums, columns, types, a0, b0) JITQUANT_STEP(sums, columns, types, a1, b1) "}" \
               : JITQUANT_SUMS_##sums                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]),    \
                 "r"(a[7]), "l"(b), "l"(b + 2))

// d (64, 2 * kSums) += A B^T, asynchronous, in two steps of 16 of k, which the compiler takes in
// less time at once. Let c = lane % 4 and r = 16 w + lane / 4 for warp w. Of A, a lane holds rows r
// (a[0], a[2]) and r + 8 (a[1], a[3]), and the same of the next step in a[4] and following. Its
// columns are those of mma.cuh.
template <class T, int kSums>
__device__ __forceinline__ void multiply_tiles(float (&d)[kSums], const uint32_t (&a)[8],
                                               uint64_t b) {
#define JITQUANT_WGMMA(sums, columns, ...)                          \
  if constexpr (std::is_same<T, Bf16>::value) {                     \
    JITQUANT_STEPS(sums, columns, "bf16.bf16", __VA_ARGS__);        \
  } else {                                                          \
    static_assert(std::is_same<T, Fp16>::value, "a type of wgmma"); \
    JITQUANT_STEPS(sums, columns, "f16.f16", __VA_ARGS__);          \
  }
  if constexpr (kSums == 16) {
    JITQUANT_WGMMA(16, 32, "%16, %17, %18, %19", "%20, %21, %22, %23", "%24", "%25")
  } else if constexpr (kSums == 32) {
    JITQUANT_WGMMA(32, 64, "%32, %33, %34, %35", "%36, %37, %38, %39", "%40", "%41")
  } else if constexpr (kSums == 48) {
    JITQUANT_WGMMA(48, 96, "%48, %49, %50, %51", "%52, %53, %54, %55", "%56", "%57")
  } else if constexpr (kSums == 64) {
    JITQUANT_WGMMA(64, 128, "%64, %65, %66, %67", "%68, %69, %70, %71", "%72", "%73")
  } else if constexpr (kSums == 80) {
    JITQUANT_WGMMA(80, 160, "%80, %81, %82, %83", "%84, %85, %86, %87", "%88", "%89")
  } else if constexpr (kSums == 96) {
    JITQUANT_WGMMA(96, 192, "%96, %97, %98, %99", "%100, %101, %102, %103", "%104", "%105")
  } else {
    static_assert(kSums == 128, "columns of wgmma");
    JITQUANT_WGMMA(128, 256, "%128, %129, %130, %131", "%132, %133, %134, %135", "%136", "%137")
  }
#undef JITQUANT_WGMMA
}

}  // namespace jitquant
#endif
