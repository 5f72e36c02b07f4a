// What was decided for an op on operands of given specs, flat, so that doing it again needs no Python.
//
//     dispatch.cpp        an op arrives: make its key, look for its recipe, or go to Python
//     recipe_cache.cpp    keys, and the recipes by key
//     siblings.cpp        recipes for sizes that were never seen
//     execute.cpp         run a recipe
//     boxed_view.cpp      views that must be boxed, which are made when they are read
//     trace.cpp           replay a trace: the recipe of a decomposition
//     recipe.cpp          make a recipe of what Python hands over (dispatch/native.py, whose FlatRecipe is its twin)
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "boxing.h"
#include "generations.h"
#include "tensor.h"

namespace gt {

class CallLineage;
using RecipeKey = CacheKey;
using torch::jit::Stack;

// Where an operand is in a call.
struct Slot {
  int32_t at;      // the argument, by the schema
  int32_t index;   // in its list, or -1
};

// What a decomposition did: registers that ops and boxings fill one after the other. The operands come first.
struct Trace {
  struct Argument {                                // a register, a list of registers, or a value
    int32_t source = -1;
    int32_t counted = -1;                          // the number of elements of this register, to divide by
    std::vector<int32_t> sources;
    c10::IValue value;
  };
  struct Step {
    std::string name;
    Purpose purpose{""};                           // of a boxing
    std::optional<c10::OperatorHandle> op;         // none: a boxing
    bool plain = false;                            // on plain tensors: the gradient of a mean, to be divided
    bool keeps = false;                            // of a boxing: pending sums are completed by it (completed.h)
    std::vector<Argument> arguments;
    std::vector<std::pair<int32_t, std::shared_ptr<const Boxing>>> moves;
  };
  std::vector<Step> steps;
  std::vector<std::vector<int32_t>> results;       // per return, its registers
  std::vector<std::pair<int32_t, double>> floats;  // arguments that the trace was made with, since keys ignore them
  bool has_boxings = false;

  bool fits(const c10::IValue* args) const;
};

// How often operands like a plain one were used: one count, whether calls are done here or in Python.
using PlainUses = std::shared_ptr<std::atomic<uint32_t>>;
PlainUses plain_uses(const std::vector<int64_t>& ranks, const std::string& key);  // null: not counted yet, or dropped

// What an op adds to lineages (lineage.h).
struct OpLineage {
  uint64_t hash = 0;                               // of its name
  int keeps = -1;                                  // the value of which operand its result has; -1: of none
  bool writes = false;                             // it writes to operands
};
OpLineage op_lineage(const c10::FunctionSchema& schema);

struct Recipe {
  struct LocalArg {                                // an argument that differs from the global one on a rank
    int32_t at;
    c10::IValue value;
  };
  struct Slice {                                   // a view of a shard: Slice in layouts/view_parts.py
    std::vector<int64_t> start, size, dims, steps;
  };
  struct Output {                                  // a return
    std::vector<SpecRef> specs;                    // several for a list; null for an undefined tensor
    int32_t written = -1;                          // it is this operand, which was written to; -1: a new tensor
    bool is_list = false;
  };
  std::string name;                                // of the op
  OpLineage lineage;
  Purpose purpose{""};                             // of its boxings: the op, with what ranks must mean alike
  bool to_python = true;                           // decompositions, local_impls and what must look at values
  std::vector<int64_t> ranks;                      // local ranks of the placement
  std::vector<Slot> slots;                         // where the operands are
  std::vector<std::shared_ptr<const Boxing>> boxings;  // per slot: how it must be boxed first, or null
  std::vector<int32_t> lists;                      // arguments that are lists with operands in them
  std::vector<Output> outputs;                     // per return
  std::vector<std::vector<LocalArg>> local_args;   // per rank, or none at all
  std::optional<c10::OperatorHandle> local_op;     // the op that ranks run, where it is another one
  std::shared_ptr<const Trace> trace;              // of a decomposition; nothing else counts then but `slots`
  bool has_boxings = false;
  bool returns_lists = false;
  bool pending = false;                            // an output is a pending sum
  bool is_view = false;                            // the results are views of the first operand
  bool boxes_view = false;                         // and boxed ones: they are made when they are read
  std::shared_ptr<const Boxing> slices_boxing;     // of slices of the base, where not the base itself is boxed
  std::vector<Slice> slices;                       // per rank
  std::vector<int32_t> writes;                     // slots of the operands that are written to
  std::vector<bool> aliased;                       // per slot: it is written to, or a result is a view of it
  std::vector<int64_t> plain_ranks;                // of several processes, where an operand is plain; else none
  std::vector<PlainUses> plain_uses;               // per slot, where there are such ranks; null for a global operand
};

size_t bytes_of(const Recipe& recipe);               // of memory, about; that of its boxings, too

// The operand in its slot.
inline const at::Tensor& operand(const c10::IValue* args, Slot slot) {
  return slot.index < 0 ? args[slot.at].toTensor() : args[slot.at].toListRef()[slot.index].toTensor();
}

// The key of a call, or false where it is none of ours: another subclass, a symbolic size, a type we do not know.
// It looks at each argument once, and so tells the lineage of the call as well.
bool make_key(const c10::OperatorHandle& op, const c10::IValue* args, size_t count, RecipeKey& key,
              CallLineage& lineage);
// Is this an argument whose ints follow from sizes, as those of `view` do? (Its twin: dispatch/siblings.py.)
bool is_size(const c10::FunctionSchema& schema, const c10::Argument& argument);
// The key of all calls that differ from this one, which has a key, in sizes alone: those of global operands, and
// those that arguments name.
void make_kind_key(const c10::OperatorHandle& op, const c10::IValue* args, size_t count, RecipeKey& kind);
RecipeKey key_from(const std::string& bytes);

std::shared_ptr<const Recipe> find_recipe(const RecipeKey& key);  // null: not decided yet
void cache_recipe(const RecipeKey& key, std::shared_ptr<Recipe> recipe, bool is_resized = false);
void clear_recipes();                              // and what siblings are made of
void limit_caches(size_t bytes);                   // all of them together
// How many ops torch has dropped. What is defined next, mostly the same op once more, may have the address of one.
uint64_t ops_dropped();

// The recipe of a call that is new, from one of its kind at other sizes; null where there is none. It is cached.
std::shared_ptr<const Recipe> recipe_of_sibling(const RecipeKey& kind, const RecipeKey& key,
                                                const c10::OperatorHandle& op, const c10::IValue* args);
void clear_siblings();

// What stands above the kernels of a device: for shards it was done already, with the global tensors.
const c10::DispatchKeySet kAboveKernels = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
    c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

constexpr auto kUnclaimed = "aten::_cudnn_init_dropout_state";  // it takes no tensor: it has torch's kernels alone
void claim_ops();                                  // all of torch's: the kernel below stands at their Python key
void claim_views();                                // view_replay.cpp

// The kernel at torch's Python key, and what it does by the kind of the recipe. Arguments come and results go by stack.
void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);
void execute(const c10::OperatorHandle& op, const Recipe& recipe, Stack* stack);
// The shard with its dims in the order in memory that the spec's strides tell: what is a view of the whole is one of
// the shard, and a kernel that is chosen by the strides of the whole fits it.
at::Tensor in_order_of(const Spec& spec, const at::Tensor& shard);
std::vector<Shards> local_results(const c10::OperatorHandle& op, const Recipe& recipe, Stack& arguments);
void replay(const c10::OperatorHandle& op, const Recipe& recipe, c10::DispatchKeySet keys, Stack* stack);

std::vector<Slot> slots_from(const pybind11::list& slots);
void bind_recipes(pybind11::module_& m);
void bind_siblings(pybind11::module_& m);
void bind_execute(pybind11::module_& m);
void bind_traces(pybind11::module_& m);
void bind_dispatch(pybind11::module_& m);

}  // namespace gt
