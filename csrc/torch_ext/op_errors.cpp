#include "op_errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace gt {
namespace {

PyObject* note_hook = nullptr;                       // (error, op, names, operands): adds the note

}  // namespace

void raise_with_operands(const std::string& op, const std::function<void(const NoteOperand&)>& each_operand) {
  try {
    throw;
  } catch (const python_error&) {
    throw;
  } catch (const py::error_already_set&) {
    throw;
  } catch (const std::exception&) {
    py::gil_scoped_acquire lock;
    torch::translate_exception_to_python(std::current_exception());
    py::error_already_set raised;
    py::list names, operands;
    each_operand([&](const std::string& name, const at::Tensor& t) {
      names.append(name);
      operands.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(t)));
    });
    const py::handle add_note(note_hook);
    add_note(raised.value(), op, names, operands);
    throw raised;
  }
}

void bind_op_errors(py::module_& m) {
  m.def("on_op_error", [](py::object hook) { note_hook = hook.release().ptr(); },
        "What adds the note to an error of torch's: (error, op, names of operands, operands).");
}

}  // namespace gt
