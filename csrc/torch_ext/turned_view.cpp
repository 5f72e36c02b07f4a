// Views that are turned in place: t_(), unsqueeze_() and their like.
//
// A view is made anew for autograd when its base was written to. torch goes by strides there, which a turn has changed;
// of our tensors by the call that made the view, which knows nothing of a turn. So the turn is added to it.
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "recipe.h"

namespace py = pybind11;

namespace gt {
namespace {

using at::Tensor;
using torch::autograd::ViewFunc;

// The view op again, with the arguments of the turn.
struct Turn final : ViewFunc {
  c10::OperatorHandle op;
  Stack arguments;                                   // the view comes in place of the first

  Turn(const c10::OperatorHandle& op, Stack arguments) : op(op), arguments(std::move(arguments)) {}

  Tensor operator()(const Tensor& view) const override {
    Stack stack = arguments;
    stack[0] = view;
    op.callBoxed(&stack);
    return stack[0].toTensor();
  }

  std::unique_ptr<ViewFunc> clone_and_set(std::optional<std::vector<c10::SymInt>>,
                                          std::optional<std::vector<Tensor>>) const override {
    return std::make_unique<Turn>(op, arguments);
  }
};

void note_turn(const Tensor& t, const std::string& name, const std::string& overload, const py::list& arguments) {
  auto* meta = torch::autograd::impl::get_view_autograd_meta(t);
  if (!meta || !meta->has_bw_view()) return;
  // torch gives it out as const, and has no way to change how a view was made
  auto& info = const_cast<torch::autograd::ViewInfo&>(meta->get_backward_view());
  if (!info.has_view_fn()) return;
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  Stack stack(1);
  for (size_t i = 0; i < arguments.size(); i++)
    stack.push_back(torch::jit::toIValue(arguments[i], op.schema().arguments()[i + 1].real_type()));
  info = info.chain(t, t, std::make_unique<Turn>(op, std::move(stack)), [](const Tensor&) -> Tensor {
    TORCH_CHECK(false, "the base of a view that was turned in place, made from the view");
  });
}

}  // namespace

void bind_turned_views(py::module_& m) {
  m.def("was_viewed", [](const Tensor& t) { return global(t)->viewed.load(); }, "Was a view made of this tensor?");
  m.def("forget_views", [](const Tensor& t) { global(t)->viewed = false; }, "No view of this tensor is left.");
  m.def("note_turn", &note_turn, "A view was turned in place, by a view op with these arguments after the first.");
}

}  // namespace gt
