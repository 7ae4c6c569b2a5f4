// A GPU on the host, for kernels that are compiled as plain C++: every thread is a fiber, and the
// fibers take turns on one thread of the host. A thread runs until it has to wait for others, so
// that a run is the same each time; `descending` turns the order of warps and blocks round, which
// shows a barrier that is missing.
//
// What a GPU leaves undefined is an error here: threads that wait at different barriers, a thread
// that has ended while others wait for it, or without having waited for the kernel that its own
// overlaps with, memory that is not aligned to what is loaded, a launch that no device takes. The
// launch returns an error then, and `emulation_error` says what happened.
//
// What threads do before they wait for the kernel before theirs runs with the memory of all tensors
// protected: an earlier kernel may not have written it yet, so that touching it is an error. The
// protection costs microseconds for each block, so some blocks of a launch are run so, not all.
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
bool allow_shared(const void* kernel, size_t bytes);
// Every tensor is on the device that the tests use. What is current may be another, and CUDA and
// torch need not agree on it: torch only remembers a device that has no context yet.
int tensor_device();
int cuda_device();
int torch_device();
void make_current(int cuda, int torch);

// Of each kernel, as what a compiler would say of it.
constexpr int kRegisters = 64;
constexpr size_t kStaticShared = 1024;

// What a multiprocessor of a device has, and how many there are.
struct Device {
  int multiprocessors, major, minor;
  unsigned threads, blocks, shared;  // shared memory in KiB
};
const Device& device_of(int number);
// Shared memory that a block can have, in bytes: the system takes 1 KiB of each.
int most_shared(const Device& device);
// Blocks that a multiprocessor holds at once.
unsigned resident(const Device& device, unsigned threads, size_t shared_bytes);

// The error that a call of CUDA leaves to the next one that asks for it.
int& last_error();
// Whether launches are refused, as of a kernel that the device has no code for.
bool refuses();

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
// From here on, threads may read what the launch before has not changed.
void previous_has_waited();
// A thread waits until something is so, which others bring about.
void wait_until(const std::function<bool()>& ready);
// Lets all others run first.
void give_way();
// Of so many threads of the block.
void named_barrier(unsigned count);
// Work of the block's, such as a tensor copy: done when no thread can run, or, descending, at once.
void work_later(std::function<void()> work);
// Work of a thread's, in groups: done when it waits for all but the last few, or, ascending, at
// once, so that of two kinds of work either may come before the other.
void own_work_later(std::function<void()> work);
void end_own_group();
void finish_own_work(size_t but);
// The kernel did what is undefined.
void fail_kernel(const char* what);
// Memory of tensors, from `past` bytes behind the beginning of a page on, until all of it is
// released.
char* allocate(size_t bytes, size_t past);
void release_all();
// That there is a tensor at the address.
void prefetch(const void* p);
// An asynchronous copy comes at the last moment, when its thread waits for it, or, descending, at
// once. A thread waits for all groups it has ended but the last few.
void copy_later(void* to, const void* from, size_t bytes, size_t zeros);
void end_group();
void copy_now(size_t but);

}  // namespace emulation

extern emulation::Index threadIdx, blockIdx, blockDim, gridDim;
