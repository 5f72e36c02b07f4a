// Rewrites, played again from a tape: an op that is other ops on global tensors and boxings, without Python between.
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "recipe.h"

namespace py = pybind11;

namespace gt {
namespace {

using torch::jit::Stack;

c10::IValue argument(const Tape::Argument& given, const std::vector<at::Tensor>& registers) {
  if (given.place >= 0) return registers[given.place];
  if (given.places.empty()) return given.value;
  c10::List<at::Tensor> list;
  for (int32_t place : given.places) list.push_back(registers[place]);
  return list;
}

void keep(const c10::IValue& result, std::vector<at::Tensor>& registers) {
  if (result.isTensor())
    registers.push_back(result.toTensor());
  else if (result.isTensorList())
    for (const at::Tensor& t : result.toTensorList().vec()) registers.push_back(t);
  else
    registers.emplace_back();                        // a number that nothing reads
}

void box_step(const Tape::Step& step, std::vector<at::Tensor>& registers) {
  std::vector<Move> moves;
  for (const auto& [place, boxing] : step.moves) moves.push_back({boxing.get(), &global(registers[place])->shards});
  auto moved = box(moves, step.name);
  for (size_t i = 0; i < moved.size(); i++) registers.push_back(wrap(step.moves[i].second->result(), std::move(moved[i])));
}

// A number where a tensor stands is what torch makes of it: a tensor that gives way to others' dtypes.
c10::IValue value_from(const py::object& given, const c10::Argument& of) {
  const bool is_float = py::isinstance<py::float_>(given);
  if (of.type()->kind() != c10::TypeKind::TensorType || !(is_float || py::isinstance<py::int_>(given)))
    return torch::jit::toIValue(given, of.real_type());
  at::Tensor number = is_float ? at::scalar_tensor(given.cast<double>(), at::kDouble)
                               : at::scalar_tensor(given.cast<int64_t>(), at::kLong);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

Tape::Argument argument_from(const py::object& given, const c10::Argument& of) {
  auto pair = given.cast<py::tuple>();               // ("place", n), ("places", [n]) or ("value", what)
  const auto kind = pair[0].cast<std::string>();
  Tape::Argument made;
  if (kind == "place")
    made.place = pair[1].cast<int32_t>();
  else if (kind == "places")
    made.places = pair[1].cast<std::vector<int32_t>>();
  else
    made.value = value_from(pair[1], of);
  return made;
}

Tape::Step tape_step(const py::tuple& given) {
  Tape::Step step;
  step.name = given[0].cast<std::string>();
  if (given.size() == 2) {                           // (what, [(place, Boxing)])
    for (auto move : given[1].cast<py::list>()) {
      auto pair = move.cast<py::tuple>();
      step.moves.emplace_back(pair[0].cast<int32_t>(), boxing_from(pair[1]));
    }
    return step;
  }
  step.op = c10::Dispatcher::singleton().findSchemaOrThrow(step.name.c_str(), given[1].cast<std::string>().c_str());
  size_t nth = 0;
  for (auto value : given[2].cast<py::list>())
    step.arguments.push_back(argument_from(py::reinterpret_borrow<py::object>(value), step.op->schema().arguments()[nth++]));
  return step;
}

}  // namespace

bool Tape::fits(const c10::IValue* args) const {
  for (const auto& [at, value] : floats)
    if (args[at].toDouble() != value) return false;
  return true;
}

void replay(const c10::OperatorHandle& op, const Recipe& recipe, c10::DispatchKeySet keys, Stack* stack) {
  const Tape& tape = *recipe.tape;
  const size_t first = stack->size() - op.schema().arguments().size();
  std::vector<at::Tensor> registers;
  for (Slot slot : recipe.slots) {
    const c10::IValue& arg = (*stack)[first + slot.at];
    registers.push_back(slot.index < 0 ? arg.toTensor() : arg.toListRef()[slot.index].toTensor());
  }
  stack->resize(first);
  Stack own;
  for (const auto& step : tape.steps) {
    if (!step.op) {
      box_step(step, registers);
      continue;
    }
    own.clear();
    for (const auto& given : step.arguments) own.push_back(argument(given, registers));
    dispatch(*step.op, keys, &own);
    for (const auto& result : own) keep(result, registers);
  }
  for (size_t k = 0; k < tape.results.size(); k++) {
    if (op.schema().returns()[k].type()->kind() == c10::TypeKind::TensorType) {
      const int32_t place = tape.results[k][0];      // -1: a gradient that is not wanted
      stack->emplace_back(place < 0 ? at::Tensor() : registers[place]);
      continue;
    }
    c10::List<at::Tensor> list;
    for (int32_t place : tape.results[k]) list.push_back(registers[place]);
    stack->emplace_back(std::move(list));
  }
}

void bind_replay(py::module_& m) {
  m.def("cache_trace", [](const std::string& ticket, const py::list& slots, const py::list& steps,
                         std::vector<std::vector<int32_t>> results, std::vector<std::pair<int32_t, double>> floats) {
    auto tape = std::make_shared<Tape>();
    for (auto step : steps) {
      tape->steps.push_back(tape_step(step.cast<py::tuple>()));
      tape->boxes |= !tape->steps.back().op;
    }
    tape->results = std::move(results);
    tape->floats = std::move(floats);
    auto recipe = std::make_shared<Recipe>();
    recipe->python = false;
    for (auto item : slots) {
      auto slot = item.cast<py::tuple>();
      recipe->slots.push_back({slot[0].cast<int32_t>(), slot[1].cast<int32_t>()});
    }
    recipe->tape = std::move(tape);
    keep_recipe(key_from(ticket), std::move(recipe));
  });
}

}  // namespace gt
