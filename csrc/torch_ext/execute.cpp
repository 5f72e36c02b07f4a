// Running a recipe: box the operands that need it, run the op once per local rank, wrap the results.
//
// The one interpreter of recipes. A small op takes a microsecond or two, so the common case (one rank, operands where
// they are wanted, tensors out) touches no list and allocates nothing but its results.
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "allocator.h"
#include "boxed_view.h"
#include "completed.h"
#include "op_errors.h"
#include "recipe.h"

namespace gt {
namespace {

struct Operand {
  at::Tensor owner;                                  // keeps it alive while its shards are in its place
  const Shards* shards;                              // null: a plain tensor, the same on every rank
};
struct Operands : c10::SmallVector<Operand, 6> {
  HeldShards held;                                   // of those that are boxed views
};

// Takes the operands out of a call's arguments. What is in a list stays there: the list is the caller's.
Operands take_operands(const Recipe& recipe, c10::IValue* args) {
  Operands operands;
  for (Slot slot : recipe.slots) {
    at::Tensor t = slot.index < 0 ? std::move(args[slot.at]).toTensor() : operand(args, slot);
    const Shards* shards = is_global(t.unsafeGetTensorImpl()) ? &global(t)->shards(operands.held) : nullptr;
    operands.push_back({std::move(t), shards});
  }
  return operands;
}

PyObject* plain_hook = nullptr;                      // compares a plain operand: (tensor, op, ranks)

// A plain operand must be the same on every rank. They are compared at uses 1, 2, 4, 8, ...: often at first, and then
// so seldom that it costs nothing.
void compare_plain(const Recipe& recipe, const Operands& operands) {
  for (size_t q = 0; q < operands.size(); q++) {
    if (!recipe.plain_uses[q]) continue;
    const uint32_t uses = recipe.plain_uses[q]->fetch_add(1, std::memory_order_relaxed) + 1;
    if (uses & (uses - 1)) continue;
    pybind11::gil_scoped_acquire lock;
    const pybind11::handle compare(plain_hook);
    compare(operands[q].owner, recipe.name, recipe.plain_ranks);
  }
}

// Boxes the operands whose layout is not the one the recipe wants, all in one go. `moved` keeps the new shards.
void box_operands(const Recipe& recipe, Operands& operands, std::vector<Shards>& moved) {
  std::vector<ShardMove> moves;
  std::vector<Shards> copies;                        // of plain operands: the same on every rank
  std::vector<size_t> places;
  copies.reserve(recipe.slots.size());               // moves point into it
  for (size_t q = 0; q < recipe.slots.size(); q++) {
    if (!recipe.boxings[q]) continue;
    const Shards* shards = operands[q].shards;
    if (!shards) {
      copies.emplace_back(recipe.ranks.size(), operands[q].owner);
      shards = &copies.back();
    }
    moves.push_back({recipe.boxings[q].get(), shards});
    moves.back().may_share = !recipe.aliased[q];
    places.push_back(q);
  }
  moved = move_shards(moves, recipe.purpose);
  for (size_t i = 0; i < places.size(); i++) {
    operands[places[i]].shards = &moved[i];
    const Boxing& boxing = *moves[i].boxing;
    if (boxing.completes && !recipe.aliased[places[i]])
      keep_completed(operands[places[i]].owner, boxing.result(), moved[i]);
  }
}

// Puts the operands of one rank into a call's arguments.
void localize(const Recipe& recipe, const Operands& operands, size_t nth, c10::IValue* args) {
  for (int32_t at : recipe.lists) args[at] = args[at].toList().copy();
  for (size_t q = 0; q < operands.size(); q++) {
    const Slot slot = recipe.slots[q];
    const at::Tensor& local = operands[q].shards ? (*operands[q].shards)[nth] : operands[q].owner;
    if (slot.index < 0)
      args[slot.at] = local;
    else
      args[slot.at].toList().set(slot.index, local);
  }
  if (!recipe.local_args.empty())
    for (const auto& local : recipe.local_args[nth]) args[local.at] = local.value;
}

// What the ranks' calls gave, return by return and item by item.
using Gathered = std::vector<std::vector<Shards>>;

// Adds what one rank's call gave; nothing but empty shards where there are no results, on a process without ranks.
void gather(const Recipe& recipe, const c10::IValue* results, Gathered& gathered) {
  gathered.resize(recipe.outputs.size());
  for (size_t k = 0; k < recipe.outputs.size(); k++) {
    gathered[k].resize(recipe.outputs[k].specs.size());
    if (recipe.outputs[k].written >= 0 || !results) continue;
    if (!recipe.outputs[k].is_list) {
      gathered[k][0].push_back(results[k].toTensor());
      continue;
    }
    auto items = results[k].toListRef();
    for (size_t i = 0; i < items.size(); i++) gathered[k][i].push_back(items[i].toTensor());
  }
}

// Runs the op on every local rank. The last one, mostly the only one, uses the call's own stack and leaves its results
// there; those of the others are gathered.
void run_ranks(const c10::OperatorHandle& op, const Recipe& recipe, const Operands& operands, size_t first,
               Stack* stack, Gathered& gathered, size_t& nth) {
  c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  ArenaScope in_arena(recipe.pending);
  const auto& local_op = recipe.local_op ? *recipe.local_op : op;
  const size_t last = recipe.ranks.size() - 1;
  Stack own;
  for (nth = 0; nth < last; nth++) {
    own.assign(stack->begin() + first, stack->end());
    localize(recipe, operands, nth, own.data());
    local_op.callBoxed(&own);
    gather(recipe, own.data(), gathered);
  }
  localize(recipe, operands, last, stack->data() + first);
  local_op.callBoxed(stack);
}

at::Tensor wrapped(const Recipe& recipe, const Spec* spec, Shards&& shards) {
  if (!shards.empty() && !shards[0].defined()) return at::Tensor();  // left out, though its shape was told
  if (!recipe.is_view)
    for (at::Tensor& shard : shards) shard = in_order_of(*spec, shard);
  return wrap(spec, std::move(shards));
}

c10::IValue wrapped_list(const Recipe& recipe, const std::vector<SpecRef>& specs, std::vector<Shards>& shards) {
  c10::List<at::Tensor> list;
  list.reserve(specs.size());
  for (size_t i = 0; i < specs.size(); i++) list.push_back(wrapped(recipe, specs[i], std::move(shards[i])));
  return list;
}

}  // namespace

at::Tensor in_order_of(const Spec& spec, const at::Tensor& shard) {
  if (C10_LIKELY(shard.is_contiguous() && spec.like->is_contiguous())) return shard;
  const auto& strides = spec.strides;
  std::vector<int64_t> order(strides.size()), back(strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  int64_t before = std::numeric_limits<int64_t>::max();
  bool in_order = true;
  for (int64_t d : order) {
    if (shard.size(d) <= 1 || !strides[d]) continue;
    in_order &= shard.stride(d) <= before;
    before = shard.stride(d);
  }
  if (in_order) return shard;
  for (size_t i = 0; i < order.size(); i++) back[order[i]] = int64_t(i);
  return shard.permute(order).contiguous().permute(back);
}

void execute(const c10::OperatorHandle& op, const Recipe& recipe, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  Operands operands = take_operands(recipe, stack->data() + first);
  if (!recipe.plain_ranks.empty()) compare_plain(recipe, operands);
  const bool inference = recipe.is_view && operands[0].owner.is_inference();
  std::vector<Shards> moved;
  if (recipe.has_boxings) box_operands(recipe, operands, moved);

  Gathered gathered;
  if (!recipe.ranks.empty()) {
    size_t nth = 0;                                  // whose turn it is
    try {
      run_ranks(op, recipe, operands, first, stack, gathered, nth);
    } catch (...) {
      std::vector<const Spec*> outputs;
      for (const auto& output : recipe.outputs) outputs.push_back(output.specs.empty() ? nullptr : output.specs[0]);
      raise_with_operands(recipe.name, [&](const NoteOperand& note) {
        for (size_t q = 0; q < operands.size(); q++)
          note(op.schema().arguments()[recipe.slots[q].at].name(), operands[q].owner);
      }, recipe.ranks[nth], outputs);
    }
  }
  for (int32_t slot : recipe.writes) {
    const at::Tensor& owner = operands[slot].owner;
    note_write(owner);
    // of lists torch's kernels count the versions, not its dispatcher
    if (recipe.slots[slot].index >= 0 && !owner.is_inference()) owner.unsafeGetTensorImpl()->bump_version();
  }
  stack->resize(first + recipe.outputs.size());
  // One rank and tensors out: each shard goes from the stack straight into its tensor.
  const bool direct = recipe.ranks.size() == 1 && !recipe.returns_lists;
  if (!direct) gather(recipe, recipe.ranks.empty() ? nullptr : stack->data() + first, gathered);
  std::optional<c10::InferenceMode> as_base;         // a view is a tensor of inference mode where what it views is one
  if (recipe.is_view && inference != c10::InferenceMode::is_enabled()) as_base.emplace(inference);
  for (size_t k = 0; k < recipe.outputs.size(); k++) {
    const auto& output = recipe.outputs[k];
    c10::IValue& result = (*stack)[first + k];
    if (output.written >= 0) {
      result = std::move(operands[output.written].owner);
    } else if (output.is_list) {
      result = wrapped_list(recipe, output.specs, gathered[k]);
    } else if (!output.specs[0]) {
      result = at::Tensor();
    } else {
      Shards shards;
      if (direct)
        shards.push_back(std::move(result).toTensor());
      else
        shards = std::move(gathered[k][0]);
      result = wrapped(recipe, output.specs[0], std::move(shards));
    }
  }
}

namespace {

// Counts of plain operands, by the ranks that compare them.
struct PlainCounts {
  std::mutex mutex;
  std::map<std::vector<int64_t>, std::unordered_map<std::string, PlainUses>> by_ranks;
};

PlainCounts& plain_counts() {
  static auto* all = new PlainCounts();
  return *all;
}

// Why counts are dropped, and all at once: agreement.py. Recipes hold counts, so they go with them: else a rank whose
// calls are native would go on with an old count where one whose calls are recorded in Python begins anew.
uint32_t count_plain_use(const std::vector<int64_t>& ranks, const std::string& key, size_t most) {
  auto& all = plain_counts();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& counts = all.by_ranks[ranks];
  if (counts.size() >= most && !counts.count(key)) {
    counts.clear();
    clear_recipes();
  }
  auto& uses = counts[key];
  if (!uses) uses = std::make_shared<std::atomic<uint32_t>>(0);
  return uses->fetch_add(1) + 1;
}

}  // namespace

PlainUses plain_uses(const std::vector<int64_t>& ranks, const std::string& key) {
  auto& all = plain_counts();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto& counts = all.by_ranks[ranks];
  auto at = counts.find(key);
  return at == counts.end() ? nullptr : at->second;
}

void bind_execute(pybind11::module_& m) {
  m.def("count_plain_use", &count_plain_use,
        "Counts a use of a plain operand on ranks; how many there were. Of more keys than `most`, all are dropped.");
  m.def("on_plain_operand", [](pybind11::object hook) { plain_hook = hook.release().ptr(); },
        "What compares a plain operand with that of other processes: (tensor, op, ranks).");
}

// The shards of every result of a call.
std::vector<Shards> local_results(const c10::OperatorHandle& op, const Recipe& recipe, Stack& arguments) {
  Operands operands = take_operands(recipe, arguments.data());
  std::vector<Shards> moved;
  if (recipe.has_boxings) box_operands(recipe, operands, moved);
  Gathered gathered;
  size_t nth = 0;
  if (!recipe.ranks.empty()) run_ranks(op, recipe, operands, 0, &arguments, gathered, nth);
  gather(recipe, recipe.ranks.empty() ? nullptr : arguments.data(), gathered);
  std::vector<Shards> results;
  for (auto& of_return : gathered)
    for (auto& shards : of_return) results.push_back(std::move(shards));
  return results;
}

}  // namespace gt
