// Recipes from Python: what it decided for a key, made flat.
#include "recipe.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace py = pybind11;

namespace gt {
namespace {

using LocalArgs = std::vector<std::vector<Recipe::LocalArg>>;

LocalArgs local_args_from(const c10::FunctionSchema& schema, const py::list& per_rank) {
  LocalArgs local_args;
  for (auto rank : per_rank) {
    auto& of_rank = local_args.emplace_back();
    for (auto item : rank.cast<py::list>()) {
      auto pair = item.cast<py::tuple>();
      const int32_t at = pair[0].cast<int32_t>();
      of_rank.push_back({at, torch::jit::toIValue(pair[1], schema.arguments()[at].real_type())});
    }
  }
  return local_args;
}

// "aten::add", "Tensor" -> "aten.add.Tensor", as Python prints the op
std::string python_name(const std::string& name, const std::string& overload) {
  const size_t colon = name.find(':');
  return name.substr(0, colon) + "." + name.substr(colon + 2) + "." + (overload.empty() ? "default" : overload);
}

// The twin of FlatRecipe in dispatch/native.py, which says what the fields are.
void cache_flat_recipe(const std::string& pending_key, const std::string& name, const std::string& overload,
                       std::vector<int64_t> ranks, const py::list& slots, const py::list& boxings,
                       const py::list& outputs, const std::vector<int32_t>& written, const py::list& local_args,
                       const std::string& local_op, bool boxes_view, const py::object& slices_boxing,
                       const py::list& slices, std::vector<int32_t> writes,
                       std::vector<int64_t> plain_ranks, const std::vector<std::string>& plain_keys,
                       const std::string& purpose) {
  auto recipe = std::make_shared<Recipe>();
  const auto& schema = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()).schema();
  recipe->name = python_name(name, overload);
  recipe->purpose = Purpose(purpose);
  recipe->to_python = false;
  recipe->ranks = std::move(ranks);
  recipe->slots = slots_from(slots);
  for (Slot slot : recipe->slots)
    if (slot.index >= 0 && (recipe->lists.empty() || recipe->lists.back() != slot.at)) recipe->lists.push_back(slot.at);
  for (Slot slot : recipe->slots) recipe->aliased.push_back(schema.arguments()[slot.at].alias_info() != nullptr);
  for (auto item : boxings) {
    recipe->boxings.push_back(item.is_none() ? nullptr : boxing_from(item.cast<py::object>()));
    recipe->has_boxings |= recipe->boxings.back() != nullptr;
  }
  const auto& returns = schema.returns();
  TORCH_CHECK(outputs.size() == returns.size() && written.size() == returns.size());
  for (size_t k = 0; k < returns.size(); k++) {
    auto& output = recipe->outputs.emplace_back();
    output.written = written[k];
    recipe->is_view |= returns[k].alias_info() && !returns[k].alias_info()->isWrite();
    output.is_list = returns[k].type()->kind() == c10::TypeKind::ListType;
    recipe->returns_lists |= output.is_list;
    for (auto spec : outputs[k].cast<py::list>()) {
      output.specs.push_back(spec.is_none() ? SpecRef() : spec_of(spec.ptr()));
      recipe->pending |= output.specs.back() && output.specs.back()->pending;
    }
  }
  recipe->boxes_view = boxes_view;
  if (!slices_boxing.is_none()) {
    recipe->slices_boxing = boxing_from(slices_boxing);
    recipe->has_boxings = true;
  }
  for (auto item : slices) {
    auto fields = item.cast<py::tuple>();
    auto numbers = [&](int at) { return fields[at].cast<std::vector<int64_t>>(); };
    recipe->slices.push_back({numbers(0), numbers(1), numbers(2), numbers(3)});
  }
  recipe->writes = std::move(writes);
  recipe->plain_ranks = std::move(plain_ranks);
  for (const auto& plain_key : plain_keys) {
    recipe->plain_uses.push_back(plain_key.empty() ? nullptr : plain_uses(recipe->plain_ranks, plain_key));
    // Its count was dropped since the first use. This use makes a new one in Python; the next call is cached.
    if (!plain_key.empty() && !recipe->plain_uses.back()) return;
  }
  if (!local_op.empty()) recipe->local_op = c10::Dispatcher::singleton().findSchemaOrThrow(local_op.c_str(), "");
  recipe->local_args = local_args_from(schema, local_args);
  cache_recipe(key_from(pending_key), std::move(recipe));
}

}  // namespace

std::vector<Slot> slots_from(const py::list& items) {
  std::vector<Slot> slots;
  for (auto item : items) {
    auto pair = item.cast<py::tuple>();
    slots.push_back({pair[0].cast<int32_t>(), pair[1].cast<int32_t>()});
  }
  return slots;
}

void bind_recipes(py::module_& m) {
  m.def("cache_recipe", &cache_flat_recipe, py::arg("pending_key"), py::arg("name"), py::arg("overload"), py::kw_only(),
        py::arg("ranks"), py::arg("slots"), py::arg("boxings"), py::arg("outputs"), py::arg("written"),
        py::arg("local_args"), py::arg("local_op"), py::arg("boxes_view"), py::arg("slices_boxing"),
        py::arg("slices"), py::arg("writes"), py::arg("plain_ranks"), py::arg("plain_keys"), py::arg("purpose"),
        "Calls of this key are done by this recipe.");
  m.def("cache_python_fallback", [](const std::string& pending_key) {
    cache_recipe(key_from(pending_key), std::make_shared<Recipe>());
  }, "Calls of this key go to Python.");
  m.def("clear_recipes", &clear_recipes, "Every call is decided anew.");
  m.def("limit_caches", &limit_caches, "How many bytes the caches of native code may hold together.");
}

}  // namespace gt
