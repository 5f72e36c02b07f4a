// `to_global` from Python to the memory and back: an explicit boxing as one function of autograd.
//
// Its backward is the boxing dst.dual -> src.dual, found by Python once per layout of the gradient that comes in.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <map>
#include <tuple>

#include "boxing.h"

namespace py = pybind11;

namespace gt {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

PyObject* plan_backward = nullptr;      // (spec of the gradient, spec of x, layout or None) -> boxing or None
PyObject* run_backward = nullptr;       // the same with the gradient itself, while boxings are watched -> gradient of x

Tensor move(const Tensor& x, const Boxing& boxing) {
  auto* impl = global(x);
  TORCH_CHECK(impl->spec == boxing.source, "a boxing for another spec");
  static const Purpose explicit_boxing("to_global");
  return wrap(boxing.result(), std::move(move_shards({{&boxing, &impl->shards()}}, explicit_boxing)[0]));
}

// The boxing that a gradient of this spec takes on its way back; null: none.
std::shared_ptr<const Boxing> backward_boxing(const Spec* gradient, const Spec* source, PyObject* layout) {
  static std::map<std::tuple<const Spec*, const Spec*, PyObject*>, std::shared_ptr<const Boxing>> known;
  py::gil_scoped_acquire lock;
  auto key = std::make_tuple(gradient, source, layout);
  auto at = known.find(key);
  if (at != known.end()) return at->second;
  const py::handle plan(plan_backward);
  auto planned = plan(py::handle(gradient->object), py::handle(source->object), py::handle(layout));
  return known[key] = planned.is_none() ? nullptr : boxing_from(planned);
}

Tensor redistribute(const Tensor& x, std::shared_ptr<const Boxing> boxing, PyObject* grad_layout);

struct Redistribute : torch::autograd::Function<Redistribute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::shared_ptr<const Boxing>& boxing,
                        PyObject* grad_layout) {
    ctx->saved_data["source"] = reinterpret_cast<int64_t>(global(x)->spec);
    ctx->saved_data["grad_layout"] = reinterpret_cast<int64_t>(grad_layout);  // interned: layouts are never freed
    return move(x, *boxing);
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list grads) {
    return {grads[0].defined() ? gradient_of_x(ctx, grads[0]) : Tensor(), Tensor(), Tensor()};
  }
  static Tensor gradient_of_x(AutogradContext* ctx, const Tensor& grad) {
    const auto* source = reinterpret_cast<const Spec*>(ctx->saved_data["source"].toInt());
    auto* layout = reinterpret_cast<PyObject*>(ctx->saved_data["grad_layout"].toInt());
    // Python takes what is watched or traced, what more is asked of than a backward pass, and plain gradients.
    const auto* spec = is_global(grad.unsafeGetTensorImpl()) ? global(grad)->spec : nullptr;
    if (!spec || boxing_watched() || has_tangent(grad) || is_transformed() ||
        c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      py::gil_scoped_acquire lock;
      return py::handle(run_backward)(grad, py::handle(source->object), py::handle(layout)).cast<Tensor>();
    }
    auto boxing = backward_boxing(spec, source, layout);
    return boxing ? redistribute(grad, boxing, Py_None) : grad;
  }
};

Tensor redistribute(const Tensor& x, std::shared_ptr<const Boxing> boxing, PyObject* grad_layout) {
  if (at::GradMode::is_enabled() && x.requires_grad()) return Redistribute::apply(x, boxing, grad_layout);
  return move(x, *boxing);
}

// redistribute(x, boxing, layout of the gradient or None)
PyObject* python_redistribute(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3 && THPVariable_Check(args[0]), "redistribute(x, boxing, layout of the gradient)");
  auto boxing = py::reinterpret_borrow<py::object>(args[1]);
  return THPVariable_Wrap(redistribute(THPVariable_Unpack(args[0]), boxing_from(boxing), args[2]));
  END_HANDLE_TH_ERRORS
}

PyMethodDef redistribute_method = {
    "redistribute", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(python_redistribute)), METH_FASTCALL,
    "x in another layout, by a boxing for its spec; differentiable."};

}  // namespace

void bind_redistribute(py::module_& m) {
  m.attr("redistribute") = py::reinterpret_steal<py::object>(PyCFunction_New(&redistribute_method, nullptr));
  m.def("on_redistribute_backward", [](py::object plan, py::object run) {
    plan_backward = plan.release().ptr();
    run_backward = run.release().ptr();
  });
}

}  // namespace gt
