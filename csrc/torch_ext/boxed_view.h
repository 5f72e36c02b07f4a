// Views that must be boxed: the twin of algorithms/aliasing.py, which says what they are.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "recipe.h"

namespace gt {

// How often the memory of a storage was written to. There is one as long as the storage has boxed views.
struct MemoryWrites;

// A call of a view op that boxes its base: done when one of its results is read, for all of them. Several threads may
// read at once: `mutex` guards what changes, in the call and in its views.
struct ViewCall {
  c10::OperatorHandle op;
  Stack arguments;                                 // the base first
  std::shared_ptr<const Recipe> recipe;            // null: Python does the call
  std::shared_ptr<MemoryWrites> memory;            // at the end of the chain of bases
  std::vector<Shards> results;                     // those that nobody has taken yet
  std::vector<bool> taken;
  uint64_t lineage;
  int64_t writes_when_made = -1;                   // how many writes there had been; -1: never made
  std::recursive_mutex mutex;                      // Python may do the call, and meanwhile read any tensor

  ViewCall(const c10::OperatorHandle& op, Stack arguments, std::shared_ptr<const Recipe> recipe,
           std::shared_ptr<MemoryWrites> memory, uint64_t lineage)
      : op(op), arguments(std::move(arguments)), recipe(std::move(recipe)), memory(std::move(memory)),
        lineage(lineage) {}
};

// Who waits for it gives up the interpreter's lock, which the call may need. On every thread a view of a view is locked
// before its base.
class ViewLock {
 public:
  explicit ViewLock(ViewCall& call) : lock_(call.mutex, std::try_to_lock) {
    if (C10_LIKELY(lock_.owns_lock())) return;
    std::optional<pybind11::gil_scoped_release> meanwhile;
    if (PyGILState_Check()) meanwhile.emplace();
    lock_.lock();
  }

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

// Held while a value is copied that another thread may read, and so make.
class ValueLock {
 public:
  explicit ValueLock(const GlobalImpl& of);

 private:
  std::optional<ViewLock> view_;
  std::optional<pybind11::gil_scoped_acquire> interpreter_;
};

// The results of such a call; nothing is done yet. The arguments are on the stack.
void push_boxed_views(const c10::OperatorHandle& op, std::shared_ptr<const Recipe> recipe, Stack* stack);

// A `view` of a boxed `view`, its arguments on the stack: is it one of that one's base, every part of which stays where
// it is? Then the base comes in the place of the first argument.
bool take_base(Stack* stack);
// The sizes of which the rows of a boxed `view` were melted, and that of its columns, where a `view` that parts them is
// such a one; else none.
std::vector<int64_t> sizes_of_rows(const at::Tensor& x);

std::shared_ptr<MemoryWrites> watched_writes(GlobalImpl* base);    // of its memory, which is watched as long as held
int64_t writes_to(const MemoryWrites& memory);
void note_write(const at::Tensor& t);              // to its memory; to that of its base, where it is a boxed view

// A view is a tensor of inference mode where its base is one.
inline void mode_of_view(const at::Tensor& base, std::optional<c10::InferenceMode>& mode) {
  if (base.is_inference() != c10::InferenceMode::is_enabled()) mode.emplace(base.is_inference());
}

pybind11::object origin_of(const BoxedView& view);

}  // namespace gt
