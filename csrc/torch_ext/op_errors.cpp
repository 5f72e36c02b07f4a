#include "op_errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace gt {
namespace {

PyObject* note_hook = nullptr;                       // (error, op, names, operands, rank, outputs): adds it

}  // namespace

void raise_with_operands(const std::string& op, const std::function<void(const NoteOperand&)>& each_operand,
                         int64_t rank, const std::vector<const Spec*>& outputs) {
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
    py::list names, operands, specs;
    each_operand([&](const std::string& name, const at::Tensor& t) {
      names.append(name);
      operands.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(t)));
    });
    for (const Spec* spec : outputs)
      specs.append(spec ? py::reinterpret_borrow<py::object>(spec->object()) : py::none());
    const py::handle add_note(note_hook);
    add_note(raised.value(), op, names, operands, rank, specs);
    throw raised;
  }
}

void bind_op_errors(py::module_& m) {
  m.def("on_op_error", [](py::object hook) { note_hook = hook.release().ptr(); },
        "What adds the note to an error of torch's: (error, op, names of operands, operands, rank, specs of outputs).");
}

}  // namespace gt
