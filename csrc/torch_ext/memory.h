// Where the results of local ops lie, in a process that shares memory with others.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace gt {

// While it lives, what this thread allocates lies in the arena, where peers read it in place: for results that are
// pending sums, since the next thing that happens to those is hardly ever anything but a boxing.
class ForPeers {
 public:
  explicit ForPeers(bool wanted);
  ~ForPeers();

 private:
  bool before_;
};

void bind_memory(pybind11::module_& m);

}  // namespace gt
