// Views of what stands for global tensors in transforms of torch.func (grad, vjp), which are written to.
//
// Autograd makes a view again, for the gradient of a write, by the call that made it where a tensor is ours, and by
// strides and an offset in memory where it is what stands for one in a transform: that would tell it an offset of 0. So
// inside the ops that make views there, autograd is asked to go by calls, as under `_force_original_view_tracking`.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>

#include "recipe.h"

namespace py = pybind11;

namespace gt {
namespace {

constexpr auto kTransforms = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;
constexpr auto kTraced = c10::DispatchKey::TESTING_ONLY_GenericMode;  // of what torch.compile traces for a global one
const c10::DispatchKeySet kStandIns({c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});

// Does this stand for a global tensor? Torch's own headers for it do not compile outside of torch.
bool is_for_global(const at::Tensor& t) {
  if (!t.defined() || !t.key_set().has_any(kStandIns)) return false;
  py::gil_scoped_acquire lock;
  static const auto* value_of = new py::object(py::module_::import("torch").attr("_C").attr("_functorch")
                                                   .attr("get_unwrapped"));
  at::Tensor value = t;
  while (value.key_set().has_any(kStandIns)) value = (*value_of)(value).cast<at::Tensor>();
  return value.key_set().has(kGlobal) || value.key_set().has(kTraced);
}

// The first operand is what a view op views; of lists, as in `meshgrid`, one tells.
bool views_global(const c10::IValue& base) {
  if (base.isTensor()) return is_for_global(base.toTensor());
  if (!base.isTensorList()) return false;
  for (const at::Tensor& t : base.toTensorVector())
    if (is_for_global(t)) return true;
  return false;
}

struct Replayed {
  explicit Replayed(bool wanted) : before(state().get_view_replay_enabled()) {
    if (wanted) state().set_view_replay_enabled(true);
  }
  ~Replayed() { state().set_view_replay_enabled(before); }
  static c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }

  const bool before;
};

// The twin of fill_diagonal in value_reads.py: torch's own asks for an offset in memory. False where torch raises.
bool fill_diagonal(Stack& stack) {
  const auto args = stack.end() - 3;                 // x, value, wrap
  const at::Tensor x = args[0].toTensor();
  const bool wraps = args[2].toBool();
  if (x.dim() < 2 || (x.dim() > 2 && std::any_of(x.sizes().begin(), x.sizes().end(), [&](int64_t size) {
        return size != x.size(0);
      })))
    return false;
  const int64_t rows = x.size(0), columns = x.size(1);
  for (int64_t start = 0; start < (wraps && x.dim() == 2 && rows > columns ? rows : 1); start += columns + 1) {
    at::Tensor diagonal = x.slice(0, start);
    while (diagonal.dim() > 1) diagonal = diagonal.diagonal();
    diagonal.fill_(args[1].toScalar());
  }
  stack.erase(args + 1, stack.end());                // x is what it returns
  return true;
}

void view(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  // torch's own for all ops, as one has it that nobody claims
  static const auto& transforms = c10::Dispatcher::singleton().findSchemaOrThrow(kUnclaimed, "")
                                      .getComputedKernelForDispatchKey(kTransforms);
  static const auto filled = c10::Dispatcher::singleton().findSchemaOrThrow("aten::fill_diagonal_", "");
  const bool of_global = views_global((*stack)[stack->size() - op.schema().arguments().size()]);
  const Replayed replayed(of_global);
  if (C10_UNLIKELY(op == filled) && of_global && fill_diagonal(*stack)) return;
  transforms.callBoxed(op, keys, stack);
}

// A view, or an op that torch makes of others, perhaps of views that it writes to: `F.pad(x, pad, "circular")`.
bool may_view(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  if (op.schema().arguments().empty()) return false;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return true;
  return !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
}

}  // namespace

void claim_views() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", kTransforms, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.getNamespace() != "aten" || !op || !may_view(*op) || op->hasKernelForDispatchKey(kTransforms)) continue;
    const std::string own = name.name.substr(sizeof("aten::") - 1);
    library->impl((name.overload_name.empty() ? own : own + "." + name.overload_name).c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&view>());
  }
}

}  // namespace gt
