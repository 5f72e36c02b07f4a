// One op on global tensors, from the dispatcher to its results, without Python where a recipe is known.
//
// The kernel stands at torch's Python key of each op that global tensors have met. Whatever is not theirs goes on to what torch
// has there: other subclasses, and everything while a dispatch mode is active. So does an op that is new, which is then
// decided in Python, and one whose recipe is Python's own (a rewrite, a runner).
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include "memory.h"
#include "recipe.h"

namespace py = pybind11;

namespace gt {
namespace {

using torch::jit::Stack;

// The call that is on its way to Python to be decided, until Python takes its key.
thread_local Key pending;
thread_local bool is_pending = false;

const c10::DispatchKeySet kAbove = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
    c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

// torch's own kernel for the Python key, as an op has it that we never take.
const auto& torchs_own() {
  static auto kernel = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_cudnn_init_dropout_state", "")
                           .getComputedKernelForDispatchKey(c10::DispatchKey::Python);
  return kernel;
}

c10::IValue with_items(const c10::IValue& list) { return c10::IValue(list.toList().copy()); }

// Puts the operands of one rank into a call's arguments.
void localize(const Recipe& recipe, const c10::SmallVector<Shards*, 8>& held, size_t nth, c10::IValue* args) {
  for (int32_t at : recipe.lists) args[at] = with_items(args[at]);
  for (size_t q = 0; q < recipe.slots.size(); q++) {
    if (!held[q]) continue;                          // a plain operand stays as it is
    const Slot slot = recipe.slots[q];
    const at::Tensor& shard = (*held[q])[nth];
    if (slot.index < 0)
      args[slot.at] = shard;
    else
      args[slot.at].toList().set(slot.index, shard);
  }
  if (!recipe.patches.empty())
    for (const auto& patch : recipe.patches[nth]) args[patch.at] = patch.value;
}

const at::Tensor& operand(const c10::IValue* args, Slot slot) {
  return slot.index < 0 ? args[slot.at].toTensor() : args[slot.at].toListRef()[slot.index].toTensor();
}

// How often a tensor was written to; tensors of inference mode do not count.
int64_t version(const at::Tensor& t) { return t.is_inference() ? -1 : int64_t(t._version()); }

// Is an operand a view that is a copy, of a tensor that was written to since? Python tells the user.
bool outdated(const Recipe& recipe, const c10::IValue* args) {
  if (!recipe.guarded) return false;
  return std::any_of(recipe.slots.begin(), recipe.slots.end(), [&](Slot slot) {
    const at::Tensor& t = operand(args, slot);
    return is_global(t.unsafeGetTensorImpl()) && global(t)->spec->copied && version(t) != global(t)->guard;
  });
}

// What every rank's call gave, gathered output by output.
struct Outputs {
  std::vector<c10::SmallVector<Shards, 1>> found;    // [return][item of it]

  explicit Outputs(const Recipe& recipe) : found(recipe.outputs.size()) {
    for (size_t k = 0; k < found.size(); k++) found[k].resize(recipe.outputs[k].size());
  }
  void add(const Recipe& recipe, const c10::IValue* results) {
    for (size_t k = 0; k < found.size(); k++) {
      if (recipe.returned[k] >= 0) continue;
      if (results[k].isTensor()) {
        found[k][0].push_back(results[k].toTensor());
        continue;
      }
      auto items = results[k].toListRef();
      for (size_t i = 0; i < items.size(); i++) found[k][i].push_back(items[i].toTensor());
    }
  }
  c10::IValue wrapped(const Recipe& recipe, size_t k, bool is_list, int64_t guard) {
    const auto& specs = recipe.outputs[k];
    if (!is_list) return specs[0] ? guarded(wrap(specs[0], std::move(found[k][0])), guard) : at::Tensor();
    c10::List<at::Tensor> list;
    list.reserve(specs.size());
    for (size_t i = 0; i < specs.size(); i++) list.push_back(guarded(wrap(specs[i], std::move(found[k][i])), guard));
    return list;
  }
  static at::Tensor guarded(at::Tensor made, int64_t guard) {
    global(made)->guard = guard;
    return made;
  }
};

// Boxes the operands whose layout is not the one the recipe wants, all in one go.
void box_operands(const Recipe& recipe, const std::string& name, const c10::SmallVector<at::Tensor, 8>& owners,
                  c10::SmallVector<Shards*, 8>& held, std::vector<Shards>& moved) {
  std::vector<Move> moves;
  std::vector<Shards> copies;                        // of plain operands: the same on every rank
  std::vector<size_t> places;
  copies.reserve(recipe.slots.size());
  for (size_t q = 0; q < recipe.slots.size(); q++) {
    if (!recipe.moves[q]) continue;
    const Shards* shards = held[q];
    if (!shards) {
      copies.emplace_back(recipe.ranks.size(), owners[q]);
      shards = &copies.back();
    }
    moves.push_back({recipe.moves[q].get(), shards});
    places.push_back(q);
  }
  moved = box(moves, name);
  for (size_t i = 0; i < places.size(); i++) held[places[i]] = &moved[i];
}

// The common case without any bookkeeping: one rank, operands as they lie, tensors out.
void run_plainly(const c10::OperatorHandle& op, const Recipe& recipe, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  c10::IValue* args = stack->data() + first;
  c10::SmallVector<c10::IValue, 6> owners;           // the operands, while their shards stand in their places
  for (Slot slot : recipe.slots) {
    owners.push_back(std::move(args[slot.at]));
    const at::Tensor& t = owners.back().toTensor();
    args[slot.at] = is_global(t.unsafeGetTensorImpl()) ? global(t)->shards[0] : t;
  }
  if (!recipe.patches.empty())
    for (const auto& patch : recipe.patches[0]) args[patch.at] = patch.value;
  {
    c10::impl::ExcludeDispatchKeyGuard below(kAbove);
    ForPeers pending(recipe.pending);
    (recipe.local ? *recipe.local : op).callBoxed(stack);
  }
  for (size_t k = 0; k < recipe.outputs.size(); k++) {
    c10::IValue& result = (*stack)[first + k];
    if (recipe.returned[k] >= 0) {
      result = std::move(owners[recipe.returned[k]]);
    } else if (const Spec* spec = recipe.outputs[k][0]) {
      result = wrap(spec, Shards(1, std::move(result).toTensor()));
    }
  }
}

void run(const c10::OperatorHandle& op, const Recipe& recipe, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count, returns = schema.returns().size();
  c10::IValue* args = stack->data() + first;
  c10::SmallVector<at::Tensor, 4> written;
  for (int32_t q : recipe.returned) written.push_back(q < 0 ? at::Tensor() : operand(args, recipe.slots[q]));
  c10::SmallVector<at::Tensor, 8> owners;            // keep the operands while their places are overwritten
  c10::SmallVector<Shards*, 8> held;
  for (Slot slot : recipe.slots) {
    owners.push_back(operand(args, slot));
    held.push_back(is_global(owners.back().unsafeGetTensorImpl()) ? &global(owners.back())->shards : nullptr);
  }
  int64_t guard = -1;
  if (recipe.copied) guard = recipe.guarded ? global(owners[0])->guard : version(owners[0]);
  std::vector<Shards> moved;
  if (recipe.boxes) box_operands(recipe, recipe.name, owners, held, moved);

  Outputs outputs(recipe);
  if (!recipe.ranks.empty()) {
    c10::impl::ExcludeDispatchKeyGuard below(kAbove);
    ForPeers pending(recipe.pending);
    const auto& local = recipe.local ? *recipe.local : op;
    Stack own;
    for (size_t nth = 0; nth + 1 < recipe.ranks.size(); nth++) {
      own.assign(stack->begin() + first, stack->end());
      localize(recipe, held, nth, own.data());
      local.callBoxed(&own);
      outputs.add(recipe, own.data());
    }
    localize(recipe, held, recipe.ranks.size() - 1, args);
    local.callBoxed(stack);
    outputs.add(recipe, stack->data() + first);
    stack->resize(first);
  } else {
    stack->resize(first);
  }
  for (size_t k = 0; k < returns; k++) {
    if (recipe.returned[k] >= 0)
      stack->emplace_back(std::move(written[k]));
    else
      stack->emplace_back(outputs.wrapped(recipe, k, schema.returns()[k].type()->kind() == c10::TypeKind::ListType, guard));
  }
}

torch::Library& library_of(const std::string& name) {
  static auto* all = new std::unordered_map<std::string, std::unique_ptr<torch::Library>>();
  auto& found = (*all)[name];
  if (!found)
    found = std::make_unique<torch::Library>(torch::Library::IMPL, name, c10::DispatchKey::Python, __FILE__, __LINE__);
  return *found;
}

}  // namespace

void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  static thread_local Key key;
  const size_t count = op.schema().arguments().size();
  const c10::IValue* args = stack->data() + stack->size() - count;
  if (!c10::impl::TorchDispatchModeTLS::any_modes_set() && make_key(op, args, count, key)) {
    auto recipe = find_recipe(key);
    if (recipe && recipe->tape) {
      if (recipe->tape->fits(args) && !(recipe->tape->boxes && boxing_watched())) return replay(op, *recipe, keys, stack);
    } else if (recipe && !recipe->python && !(recipe->boxes && boxing_watched()) && !outdated(*recipe, args)) {
      return recipe->plain ? run_plainly(op, *recipe, stack) : run(op, *recipe, stack);
    }
    if (!recipe) {
      pending = key;
      is_pending = true;
    }
  }
  torchs_own().callBoxed(op, keys, stack);
  is_pending = false;
}

void bind_dispatch(py::module_& m) {
  m.def("claim_op", [](const std::string& library, const std::string& name) {
    library_of(library).impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&dispatch>());
  }, "Stand at the Python key of an op, such as aten and add.Tensor.");
  m.def("pending_key", []() -> py::object {
    if (!is_pending) return py::none();
    is_pending = false;
    return py::bytes(reinterpret_cast<const char*>(pending.data()), pending.size() * sizeof(uint64_t));
  }, "The key of the call that came to be decided, or None where it came another way.");
}

}  // namespace gt
