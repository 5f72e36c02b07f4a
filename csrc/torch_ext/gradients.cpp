// What watches the gradients of leaves: Python is called only where a gradient may lie elsewhere than it shall.
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "tensor.h"

namespace py = pybind11;

namespace gt {
namespace {

PyObject* on_accumulated = nullptr;                  // (leaf) -> does its gradient lie where it shall?

struct Follow final : torch::autograd::PostAccumulateGradHook {
  const Spec* settled = nullptr;                     // a gradient of this spec lies where it shall

  void operator()(const at::Tensor& leaf) override {
    const at::Tensor& grad = leaf.grad();
    if (settled && grad.defined() && is_global(grad.unsafeGetTensorImpl()) && global(grad)->spec == settled) return;
    py::gil_scoped_acquire lock;
    auto self = py::reinterpret_steal<py::object>(THPVariable_Wrap(leaf));
    auto said = py::reinterpret_steal<py::object>(PyObject_CallOneArg(on_accumulated, self.ptr()));
    if (!said) throw python_error();
    settled = said.ptr() == Py_True ? global(leaf.grad())->spec : nullptr;
  }
};

}  // namespace

void bind_gradients(py::module_& m) {
  m.def("on_accumulated", [](py::object hook) { on_accumulated = hook.release().ptr(); });
  m.def("watch_gradient", [](const at::Tensor& leaf) {
    torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<Follow>());
  }, "Watch what backward accumulates in this leaf; what was known of it is forgotten.");
}

}  // namespace gt
