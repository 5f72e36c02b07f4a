// `to_global` from Python to the memory and back: an explicit boxing as one function of autograd.
//
// Its backward is the boxing dst.dual -> src.dual, found by Python once per layout of the gradient that comes in.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <map>
#include <mutex>
#include <tuple>

#include "boxing.h"

namespace py = pybind11;

namespace gt {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

PyObject* plan_back = nullptr;                       // (spec of the gradient, spec of x, layout or None) -> boxing or None
PyObject* box_back = nullptr;                        // the same with the gradient itself, while boxings are watched

Tensor run_box(const Tensor& x, const Boxing& boxing, const std::string& what) {
  const auto* impl = global(x);
  TORCH_CHECK(impl->spec == boxing.source, "a boxing made for another spec");
  return wrap(boxing.result(), std::move(box({{&boxing, &impl->shards}}, what)[0]));
}

Tensor convert(const Tensor& x, std::shared_ptr<const Boxing> boxing, PyObject* grad_layout);

// The boxing that a gradient of this spec takes on its way back; null: none.
std::shared_ptr<const Boxing> way_back(const Spec* gradient, const Spec* source, PyObject* layout) {
  static std::map<std::tuple<const Spec*, const Spec*, PyObject*>, std::shared_ptr<const Boxing>> known;
  py::gil_scoped_acquire lock;
  auto key = std::make_tuple(gradient, source, layout);
  auto found = known.find(key);
  if (found != known.end()) return found->second;
  auto made = py::handle(plan_back)(py::handle(gradient->object), py::handle(source->object), py::handle(layout));
  return known[key] = made.is_none() ? nullptr : boxing_from(made);
}

struct Box : torch::autograd::Function<Box> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::shared_ptr<const Boxing>& boxing, PyObject* layout) {
    ctx->saved_data["source"] = reinterpret_cast<int64_t>(global(x)->spec);
    ctx->saved_data["layout"] = reinterpret_cast<int64_t>(layout);  // interned: layouts are never freed
    return run_box(x, *boxing, "to_global");
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list grads) {
    const auto* source = reinterpret_cast<const Spec*>(ctx->saved_data["source"].toInt());
    auto* layout = reinterpret_cast<PyObject*>(ctx->saved_data["layout"].toInt());
    if (!grads[0].defined()) return {Tensor(), Tensor(), Tensor()};
    const auto* gradient = global(grads[0])->spec;
    if (boxing_watched() || gradient->copied) {
      py::gil_scoped_acquire lock;
      return {py::handle(box_back)(grads[0], py::handle(source->object), py::handle(layout)).cast<Tensor>(), Tensor(), Tensor()};
    }
    auto boxing = way_back(gradient, source, layout);
    return {boxing ? convert(grads[0], boxing, Py_None) : grads[0], Tensor(), Tensor()};
  }
};

Tensor convert(const Tensor& x, std::shared_ptr<const Boxing> boxing, PyObject* layout) {
  if (at::GradMode::is_enabled() && x.requires_grad()) return Box::apply(x, boxing, layout);
  return run_box(x, *boxing, "to_global");
}

// redistribute(x, boxing, layout of the gradient or None)
PyObject* python_convert(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3 && THPVariable_Check(args[0]), "redistribute(x, boxing, layout of the gradient)");
  auto boxing = py::reinterpret_borrow<py::object>(args[1]);
  return THPVariable_Wrap(convert(THPVariable_Unpack(args[0]), boxing_from(boxing), args[2]));
  END_HANDLE_TH_ERRORS
}

PyMethodDef convert_method = {"redistribute", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(python_convert)),
                              METH_FASTCALL, "x in another layout, by a boxing made for its spec; differentiable."};

}  // namespace

void bind_convert(py::module_& m) {
  m.attr("redistribute") = py::reinterpret_steal<py::object>(PyCFunction_New(&convert_method, nullptr));
  m.def("on_redistribute_backward", [](py::object plan, py::object box) {
    plan_back = plan.release().ptr();
    box_back = box.release().ptr();
  });
}

}  // namespace gt
