// The specs of a process: found by their Python objects, or by kind and sizes.
#include "spec.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <numeric>
#include <tuple>
#include <unordered_map>

#include "tensor.h"

namespace py = pybind11;

namespace gt {
namespace {

PyObject* describe = nullptr;          // Spec -> (sizes, strides, dtype, device, ranks, ..., layout)
PyObject* make_object = nullptr;       // (layout, sizes, strides, dtype, copied, conjugated, negated) -> Spec

using Sizes = std::vector<int64_t>;

// The strides of a tensor without gaps, counted as torch does: a size of 0 counts as 1.
Sizes dense_strides(const Sizes& sizes, const Sizes& order) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = step;
    step *= std::max<int64_t>(sizes[*d], 1);
  }
  return strides;
}

// The dims from the outermost inwards; empty where these are not the strides of a tensor without gaps.
Sizes order_of(const Sizes& sizes, const Sizes& strides) {
  Sizes order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  if (dense_strides(sizes, order) == strides) return order;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return strides[a] != strides[b] ? strides[a] > strides[b] : sizes[a] > 1 && sizes[b] <= 1;
  });
  return dense_strides(sizes, order) == strides ? order : Sizes();
}

// What gaps memory has, alike for many sizes: the dims from the outermost inwards, and which are repeated. Where that
// does not tell all that may matter, as elements lie in each other's way or there are none, the strides themselves.
Sizes gaps_of(const Sizes& sizes, const Sizes& strides) {
  Sizes gaps(sizes.size());
  std::iota(gaps.begin(), gaps.end(), 0);
  std::stable_sort(gaps.begin(), gaps.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  int64_t reach = 0;                   // of the dims further in
  for (auto d = gaps.rbegin(); d != gaps.rend(); ++d) {
    if (sizes[*d] == 0 || strides[*d] < 0) return strides;
    if (sizes[*d] == 1 || strides[*d] == 0) continue;
    if (strides[*d] <= reach) return strides;
    reach += strides[*d] * (sizes[*d] - 1);
  }
  for (size_t d = 0; d < sizes.size(); d++) gaps.push_back(strides[d] ? -1 : -2);
  return gaps;
}

}  // namespace

constexpr size_t kMany = 1024;         // specs that are kept, though nobody may hold them

class Specs {
 public:
  static Specs& all() {
    static auto* specs = new Specs();
    return *specs;
  }

  SpecRef of_object(PyObject* object) {
    auto at = by_object_.find(object);
    if (at != by_object_.end()) return at->second;
    auto fields = py::reinterpret_steal<py::tuple>(PyObject_CallOneArg(describe, object));
    if (!fields) throw python_error();
    auto sizes = fields[0].cast<Sizes>(), strides = fields[1].cast<Sizes>();
    SpecTraits traits{fields[10].ptr(), fields[2].cast<c10::ScalarType>(),
                      c10::Device(fields[3].cast<std::string>()).type(), fields[4].cast<Sizes>(),
                      fields[5].cast<bool>(), fields[6].cast<Sizes>(), fields[7].cast<bool>(), fields[8].cast<bool>(),
                      fields[9].cast<bool>()};
    free_unheld();
    const auto layout = std::make_shared<const LayoutRef>(traits.layout);
    const std::lock_guard<std::mutex> lock(mutex_);
    Spec* spec = intern(kind_of(traits, layout, cuts_from(fields[11]), sizes, strides), sizes, strides);
    if (!spec->object_) {              // equal objects are one: else another thread was here while Python ran
      Py_INCREF(object);
      spec->object_ = object;
      by_object_[object] = spec;
    }
    return spec;
  }

  SpecRef sized_like(const Spec* like, Sizes sizes) {
    if (like->kind->order.empty() && !sizes.empty()) return nullptr;
    make_room();
    Sizes strides = dense_strides(sizes, like->kind->order);
    const std::lock_guard<std::mutex> lock(mutex_);
    return intern(like->kind, sizes, strides);
  }

  SpecRef strided_like(const Spec* like, const Sizes& sizes, const Sizes& strides) {
    make_room();
    const std::lock_guard<std::mutex> lock(mutex_);
    return intern(kind_of(*like, like->kind->layout_ref, like->kind->cuts, sizes, strides), sizes, strides);
  }

  PyObject* object_of(const Spec* spec) {
    if (spec->object_) return spec->object_;
    const SpecTraits& traits = *spec;
    auto object = py::reinterpret_borrow<py::object>(make_object)(
        py::handle(traits.layout), py::tuple(py::cast(spec->sizes)), py::tuple(py::cast(spec->strides)), traits.dtype,
        traits.copied, traits.conjugated, traits.negated);
    if (!spec->object_) {              // another thread may have been here while Python ran
      spec->object_ = object.release().ptr();
      by_object_[spec->object_] = const_cast<Spec*>(spec);
    }
    return spec->object_;
  }

 private:
  using KindKey = std::tuple<PyObject*, c10::ScalarType, bool, bool, bool, size_t, Sizes, Sizes>;

  static std::vector<SpecKind::Cuts> cuts_from(const py::handle& per_rank) {
    std::vector<SpecKind::Cuts> all;
    for (const auto& own : per_rank.cast<std::vector<std::vector<std::array<int64_t, 3>>>>()) {
      auto& cuts = all.emplace_back();
      for (const auto& [dim, parts, index] : own) cuts.push_back({dim, parts, index});
    }
    return all;
  }

  std::shared_ptr<const SpecKind> kind_of(const SpecTraits& traits, const std::shared_ptr<const LayoutRef>& layout,
                                          const std::vector<SpecKind::Cuts>& cuts, const Sizes& sizes,
                                          const Sizes& strides) {
    Sizes order = order_of(sizes, strides);
    Sizes gaps = order.empty() ? gaps_of(sizes, strides) : Sizes();
    auto& known = kinds_[KindKey(traits.layout, traits.dtype, traits.copied, traits.conjugated, traits.negated,
                                 sizes.size(), order, gaps)];
    auto kind = known.lock();
    if (!kind) {
      auto fresh = std::make_shared<SpecKind>(traits, ++ids_, layout);
      fresh->ndim = sizes.size();
      fresh->order = std::move(order);
      fresh->gaps = std::move(gaps);
      fresh->cuts = cuts;
      known = kind = fresh;
    }
    return kind;
  }

  static size_t hash_of(const SpecKind* kind, const Sizes& sizes) {
    uint64_t hash = kind->id;
    for (int64_t n : sizes) hash = (hash ^ uint64_t(n)) * 0xD6E8FEB86659FD93u, hash ^= hash >> 32;
    return hash;
  }

  Spec* intern(const std::shared_ptr<const SpecKind>& kind, const Sizes& sizes, const Sizes& strides) {
    const size_t hash = hash_of(kind.get(), sizes);
    auto [at, end] = by_sizes_.equal_range(hash);
    for (; at != end; ++at)
      if (at->second->kind == kind && at->second->sizes == sizes && at->second->strides == strides) return at->second;
    auto* spec = new Spec;
    static_cast<SpecTraits&>(*spec) = *kind;
    spec->id = ++ids_;
    spec->kind = kind;
    spec->sizes = sizes;
    spec->strides = strides;
    spec->like = c10::make_intrusive<GlobalImpl>(spec);
    by_sizes_.emplace(hash, spec);
    by_sizes_count_ = by_sizes_.size();
    return spec;
  }

  void make_room() {
    if (by_sizes_count_ < free_at_) return;
    py::gil_scoped_acquire interpreter;
    free_unheld();
  }

  // With the interpreter's lock. What frees Python objects may run Python, so it is done when the lock here is free.
  void free_unheld() {
    if (by_sizes_count_ < free_at_) return;
    std::vector<Spec*> unheld;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto at = by_sizes_.begin(); at != by_sizes_.end();) {
        if (at->second->holders.load(std::memory_order_acquire)) {
          ++at;
          continue;
        }
        unheld.push_back(at->second);
        at = by_sizes_.erase(at);
      }
      by_sizes_count_ = by_sizes_.size();
      free_at_ = std::max(kMany, 2 * by_sizes_.size());
    }
    for (Spec* spec : unheld)
      if (spec->object_) by_object_.erase(spec->object_);
    for (Spec* spec : unheld) {
      Py_XDECREF(spec->object_);
      delete spec;                     // with the last of a kind, the kind
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = kinds_.begin(); at != kinds_.end();) at = at->second.expired() ? kinds_.erase(at) : std::next(at);
  }

  std::mutex mutex_;                   // of all but `by_object_`, which the interpreter's lock guards
  std::unordered_map<PyObject*, Spec*> by_object_;
  std::unordered_multimap<size_t, Spec*> by_sizes_;
  std::map<KindKey, std::weak_ptr<const SpecKind>> kinds_;
  std::atomic<size_t> by_sizes_count_{0}, free_at_{kMany};
  uint64_t ids_ = 0;
};

LayoutRef::LayoutRef(PyObject* layout) : layout_(layout) { Py_INCREF(layout_); }
LayoutRef::~LayoutRef() { Py_DECREF(layout_); }

PyObject* Spec::object() const { return Specs::all().object_of(this); }
SpecRef spec_of(PyObject* object) { return Specs::all().of_object(object); }
SpecRef sized_like(const Spec* spec, std::vector<int64_t> sizes) {
  return Specs::all().sized_like(spec, std::move(sizes));
}
SpecRef strided_like(const Spec* spec, const Sizes& sizes, const Sizes& strides) {
  return Specs::all().strided_like(spec, sizes, strides);
}

// The twin of Layout.region.
Sizes local_sizes(const Spec* spec, size_t nth) {
  Sizes sizes = spec->sizes;
  for (const auto& cut : spec->kind->cuts[nth])
    sizes[cut.dim] = sizes[cut.dim] / cut.parts + (cut.index < sizes[cut.dim] % cut.parts);
  return sizes;
}

void bind_specs(py::module_& m) {
  m.def("bind_specs", [](py::object describe_spec, py::object make_spec) {
    describe = describe_spec.release().ptr();
    make_object = make_spec.release().ptr();
  }, "What tells the fields of a Python Spec, and what makes one.");
}

}  // namespace gt
