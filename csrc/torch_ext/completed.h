// A pending tensor that an op needed whole is completed once: what came out is kept beside it, and ops take that from
// then on. The twin of algorithms/completed.py, which says why.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "tensor.h"

namespace gt {

struct MemoryWrites;

struct Completed {
  SpecRef spec;
  Shards shards;
  std::shared_ptr<MemoryWrites> memory;              // of the pending tensor
  int64_t writes;                                    // how many there had been, and its version
  uint32_t version;
  at::Tensor whole;                                  // of the shards, once an op takes it
};

// Keeps what the boxing of `t` to a layout without anything pending gave.
void keep_completed(const at::Tensor& t, const Spec* spec, Shards shards);

// Puts it in the place of operands that have it and are not written to or viewed; was there one?
bool take_completed(const c10::OperatorHandle& op, torch::jit::Stack* stack);

void bind_completed(pybind11::module_& m);

}  // namespace gt
