// A GPU on the host, for kernels that are compiled as plain C++: every thread is a fiber, and the
// fibers take turns on one thread of the host. A thread runs until it has to wait for others, so
// that a run is the same each time; `descending` turns the order of warps and blocks round, which
// shows a barrier that is missing.
//
// What a GPU leaves undefined is an error here: threads that wait at different barriers, a thread
// that has ended while others wait for it, or without having waited for the kernel that its own
// overlaps with, memory that is not aligned to what is loaded, a launch that no device takes. The
// launch returns an error then, and `emulation_error` says what happened.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulation {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Launch {
  unsigned grid, block_x, block_y;
  unsigned cluster;  // blocks
  bool cooperative, overlapped;
  size_t dynamic_shared;
  const void* kernel;
  const void* in_shared;  // anything in it: it is there from the first use of its address on
};

// Where the shared memory of a kernel's module is. `__shared__` is `thread_local`, of which the
// linker makes one piece of memory for each module: the one piece that holds all of a block's.
struct SharedMemory {
  char* data = nullptr;
  size_t bytes = 0;
};

// False, with the error set, where no device would take the launch or the kernel did what is
// undefined.
bool run(const Launch& launch, const std::function<void()>& thread);

void know(const void* kernel);
void allow_shared(const void* kernel, size_t bytes);
int current_device();
int multiprocessors();
int capability_major();

// ---- what a running thread calls ----
void block_barrier();
int block_barrier_or(int value);
void gang_arrive();  // of the cluster, or of the grid of a cooperative launch
void gang_wait();
// The values of the lanes of this warp, by lane, once all of `mask` have come to the same call.
const uint64_t* exchange(uint32_t mask, uint64_t value, int call);
char* in_block(const void* shared, unsigned rank);
uint32_t shared_address(const void* shared);
char* shared_pointer(uint32_t address);
unsigned lane();
// That all threads of a launch that overlaps with the one before have to do.
void wait_for_previous();
// An asynchronous copy comes at the last moment, when its thread waits for it, or, descending, at
// once. A thread waits for all groups it has ended but the last few.
void copy_later(void* to, const void* from, size_t bytes, size_t zeros);
void end_group();
void copy_now(size_t but);

}  // namespace emulation

extern emulation::Index threadIdx, blockIdx, blockDim, gridDim;
