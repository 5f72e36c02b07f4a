// Where the results of local ops are allocated, in a process that shares memory with others.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace gt {

// While it lives, this thread allocates in the arena, where peers read in place: for results that are pending sums,
// since what happens next to those is nearly always a boxing.
class ArenaScope {
 public:
  explicit ArenaScope(bool wanted);
  ~ArenaScope();

 private:
  bool before_;
};

void bind_allocator(pybind11::module_& m);

}  // namespace gt
