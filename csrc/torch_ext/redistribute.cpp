// `to_global` from Python to the memory and back: an explicit boxing as one function of autograd.
//
// Its backward is the boxing dst.dual -> src.dual, found by Python once per layout of the gradient that comes in.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "boxing.h"
#include "generations.h"

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
  HeldShards held;
  auto shards = move_shards({{&boxing, &impl->shards(held), impl->lineage}}, explicit_boxing);
  Tensor moved = wrap(boxing.result(), std::move(shards[0]));
  global(moved)->lineage = impl->lineage;
  return moved;
}

// The boxing that a gradient of this spec takes on its way back; null: none.
std::shared_ptr<const Boxing> backward_boxing(const Spec* gradient, const Spec* source, PyObject* layout) {
  struct Planned {
    std::shared_ptr<const Boxing> boxing;
    py::object layout;                               // held, so that no other gets its address
  };
  static auto* known = new Generations<Planned>(1024);
  py::gil_scoped_acquire lock;
  const CacheKey key{gradient->id, source->id, reinterpret_cast<uint64_t>(layout)};
  if (const Planned* before = known->find(key)) return before->boxing;
  auto planned = py::handle(plan_backward)(py::handle(gradient->object()), py::handle(source->object()),
                                           py::handle(layout));
  auto boxing = planned.is_none() ? nullptr : boxing_from(planned);
  known->put(key, {boxing, py::reinterpret_borrow<py::object>(layout)}, boxing ? bytes_of(*boxing) : sizeof(key));
  return boxing;
}

Tensor redistribute(const Tensor& x, std::shared_ptr<const Boxing> boxing, PyObject* grad_layout);

// What backward needs to know: of which spec x was, and the layout that its gradient shall have, or None.
struct SourceOfGradient final : torch::CustomClassHolder {
  SpecRef spec;
  py::object layout;
  SourceOfGradient(const Spec* spec, PyObject* layout) : spec(spec) {
    py::gil_scoped_acquire lock;
    this->layout = py::reinterpret_borrow<py::object>(layout);
  }
  ~SourceOfGradient() override {
    py::gil_scoped_acquire lock;
    layout = py::object();
  }
};

struct Redistribute : torch::autograd::Function<Redistribute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::shared_ptr<const Boxing>& boxing,
                        PyObject* grad_layout) {
    auto source = c10::make_intrusive<SourceOfGradient>(global(x)->spec, grad_layout);
    ctx->saved_data["source"] = c10::IValue::make_capsule(std::move(source));
    return move(x, *boxing);
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list grads) {
    return {grads[0].defined() ? gradient_of_x(ctx, grads[0]) : Tensor(), Tensor(), Tensor()};
  }
  static Tensor gradient_of_x(AutogradContext* ctx, const Tensor& grad) {
    const auto capsule = ctx->saved_data["source"].toCapsule();
    const auto& of = static_cast<const SourceOfGradient&>(*capsule);
    const Spec* source = of.spec;
    PyObject* layout = of.layout.ptr();
    // Python takes what is watched or traced, what more is asked of than a backward pass, and plain gradients.
    const Spec* spec = is_global(grad.unsafeGetTensorImpl()) ? global(grad)->spec : SpecRef();
    if (!spec || boxing_watched() || has_tangent(grad) || is_transformed() ||
        c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      py::gil_scoped_acquire lock;
      return py::handle(run_backward)(grad, py::handle(source->object()), py::handle(layout)).cast<Tensor>();
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
