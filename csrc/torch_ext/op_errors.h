// Errors of torch in an op of ours: raised on as they are, with a note that tells the operands and their layouts.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <string>

namespace gt {

using NoteOperand = std::function<void(const std::string& name, const at::Tensor& t)>;

// In a catch block: the error in flight as the Python error that torch makes of it, with the note. An error that comes
// from Python stays as it is. `each_operand` calls what it is given for every operand.
[[noreturn]] void raise_with_operands(const std::string& op,
                                        const std::function<void(const NoteOperand&)>& each_operand);

void bind_op_errors(pybind11::module_& m);

}  // namespace gt
