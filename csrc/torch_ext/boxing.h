// Boxing of global tensors by the native kernel: programs that Python compiled, run on the tensors at hand.
//
// A process that drives all ranks runs them on its own memory; one of several ranks of a host reads and writes the
// others' shared memory.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../transport/transport.h"
#include "tensor.h"

namespace gt {

// One direct step, as this process does it. `corners` index ranks of the host.
struct BoxingStep {
  std::vector<gt_region> regions;
  std::vector<gt_corner> corners;
  int op;
  std::vector<int32_t> partners;
  std::vector<uint8_t> ties;
  SpecRef result;                                  // what is there after it
  std::vector<std::vector<int64_t>> sizes;         // of the new shards, in the order of result->ranks
  std::vector<std::vector<int64_t>> strides;       // of them; none where they are contiguous
  bool reusable;                                   // they may be the old shards, written over (kernel_program.py)
  bool unmoved;                                    // they are what the old ones are
};

struct Boxing {
  SpecRef source;
  std::vector<BoxingStep> steps;
  uint64_t agreement;                              // the same number on all ranks that mean the same
  bool completes;                                  // it leaves nothing pending, and changes nothing else
  const Spec* result() const { return steps.back().result; }
};
size_t bytes_of(const Boxing& boxing);               // of memory, about

struct ShardMove {
  const Boxing* boxing;
  const Shards* shards;
  uint64_t lineage = 0;                            // of the tensor; counts where no op asks for the boxing
  bool in_place = false;                           // the only step writes over the shards
  bool may_share = false;                          // new shards are only read, while the old ones stay as they are
};

// What shards are moved for: all ranks must mean the same, and errors show it.
struct Purpose {
  std::string text;
  uint64_t agreement;
  bool is_explicit = false;                        // asked for by name: ranks must be at one place in the program
  Purpose(std::string text);
};

// The new shards of every move, all moved together, step by step: a boxing, as profilers show it (boxing_watch.cpp).
std::vector<Shards> move_shards(const std::vector<ShardMove>& moves, const Purpose& what);
// The same, as a part of a boxing that is shown already.
std::vector<Shards> move_shards_unseen(const std::vector<ShardMove>& moves, const Purpose& what);

bool boxing_watched();                             // someone records or restricts boxings: they go through Python
std::shared_ptr<const Boxing> boxing_from(pybind11::object object);
void bind_boxing(pybind11::module_& m);
void bind_boxing_watch(pybind11::module_& m);
void bind_redistribute(pybind11::module_& m);

}  // namespace gt
