// Learning from Python: what it decided for a key, made flat.
#include "recipe.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace py = pybind11;

namespace gt {
namespace {

std::vector<std::vector<Recipe::Patch>> patches_from(const c10::FunctionSchema& schema, const py::list& per_rank) {
  std::vector<std::vector<Recipe::Patch>> patches;
  for (auto rank : per_rank) {
    auto& mine = patches.emplace_back();
    for (auto item : rank.cast<py::list>()) {
      auto patch = item.cast<py::tuple>();
      const int32_t at = patch[0].cast<int32_t>();
      mine.push_back({at, torch::jit::toIValue(patch[1], schema.arguments()[at].real_type())});
    }
  }
  return patches;
}

// slots [(argument, index in its list or -1)], moves [program or None], outputs [[Spec or None]] per return,
// returned [slot or -1] per return, patches [[(argument, value)]] per rank, local: the op that ranks run, "" for this one
void teach(const std::string& ticket, const std::string& name, const std::string& overload, std::vector<int64_t> ranks,
           const py::list& slots, const py::list& moves, const py::list& outputs, std::vector<int32_t> returned,
           const py::list& patches, const std::string& local, bool copied, bool guarded) {
  auto recipe = std::make_shared<Recipe>();
  const auto& schema = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()).schema();
  recipe->name = name.substr(name.find(':') + 2) + "." + (overload.empty() ? "default" : overload);
  recipe->name = name.substr(0, name.find(':')) + "." + recipe->name;
  recipe->python = false;
  recipe->ranks = std::move(ranks);
  for (auto item : slots) {
    auto slot = item.cast<py::tuple>();
    recipe->slots.push_back({slot[0].cast<int32_t>(), slot[1].cast<int32_t>()});
    const auto added = recipe->slots.back();
    if (added.index >= 0 && (recipe->lists.empty() || recipe->lists.back() != added.at)) recipe->lists.push_back(added.at);
  }
  for (auto item : moves) {
    recipe->moves.push_back(item.is_none() ? nullptr : boxing_from(item.cast<py::object>()));
    recipe->boxes |= recipe->moves.back() != nullptr;
  }
  for (auto item : outputs) {
    auto& specs = recipe->outputs.emplace_back();
    for (auto spec : item.cast<py::list>()) {
      specs.push_back(spec.is_none() ? nullptr : spec_of(spec.ptr()));
      recipe->pending |= specs.back() && specs.back()->pending;
    }
  }
  recipe->returned = std::move(returned);
  recipe->copied = copied;
  recipe->guarded = guarded;
  if (!local.empty()) recipe->local = c10::Dispatcher::singleton().findSchemaOrThrow(local.c_str(), "");
  recipe->patches = patches_from(schema, patches);
  TORCH_CHECK(recipe->outputs.size() == schema.returns().size() && recipe->returned.size() == schema.returns().size());
  bool tensors = true;
  for (const auto& returned : schema.returns()) tensors &= returned.type()->kind() == c10::TypeKind::TensorType;
  recipe->plain = recipe->ranks.size() == 1 && recipe->lists.empty() && !recipe->boxes && !copied && tensors;
  keep_recipe(key_from(ticket), std::move(recipe));
}

}  // namespace

Key key_from(const std::string& ticket) {
  Key key;
  key.resize(ticket.size() / sizeof(uint64_t));
  memcpy(key.data(), ticket.data(), ticket.size());
  return key;
}

void bind_recipes(py::module_& m) {
  m.def("cache_recipe", &teach);
  m.def("cache_python_fallback", [](const std::string& ticket) {
    keep_recipe(key_from(ticket), std::make_shared<Recipe>());
  }, "Calls of this key go to Python.");
  m.def("forget", &forget_recipes);
}

}  // namespace gt
