// Recipes by key: the op, the specs of global operands, shapes of plain ones, the values of static arguments. Floats
// count by type alone, as no rule depends on one.
#include <c10/core/DefaultDtype.h>
#include <array>
#include <atomic>
#include <shared_mutex>
#include <unordered_map>

#include "../common/tensor_memory.h"
#include "recipe.h"

namespace gt {
namespace {

enum Tag : uint64_t {
  kNone = 1, kInt, kBool, kDouble, kComplex, kString, kDevice, kGenerator, kList, kUndefined, kPlain, kSpec
};

void push_tensor(const at::Tensor& t, RecipeKey& key) {
  auto* impl = t.unsafeGetTensorImpl();
  if (is_global(impl)) {
    // one word: no address needs the upper byte, and no other tag is there
    key.push_back(reinterpret_cast<uint64_t>(static_cast<GlobalImpl*>(impl)->spec) | uint64_t(kSpec) << 56);
    return;
  }
  key.push_back(kPlain | uint64_t(impl->dim()) << 8 | uint64_t(t.scalar_type()) << 16 |
                uint64_t(impl->is_wrapped_number()) << 24 | uint64_t(t.device().type()) << 32 |
                uint64_t(uint8_t(t.device().index())) << 40);
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

bool push(const c10::IValue& v, RecipeKey& key) {
  if (v.isTensor()) {
    const at::Tensor& t = v.toTensor();
    if (!t.defined()) return key.push_back(kUndefined), true;
    if (foreign(t)) return false;
    push_tensor(t, key);
  } else if (v.isNone()) {
    key.push_back(kNone);
  } else if (v.isInt()) {
    key.push_back(kInt);
    key.push_back(v.toInt());
  } else if (v.isBool()) {
    key.push_back(kBool | uint64_t(v.toBool()) << 8);
  } else if (v.isDouble()) {
    key.push_back(kDouble);
  } else if (v.isString()) {
    push_string(v.toStringRef(), key);
  } else if (v.isDevice()) {
    key.push_back(kDevice | uint64_t(v.toDevice().type()) << 8 | uint64_t(uint8_t(v.toDevice().index())) << 16);
  } else if (v.isComplexDouble()) {
    key.push_back(kComplex);
  } else if (v.isGenerator()) {
    key.push_back(kGenerator);
  } else if (v.isList()) {
    auto items = v.toListRef();
    key.push_back(kList | uint64_t(items.size()) << 8);
    for (const c10::IValue& item : items)
      if (!push(item, key)) return false;
  } else {
    return false;
  }
  return true;
}

uint64_t hash_of(const RecipeKey& key) {
  uint64_t h = 0x9E3779B97F4A7C15u ^ key.size();
  for (uint64_t word : key) {
    h = (h ^ word) * 0xD6E8FEB86659FD93u;
    h ^= h >> 32;
  }
  return h;
}

struct RecipeKeyHash {
  size_t operator()(const RecipeKey& key) const { return hash_of(key); }
};

// Calls on several threads share them.
struct Recipes {
  std::shared_mutex mutex;
  std::unordered_map<RecipeKey, std::shared_ptr<const Recipe>, RecipeKeyHash> known;
  std::atomic<uint64_t> changes{1};                  // how often a recipe was replaced, or all were cleared
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

constexpr size_t kLimit = 50'000;                    // shapes that change with every call would pile up without end

}  // namespace

bool make_key(const c10::OperatorHandle& op, const c10::IValue* args, size_t count, RecipeKey& key) {
  key.clear();
  // i / 2 of integers gives the default dtype; no address needs the upper byte
  key.push_back(reinterpret_cast<uint64_t>(&op.schema()) ^ uint64_t(c10::get_default_dtype_as_scalartype()) << 56);
  for (size_t i = 0; i < count; i++)
    if (!push(args[i], key)) return false;
  return true;
}

std::shared_ptr<const Recipe> find_recipe(const RecipeKey& key) {
  static thread_local std::array<RecentRecipe, kRecent> recent;
  auto& all = recipes();
  const uint64_t hash = hash_of(key);
  RecentRecipe& last = recent[hash % kRecent];
  const uint64_t changes = all.changes.load(std::memory_order_acquire);
  if (last.hash == hash && last.changes == changes && last.key == key) return last.recipe;
  std::shared_lock lock(all.mutex);
  auto at = all.known.find(key);
  if (at == all.known.end()) return nullptr;
  last = {hash, changes, key, at->second};
  return at->second;
}

void cache_recipe(const RecipeKey& key, std::shared_ptr<const Recipe> recipe) {
  auto& all = recipes();
  std::unique_lock lock(all.mutex);
  if (all.known.size() >= kLimit) all.known.clear();
  auto& at = all.known[key];
  if (at) all.changes++;
  at = std::move(recipe);
}

void clear_recipes() {
  auto& all = recipes();
  std::unique_lock lock(all.mutex);
  all.known.clear();
  all.changes++;
}

RecipeKey key_from(const std::string& bytes) {
  RecipeKey key;
  key.resize(bytes.size() / sizeof(uint64_t));
  memcpy(key.data(), bytes.data(), bytes.size());
  return key;
}

}  // namespace gt
