// Recipes for sizes that were never seen, from one for other sizes: its sibling.
//
// Python says once, with a recipe, which sizes do not matter to it and how those of the results follow
// (dispatch/siblings.py). From then on a call that differs in such sizes alone never enters Python.
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "generations.h"
#include "recipe.h"

namespace py = pybind11;

namespace gt {
namespace {

// The size of each dim: a label, by its number, or ~n for the size n that it always has.
using Dims = std::vector<int64_t>;

// A group of dims of operand 0 that become these dims of result 0: one side merges what the other has.
using Group = std::pair<std::vector<int64_t>, std::vector<int64_t>>;

struct Sibling {
  std::shared_ptr<const Recipe> recipe;
  std::vector<Dims> operands;                        // per slot; none of a plain operand, of which the key knows all
  std::vector<std::vector<Dims>> outputs;            // per return and result; none where it is an operand
  std::vector<int64_t> least;                        // per label, the least size that this holds for
  std::vector<std::vector<int64_t>> sums;            // labels after these: the sum of such labels' sizes
  std::vector<std::optional<int64_t>> numbers;       // each that a kind leaves out, or none where any will do
  bool no_larger;                                    // it holds where the results are no larger than operand 0
  bool told_by_torch;                                // torch's shape function says what the results are, not `outputs`
  std::vector<std::tuple<int64_t, int64_t, bool>> kept;     // is this dim of operand 0 as long as that of result 0?
  std::vector<Group> groups;                         // if any, those of a view
  std::vector<std::tuple<bool, int64_t, int64_t>> even;     // this dim of result 0, or operand 0, is a multiple of
  int64_t local_size;                                // the argument that is the size of result 0 on each rank, or -1
};

constexpr size_t kKinds = 1024;                      // kinds of calls of which siblings are kept
constexpr size_t kOfAKind = 8;                       // siblings of one kind: they differ in sizes that matter
using OfKind = std::vector<std::shared_ptr<const Sibling>>;

struct Siblings {
  std::mutex mutex;
  Generations<OfKind> by_kind{kKinds};
};

Siblings& siblings() {
  static auto* all = new Siblings();
  return *all;
}

using Sizes = std::vector<int64_t>;
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
  for (const auto& labels : sibling.sums) {
    int64_t sum = 0;
    for (int64_t label : labels) sum += sizes[label];
    sizes.push_back(sum);
  }
  return true;
}

// Are the numbers that a kind leaves out those that matter?
bool read_numbers(const Sibling& sibling, const c10::OperatorHandle& op, const c10::IValue* args) {
  size_t nth = 0;
  const auto fits = [&](const c10::IValue& v) {
    return nth < sibling.numbers.size() && sibling.numbers[nth++].value_or(v.toInt()) == v.toInt();
  };
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!is_size(op.schema(), arguments[i])) continue;
    if (args[i].isInt() && !fits(args[i])) return false;
    if (args[i].isList())
      for (const c10::IValue& item : args[i].toListRef())
        if (item.isInt() && !fits(item)) return false;
  }
  return nth == sibling.numbers.size();
}

// What torch's own shape function gives for the call; none where it refuses it, as the call will.
std::vector<at::Tensor> results_by_torch(const c10::OperatorHandle& op, const Recipe& recipe, const c10::IValue* args) {
  Stack stack(args, args + op.schema().arguments().size());
  const auto& first = operand(args, recipe.slots[0]);
  const Spec* spec = global(first)->spec;
  stack[recipe.slots[0].at] = at::detail::empty_strided_meta(spec->sizes, spec->strides, spec->dtype);
  std::vector<at::Tensor> results;
  try {
    c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
    op.callBoxed(&stack);
  } catch (const c10::Error&) {
    return results;
  }
  if (stack.size() == 1 && stack[0].isTensor()) results.push_back(stack[0].toTensor());
  if (stack.size() == 1 && stack[0].isTensorList()) results = stack[0].toTensorVector();
  return results;
}

// Is what becomes of dims as it was? A size of 1 stays one.
bool has_shape(const Sibling& sibling, c10::IntArrayRef src, c10::IntArrayRef dst, const Sizes& was) {
  if (dst.size() != was.size()) return false;
  for (size_t d = 0; d < was.size(); d++)
    if ((dst[d] == 1) != (was[d] == 1) || (dst[d] == 0) != (was[d] == 0)) return false;
  for (const auto& [from, to, same] : sibling.kept)
    if ((src[from] == dst[to]) != same) return false;
  const auto elements = [](c10::IntArrayRef sizes, const std::vector<int64_t>& dims) {
    int64_t n = 1;
    for (int64_t d : dims) n *= sizes[d];
    return n;
  };
  for (const auto& [from, to] : sibling.groups)
    if (elements(src, from) != elements(dst, to)) return false;
  for (const auto& [of_result, dim, parts] : sibling.even)
    if ((of_result ? dst : src)[dim] % parts) return false;
  return true;
}

size_t bytes_of(const Spec* spec) { return spec->like->numel() * c10::elementSize(spec->dtype); }

// The results as torch tells them, and the arguments that name their sizes.
bool resize_as_told(const Sibling& sibling, const c10::OperatorHandle& op, const c10::IValue* args, Recipe& recipe) {
  auto& specs = recipe.outputs[0].specs;
  const auto results = results_by_torch(op, recipe, args);
  if (results.size() != specs.size()) return false;
  const Spec* src = global(operand(args, recipe.slots[0]))->spec;
  if (!has_shape(sibling, src->sizes, results[0].sizes(), specs[0]->sizes)) return false;
  for (size_t i = 0; i < specs.size(); i++) {
    if (results[i].dim() != int64_t(specs[i]->sizes.size())) return false;
    specs[i] = strided_like(specs[i], results[i].sizes().vec(), results[i].strides().vec());
  }
  if (sibling.local_size < 0) return true;
  for (size_t nth = 0; nth < recipe.ranks.size(); nth++)
    for (auto& local : recipe.local_args[nth])       // others, such as the device, are as they were
      if (local.at == int32_t(sibling.local_size)) local.value = c10::IValue(local_sizes(specs[0], nth));
  return true;
}

bool resize_by_labels(const Sibling& sibling, const LabelSizes& sizes, Recipe& recipe) {
  for (size_t k = 0; k < recipe.outputs.size(); k++) {
    auto& specs = recipe.outputs[k].specs;
    for (size_t i = 0; i < specs.size(); i++) {
      if (!specs[i]) continue;
      Sizes own;
      for (int64_t dim : sibling.outputs[k][i]) own.push_back(dim < 0 ? ~dim : sizes[dim]);
      specs[i] = sized_like(specs[i], std::move(own));
      if (!specs[i]) return false;
    }
  }
  return true;
}

PyObject* find_boxing = nullptr;                     // (spec, layout) -> Boxing or None

// The boxings of operands of other sizes, which Python makes; false where there is none.
bool resize_boxings(const c10::IValue* args, Recipe& recipe) {
  py::gil_scoped_acquire lock;
  for (size_t q = 0; q < recipe.boxings.size(); q++) {
    if (!recipe.boxings[q]) continue;
    const Spec* own = global(operand(args, recipe.slots[q]))->spec;
    auto boxing = py::handle(find_boxing)(py::handle(own->object()), py::handle(recipe.boxings[q]->result()->layout));
    if (boxing.is_none()) return false;
    recipe.boxings[q] = boxing_from(boxing);
  }
  return true;
}

std::shared_ptr<Recipe> resized(const Sibling& sibling, const c10::OperatorHandle& op, const c10::IValue* args) {
  LabelSizes sizes;
  if (!read_sizes(sibling, args, sizes) || !read_numbers(sibling, op, args)) return nullptr;
  auto recipe = std::make_shared<Recipe>(*sibling.recipe);
  if (!(sibling.told_by_torch ? resize_as_told(sibling, op, args, *recipe)
                              : resize_by_labels(sibling, sizes, *recipe)))
    return nullptr;
  if (recipe->has_boxings && !resize_boxings(args, *recipe)) return nullptr;
  if (!sibling.no_larger) return recipe;
  size_t bytes = 0;
  for (const auto& output : recipe->outputs)
    for (const auto& spec : output.specs) bytes += spec ? bytes_of(spec) : 0;
  return bytes > bytes_of(global(operand(args, recipe->slots[0]))->spec) ? nullptr : recipe;
}

void cache_sibling(const std::string& kind, const std::string& key, const py::dict& known_as) {
  auto recipe = find_recipe(key_from(key));
  if (!recipe || recipe->to_python) return;          // a plain operand's count was dropped meanwhile
  auto sibling = std::make_shared<Sibling>();
  sibling->recipe = recipe;
  const auto take = [&](const char* name, auto& field) {
    field = known_as[name].template cast<std::decay_t<decltype(field)>>();
  };
  take("operands", sibling->operands);
  take("outputs", sibling->outputs);
  take("least", sibling->least);
  take("sums", sibling->sums);
  take("numbers", sibling->numbers);
  take("no_larger", sibling->no_larger);
  take("told_by_torch", sibling->told_by_torch);
  take("kept", sibling->kept);
  take("groups", sibling->groups);
  take("even", sibling->even);
  take("local_size", sibling->local_size);
  auto& all = siblings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const RecipeKey of = key_from(kind);
  auto* before = all.by_kind.find(of);
  OfKind known = before ? *before : OfKind();
  if (known.size() >= kOfAKind) known.erase(known.begin());
  known.push_back(std::move(sibling));
  size_t bytes = of.size() * sizeof(uint64_t);
  for (const auto& each : known) bytes += sizeof(Sibling) + bytes_of(*each->recipe);
  all.by_kind.put(of, std::move(known), bytes);
}

}  // namespace

std::shared_ptr<const Recipe> recipe_of_sibling(const RecipeKey& kind, const RecipeKey& key,
                                                const c10::OperatorHandle& op, const c10::IValue* args) {
  auto& all = siblings();
  OfKind of_kind;                                    // resizing may wait for the interpreter: no lock is held then
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    auto* known = all.by_kind.find(kind);
    if (!known) return nullptr;
    of_kind = *known;
  }
  for (const auto& sibling : of_kind) {
    auto recipe = resized(*sibling, op, args);
    if (!recipe) continue;
    cache_recipe(key, recipe, true);
    return recipe;
  }
  return nullptr;
}

void clear_siblings() {
  auto& all = siblings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_kind.clear();
}

void bind_siblings(py::module_& m) {
  m.def("on_resized_boxing", [](py::object hook) { find_boxing = hook.release().ptr(); },
        "What finds the boxing of a tensor of a spec to a layout, for a call that is done by a sibling's recipe.");
  m.def("cache_sibling", &cache_sibling, py::arg("kind"), py::arg("key"), py::arg("known_as"),
        "Calls of this kind, at other sizes, are done by the recipe of this key: Siblings in dispatch/siblings.py.");
}

}  // namespace gt
