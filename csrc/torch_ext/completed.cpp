#include "completed.h"

#include <torch/csrc/autograd/python_variable.h>

#include "boxed_view.h"

namespace py = pybind11;

namespace gt {
namespace {

uint32_t version_of(GlobalImpl* impl) {
  return impl->is_inference() ? 0 : impl->version_counter().current_version();
}

// The completed form of `t`; undefined where there is none, or where `t` was written to since.
at::Tensor completed(const at::Tensor& t) {
  auto* impl = global(t);
  if (C10_LIKELY(!impl->is_completed.load(std::memory_order_acquire))) return at::Tensor();
  const py::gil_scoped_acquire lock;                 // threads may share a tensor
  auto& kept = impl->completed;
  if (!kept) return at::Tensor();
  if (kept->writes != writes_to(*kept->memory) || kept->version != version_of(impl)) {
    impl->is_completed = false;
    kept.reset();
    return at::Tensor();
  }
  if (kept->whole.defined()) return kept->whole;
  at::Tensor whole = wrap(kept->spec, Shards(kept->shards));  // Python may run here, and so another thread
  global(whole)->lineage = impl->lineage;
  if (kept && !kept->whole.defined()) {
    kept->whole = whole;
    kept->shards.clear();
  }
  return whole;
}

// Does this op want the value of its operands, and not their memory, or what each rank holds? What an op that torch
// makes of others does with its operands, those will tell.
bool wants_values(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name.rfind("globaltensor::", 0) == 0) return name == "globaltensor::linear" || name == "globaltensor::contract";
  return name != "aten::lift" && name != "aten::unsafe_split" && name != "aten::unsafe_split_with_sizes" &&
         (op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
          !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd));
}

}  // namespace

void GlobalImpl::forget_completed() {
  if (!is_completed.exchange(false)) return;
  const py::gil_scoped_acquire lock;
  completed.reset();
}

void keep_completed(const at::Tensor& t, const Spec* spec, Shards shards) {
  auto* impl = global(t);
  auto memory = watched_writes(impl);
  const int64_t writes = writes_to(*memory);
  auto kept = std::make_unique<Completed>(
      Completed{spec, std::move(shards), std::move(memory), writes, version_of(impl), at::Tensor()});
  const py::gil_scoped_acquire lock;
  impl->completed = std::move(kept);
  impl->is_completed.store(true, std::memory_order_release);
}

bool take_completed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!wants_values(op)) return false;
  const auto& arguments = op.schema().arguments();
  c10::IValue* args = stack->data() + stack->size() - arguments.size();
  bool any = false;
  const auto of = [&](const at::Tensor& t) {
    return t.defined() && is_global(t.unsafeGetTensorImpl()) ? completed(t) : at::Tensor();
  };
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].alias_info()) continue;
    if (args[i].isTensor()) {
      at::Tensor whole = of(args[i].toTensor());
      if (!whole.defined()) continue;
      args[i] = std::move(whole);
      any = true;
    } else if (args[i].isList()) {
      auto items = args[i].toListRef();
      bool copied = false;
      for (size_t k = 0; k < items.size(); k++) {
        at::Tensor whole = args[i].toListRef()[k].isTensor() ? of(args[i].toListRef()[k].toTensor()) : at::Tensor();
        if (!whole.defined()) continue;
        if (!copied) args[i] = args[i].toList().copy();  // the list is the caller's
        copied = any = true;
        args[i].toList().set(k, std::move(whole));
      }
    }
  }
  return any;
}

void bind_completed(py::module_& m) {
  m.def("keep_completed", [](const at::Tensor& t, py::object spec, py::object shards) {
    const SpecRef of = spec_of(spec.ptr());
    keep_completed(t, of, shards_from(of, shards.ptr()));
  }, "Keep what the boxing of a pending tensor to a layout without anything pending gave.");
  m.def("completed", [](const at::Tensor& t) {
    at::Tensor whole = completed(t);
    return whole.defined() ? whole : t;
  }, "The completed form of a pending tensor, or the tensor where there is none.");
}

}  // namespace gt
