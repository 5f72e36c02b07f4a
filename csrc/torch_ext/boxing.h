// Boxing of global tensors by the native kernel: programs that Python compiled, run on the tensors at hand.
//
// A process that drives all ranks runs them on its own memory; one of several ranks of a host meets the others over
// shared memory. A failure goes to a Python hook, which knows how to tell it.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../transport/transport.h"
#include "tensor.h"

namespace gt {

// One direct step, as this process does it. `corners` index ranks of the host.
struct Step {
  std::vector<gt_region> regions;
  std::vector<gt_corner> corners;
  int op;
  std::vector<int32_t> partners;
  std::vector<uint8_t> ties;
  const Spec* result;                              // what is there after it
  std::vector<std::vector<int64_t>> sizes;         // of the new shards, in the order of result->ranks
};

struct Boxing {
  const Spec* source;
  std::vector<Step> steps;
  uint64_t agreement;                              // the same number on all ranks that mean the same
  const Spec* result() const { return steps.back().result; }
};

struct Move {
  const Boxing* boxing;
  const Shards* shards;
};

// The new shards of every move, all in one meeting of the ranks per step. `what` for is told in errors and agreed on.
std::vector<Shards> box(const std::vector<Move>& moves, const std::string& what);

gt_transport* host();                              // the ranks of this host; null where this process drives all ranks
void check(int status, const std::string& what);   // raises what a failed call of the transport means
uint64_t hash_text(const std::string& text);
at::Tensor shared_empty(c10::IntArrayRef sizes, c10::ScalarType dtype);  // in the arena, where peers reach it

bool boxing_watched();                             // someone records or restricts boxings: they go through Python
std::shared_ptr<const Boxing> boxing_from(pybind11::object given);
void bind_boxing(pybind11::module_& m);
void bind_convert(pybind11::module_& m);
void bind_letters(pybind11::module_& m);

}  // namespace gt
