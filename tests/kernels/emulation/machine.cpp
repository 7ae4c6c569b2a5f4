#include "machine.h"

#include <dlfcn.h>
#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

emulation::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {
namespace {

// What a kernel that reads what it has not written finds.
constexpr int kGarbage = 0xff;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kUsualShared = 48 << 10;
constexpr unsigned kMostThreads = 1024, kMostCluster = 8;
constexpr unsigned kWarps = (64 << 10) / (32 * kRegisters);  // by the registers of a multiprocessor

// The devices, by number: what a launcher asks of a device it may keep. The last one is only for
// tests that ask for it.
constexpr Device kDevices[] = {
    {1, 9, 0, 2048, 32, 228},    {2, 9, 0, 2048, 32, 228},  {3, 8, 0, 2048, 32, 164},
    {132, 10, 0, 2048, 32, 228}, {2, 8, 6, 1536, 16, 100},  {1, 8, 9, 1536, 24, 100},
    {2, 12, 0, 1536, 24, 100},   {1, 10, 0, 2048, 32, 228}, {4, 9, 0, 2048, 32, 228},
};

int device = 0, current_of_cuda = 0, current_of_torch = 0;
int error_left = 0;
bool refusing = false;
bool descending = false;
int64_t launches = 0;
char error_text[256] = "";
std::map<std::pair<const void*, int>, size_t> allowed_shared;  // by kernel and device
std::map<const void*, int64_t> launches_of;                    // each kernel that is known

__attribute__((format(printf, 1, 2))) bool fail(const char* format, ...) {
  if (error_text[0] == '\0') {
    va_list parts;
    va_start(parts, format);
    std::vsnprintf(error_text, sizeof error_text, format, parts);
    va_end(parts);
  }
  return false;
}

struct Barrier {
  unsigned arrived = 0, generation = 0;

  // Whether it was the last one.
  bool arrive(unsigned expected) {
    if (++arrived < expected) return false;
    arrived = 0;
    ++generation;
    return true;
  }
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes, zeros;  // the last of the bytes, which are not read
  size_t group;

  void make() const {
    std::memcpy(to, from, bytes - zeros);
    std::memset(static_cast<char*>(to) + bytes - zeros, 0, zeros);
  }
};

struct Fiber {
  char* stack = nullptr;
  ucontext_t start;
  jmp_buf here;
  bool begun, done, arrived;
  bool waited, held;  // for the kernel before, and until all others of the gang do so too
  const Barrier* waits_for;
  unsigned generation;  // of what it waits for
  unsigned gang_generation;
  Index thread;
  uint64_t exchanged[32];  // by its warp, the last time
  std::vector<Copy> copies;
  size_t groups;  // of copies, so far
  const std::function<bool()>* ready;
  std::deque<std::pair<size_t, std::function<void()>>> work;
  size_t work_groups;

  bool can_run() const {
    return !done && !held && (waits_for == nullptr || waits_for->generation != generation) &&
           (ready == nullptr || (*ready)());
  }
};

// Lanes that exchange values, of which a warp may have several at once.
struct Exchange {
  Barrier barrier;
  uint32_t mask, came;  // the lanes that take part, and those that have come
  int call;
};

struct Warp {
  Exchange exchanges[32];  // no more than lanes
  uint64_t values[32];
  uint32_t ended;
};

struct ThreadBlock {
  Index index;
  Fiber* fibers;
  std::vector<Warp> warps;
  Barrier barrier, named;
  int any[2];
  unsigned ended;
  std::unique_ptr<char[]> memory;  // while another block of its gang has the place
};

jmp_buf scheduler;
Fiber* fiber;
ThreadBlock* block;
std::vector<Fiber> fibers;
std::vector<ThreadBlock> gang;  // the blocks that are at work at once
Barrier gang_barrier;
std::deque<std::function<void()>> gang_work;
uint64_t rounds;  // in which all blocks of the gang have run
bool gave_way;    // whether a thread did in this round
unsigned threads, gang_threads;
SharedMemory shared;
std::function<void()> body;
bool overlapped;  // with the launch before
bool holds;       // threads that wait for that
bool stopped;     // after an error nothing runs on

// The memory of all tensors, of which as much is in use.
constexpr size_t kArenaBytes = size_t{16} << 30;
char* arena = nullptr;
size_t arena_used = 0;
struct Region {
  const char *begin, *end;
};
std::vector<Region> regions;
bool knows_tensors = false;  // not those of a call from Python that makes its own
bool is_protected = false, reads_allowed = false;
std::vector<char> before;      // what all tensors were before the launch before
struct sigaction usual[NSIG];  // what signals did before

void protect(bool on) {
  if (arena == nullptr || on == is_protected) return;
  mprotect(arena, arena_used, on ? PROT_NONE : PROT_READ | PROT_WRITE);
  is_protected = on;
  reads_allowed = false;
}

// Of the pages that the launch before has not changed.
void allow_reads() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t at = 0; at < arena_used; at += page) {
    const bool known = at + page <= before.size();
    mprotect(arena + at, page, PROT_READ);
    if (!known || std::memcmp(arena + at, before.data() + at, page) != 0) {
      mprotect(arena + at, page, PROT_NONE);
    }
  }
}

void on_fault(int signal, siginfo_t* info, void*) {
  const char* const address = static_cast<const char*>(info->si_addr);
  if (!is_protected || address < arena || address >= arena + arena_used) {
    sigaction(signal, &usual[signal], nullptr);  // which the access that comes again finds
    return;
  }
  fail("a thread reads or writes a tensor before it waits for the kernel before");
  protect(false);
}

unsigned flat(const Index& i) {
  return i.y * blockDim.x + i.x;
}
Warp& warp() {
  return block->warps[flat(threadIdx) / 32];
}
unsigned lanes_of(unsigned first) {
  return threads - first < 32 ? threads - first : 32;
}

void leave() {
  if (_setjmp(fiber->here) == 0) _longjmp(scheduler, 1);
}

[[noreturn]] void stop() {
  stopped = true;
  leave();
  __builtin_unreachable();
}

void wait_for(const Barrier& barrier, unsigned generation) {
  if (barrier.generation != generation) return;
  fiber->waits_for = &barrier;
  fiber->generation = generation;
  leave();
  fiber->waits_for = nullptr;
}

// The check of alignment by the compiler ends in a trap. One of the host is not ours.
void on_trap(int signal, siginfo_t*, void*) {
  const char* const here = static_cast<const char*>(__builtin_frame_address(0));
  if (fiber == nullptr || here < fiber->stack || here >= fiber->stack + kStackBytes) {
    sigaction(signal, &usual[signal], nullptr);
    return;
  }
  fail("an address is not aligned to what is loaded or stored there");
  stop();
}

void handle(int signal, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;  // a handler may not return
  sigaction(signal, &action, &usual[signal]);
}

void enter() {
  body();
  if (overlapped && !fiber->waited) fail("a thread did not wait for the kernel before");
  fiber->done = true;
  ++block->ended;
  warp().ended |= 1u << lane();
  _longjmp(scheduler, 1);
}

void resume(Fiber& f) {
  fiber = &f;
  threadIdx = f.thread;
  if (_setjmp(scheduler) != 0) return;
  if (f.begun) _longjmp(f.here, 1);
  f.begun = true;
  setcontext(&f.start);
}

void prepare(Fiber& f, Index thread) {
  if (f.stack == nullptr) {
    f.stack = static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  f.begun = f.done = f.arrived = f.waited = f.held = false;
  f.waits_for = nullptr;
  f.copies.clear();
  f.work.clear();
  f.groups = f.work_groups = 0;
  f.ready = nullptr;
  f.thread = thread;
  getcontext(&f.start);
  f.start.uc_stack.ss_sp = f.stack;
  f.start.uc_stack.ss_size = kStackBytes;
  f.start.uc_link = nullptr;
  makecontext(&f.start, enter, 0);
}

// Gives the place of the shared memory to another block of the gang.
void activate(ThreadBlock& next) {
  if (block != &next && gang.size() > 1) {
    if (block != nullptr) {
      block->memory.reset(new char[shared.bytes]);
      std::memcpy(block->memory.get(), shared.data, shared.bytes);
    }
    std::memcpy(shared.data, next.memory.get(), shared.bytes);
  }
  block = &next;
  blockIdx = next.index;
}

// Whether a thread of the block has run.
bool run_block(ThreadBlock& next) {
  activate(next);
  bool any = false;
  const unsigned warps = (threads + 31) / 32;
  for (unsigned i = 0; i < warps; ++i) {
    const unsigned first = (descending ? warps - 1 - i : i) * 32, lanes = lanes_of(first);
    for (bool ran = true; ran && !stopped;) {
      ran = false;
      for (unsigned j = 0; j < lanes && !stopped; ++j) {
        Fiber& f = next.fibers[first + (descending ? lanes - 1 - j : j)];
        if (f.can_run()) resume(f), ran = any = true;
      }
    }
  }
  return any;
}

// `early`: what comes before the wait runs with protected memory, all of it before all else.
void run_gang(unsigned first, unsigned count, bool early) {
  gang_barrier = Barrier();
  gang_work.clear();
  block = nullptr;
  gang.clear();
  gang.resize(count);
  for (unsigned b = 0; b < count; ++b) {
    ThreadBlock& t = gang[b];
    t.index.x = first + b;
    t.fibers = fibers.data() + static_cast<size_t>(b) * threads;
    t.warps.assign((threads + 31) / 32, Warp{});
    t.any[0] = t.any[1] = 0;
    t.ended = 0;
    if (count > 1) {
      t.memory.reset(new char[shared.bytes]);
      std::memset(t.memory.get(), kGarbage, shared.bytes);
    }
    for (unsigned i = 0; i < threads; ++i) {
      prepare(t.fibers[i], {i % blockDim.x, i / blockDim.x, 0});
    }
  }
  if (count == 1) std::memset(shared.data, kGarbage, shared.bytes);
  const auto run_all = [&] {
    for (bool ran = true; ran && !stopped;) {
      ran = false;
      for (unsigned b = 0; b < count && !stopped; ++b) {
        if (run_block(gang[descending ? count - 1 - b : b])) ran = true;
      }
      ++rounds;
      if (std::exchange(gave_way, false)) ran = true;
      if (!ran && !stopped && !gang_work.empty()) {
        gang_work.front()();
        gang_work.pop_front();
        ran = true;
      }
    }
  };
  holds = overlapped && early;
  if (holds) {
    protect(true);
    run_all();
    protect(false);
    for (unsigned i = 0; i < gang_threads; ++i) fibers[i].held = false;
    holds = false;
  }
  run_all();
  for (const ThreadBlock& t : gang) {
    if (t.ended != threads) fail("block %u waits at barriers that not all come to", t.index.x);
  }
}

// Of the modules, the one whose piece of thread-local memory has the address.
int find_shared(dl_phdr_info* info, size_t, void* address) {
  char* data = static_cast<char*>(info->dlpi_tls_data);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_TLS || data == nullptr) continue;
    if (address < data || address >= data + segment.p_memsz) continue;
    shared = {data, segment.p_memsz};
    return 1;
  }
  return 0;
}

bool acceptable(const Launch& l) {
  const auto allowed = allowed_shared.find({l.kernel, device});
  const size_t limit = allowed == allowed_shared.end() ? kUsualShared : allowed->second;
  if (threads < 1 || threads > kMostThreads) return fail("a block of %u threads", threads);
  if (l.grid < 1 || l.grid > 0x7fffffffu) return fail("a grid of %u blocks", l.grid);
  if (l.dynamic_shared > limit) {
    return fail("%zu bytes of shared memory where %zu are allowed", l.dynamic_shared, limit);
  }
  if (l.cluster > 1 && (kDevices[device].major < 9 || l.cluster > kMostCluster)) {
    return fail("a cluster of %u blocks", l.cluster);
  }
  if (l.grid % l.cluster != 0) return fail("%u blocks in clusters of %u", l.grid, l.cluster);
  if (current_of_cuda != device) {
    return fail("a launch on device %d of what is on %d", current_of_cuda, device);
  }
  if (l.cooperative) {
    const Device& d = kDevices[device];
    const unsigned most = resident(d, threads, kStaticShared + l.dynamic_shared) *
                          static_cast<unsigned>(d.multiprocessors);
    if (l.grid > most) return fail("%u blocks of %u threads at once", l.grid, threads);
  }
  return true;
}

}  // namespace

bool run(const Launch& l, const std::function<void()>& thread) {
  ++launches;
  ++launches_of[l.kernel];
  threads = l.block_x * l.block_y;
  if (!acceptable(l)) return false;
  shared = {};
  dl_iterate_phdr(find_shared, const_cast<void*>(l.in_shared));
  // The host's thread-local variables are there too.
  const std::vector<char> of_host(shared.data, shared.data + shared.bytes);
  blockDim = {l.block_x, l.block_y, 1};
  gridDim = {l.grid, 1, 1};
  body = thread;
  overlapped = l.overlapped;
  stopped = false;
  std::vector<char> now(arena, arena + arena_used);
  const unsigned size = l.cooperative ? l.grid : l.cluster;
  gang_threads = size * threads;
  if (fibers.size() < gang_threads) fibers.resize(gang_threads);
  const unsigned gangs = l.grid / size;
  for (unsigned i = 0; i < gangs && error_text[0] == '\0'; ++i) {
    run_gang((descending ? gangs - 1 - i : i) * size, size,
             i < 2 || i + 1 == gangs || i % (gangs / 4 + 1) == 0);
  }
  std::memcpy(shared.data, of_host.data(), shared.bytes);
  before = std::move(now);
  return error_text[0] == '\0';
}

void know(const void* kernel) {
  launches_of.emplace(kernel, 0);
}
bool allow_shared(const void* kernel, size_t bytes) {
  if (bytes > static_cast<size_t>(most_shared(kDevices[current_of_cuda]))) return false;
  allowed_shared[{kernel, current_of_cuda}] = bytes;
  return true;
}
int tensor_device() {
  return device;
}
int cuda_device() {
  return current_of_cuda;
}
int torch_device() {
  return current_of_torch;
}
void make_current(int cuda, int torch) {
  current_of_cuda = cuda;
  current_of_torch = torch;
}
const Device& device_of(int number) {
  if (number != device) fail("device %d is asked for what is of device %d", number, device);
  return kDevices[number];
}
int most_shared(const Device& d) {
  return static_cast<int>(d.shared - 1) << 10;
}
unsigned resident(const Device& d, unsigned block_threads, size_t shared_bytes) {
  const unsigned warps = (block_threads + 31) / 32;
  const auto by_shared = static_cast<unsigned>((d.shared << 10) / (shared_bytes + 1024));
  return std::min({d.blocks, d.threads / (warps * 32), kWarps / warps, by_shared});
}
int& last_error() {
  return error_left;
}
bool refuses() {
  return refusing;
}

unsigned lane() {
  return flat(threadIdx) & 31;
}

void previous_has_waited() {
  // Once for a gang: all of it comes here first.
  if (is_protected && !std::exchange(reads_allowed, true)) allow_reads();
}

void wait_for_previous() {
  const bool first = !fiber->waited;
  fiber->waited = true;
  if (!first || !holds) return;
  fiber->held = true;
  leave();
}

char* allocate(size_t bytes, size_t past) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (arena == nullptr) {
    arena = static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    handle(SIGSEGV, on_fault);
    handle(SIGILL, on_trap);
    handle(SIGTRAP, on_trap);  // on Arm
  }
  char* const begin = arena + arena_used + past;
  arena_used += (past + bytes + page - 1) / page * page;
  if (arena_used > kArenaBytes) fail("tensors of more than %zu bytes", kArenaBytes);
  regions.push_back({begin, begin + bytes});
  return begin;
}
void release_all() {
  knows_tensors = false;
  arena_used = 0;
  regions.clear();
}

void prefetch(const void* p) {
  const char* const at = static_cast<const char*>(p);
  if (knows_tensors && std::none_of(regions.begin(), regions.end(), [at](const Region& r) {
        return r.begin <= at && at < r.end;
      })) {
    fail("a prefetch outside of all tensors");
    stop();
  }
}

void wait_until(const std::function<bool()>& ready) {
  while (!ready()) {
    fiber->ready = &ready;
    leave();
    fiber->ready = nullptr;
  }
}

void give_way() {
  gave_way = true;
  wait_until([now = rounds] { return rounds > now; });
}

void named_barrier(unsigned count) {
  const unsigned generation = block->named.generation;
  if (!block->named.arrive(count)) wait_for(block->named, generation);
}

void work_later(std::function<void()> work) {
  if (descending) {
    work();
  } else {
    gang_work.push_back(std::move(work));
  }
}
void own_work_later(std::function<void()> work) {
  if (descending) {
    fiber->work.emplace_back(fiber->work_groups, std::move(work));
  } else {
    work();
  }
}
void end_own_group() {
  ++fiber->work_groups;
}
void finish_own_work(size_t but) {
  auto& work = fiber->work;
  while (!work.empty() && work.front().first + but < fiber->work_groups) {
    work.front().second();
    work.pop_front();
  }
}

void fail_kernel(const char* what) {
  fail("%s", what);
  stop();
}

void copy_later(void* to, const void* from, size_t bytes, size_t zeros) {
  const auto address = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if (address % bytes != 0) fail("a copy of %zu bytes is not aligned to as many", bytes);
  // Tools take a copy for one of all its bytes, the zeros too.
  const char* const begin = static_cast<const char*>(from);
  for (const Region& r : regions) {
    if (r.begin <= begin && begin < r.end && begin + bytes > r.end) {
      fail("a copy of %zu bytes reaches past the end of a tensor's memory", bytes);
    }
  }
  const Copy copy = {to, from, bytes, zeros, fiber->groups};
  if (descending) {
    copy.make();
  } else {
    fiber->copies.push_back(copy);
  }
}
void end_group() {
  ++fiber->groups;
}
void copy_now(size_t but) {
  std::vector<Copy>& copies = fiber->copies;
  auto rest = copies.begin();
  for (; rest != copies.end() && rest->group + but < fiber->groups; ++rest) {
    rest->make();
  }
  copies.erase(copies.begin(), rest);
}

void block_barrier() {
  if (block->ended > 0) {
    fail("__syncthreads after a thread of the block has ended");
    stop();
  }
  const unsigned generation = block->barrier.generation;
  if (!block->barrier.arrive(threads)) wait_for(block->barrier, generation);
}

int block_barrier_or(int value) {
  // Two in turn: nobody comes to the next but one before all have read this one.
  const unsigned turn = block->barrier.generation & 1;
  if (block->barrier.arrived == 0) block->any[turn] = 0;
  block->any[turn] |= value != 0;
  block_barrier();
  return block->any[turn];
}

void gang_arrive() {
  if (fiber->arrived) {
    fail("a thread arrives twice at a barrier of its cluster or grid");
    stop();
  }
  fiber->arrived = true;
  fiber->gang_generation = gang_barrier.generation;
  gang_barrier.arrive(gang_threads);
}

void gang_wait() {
  if (!fiber->arrived) {
    fail("a thread waits at a barrier of its cluster or grid without having arrived");
    stop();
  }
  wait_for(gang_barrier, fiber->gang_generation);
  fiber->arrived = false;
}

const uint64_t* exchange(uint32_t mask, uint64_t value, int call) {
  Warp& w = warp();
  const unsigned l = lane(), lanes = lanes_of(flat(threadIdx) & ~31u);
  const uint32_t there = lanes == 32 ? ~0u : (1u << lanes) - 1;
  bool valid = (mask >> l & 1) != 0 && (mask & ~there) == 0 && (mask & w.ended) == 0;
  Exchange* found = nullptr;
  for (Exchange& other : w.exchanges) {
    if (other.barrier.arrived == 0) {
      if (found == nullptr) found = &other;
    } else if (other.mask == mask) {
      found = &other;
      valid &= other.call == call;
    } else {
      // Lanes that have come there wait for this one, and it would wait for one of them.
      valid &= (other.mask >> l & 1) == 0 || (other.came & mask) == 0;
    }
  }
  if (!valid) {
    fail("the lanes of a warp do not come to the same exchange");
    stop();
  }
  Exchange& e = *found;
  if (e.barrier.arrived == 0) e.mask = mask, e.call = call, e.came = 0;
  e.came |= 1u << l;
  w.values[l] = value;
  const unsigned generation = e.barrier.generation;
  if (e.barrier.arrive(__builtin_popcount(mask))) {
    for (unsigned i = 0; i < lanes; ++i) {
      std::memcpy(fiber[static_cast<int>(i) - static_cast<int>(l)].exchanged, w.values,
                  mask >> i & 1 ? sizeof w.values : 0);
    }
  } else {
    wait_for(e.barrier, generation);
  }
  return fiber->exchanged;
}

uint32_t shared_address(const void* p) {
  const char* q = static_cast<const char*>(p);
  if (q < shared.data || q >= shared.data + shared.bytes) {
    fail("an address that is not in shared memory is taken for one");
    stop();
  }
  return static_cast<uint32_t>(q - shared.data);
}

char* shared_pointer(uint32_t address) {
  if (address >= shared.bytes) {
    fail("an address past the end of shared memory");
    stop();
  }
  return shared.data + address;
}

char* in_block(const void* p, unsigned rank) {
  if (rank >= gang.size()) {
    fail("block %u of a cluster of %zu", rank, gang.size());
    stop();
  }
  const uint32_t address = shared_address(p);
  return &gang[rank] == block ? shared.data + address : gang[rank].memory.get() + address;
}

}  // namespace emulation

// ---- for the tests ----

extern "C" {

void emulation_use(int number, int order) {
  emulation::device = number;
  emulation::make_current(number, number);
  emulation::descending = order != 0;
  emulation::error_text[0] = '\0';
}
void emulation_make_current(int cuda, int torch) {
  emulation::make_current(cuda, torch);
}
int emulation_current(bool torch) {
  return torch ? emulation::current_of_torch : emulation::current_of_cuda;
}
int emulation_multiprocessors(int number) {
  return emulation::kDevices[number].multiprocessors;
}
void emulation_refuse(bool refuse) {
  emulation::refusing = refuse;
}
int emulation_last_error() {
  return emulation::error_left;
}
char* emulation_allocate(size_t bytes, size_t past) {
  emulation::knows_tensors = true;
  return emulation::allocate(bytes, past);
}
void emulation_release_all() {
  emulation::release_all();
}
int emulation_devices() {
  return static_cast<int>(std::size(emulation::kDevices)) - 1;
}
const char* emulation_error() {
  return emulation::error_text;
}
int64_t emulation_launches() {
  return emulation::launches;
}

// Whether the kernel was launched, and where in the file of its module it is; false past the last.
bool emulation_kernel(int index, bool* launched, const char** module, uint64_t* place) {
  if (index >= static_cast<int>(emulation::launches_of.size())) return false;
  const auto& [kernel, count] = *std::next(emulation::launches_of.begin(), index);
  Dl_info info;
  if (dladdr(kernel, &info) == 0) return false;
  *launched = count > 0;
  *module = info.dli_fname;
  *place = static_cast<const char*>(kernel) - static_cast<const char*>(info.dli_fbase);
  return true;
}
}
