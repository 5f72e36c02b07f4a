// One op on global tensors, from torch's dispatcher to its results, without Python where a recipe is known.
//
// The kernel stands at the Python key of all of torch's ops, from the first global tensor on. Whatever is not theirs
// goes on to what torch has there: other subclasses, and everything while a dispatch mode is active. A call that is new
// is decided in Python; one whose recipe says so runs there.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "boxed_view.h"
#include "completed.h"
#include "lineage.h"
#include "recipe.h"

namespace py = pybind11;

namespace gt {
namespace {

// The call that is on its way to Python to be decided, until Python asks for its keys.
thread_local RecipeKey pending, pending_kind;
thread_local bool is_pending = false;

// No call is on its way once this one has ended, by an error too.
struct PendingEnds {
  ~PendingEnds() { is_pending = false; }
};

// torch's own kernel for the Python key, as an op has it that we never claim.
const auto& torch_kernel() {
  static auto kernel = c10::Dispatcher::singleton().findSchemaOrThrow(kUnclaimed, "")
                           .getComputedKernelForDispatchKey(c10::DispatchKey::Python);
  return kernel;
}

// What torch leaves out where it calls Python: all that comes before, but for what makes views plain.
constexpr c10::DispatchKeySet kFromPython(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python);
constexpr auto kBeforePython =
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^ (kFromPython | c10::DispatchKeySet(c10::DispatchKey::Python)))
        .remove(c10::DispatchKey::ZeroTensor).remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);

py::handle on_arrival;                               // gives an op its function in Python, at our own key

// Calls that function, past torch's own way to Python: that asks of each operand whether it is a DTensor, and so
// imports DTensor and sympy, half a second at the first op of a process.
void call_python(const c10::OperatorHandle& op, Stack* stack) {
  static auto* known = new std::unordered_set<const c10::FunctionSchema*>();
  static uint64_t known_since = ops_dropped();
  c10::impl::ExcludeDispatchKeyGuard below(kBeforePython);
  {
    py::gil_scoped_acquire lock;
    if (known_since != ops_dropped()) {
      known->clear();
      known_since = ops_dropped();
    }
    if (!known->count(&op.schema())) {
      on_arrival(torch::detail::getTorchApiFunction(op));
      known->insert(&op.schema());
    }
  }
  (*getPyInterpreter())->python_dispatcher(op, c10::DispatchKeySet(kGlobal), stack);
}

// A view op's base, which comes first, is noted as one: not every change of it is possible then.
void note_view(const c10::OperatorHandle& op, const c10::IValue* args) {
  const auto& returns = op.schema().returns();
  if (returns.empty() || !returns[0].alias_info() || returns[0].alias_info()->isWrite() || !args[0].isTensor()) return;
  auto* impl = args[0].toTensor().unsafeGetTensorImpl();
  if (is_global(impl)) static_cast<GlobalImpl*>(impl)->viewed.store(true, std::memory_order_relaxed);
}

// May this recipe be run here and now? Boxings that someone watches go through Python, which tells the watcher.
bool runs_natively(const Recipe& recipe, const c10::IValue* args) {
  if (recipe.trace) return recipe.trace->fits(args) && !(recipe.trace->has_boxings && boxing_watched());
  return !recipe.to_python && (recipe.boxes_view || !(recipe.has_boxings && boxing_watched()));
}

void run_natively(const c10::OperatorHandle& op, const std::shared_ptr<const Recipe>& recipe, c10::DispatchKeySet keys,
                  Stack* stack) {
  if (recipe->boxes_view)
    push_boxed_views(op, recipe, stack);
  else if (recipe->trace)
    replay(op, *recipe, keys, stack);
  else
    execute(op, *recipe, stack);
}

void call_torch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  is_pending = false;
  torch_kernel().callBoxed(op, keys, stack);
}

// Is one of these torch's DTensor? Asked only where another subclass is among the operands.
bool is_dtensor(const at::Tensor& t) {
  if (!t.unsafeGetTensorImpl()->is_python_dispatch() || is_global(t.unsafeGetTensorImpl())) return false;
  py::gil_scoped_acquire lock;
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains("torch.distributed.tensor")) return false;  // then nobody has made one
  return py::isinstance(py::reinterpret_steal<py::object>(THPVariable_Wrap(t)),
                        modules["torch.distributed.tensor"].attr("DTensor"));
}

// A DTensor beside a global tensor: DTensor would refuse it in words that do not know of us.
bool mixes_in_dtensor(const c10::IValue* args, size_t count) {
  bool global = false, dtensor = false;
  const auto look = [&](const at::Tensor& t) {
    if (!t.defined()) return;
    global = global || is_global(t.unsafeGetTensorImpl());
    dtensor = dtensor || is_dtensor(t);
  };
  for (size_t i = 0; i < count; ++i) {
    if (args[i].isTensor()) look(args[i].toTensor());
    if (args[i].isTensorList())
      for (const at::Tensor& t : args[i].toTensorVector()) look(t);
  }
  return global && dtensor;
}

// Stands at the Python key of an op, once.
void claim_op(const c10::OperatorName& name) {
  static std::mutex mutex;
  static auto* claimed = new std::unordered_set<c10::OperatorName>();
  static auto* libraries = new std::unordered_map<std::string, std::unique_ptr<torch::Library>>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (name.name == kUnclaimed || !claimed->insert(name).second) return;
  const std::string ns(name.getNamespace().value());
  auto& library = (*libraries)[ns];
  if (!library)
    library = std::make_unique<torch::Library>(torch::Library::IMPL, ns, c10::DispatchKey::Python, __FILE__, __LINE__);
  const std::string op = name.name.substr(ns.size() + 2);
  library->impl((name.overload_name.empty() ? op : op + "." + name.overload_name).c_str(),
                torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

py::bytes bytes_of(const RecipeKey& key) {
  return py::bytes(reinterpret_cast<const char*>(key.data()), key.size() * sizeof(uint64_t));
}

py::object pending_keys() {
  if (!is_pending) return py::none();
  is_pending = false;
  return py::make_tuple(bytes_of(pending), bytes_of(pending_kind));
}

std::atomic<uint64_t> dropped{0};

// Torch calls it with its own lock held, so it waits for no other.
struct DropListener final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    if (!Py_IsInitialized()) return;                 // the program has ended
    forget_schema(&op.schema());
    dropped++;
  }
};

}  // namespace

uint64_t ops_dropped() { return dropped.load(std::memory_order_acquire); }

void claim_ops() {
  [[maybe_unused]] static auto* listens = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<DropListener>()));
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto ns = name.getNamespace();
    if (ns && (*ns == "aten" || *ns == "globaltensor")) claim_op(name);
  }
}

void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  static const auto view = c10::Dispatcher::singleton().findSchemaOrThrow("aten::view", "");
  static const auto unsafe_view = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_unsafe_view", "");
  static thread_local RecipeKey key, kind;
  const size_t count = op.schema().arguments().size();
  const size_t first = stack->size() - count;
  const c10::IValue* args = stack->data() + first;
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return call_torch(op, keys, stack);
  if (C10_UNLIKELY(op == view || op == unsafe_view) && is_global(args[0].toTensor().unsafeGetTensorImpl())) {
    if (op == unsafe_view) return dispatch(view, keys, stack);   // autograd alone tells them apart
    if (take_base(stack)) return dispatch(op, keys, stack);
  }
  CallLineage lineage;
  if (!make_key(op, args, count, key, lineage)) {
    if (C10_UNLIKELY(mixes_in_dtensor(args, count))) return call_python(op, stack);
    return call_torch(op, keys, stack);
  }
  if (C10_UNLIKELY(lineage.saw_completed) && take_completed(op, stack)) return dispatch(op, keys, stack);
  auto recipe = find_recipe(key);
  if (C10_UNLIKELY(!recipe)) {
    make_kind_key(op, args, count, kind);
    recipe = recipe_of_sibling(kind, key, op, args);
  }
  if (lineage) lineage.enter(op, args, recipe ? recipe->lineage : op_lineage(op.schema()));
  if (recipe && runs_natively(*recipe, args)) {
    if (recipe->is_view) note_view(op, args);
    run_natively(op, recipe, keys, stack);
  } else {
    if (!recipe) {
      pending = key;
      pending_kind = kind;
      is_pending = true;
    }
    PendingEnds ends;
    note_view(op, args);
    call_python(op, stack);
  }
  if (lineage) lineage.leave(*stack, first);
}

void bind_dispatch(py::module_& m) {
  m.def("claim_op", [](const std::string& name, const std::string& overload) { claim_op({name, overload}); },
        "Stand at the Python key of an op that is not torch's, such as mine::twice.");
  m.def("on_arrival", [](py::object hook) { on_arrival = hook.release(); },
        "What gives an op its function in Python, when a global tensor first meets it.");
  m.def("pending_keys", &pending_keys,
        "The keys of the call that is to be decided, and of its kind; None where it did not come through here.");
}

}  // namespace gt
