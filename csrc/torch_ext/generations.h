// A cache that forgets what was not used of late.
//
// There are two generations. What is new goes into the young one, and so does what is found in the old one. Where the
// young one is full it becomes the old one, and what was left in that is forgotten: the last so many that were used are
// always there, and never more than twice as many.
#pragma once
#include <c10/util/SmallVector.h>

#include <unordered_map>

namespace gt {

using CacheKey = c10::SmallVector<uint64_t, 48>;

inline uint64_t hash_of(const CacheKey& key) {
  uint64_t h = 0x9E3779B97F4A7C15u ^ key.size();
  for (uint64_t word : key) {
    h = (h ^ word) * 0xD6E8FEB86659FD93u;
    h ^= h >> 32;
  }
  return h;
}

template <class Value>
class Generations {
 public:
  explicit Generations(size_t kept) : kept_(kept) {}

  // Null where it is not there, or has grown old.
  const Value* young(const CacheKey& key) const {
    auto at = young_.find(key);
    return at == young_.end() ? nullptr : &at->second;
  }

  // Null where it is not there. It is young from now on.
  Value* find(const CacheKey& key) {
    auto at = young_.find(key);
    if (at != young_.end()) return &at->second;
    auto old = old_.find(key);
    if (old == old_.end()) return nullptr;
    Value value = std::move(old->second);
    old_.erase(old);
    return &put(key, std::move(value));
  }

  Value& put(const CacheKey& key, Value value) {
    if (young_.size() >= kept_ && !young_.count(key)) {
      old_ = std::move(young_);
      young_.clear();
    }
    old_.erase(key);
    return young_[key] = std::move(value);
  }

  void clear() {
    young_.clear();
    old_.clear();
  }

 private:
  struct Hash {
    size_t operator()(const CacheKey& key) const { return hash_of(key); }
  };
  using Map = std::unordered_map<CacheKey, Value, Hash>;

  size_t kept_;
  Map young_, old_;
};

}  // namespace gt
