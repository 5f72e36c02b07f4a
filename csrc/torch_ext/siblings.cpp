// Recipes for sizes that were never seen, from one for other sizes: its sibling.
//
// Python says once, with a recipe, which sizes do not matter to it and how those of the results follow
// (dispatch/siblings.py). From then on a call that differs in such sizes alone never enters Python.
#include <pybind11/pybind11.h>

#include "generations.h"
#include "recipe.h"

namespace py = pybind11;

namespace gt {
namespace {

// The size of each dim: a label, by its number, or ~n for the size n that it always has.
using Dims = std::vector<int64_t>;

struct Sibling {
  std::shared_ptr<const Recipe> recipe;
  std::vector<Dims> operands;                        // per slot; none of a plain operand, of which the key knows all
  std::vector<std::vector<Dims>> outputs;            // per return and result; none where it is an operand
  std::vector<int64_t> least;                        // per label, the least size that this holds for
  bool no_larger;                                    // it holds where the results are no larger than operand 0
};

constexpr size_t kKinds = 4096;                      // kinds of calls of which siblings are kept
constexpr size_t kOfAKind = 8;                       // siblings of one kind: they differ in sizes that matter

struct Siblings {
  std::mutex mutex;
  Generations<std::vector<Sibling>> by_kind{kKinds};
};

Siblings& siblings() {
  static auto* all = new Siblings();
  return *all;
}

using LabelSizes = c10::SmallVector<int64_t, 8>;

// Reads the sizes of the labels; false where the sizes of the operands are not of this kind.
bool read_sizes(const Sibling& sibling, const c10::IValue* args, LabelSizes& sizes) {
  sizes.assign(sibling.least.size(), -1);
  for (size_t q = 0; q < sibling.operands.size(); q++) {
    const Dims& dims = sibling.operands[q];
    if (dims.empty()) continue;
    auto own = operand(args, sibling.recipe->slots[q]).unsafeGetTensorImpl()->sizes();
    if (own.size() != dims.size()) return false;
    for (size_t d = 0; d < dims.size(); d++) {
      if (dims[d] < 0) {
        if (own[d] != ~dims[d]) return false;
        continue;
      }
      int64_t& size = sizes[dims[d]];
      if (size < 0) size = own[d];
      if (size != own[d] || size < sibling.least[dims[d]]) return false;
    }
  }
  return true;
}

size_t bytes_of(const Spec* spec) { return spec->like->numel() * c10::elementSize(spec->dtype); }

std::shared_ptr<Recipe> resized(const Sibling& sibling, const c10::IValue* args) {
  LabelSizes sizes;
  if (!read_sizes(sibling, args, sizes)) return nullptr;
  auto recipe = std::make_shared<Recipe>(*sibling.recipe);
  size_t bytes = 0;
  for (size_t k = 0; k < recipe->outputs.size(); k++) {
    auto& specs = recipe->outputs[k].specs;
    for (size_t i = 0; i < specs.size(); i++) {
      if (!specs[i]) continue;
      std::vector<int64_t> own;
      for (int64_t dim : sibling.outputs[k][i]) own.push_back(dim < 0 ? ~dim : sizes[dim]);
      specs[i] = sized_like(specs[i], std::move(own));
      if (!specs[i]) return nullptr;
      bytes += bytes_of(specs[i]);
    }
  }
  if (sibling.no_larger && bytes > bytes_of(global(operand(args, recipe->slots[0]))->spec)) return nullptr;
  return recipe;
}

void cache_sibling(const std::string& kind, const std::string& key, std::vector<Dims> operands,
                   std::vector<std::vector<Dims>> outputs, std::vector<int64_t> least, bool no_larger) {
  auto recipe = find_recipe(key_from(key));
  if (!recipe || recipe->to_python) return;          // a plain operand's count was dropped meanwhile
  auto& all = siblings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const RecipeKey of = key_from(kind);
  auto* known = all.by_kind.find(of);
  if (!known) known = &all.by_kind.put(of, {});
  if (known->size() >= kOfAKind) known->erase(known->begin());
  known->push_back({recipe, std::move(operands), std::move(outputs), std::move(least), no_larger});
}

}  // namespace

std::shared_ptr<const Recipe> recipe_of_sibling(const RecipeKey& kind, const RecipeKey& key, const c10::IValue* args) {
  auto& all = siblings();
  std::shared_ptr<Recipe> recipe;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    auto* known = all.by_kind.find(kind);
    if (!known) return nullptr;
    for (const Sibling& sibling : *known)
      if ((recipe = resized(sibling, args))) break;
  }
  if (recipe) cache_recipe(key, recipe, true);
  return recipe;
}

void clear_siblings() {
  auto& all = siblings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_kind.clear();
}

void bind_siblings(py::module_& m) {
  m.def("cache_sibling", &cache_sibling, py::arg("kind"), py::arg("key"), py::kw_only(), py::arg("operands"),
        py::arg("outputs"), py::arg("least"), py::arg("no_larger"),
        "Calls of this kind, at other sizes, are done by the recipe of this key.");
}

}  // namespace gt
