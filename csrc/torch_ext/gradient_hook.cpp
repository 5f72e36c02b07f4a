// What watches the gradients of leaves: Python is called only where a gradient may have another layout than it shall.
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "tensor.h"

namespace py = pybind11;

namespace gt {
namespace {

PyObject* on_accumulated = nullptr;                  // (leaf) -> has its gradient the layout that it shall have?

struct GradientHook final : torch::autograd::PostAccumulateGradHook {
  SpecRef wanted;                                    // a gradient of this spec needs nothing more

  void operator()(const at::Tensor& leaf) override {
    const at::Tensor& grad = leaf.grad();
    if (wanted && grad.defined() && is_global(grad.unsafeGetTensorImpl()) && global(grad)->spec == wanted) return;
    py::gil_scoped_acquire lock;
    auto self = py::reinterpret_steal<py::object>(THPVariable_Wrap(leaf));
    auto as_wanted = py::reinterpret_steal<py::object>(PyObject_CallOneArg(on_accumulated, self.ptr()));
    if (!as_wanted) throw python_error();
    wanted = as_wanted.ptr() == Py_True ? global(leaf.grad())->spec : SpecRef();
  }

  // Asked by compiled autograd, which would have to trace what stands here.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "compiled autograd of global parameters: the layout of a gradient is seen to outside of graphs; try "
               "torch._dynamo.config.compiled_autograd = False, with which torch.compile still compiles the backward "
               "pass of what it compiles");
  }
};

}  // namespace

void bind_gradient_hook(py::module_& m) {
  m.def("on_accumulated", [](py::object hook) { on_accumulated = hook.release().ptr(); });
  m.def("watch_gradient", [](const at::Tensor& leaf) {
    torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<GradientHook>());
  }, "Watch what backward accumulates in this leaf; what was known of it is forgotten.");
}

}  // namespace gt
