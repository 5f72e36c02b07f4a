// What a global tensor is without its data: the twin of layout.Spec.
//
// Equal ones are one, so that the hot paths compare them by address. One that nobody holds any more is freed when there
// are many: shapes that change with every step leave nothing behind.
#pragma once
#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <vector>

namespace gt {

struct GlobalImpl;

// A reference to a layout, with which kinds of it are made where nobody has the interpreter's lock.
class LayoutRef {
 public:
  explicit LayoutRef(PyObject* layout);              // with the interpreter's lock; its end, too
  LayoutRef(const LayoutRef&) = delete;
  ~LayoutRef();

 private:
  PyObject* layout_;
};

struct SpecTraits {
  PyObject* layout;
  c10::ScalarType dtype;
  c10::DeviceType device;
  std::vector<int64_t> ranks;          // the ranks of its placement that this process drives, ascending
  bool copied;                         // a boxed view
  std::vector<int64_t> parts;          // per dim: into how many it is split
  bool pending;                        // a partial sum, max or min on some axis
  bool conjugated;                     // a view whose elements torch conjugates when it reads them
  bool negated;                        // the same for their sign
};

// All of a spec but its sizes. Of two specs of one kind, one is the other at other sizes.
struct SpecKind : SpecTraits {
  struct Cut {                         // a dim, into so many parts, and which of them it is
    int64_t dim, parts, index;
  };
  using Cuts = std::vector<Cut>;       // what a rank has of a tensor, the outermost axis first

  uint64_t id;                         // never used again
  size_t ndim;
  // The dims from the outermost in memory to the innermost, where there are no gaps; else what gaps there are: the same
  // dims and which are repeated, and the strides themselves where elements lie in each other's way.
  std::vector<int64_t> order, gaps;
  std::vector<Cuts> cuts;              // per rank of `ranks`
  std::shared_ptr<const LayoutRef> layout_ref;       // shared by the kinds that were made of one

  SpecKind(const SpecTraits& traits, uint64_t id, std::shared_ptr<const LayoutRef> layout_ref)
      : SpecTraits(traits), id(id), layout_ref(std::move(layout_ref)) {}
};

struct Spec : SpecTraits {
  uint64_t id;                         // never used again: keys of caches have it, which may outlive the spec
  std::shared_ptr<const SpecKind> kind;
  std::vector<int64_t> sizes, strides;
  c10::intrusive_ptr<c10::TensorImpl> like;  // a tensor of this spec, with no shards: what others copy
  mutable std::atomic<int64_t> holders{0};

  PyObject* object() const;            // the Python Spec, which is made when it is first asked for; with the lock

 private:
  friend class Specs;
  mutable PyObject* object_ = nullptr;
};

// Holds a spec.
class SpecRef {
 public:
  SpecRef() = default;
  SpecRef(const Spec* spec) : spec_(spec) {
    if (spec_) spec_->holders.fetch_add(1, std::memory_order_relaxed);
  }
  SpecRef(const SpecRef& other) : SpecRef(other.spec_) {}
  SpecRef(SpecRef&& other) noexcept : spec_(other.spec_) { other.spec_ = nullptr; }
  SpecRef& operator=(SpecRef other) noexcept {
    std::swap(spec_, other.spec_);
    return *this;
  }
  ~SpecRef() {
    if (spec_) spec_->holders.fetch_sub(1, std::memory_order_release);
  }
  operator const Spec*() const { return spec_; }
  const Spec* operator->() const { return spec_; }

 private:
  const Spec* spec_ = nullptr;
};

SpecRef spec_of(PyObject* object);     // with the interpreter's lock
// The same at other sizes; null where memory has gaps, as its strides do not follow from sizes then.
SpecRef sized_like(const Spec* spec, std::vector<int64_t> sizes);
// The same at other sizes and strides.
SpecRef strided_like(const Spec* spec, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);
// The sizes of what a rank holds, counted as in `ranks`.
std::vector<int64_t> local_sizes(const Spec* spec, size_t nth);

void bind_specs(pybind11::module_& m);

}  // namespace gt
