// Boxings as a profiler and whoever counts them see them: they stay in native code, unlike those that are recorded.
//
// What a boxing is called there, and what it moves, Python says (boxings/seen.py), and only where someone looks.
#include <ATen/record_function.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>

#include "boxing.h"
#include "generations.h"
#include "host.h"

namespace py = pybind11;

namespace gt {
namespace {

std::atomic<bool> counted{false};
std::atomic<int64_t> boxings{0}, bytes{0}, nanoseconds{0};
PyObject* name_hook = nullptr;                       // (purpose, [(spec, spec of the result)]) -> name of the range
PyObject* bytes_hook = nullptr;                      // [(spec, spec of the result)] -> bytes

py::list specs_of(const std::vector<ShardMove>& moves) {
  py::list specs;
  for (const ShardMove& move : moves)
    specs.append(py::make_tuple(py::reinterpret_borrow<py::object>(move.boxing->source->object()),
                                py::reinterpret_borrow<py::object>(move.boxing->result()->object())));
  return specs;
}

std::string name_of(const std::vector<ShardMove>& moves, const Purpose& what) {
  py::gil_scoped_acquire lock;
  return py::handle(name_hook)(what.text, specs_of(moves)).cast<std::string>();
}

int64_t bytes_of(const std::vector<ShardMove>& moves) {
  static auto* known = new Generations<int64_t>(1024);
  py::gil_scoped_acquire lock;
  CacheKey key;
  for (const ShardMove& move : moves) key.push_back(move.boxing->agreement);  // of layouts, shape and dtype
  if (const int64_t* before = known->find(key)) return *before;
  return known->put(key, py::handle(bytes_hook)(specs_of(moves)).cast<int64_t>(), key.size() * sizeof(uint64_t));
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::vector<Shards> move_and_count(const std::vector<ShardMove>& moves, const Purpose& what) {
  if (!counted.load(std::memory_order_relaxed)) return move_shards_unseen(moves, what);
  const int64_t moved = bytes_of(moves), began = now_ns();
  auto shards = move_shards_unseen(moves, what);
  nanoseconds += now_ns() - began;
  bytes += moved;
  boxings++;
  return shards;
}

// ---- for Python

void count_boxings(bool on) {
  counted = on;
  count_waits(on);
}

py::tuple counts() { return py::make_tuple(boxings.load(), bytes.load(), nanoseconds * 1e-9, seconds_waited()); }

}  // namespace

std::vector<Shards> move_shards(const std::vector<ShardMove>& moves, const Purpose& what) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (C10_LIKELY(!callbacks)) return move_and_count(moves, what);
  at::RecordFunction range(std::move(*callbacks));
  const std::string name = name_of(moves, what);
  range.before(name);
  return move_and_count(moves, what);
}

void bind_boxing_watch(py::module_& m) {
  m.def("on_seen_boxing", [](py::object name, py::object bytes) {
    name_hook = name.release().ptr();
    bytes_hook = bytes.release().ptr();
  }, "What tells how a profiler shows a boxing, and how many bytes it moves.");
  m.def("count_boxings", &count_boxings, "Begin or end to count boxings, and how long this rank waits for others.");
  m.def("boxing_counts", &counts, "Boxings, their bytes and seconds, and seconds of waiting, since the process began.");
}

}  // namespace gt
