// Replaying traces: an op that is other ops on global tensors and boxings, without Python between them.
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "completed.h"
#include "recipe.h"

namespace py = pybind11;

namespace gt {
namespace {

at::Tensor scalar_of(const c10::Scalar& value, c10::ScalarType dtype) {
  at::Tensor number = at::scalar_tensor(value, dtype);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

c10::IValue argument_of(const Trace::Argument& argument, const std::vector<at::Tensor>& registers) {
  if (argument.source >= 0) return registers[argument.source];
  if (argument.counted >= 0) return scalar_of(double(registers[argument.counted].numel()), at::kDouble);
  if (argument.sources.empty()) return argument.value;
  c10::List<at::Tensor> list;
  for (int32_t source : argument.sources) list.push_back(registers[source]);
  return list;
}

void push_result(const c10::IValue& result, std::vector<at::Tensor>& registers) {
  if (result.isTensor())
    registers.push_back(result.toTensor());
  else if (result.isTensorList())
    for (const at::Tensor& t : result.toTensorList().vec()) registers.push_back(t);
  else
    registers.emplace_back();                        // a number that nothing reads
}

void run_moves(const Trace::Step& step, std::vector<at::Tensor>& registers) {
  std::vector<ShardMove> moves;
  HeldShards held;
  for (const auto& [source, boxing] : step.moves)
    moves.push_back({boxing.get(), &global(registers[source])->shards(held)});
  auto moved = move_shards(moves, step.purpose);
  for (size_t i = 0; i < moved.size(); i++) {
    const Boxing& boxing = *step.moves[i].second;
    if (step.keeps && boxing.completes) keep_completed(registers[step.moves[i].first], boxing.result(), moved[i]);
    registers.push_back(wrap(boxing.result(), std::move(moved[i])));
  }
}

// ---- a trace from Python (dispatch/trace.py)

// A number where a tensor is wanted is what torch makes of it: a tensor that gives way to others' dtypes.
c10::IValue value_from(const py::object& object, const c10::Argument& of) {
  const bool is_float = py::isinstance<py::float_>(object);
  if (of.type()->kind() != c10::TypeKind::TensorType || !(is_float || py::isinstance<py::int_>(object)))
    return torch::jit::toIValue(object, of.real_type());
  return is_float ? scalar_of(object.cast<double>(), at::kDouble)
                  : scalar_of(object.cast<int64_t>(), at::kLong);
}

Trace::Argument argument_from(const py::object& object, const c10::Argument& of) {
  auto pair = object.cast<py::tuple>();               // ("place", n), ("places", [n]), ("count", n) or ("value", what)
  const auto kind = pair[0].cast<std::string>();
  Trace::Argument argument;
  if (kind == "place")
    argument.source = pair[1].cast<int32_t>();
  else if (kind == "count")
    argument.counted = pair[1].cast<int32_t>();
  else if (kind == "places")
    argument.sources = pair[1].cast<std::vector<int32_t>>();
  else
    argument.value = value_from(pair[1], of);
  return argument;
}

Trace::Step trace_step_from(const py::tuple& fields) {
  Trace::Step step;
  step.name = fields[0].cast<std::string>();
  if (fields.size() == 2) {                           // (what, [(place, Boxing, keeps)])
    step.purpose = Purpose(step.name);
    for (auto move : fields[1].cast<py::list>()) {
      auto pair = move.cast<py::tuple>();
      step.moves.emplace_back(pair[0].cast<int32_t>(), boxing_from(pair[1]));
      step.keeps |= pair[2].cast<bool>();
    }
    return step;
  }
  step.op = c10::Dispatcher::singleton().findSchemaOrThrow(step.name.c_str(), fields[1].cast<std::string>().c_str());
  step.plain = fields[3].cast<bool>();
  size_t nth = 0;
  for (auto value : fields[2].cast<py::list>()) {
    const auto& argument = step.op->schema().arguments()[nth++];
    step.arguments.push_back(argument_from(py::reinterpret_borrow<py::object>(value), argument));
  }
  return step;
}

void cache_trace(const std::string& pending_key, const py::list& slots, const py::list& steps,
                 std::vector<std::vector<int32_t>> results, std::vector<std::pair<int32_t, double>> floats) {
  auto trace = std::make_shared<Trace>();
  for (auto step : steps) {
    trace->steps.push_back(trace_step_from(step.cast<py::tuple>()));
    trace->has_boxings |= !trace->steps.back().op;
  }
  trace->results = std::move(results);
  trace->floats = std::move(floats);
  auto recipe = std::make_shared<Recipe>();
  recipe->to_python = false;
  recipe->slots = slots_from(slots);
  recipe->trace = std::move(trace);
  cache_recipe(key_from(pending_key), std::move(recipe));
}

}  // namespace

bool Trace::fits(const c10::IValue* args) const {
  for (const auto& [at, value] : floats)
    if (args[at].toDouble() != value) return false;
  return true;
}

void replay(const c10::OperatorHandle& op, const Recipe& recipe, c10::DispatchKeySet keys, Stack* stack) {
  const Trace& trace = *recipe.trace;
  const size_t first = stack->size() - op.schema().arguments().size();
  std::vector<at::Tensor> registers;
  for (Slot slot : recipe.slots) registers.push_back(operand(stack->data() + first, slot));
  stack->resize(first);
  Stack own;
  for (const auto& step : trace.steps) {
    if (!step.op) {
      run_moves(step, registers);
      continue;
    }
    own.clear();
    for (const auto& argument : step.arguments) own.push_back(argument_of(argument, registers));
    if (step.plain) {
      c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
      step.op->callBoxed(&own);
    } else {
      dispatch(*step.op, keys, &own);
    }
    for (const auto& result : own) push_result(result, registers);
  }
  for (size_t k = 0; k < trace.results.size(); k++) {
    if (op.schema().returns()[k].type()->kind() == c10::TypeKind::TensorType) {
      const int32_t source = trace.results[k][0];    // -1: a gradient that is not wanted
      stack->emplace_back(source < 0 ? at::Tensor() : registers[source]);
      continue;
    }
    if (op.schema().returns()[k].type()->kind() != c10::TypeKind::ListType) {  // a whole number, the same for this key
      stack->emplace_back(int64_t(trace.results[k][0]));
      continue;
    }
    c10::List<at::Tensor> list;
    for (int32_t source : trace.results[k]) list.push_back(registers[source]);
    stack->emplace_back(std::move(list));
  }
}

void bind_traces(py::module_& m) {
  m.def("cache_trace", &cache_trace, "Calls of this key replay what a decomposition did.");
}

}  // namespace gt
