// torch's CPU allocator, with the arena beside it, and a malloc that keeps what was freed.
//
// The arena does not serve all tensors, although that would also save page faults: around a fork its used part is
// copied (arena.cpp), which a loader with workers would pay for the whole model.
#include "allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>

#include "../common/arena_memory.h"

namespace gt {
namespace {

constexpr size_t kLeast = 4096;                    // smaller ones are copied to where peers read them, in no time

thread_local bool for_peers = false;

c10::Allocator* torch_allocator = nullptr;                  // what serves everything else

void free_either(void* data) { gt_in_arena(data) ? gt_free(data) : torch_allocator->raw_deleter()(data); }

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (for_peers && bytes >= kLeast)
      if (void* data = gt_alloc(bytes)) return {data, data, &gt_free, c10::Device(c10::kCPU)};
    return torch_allocator->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_either; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// By default malloc hands large blocks back to the kernel as soon as they are freed, and a training step faults the
// same pages in again and again. Whoever set malloc up by the environment is left alone.
void keep_freed_memory() {
#ifdef __GLIBC__
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_",
                           "GLIBC_TUNABLES"})
    if (getenv(name)) return;
  const long eighth = sysconf(_SC_PHYS_PAGES) / 8 * sysconf(_SC_PAGESIZE);
  mallopt(M_TRIM_THRESHOLD, static_cast<int>(std::clamp<long>(eighth, 1 << 30, INT_MAX)));
  mallopt(M_MMAP_MAX, 0);
#endif
}

}  // namespace

ArenaScope::ArenaScope(bool wanted) : before_(for_peers) { for_peers = wanted; }
ArenaScope::~ArenaScope() { for_peers = before_; }

void bind_allocator(pybind11::module_& m) {
  m.def("install_allocator", [] {
    if (torch_allocator) return;
    torch_allocator = c10::GetCPUAllocator();
    c10::SetCPUAllocator(new ArenaAllocator());
    keep_freed_memory();
  }, "From now on results that peers will read are computed in place, and freed memory is kept.");
}

}  // namespace gt
