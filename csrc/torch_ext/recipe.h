// What was decided for an op on operands of given specs, flat, so that doing it again needs no Python.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <optional>

#include "boxing.h"
#include "tensor.h"

namespace gt {

using Key = c10::SmallVector<uint64_t, 48>;

struct Slot {
  int32_t at;      // the argument, by the schema
  int32_t index;   // in its list, or -1
};

// What a rewrite did, as registers that ops and boxings fill one after the other; the operands come first.
struct Tape {
  struct Argument { int32_t place = -1; std::vector<int32_t> places; c10::IValue value; };
  struct Step {
    std::string name;
    std::optional<c10::OperatorHandle> op;           // none: a boxing
    std::vector<Argument> arguments;
    std::vector<std::pair<int32_t, std::shared_ptr<const Boxing>>> moves;
  };
  std::vector<Step> steps;
  std::vector<std::vector<int32_t>> results;         // per return
  std::vector<std::pair<int32_t, double>> floats;    // arguments that the tape was made with, as keys ignore them
  bool boxes = false;

  bool fits(const c10::IValue* args) const;
};

struct Recipe {
  std::string name;                                // of the op, as boxings tell it
  bool python = true;                              // goes to Python: rewrites, runners, what must look at values
  std::vector<int64_t> ranks;                      // driven, in the placement
  std::vector<Slot> slots;                         // where the operands stand
  std::vector<std::shared_ptr<const Boxing>> moves;  // per slot: how it must be boxed first, or null
  std::vector<int32_t> lists;                      // arguments that are lists with operands in them
  std::vector<std::vector<const Spec*>> outputs;   // per return; several for a list; null for an undefined tensor
  std::vector<int32_t> returned;                   // returns that are operands written to: their slots, instead
  struct Patch { int32_t at; c10::IValue value; };
  std::vector<std::vector<Patch>> patches;         // per rank: arguments that differ from the global ones
  std::optional<c10::OperatorHandle> local;        // the op that ranks run, where it is another one
  std::shared_ptr<const Tape> tape;                // of a rewrite; nothing else counts then but `slots`
  bool plain = false;                              // one rank, operands as they lie, tensors out
  bool boxes = false;                              // any move
  bool pending = false;                            // any output is a pending sum
  bool copied = false;                             // makes a view that is a copy: it gets a guard
  bool guarded = false;                            // an operand is such a view: its guard is checked
};

// The key of a call, or false where it is none of ours: another subclass, a symbolic size, a type we do not know.
bool make_key(const c10::OperatorHandle& op, const c10::IValue* args, size_t count, Key& key);

std::shared_ptr<const Recipe> find_recipe(const Key& key);  // null: not decided yet
void keep_recipe(const Key& key, std::shared_ptr<const Recipe> recipe);
void forget_recipes();
Key key_from(const std::string& ticket);

// The kernel at torch's Python key, and what it does where the recipe is a tape.
void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
void replay(const c10::OperatorHandle& op, const Recipe& recipe, c10::DispatchKeySet keys, torch::jit::Stack* stack);

void bind_recipes(pybind11::module_& m);
void bind_replay(pybind11::module_& m);
void bind_dispatch(pybind11::module_& m);

}  // namespace gt
