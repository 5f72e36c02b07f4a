// What goes into a lineage, who gets it, and the history that errors read.
#include "lineage.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <limits>
#include <unordered_set>

#include "host.h"

namespace py = pybind11;

namespace gt {
namespace {

constexpr uint64_t kStart = 0x9E3779B97F4A7C15u, kEvents = 8192;
constexpr size_t kSamples = 8;                       // elements of a plain operand that are looked at
const double kNoNumber = std::numeric_limits<double>::quiet_NaN();

struct History {
  std::array<LineageEvent, kEvents> events;
  uint64_t count = 0;

  LineageEvent& next() {
    LineageEvent& event = events[count++ % kEvents];
    event.lineage = 0;                               // until all arguments were looked at
    for (int i = 0; i < LineageEvent::kMost; i++) event.operands[i] = 0, event.numbers[i] = kNoNumber;
    return event;
  }
};

History& history() {
  static auto* all = new History();                  // of all threads: torn at worst, and read by errors only
  return *all;
}

void give(const at::Tensor& t, uint64_t lineage) {
  auto* impl = t.unsafeGetTensorImpl();
  if (t.defined() && is_global(impl)) static_cast<GlobalImpl*>(impl)->lineage = lineage;
}

// Of which tensor is this a view, by torch's count?
const at::Tensor* base_of(const at::Tensor& t) {
  auto* meta = torch::autograd::impl::get_view_autograd_meta(t);
  return meta && meta->has_bw_view() ? &meta->get_backward_view().base_ : nullptr;
}

double number_at(const at::Tensor& of, const char* data) {
  switch (of.scalar_type()) {
    case at::kBool: return *data;
    case at::kInt: return *reinterpret_cast<const int32_t*>(data);
    case at::kLong: return double(*reinterpret_cast<const int64_t*>(data));
    case at::kFloat: return *reinterpret_cast<const float*>(data);
    case at::kDouble: return *reinterpret_cast<const double*>(data);
    default: return kNoNumber;
  }
}

PyObject* place_hook = nullptr;                      // is called with the lineage of each call of an op

void note_place(uint64_t lineage) {
  py::gil_scoped_acquire lock;
  if (place_hook) py::reinterpret_borrow<py::object>(place_hook)(lineage);
}

py::list history_of_python() {
  py::list rows;
  const History& all = history();
  const uint64_t known = std::min(all.count, kEvents);
  for (uint64_t i = all.count - known; i < all.count; i++) {
    const LineageEvent& event = all.events[i % kEvents];
    py::list operands, numbers;
    for (uint64_t operand : event.operands)
      if (operand) operands.append(operand);
    for (double number : event.numbers)
      if (number == number) numbers.append(number);
    const std::string name = event.op ? event.op->name() + "." + event.op->overload_name() : "";
    rows.append(py::make_tuple(event.lineage, name, operands, numbers, event.gradients));
  }
  return rows;
}

}  // namespace

void CallLineage::begin() {
  event_ = &history().next();
  event_->gradients = c10::GradMode::is_enabled();
  hash_ = kStart ^ uint64_t(event_->gradients);
}

// A few elements, spread over all: what differs between ranks mostly differs everywhere.
void CallLineage::plain(const at::Tensor& t) {
  if (!t.device().is_cpu() || !t.is_contiguous() || !t.numel() || t.is_conj() || t.is_neg()) return;
  const auto* data = static_cast<const char*>(t.const_data_ptr());
  const size_t itemsize = t.element_size(), n = t.numel();
  if (t.dim() == 0 && t.scalar_type() == at::kDouble) return number(*reinterpret_cast<const double*>(data));
  if (t.dim() == 0 && t.scalar_type() == at::kFloat) return number(*reinterpret_cast<const float*>(data));
  const size_t samples = std::min(n, kSamples);
  for (size_t i = 0; i < samples; i++) {
    uint64_t word = 0;
    memcpy(&word, data + (samples > 1 ? i * (n - 1) / (samples - 1) : 0) * itemsize, std::min<size_t>(itemsize, 8));
    mix(hash_, word);
  }
  for (size_t i = 0; n <= LineageEvent::kMost && i < n; i++) tell(number_at(t, data + i * itemsize));
}

void CallLineage::note_written(const c10::OperatorHandle& op, const c10::IValue* args) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!arguments[i].alias_info() || !arguments[i].alias_info()->isWrite()) continue;
    if (args[i].isTensor())
      written_.push_back(args[i].toTensor());
    else if (args[i].isTensorList())
      for (const c10::IValue& item : args[i].toListRef()) written_.push_back(item.toTensor());
  }
}

void CallLineage::enter(const c10::OperatorHandle& op, const c10::IValue* args, const OpLineage& name) {
  if (name.writes) note_written(op, args);
  mix(hash_, name.hash);
  hash_ &= ~kResultBits;
  event_->lineage = hash_;
  event_->op = &op.schema();
  keeps_ = name.keeps;
  call_lineage = hash_;
  entered_ = true;
}

void CallLineage::leave(const Stack& stack, size_t first) {
  hash_ = event_->lineage = call_lineage;            // random numbers may have been drawn meanwhile
  if (C10_UNLIKELY(places_noted)) note_place(hash_);
  const bool keeps = 0 <= keeps_ && keeps_ < operands_;
  uint64_t nth = 0;
  auto next = [&] { return keeps ? event_->operands[keeps_] : hash_ | std::min(nth++, kResultBits); };
  for (size_t i = first; i < stack.size(); i++) {
    if (stack[i].isTensor())
      give(stack[i].toTensor(), next());
    else if (stack[i].isTensorList())
      for (const c10::IValue& item : stack[i].toListRef()) give(item.toTensor(), next());
  }
  nth = 0;
  for (const at::Tensor& t : written_) {
    const uint64_t lineage = hash_ | std::min(nth++, kResultBits);
    give(t, keeps ? event_->operands[keeps_] : lineage);
    if (!t.defined()) continue;
    const at::Tensor* base = base_of(t);
    if (!base || !is_global(base->unsafeGetTensorImpl())) continue;
    uint64_t of_base = global(*base)->lineage;
    mix(of_base, lineage);                           // with what view it is that was written to
    give(*base, of_base);
  }
}

OpLineage op_lineage(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string> keeping = {"aten::clone", "aten::detach", "aten::alias", "aten::lift",
                                                          "aten::lift_fresh", "globaltensor::redistribute"};
  const std::string& name = schema.name();
  return {hash_text(name + "." + schema.overload_name()), keeping.count(name) ? 0 : name == "aten::copy_" ? 1 : -1,
          schema.is_mutable()};
}

void forget_schema(const c10::FunctionSchema* schema) {
  History& all = history();
  for (uint64_t i = 0; i < std::min(all.count, kEvents); i++)
    if (all.events[i].op == schema) all.events[i].op = nullptr;
}

namespace {
thread_local std::vector<uint64_t> boxed;
}

void note_boxed(const std::vector<ShardMove>& moves) {
  boxed.clear();
  if (call_lineage) boxed.push_back(call_lineage);
  for (const ShardMove& move : moves)
    if (!call_lineage) boxed.push_back(move.lineage);
}

void bind_lineage(py::module_& m) {
  m.def("keep_lineages", [](bool on) { lineages_kept = on; },
        "From now on, or no longer, ops give their results lineages.");
  m.def("call_lineage", [] { return call_lineage; }, "That of the op that the program called; 0 outside of ops.");
  m.def("note_lineage", [](uint64_t word) {
    if (!call_lineage) return;
    mix(call_lineage, word);
    call_lineage &= ~kResultBits;
  }, "What the op that the program called depends on beside its arguments.");
  m.def("note_new_lineage", [](uint64_t lineage, double nth) {
    LineageEvent& event = history().next();
    event.lineage = lineage;
    event.op = nullptr;
    event.gradients = true;
    event.numbers[0] = nth;
  }, "A tensor that no op made, the nth.");
  m.def("boxed_lineages", [] { return boxed; }, "What a boxing that failed agrees on.");
  m.def("lineage_history", &history_of_python,
        "[(lineage, op or \"\", operands, numbers, gradients)] of the last calls.");
  m.def("note_places", [](py::object hook) {
    places_noted = !hook.is_none();
    Py_XDECREF(place_hook);
    place_hook = places_noted ? hook.release().ptr() : nullptr;
  }, "From now on call this with the lineage of each op that the program called; None: no longer.");
}

}  // namespace gt
