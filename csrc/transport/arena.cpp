// One arena per process: a heap over a sealed, sparse memfd, safe for threads and for fork.
//
// Freed memory is kept: faulting a page in costs more than copying what is on it. Only beyond a high-water mark of free
// memory is some of it given back, the largest runs first.
//
// fork() promises a child its own memory as it stood. Shared memory breaks that, so around a fork the used part of the
// arena is copied into a new file, which the child maps over the arena's addresses: it is the child's own arena.
// No other pages than those in use are copied, and nothing happens where the arena was never used.
#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <vector>

#include "heap.h"
#include "segment.h"
#include "transport.h"

namespace gt {
namespace {

struct Arena {
  explicit Arena(uint64_t bytes) : heap(bytes), size(bytes) {}
  Heap heap;
  uint64_t size;
  uint64_t keep = 0;               // bytes of free memory that are not given back
  int fd = -1;
  std::vector<uint64_t> held;      // offsets in blocks that are never reused
};

std::mutex lock;                   // of all below
Arena* arena = nullptr;            // never deleted
std::atomic<char*> base{nullptr};
std::atomic<uint64_t> extent{0};
std::atomic<unsigned> generation{0};
int child_fd = -1;                 // during a fork

uint64_t memory_size() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// The part of the arena that is in use and not a hole, as (begin, end) offsets.
template <class F>
void each_used(F f) {
  Runs& runs = arena->heap.runs();
  for (uint32_t p = 0; p < runs.top();) {
    Runs::Page& page = runs.at(p);
    if (page.kind == Runs::kSpan) {
      f(p * kPage, (p + 1) * kPage);
      ++p;
      continue;
    }
    uint64_t begin = p * kPage, end = (p + uint64_t{page.length}) * kPage;
    if (page.kind == Runs::kUsed)
      for (;;) {
        off_t data = lseek(arena->fd, static_cast<off_t>(begin), SEEK_DATA);
        if (data < 0 || static_cast<uint64_t>(data) >= end) break;
        off_t hole = lseek(arena->fd, data, SEEK_HOLE);
        uint64_t until = hole < 0 ? end : std::min(end, static_cast<uint64_t>(hole));
        f(static_cast<uint64_t>(data), until);
        begin = until;
      }
    p += page.length;
  }
}

bool write_all(int fd, const char* from, uint64_t begin, uint64_t end) {
  while (begin < end) {
    ssize_t n = pwrite(fd, from + begin, end - begin, static_cast<off_t>(begin));
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) begin += static_cast<uint64_t>(n);
  }
  return true;
}

void before_fork() {
  lock.lock();
  segment_lock();
  std::string error;
  child_fd = segment_make("globaltensor-arena", arena->size, error);
  bool whole = child_fd >= 0;
  each_used([&](uint64_t begin, uint64_t end) { whole = whole && write_all(child_fd, base.load(), begin, end); });
  if (!whole && child_fd >= 0) {
    close(child_fd);
    child_fd = -1;
  }
}

void after_fork_in_parent() {
  if (child_fd >= 0) close(child_fd);
  child_fd = -1;
  segment_unlock();
  lock.unlock();
}

void after_fork_in_child() {
  // Without a copy, the addresses become unusable: a crash is better than tensors that change by themselves.
  int access = child_fd < 0 ? PROT_NONE : PROT_READ | PROT_WRITE;
  int kind = MAP_FIXED | MAP_NORESERVE | (child_fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  if (mmap(base.load(), arena->size, access, kind, child_fd, 0) == MAP_FAILED) _exit(127);
  close(arena->fd);
  arena->fd = child_fd;
  child_fd = -1;
  generation.fetch_add(1);
  segment_forget();
  segment_unlock();
  if (arena->fd >= 0) segment_known(arena->fd, base.load(), arena->size);
  lock.unlock();
}

// Of the address space that a limit (`ulimit -v`) leaves this process; without one, all there is.
uint64_t address_space_left() {
  rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
  unsigned long long pages = 0;
  if (FILE* file = fopen("/proc/self/statm", "re")) {
    if (fscanf(file, "%llu", &pages) != 1) pages = 0;
    fclose(file);
  }
  uint64_t used = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

// Called with the lock. Each of the `ranks` of this host maps the arenas of all: where the address space is limited,
// they take a half of what is left. Half the size, and half again, where the system has less than it tells.
bool make_arena(int ranks, std::string& error) {
  if (arena) return true;
  constexpr uint64_t kLeast = uint64_t{1} << 28;
  uint64_t memory = memory_size();
  uint64_t share = address_space_left() / (2 * static_cast<uint64_t>(ranks)) / kPage * kPage;
  error = "the address space that is left has no room for memory that is shared";
  for (uint64_t size = std::min(share, std::max(uint64_t{64} << 30, 2 * memory / kPage * kPage)); size >= kLeast;
       size = size / 2 / kPage * kPage) {
    int fd = segment_make("globaltensor-arena", size, error);
    if (fd < 0) return false;
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) {
      error = std::string("mmap of the arena: ") + strerror(errno);
      close(fd);
      continue;
    }
    arena = new Arena(size);
    arena->fd = fd;
    arena->keep = std::max(uint64_t{1} << 30, memory / 8);
    segment_known(fd, static_cast<char*>(at), size);
    extent.store(size);
    base.store(static_cast<char*>(at));
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return true;
  }
  return false;
}

// Called with the lock. Down to half of what may be kept, so that it is not done again at once.
void give_back() {
  Runs& runs = arena->heap.runs();
  while (runs.resident_free() * kPage > arena->keep / 2) {
    uint32_t run = runs.shed();
    if (run == Runs::kNone) break;
    fallocate(arena->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(run * kPage),
              static_cast<off_t>(runs.at(run).length * kPage));
  }
}

bool make_first() {
  std::string error;
  return make_arena(1, error);
}

bool is_held(uint64_t offset) {
  uint64_t end = offset + arena->heap.size(offset);
  for (uint64_t held : arena->held)
    if (offset <= held && held < end) return true;
  return false;
}

}  // namespace

int arena_file(int ranks, std::string& error) {
  std::lock_guard<std::mutex> guard(lock);
  try {
    return make_arena(ranks, error) ? arena->fd : -1;
  } catch (const std::bad_alloc&) {
    error = "out of memory";
    return -1;
  }
}

char* arena_base() { return base.load(std::memory_order_acquire); }

unsigned arena_generation() { return generation.load(std::memory_order_relaxed); }

void arena_hold(const void* data) {
  if (!gt_in_arena(data)) return;
  std::lock_guard<std::mutex> guard(lock);
  arena->held.push_back(static_cast<uint64_t>(static_cast<const char*>(data) - base.load()));
}

ArenaUse arena_use() {
  std::lock_guard<std::mutex> guard(lock);
  if (!arena) return {};
  Runs& runs = arena->heap.runs();
  return {runs.used() * kPage, runs.resident_free() * kPage, runs.top() * kPage};
}

}  // namespace gt

using namespace gt;

extern "C" {

void* gt_alloc(size_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  try {
    if (__builtin_expect(!arena, 0) && !make_first()) return nullptr;
    uint64_t offset = arena->heap.take(bytes);
    return offset == kNowhere ? nullptr : base.load(std::memory_order_relaxed) + offset;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void gt_free(void* data) {
  if (!data) return;
  std::lock_guard<std::mutex> guard(lock);
  uint64_t offset = static_cast<uint64_t>(static_cast<char*>(data) - base.load(std::memory_order_relaxed));
  if (__builtin_expect(!arena->held.empty(), 0) && is_held(offset)) return;
  arena->heap.give(offset);
  if (__builtin_expect(arena->heap.runs().resident_free() * kPage > arena->keep, 0)) give_back();
}

int gt_in_arena(const void* data) {
  const char* begin = base.load(std::memory_order_acquire);
  uint64_t offset = static_cast<uint64_t>(static_cast<const char*>(data) - begin);
  return begin && offset < extent.load(std::memory_order_relaxed);
}

}  // extern "C"
