// Recipes by key: the op, the specs of global operands, shapes of plain ones, the values of static arguments. Floats
// count by type, and by whether they are 0, and finite, as no rule depends on more of one.
#include <c10/core/DefaultDtype.h>
#include <array>
#include <atomic>
#include <cmath>
#include <complex>
#include <shared_mutex>
#include <unordered_set>

#include "../common/tensor_memory.h"
#include "generations.h"
#include "host.h"
#include "lineage.h"
#include "recipe.h"

namespace gt {
namespace {

enum Tag : uint64_t {
  kNone = 1, kInt, kBool, kDouble, kComplex, kString, kDevice, kGenerator, kList, kUndefined, kPlain, kSpec
};

// What a key says of a number: whether it is 0, and finite.
template <class Number>
uint64_t kind_of(Number value) {
  return uint64_t(value == Number(0)) | uint64_t(!std::isfinite(std::abs(value))) << 1;
}

// The same of a Python number that torch has made a tensor of.
uint64_t kind_of_scalar(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kDouble: return kind_of(*t.const_data_ptr<double>());
    case at::kComplexDouble: return kind_of(*static_cast<const std::complex<double>*>(t.const_data_ptr()));
    case at::kLong: return *t.const_data_ptr<int64_t>() == 0;
    default: return 0;
  }
}

// What a key says of global operands: all, or all but their sizes.
enum class Of { call, kind };

template <Of of>
void push_tensor(const at::Tensor& t, RecipeKey& key) {
  auto* impl = t.unsafeGetTensorImpl();
  if (is_global(impl)) {
    const Spec* spec = static_cast<GlobalImpl*>(impl)->spec;
    // one word: no count gets to the upper byte, and no other tag is there
    key.push_back((of == Of::call ? spec->id : spec->kind->id) | uint64_t(kSpec) << 56);
    return;
  }
  key.push_back(kPlain | uint64_t(impl->dim()) << 8 | uint64_t(t.scalar_type()) << 16 |
                uint64_t(impl->is_wrapped_number()) << 24 | uint64_t(t.device().type()) << 32 |
                uint64_t(uint8_t(t.device().index())) << 40 |
                (impl->is_wrapped_number() ? kind_of_scalar(t) : 0) << 48);
  for (int64_t n : impl->sizes()) key.push_back(n);
  for (int64_t n : impl->strides()) key.push_back(n);
}

bool foreign(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  if (is_global(impl)) return false;
  return impl->is_python_dispatch() || impl->has_symbolic_sizes_strides() || impl->layout() != c10::kStrided ||
         impl->key_set().has(c10::DispatchKey::NestedTensor) || without_memory(impl);
}

void push_string(const std::string& text, RecipeKey& key) {
  key.push_back(kString | text.size() << 8);
  for (size_t i = 0; i < text.size(); i += 8) {
    uint64_t word = 0;
    memcpy(&word, text.data() + i, std::min<size_t>(8, text.size() - i));
    key.push_back(word);
  }
}

template <Of of>
bool push(const c10::IValue& v, RecipeKey& key, CallLineage& lineage, const c10::Argument& argument,
          bool is_size = false) {
  if (v.isTensor()) {
    const at::Tensor& t = v.toTensor();
    if (!t.defined()) return key.push_back(kUndefined), true;
    if (foreign(t)) return false;
    push_tensor<of>(t, key);
    const bool ours = is_global(t.unsafeGetTensorImpl());
    if (ours && C10_UNLIKELY(global(t)->is_completed.load(std::memory_order_relaxed))) lineage.saw_completed = true;
    if (!lineage) return true;
    if (ours)
      lineage.operand(global(t)->lineage);
    else if (lineage.reads && (!argument.alias_info() || !argument.alias_info()->isWrite()))
      lineage.plain(t);                              // else nobody may have set its memory
  } else if (v.isNone()) {
    key.push_back(kNone);
  } else if (v.isInt()) {
    key.push_back(kInt);
    if (is_size) {
      if (argument.name() == "other") key.back() |= kind_of(double(v.toInt())) << 8;
      return true;
    }
    key.push_back(v.toInt());
    if (lineage) lineage.number(double(v.toInt()));
  } else if (v.isBool()) {
    key.push_back(kBool | uint64_t(v.toBool()) << 8);
    if (lineage) lineage.word(key.back()), lineage.tell(v.toBool());
  } else if (v.isDouble()) {
    key.push_back(kDouble | kind_of(v.toDouble()) << 8);
    if (lineage) lineage.number(v.toDouble());
  } else if (v.isString()) {
    push_string(v.toStringRef(), key);
    if (lineage) lineage.word(hash_text(v.toStringRef()));
  } else if (v.isDevice()) {
    key.push_back(kDevice | uint64_t(v.toDevice().type()) << 8 | uint64_t(uint8_t(v.toDevice().index())) << 16);
  } else if (v.isComplexDouble()) {
    key.push_back(kComplex | kind_of(std::complex<double>(v.toComplexDouble())) << 8);
    if (lineage) lineage.number(v.toComplexDouble().real()), lineage.number(v.toComplexDouble().imag());
  } else if (v.isGenerator()) {
    key.push_back(kGenerator);
  } else if (v.isList()) {
    auto items = v.toListRef();
    key.push_back(kList | uint64_t(items.size()) << 8);
    if (lineage) lineage.word(key.back());
    for (const c10::IValue& item : items)
      if (!push<of>(item, key, lineage, argument, is_size)) return false;
  } else {
    return false;
  }
  return true;
}

// Does the op not look at its first operand, a plain one? So torch.baddbmm(torch.empty(...), q, k, beta=0).
// Twin: `ignores_first` in runtime/lineage.py.
bool ignores_first(const c10::FunctionSchema& schema, const c10::IValue* args, size_t count) {
  if (!count || !args[0].isTensor() || is_global(args[0].toTensor().unsafeGetTensorImpl())) return false;
  const auto beta = schema.argumentIndexWithName("beta");
  if (!beta || !schema.argumentIndexWithName("alpha") || size_t(*beta) >= count) return false;
  return args[*beta].isScalar() && args[*beta].toScalar().equal(0);
}

template <Of of>
bool push_call(const c10::OperatorHandle& op, const c10::IValue* args, size_t count, RecipeKey& key,
               CallLineage& lineage) {
  key.clear();
  // i / 2 of integers gives the default dtype; no address needs the upper byte
  key.push_back(reinterpret_cast<uint64_t>(&op.schema()) ^ uint64_t(c10::get_default_dtype_as_scalartype()) << 56);
  const auto& arguments = op.schema().arguments();
  lineage.reads = !ignores_first(op.schema(), args, count);
  for (size_t i = 0; i < count; i++, lineage.reads = true)
    if (!push<of>(args[i], key, lineage, arguments[i], of == Of::kind && is_size(op.schema(), arguments[i])))
      return false;
  return true;
}

constexpr size_t kKept = 2'000;                      // recipes of either kind

// Calls on several threads share them.
struct Recipes {
  std::shared_mutex mutex;
  // Siblings' are kept apart: they are many, and quickly made again.
  Generations<std::shared_ptr<const Recipe>> decided{kKept}, resized{kKept};
  std::atomic<uint64_t> changes{1};                  // how often a recipe was replaced, or all were cleared
  std::atomic<uint64_t> known_since{0};              // of all ops that torch had dropped by then
};

// What this thread ran last, by hash: it takes no lock.
struct RecentRecipe {
  uint64_t hash = 0, changes = 0;
  RecipeKey key;
  std::shared_ptr<const Recipe> recipe;
};
constexpr size_t kRecent = 256;

Recipes& recipes() {
  static auto* all = new Recipes();
  return *all;
}

const c10::FunctionSchema& schema_of(const RecipeKey& key) {
  return *reinterpret_cast<const c10::FunctionSchema*>(key[0] & (~uint64_t{0} >> 8));
}

}  // namespace

bool make_key(const c10::OperatorHandle& op, const c10::IValue* args, size_t count, RecipeKey& key,
              CallLineage& lineage) {
  return push_call<Of::call>(op, args, count, key, lineage);
}

bool is_size(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  static const std::unordered_set<std::string> names{"size",  "shape", "input_sizes", "split_size", "split_sizes",
                                                     "start", "end"};
  static const std::unordered_set<std::string> scaled{"aten::div", "aten::mul"};  // by a count of elements
  return names.count(argument.name()) ||
         (argument.name() == "other" && schema.overload_name() == "Scalar" && scaled.count(schema.name()));
}

void make_kind_key(const c10::OperatorHandle& op, const c10::IValue* args, size_t count, RecipeKey& kind) {
  CallLineage none(nullptr);
  push_call<Of::kind>(op, args, count, kind, none);
}

// Keys have the address of the op's schema.
static void forget_dropped_ops() {
  const uint64_t dropped = ops_dropped();
  clear_recipes();
  recipes().known_since.store(dropped, std::memory_order_release);
}

std::shared_ptr<const Recipe> find_recipe(const RecipeKey& key) {
  static thread_local std::array<RecentRecipe, kRecent> recent;
  auto& all = recipes();
  const uint64_t hash = hash_of(key);
  RecentRecipe& last = recent[hash % kRecent];
  if (C10_UNLIKELY(all.known_since.load(std::memory_order_acquire) != ops_dropped())) forget_dropped_ops();
  const uint64_t changes = all.changes.load(std::memory_order_acquire);
  if (last.hash == hash && last.changes == changes && last.key == key) return last.recipe;
  std::shared_ptr<const Recipe> recipe;
  {
    std::shared_lock lock(all.mutex);
    if (const auto* known = all.decided.young(key)) recipe = *known;
    else if (const auto* known = all.resized.young(key)) recipe = *known;
  }
  if (!recipe) {
    std::unique_lock lock(all.mutex);
    if (const auto* known = all.decided.find(key)) recipe = *known;
    else if (const auto* known = all.resized.find(key)) recipe = *known;
  }
  if (recipe) last = {hash, changes, key, recipe};
  return recipe;
}

size_t bytes_of(const Recipe& recipe) {
  const auto of_boxing = [](const std::shared_ptr<const Boxing>& boxing) { return boxing ? bytes_of(*boxing) : 0; };
  size_t bytes = sizeof(Recipe) + recipe.slots.size() * sizeof(Slot) + of_boxing(recipe.slices_boxing);
  for (const auto& boxing : recipe.boxings) bytes += sizeof(boxing) + of_boxing(boxing);
  for (const auto& output : recipe.outputs) bytes += sizeof(output) + output.specs.size() * sizeof(SpecRef);
  for (const auto& own : recipe.local_args) {
    bytes += sizeof(own);
    for (const auto& [at, value] : own)
      bytes += sizeof(Recipe::LocalArg) + (value.isIntList() ? value.toDimVector().size() * sizeof(int64_t) : 0);
  }
  for (const auto& slice : recipe.slices) bytes += sizeof(slice) + 4 * slice.start.size() * sizeof(int64_t);
  if (!recipe.trace) return bytes;
  for (const auto& step : recipe.trace->steps) {
    bytes += sizeof(step) + step.arguments.size() * sizeof(Trace::Argument);
    for (const auto& [from, boxing] : step.moves) bytes += sizeof(boxing) + of_boxing(boxing);
  }
  return bytes;
}

void limit_caches(size_t bytes) {
  const bool is_less = bytes < all_cache_bytes;
  all_cache_bytes = bytes;
  if (is_less) clear_recipes();
}

void cache_recipe(const RecipeKey& key, std::shared_ptr<Recipe> recipe, bool is_resized) {
  recipe->lineage = op_lineage(schema_of(key));
  const size_t bytes = bytes_of(*recipe) + key.size() * sizeof(uint64_t);
  auto& all = recipes();
  std::unique_lock lock(all.mutex);
  if (is_resized) {                                  // nothing else was known
    all.resized.put(key, std::move(recipe), bytes);
    return;
  }
  if (all.decided.find(key)) all.changes++;
  all.decided.put(key, std::move(recipe), bytes);
}

void clear_recipes() {
  clear_siblings();
  auto& all = recipes();
  std::unique_lock lock(all.mutex);
  all.decided.clear();
  all.resized.clear();
  all.changes++;
}

RecipeKey key_from(const std::string& bytes) {
  RecipeKey key;
  key.resize(bytes.size() / sizeof(uint64_t));
  memcpy(key.data(), bytes.data(), bytes.size());
  return key;
}

}  // namespace gt
