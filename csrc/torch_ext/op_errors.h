// Errors of torch in an op of ours: raised on as they are, with a note that tells the operands and their layouts.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <string>
#include <vector>

#include "spec.h"

namespace gt {

using NoteOperand = std::function<void(const std::string& name, const at::Tensor& t)>;

// In a catch block: the error in flight as the Python error that torch makes of it, with the note. An error that comes
// from Python stays as it is. `each_operand` calls what it is given for every operand. `rank` is the one whose local op
// raised, or -1, and `outputs` are the specs of what the op returns, null for what has none.
[[noreturn]] void raise_with_operands(const std::string& op,
                                        const std::function<void(const NoteOperand&)>& each_operand, int64_t rank = -1,
                                        const std::vector<const Spec*>& outputs = {});

void bind_op_errors(pybind11::module_& m);

}  // namespace gt
