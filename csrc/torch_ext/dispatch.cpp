// One op on global tensors, from torch's dispatcher to its results, without Python where a recipe is known.
//
// The kernel stands at torch's Python key of each op that global tensors have met. Whatever is not theirs goes on to
// what torch has there: other subclasses, and everything while a dispatch mode is active. So does an op that is new,
// which is then decided in Python, and one whose recipe is to go there.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <unordered_map>

#include "recipe.h"

namespace py = pybind11;

namespace gt {
namespace {

// The call that is on its way to Python to be decided, until Python asks for its key.
thread_local RecipeKey pending;
thread_local bool is_pending = false;

// torch's own kernel for the Python key, as an op has it that we never claim.
const auto& torch_kernel() {
  static auto kernel = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_cudnn_init_dropout_state", "")
                           .getComputedKernelForDispatchKey(c10::DispatchKey::Python);
  return kernel;
}

// Is an operand a view that is a copy, of a tensor that was written to since? Python tells the user.
bool outdated(const Recipe& recipe, const c10::IValue* args) {
  if (!recipe.guarded) return false;
  return std::any_of(recipe.slots.begin(), recipe.slots.end(), [&](Slot slot) {
    const at::Tensor& t = operand(args, slot);
    return is_global(t.unsafeGetTensorImpl()) && global(t)->spec->copied && version(t) != global(t)->guard;
  });
}

// May this recipe be run here and now? Boxings that someone watches go through Python, which tells the watcher.
bool runs_natively(const Recipe& recipe, const c10::IValue* args) {
  if (recipe.trace) return recipe.trace->fits(args) && !(recipe.trace->has_boxings && boxing_watched());
  return !recipe.to_python && !(recipe.has_boxings && boxing_watched()) && !outdated(recipe, args);
}

torch::Library& library_of(const std::string& name) {
  static auto* all = new std::unordered_map<std::string, std::unique_ptr<torch::Library>>();
  auto& library = (*all)[name];
  if (library) return *library;
  library = std::make_unique<torch::Library>(torch::Library::IMPL, name, c10::DispatchKey::Python, __FILE__, __LINE__);
  return *library;
}

void claim_op(const std::string& library, const std::string& name) {
  library_of(library).impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

py::object pending_key() {
  if (!is_pending) return py::none();
  is_pending = false;
  return py::bytes(reinterpret_cast<const char*>(pending.data()), pending.size() * sizeof(uint64_t));
}

}  // namespace

void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  static thread_local RecipeKey key;
  const size_t count = op.schema().arguments().size();
  const c10::IValue* args = stack->data() + stack->size() - count;
  if (!c10::impl::TorchDispatchModeTLS::any_modes_set() && make_key(op, args, count, key)) {
    auto recipe = find_recipe(key);
    if (recipe && runs_natively(*recipe, args))
      return recipe->trace ? replay(op, *recipe, keys, stack) : execute(op, *recipe, stack);
    if (!recipe) {
      pending = key;
      is_pending = true;
    }
  }
  torch_kernel().callBoxed(op, keys, stack);
  is_pending = false;
}

void bind_dispatch(py::module_& m) {
  m.def("claim_op", &claim_op, "Stand at the Python key of an op, such as aten and add.Tensor.");
  m.def("pending_key", &pending_key,
        "The key of the call that is to be decided; None where it did not come through here.");
}

}  // namespace gt
