// What a process does while it waits for others: let other Python threads run, answer Ctrl-C, and tell the watch for
// deadlocks whom it waits for. All of it only once a wait has outlasted the spinning.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "../transport/transport.h"

namespace gt {

class Waiting {
 public:
  template <class Programs>
  Waiting(const std::string& what, uint64_t tag, const Programs& programs) : what_(what), tag_(tag) {
    program_ = programs.data();
    count_ = programs.size();
    hooks_ = {&enter, &tick, &leave, this};
  }
  const gt_hooks* hooks() const { return &hooks_; }
  // enter(what, peers, tag), leave(), found() -> raises where the wait is in vain
  static void hook(pybind11::object enter, pybind11::object leave, pybind11::object found);

 private:
  static void enter(void* self);
  static int tick(void* self);
  static void leave(void* self);

  const std::string& what_;
  uint64_t tag_;
  const gt_program* program_;
  size_t count_;
  gt_hooks hooks_;
  PyThreadState* released_ = nullptr;
};

}  // namespace gt
