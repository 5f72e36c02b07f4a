// A cache that forgets what was not used of late.
//
// There are two generations. What is new goes into the young one, and so does what is found in the old one. Where the
// young one is full it becomes the old one, and what was left in that is forgotten: the last so many that were used are
// always there, and never more than twice as many. It is full, too, where its entries take up too many bytes.
#pragma once
#include <c10/util/SmallVector.h>

#include <atomic>
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

// What the caches of recipes, siblings and boxings may hold: half of gt.config.cache_bytes (layouts/recent.py).
inline std::atomic<size_t> all_cache_bytes{128 << 20};
constexpr size_t kCaches = 4;                        // they share it

template <class Value>
class Generations {
 public:
  explicit Generations(size_t kept) : kept_(kept) {}

  // Null where it is not there, or has grown old.
  const Value* young(const CacheKey& key) const {
    auto at = young_.find(key);
    return at == young_.end() ? nullptr : &at->second.value;
  }

  // Null where it is not there. It is young from now on.
  Value* find(const CacheKey& key) {
    auto at = young_.find(key);
    if (at != young_.end()) return &at->second.value;
    auto old = old_.find(key);
    if (old == old_.end()) return nullptr;
    Weighed entry = std::move(old->second);
    old_.erase(old);
    return &put(key, std::move(entry.value), entry.bytes);
  }

  Value& put(const CacheKey& key, Value value, size_t bytes) {
    auto at = young_.find(key);
    const size_t before = at == young_.end() ? 0 : at->second.bytes;
    const bool is_heavy = bytes_ - before + bytes > all_cache_bytes / kCaches / 2;
    if (is_heavy || (at == young_.end() && young_.size() >= kept_)) {
      old_ = std::move(young_);
      young_.clear();
      bytes_ = 0;
    } else {
      bytes_ -= before;
    }
    old_.erase(key);
    bytes_ += bytes;
    Weighed& entry = young_[key];
    entry = {std::move(value), bytes};
    return entry.value;
  }

  void clear() {
    young_.clear();
    old_.clear();
    bytes_ = 0;
  }

 private:
  struct Hash {
    size_t operator()(const CacheKey& key) const { return hash_of(key); }
  };
  struct Weighed {
    Value value;
    size_t bytes;
  };
  using Map = std::unordered_map<CacheKey, Weighed, Hash>;

  size_t kept_;
  size_t bytes_ = 0;                                 // of the young ones
  Map young_, old_;
};

}  // namespace gt
