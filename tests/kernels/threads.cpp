// Two threads ask how many blocks of a kernel fit on an SM: one makes CUDA answer, which prepares
// the kernel, and the other gets the cached answer. For -fsanitize=thread, which reports a use of
// the kernel that its preparation does not precede.
#include <cstdio>
#include <thread>

#include "jitquant/device.cuh"

namespace {

int prepared = 0;
void kernel() {}

}  // namespace

namespace emulation {

int cuda_device() {
  return 0;
}
const Device& device_of(int) {
  static constexpr Device kDevice = {1, 9, 0, 2048, 32, 228};
  return kDevice;
}
int most_shared(const Device&) {
  return 227 << 10;
}
unsigned resident(const Device&, unsigned, size_t) {
  return 3;
}
void know(const void*) {}
bool allow_shared(const void*, size_t) {
  ++prepared;
  return true;
}
int& last_error() {
  thread_local int error = 0;
  return error;
}

}  // namespace emulation

int main() {
  std::atomic<bool> answered{false};
  std::thread first([&] {
    jitquant::blocks_per_sm<&kernel>(256, 1024);
    answered.store(true, std::memory_order_relaxed);  // which orders nothing else
  });
  while (!answered.load(std::memory_order_relaxed)) {
  }
  const int count = jitquant::blocks_per_sm<&kernel>(256, 1024);
  std::printf("%d %d\n", count, prepared);
  first.join();
}
