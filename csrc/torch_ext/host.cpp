#include "host.h"

#include <pybind11/stl.h>

#include <set>
#include <vector>

namespace py = pybind11;

namespace gt {
namespace {

gt_transport* transport = nullptr;
int ranks_of_host = 0;                               // of the transport
bool waits_counted = false;
PyObject* failure_hook = nullptr;                    // (how, what, rank to blame, text): raises
PyObject *enter_hook = nullptr, *leave_hook = nullptr, *check_hook = nullptr;

std::string open_transport(int rank, int ranks, double timeout) {
  char error[512] = "";
  transport = gt_open(rank, ranks, timeout, error, sizeof error);
  ranks_of_host = ranks;
  TORCH_CHECK(transport, error);
  count_waits(waits_counted);
  return gt_address(transport);
}

void connect_transport(const std::vector<std::string>& addresses) {
  std::vector<const char*> names;
  for (const auto& address : addresses) names.push_back(address.c_str());
  raise_if_failed(gt_connect(transport, names.data()), "");
}

void close_transport() {
  if (transport) gt_close(transport);
  transport = nullptr;
}

std::vector<std::string> collect_reports(double seconds) {
  constexpr size_t kEach = 1024;
  std::vector<char> texts(ranks_of_host * kEach);
  {
    py::gil_scoped_release free;
    gt_collect_reports(transport, seconds, texts.data(), kEach);
  }
  std::vector<std::string> reports;
  for (int r = 0; r < ranks_of_host; r++) reports.emplace_back(texts.data() + r * kEach);
  return reports;
}

}  // namespace

gt_transport* host_transport() { return transport; }

void count_waits(bool on) {
  waits_counted = on;
  if (transport) gt_count_waits(transport, on);
}

double seconds_waited() { return transport ? gt_waited(transport) : 0; }

// Hooks that only watch must not replace what the program is about to see. What a signal handler raises is the
// program's.
void WatchedWait::call_watching(PyObject* hook, py::tuple arguments) {
  if (PyErr_CheckSignals() != 0) keep_error();
  PyObject* result = PyObject_CallObject(hook, arguments.ptr());
  if (!result && !PyErr_ExceptionMatches(PyExc_Exception)) keep_error();     // Ctrl-C, in the hook itself
  else if (!result) PyErr_WriteUnraisable(hook);
  Py_XDECREF(result);
}

void WatchedWait::on_enter() {
  if (!enter_hook) return;
  py::gil_scoped_acquire lock;
  std::set<int32_t> peers(peers_.begin(), peers_.end());
  for (const gt_program& program : programs_) peers.insert(program.partner, program.partner + program.partners);
  call_watching(enter_hook, py::make_tuple(what_, std::vector<int32_t>(peers.begin(), peers.end()), tag_));
}

bool WatchedWait::on_tick() {
  if (!check_hook) return true;
  PyObject* result = PyObject_CallNoArgs(check_hook);
  Py_XDECREF(result);
  return result;
}

void WatchedWait::on_leave() {
  if (!leave_hook) return;
  py::gil_scoped_acquire lock;
  call_watching(leave_hook, py::tuple());
}

void raise_if_failed(int status, const std::string& what, const GilFreeWait* wait) {
  if (wait) wait->rethrow();
  if (status == GT_OK) return;
  py::gil_scoped_acquire lock;
  char text[1024] = "";
  const int rank = transport ? gt_blame(transport, text, sizeof text) : -1;
  const bool disagreed = status == GT_DISAGREED || status == GT_DEADLOCKED;
  const char* how = disagreed ? "disagreed" : status == GT_STOPPED ? "stopped" : "lost";
  PyObject* result = PyObject_CallFunction(failure_hook, "ssis", how, what.c_str(), rank, text);
  Py_XDECREF(result);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, text);
  throw py::error_already_set();
}

uint64_t hash_text(const std::string& text) {
  uint64_t h = 0xCBF29CE484222325u;                 // FNV-1a
  for (unsigned char c : text) h = (h ^ c) * 0x100000001B3u;
  return h;
}

void bind_host(py::module_& m) {
  m.def("open_transport", &open_transport,
        "Open this rank's side of the shared memory of a host; gives the address that the other ranks need.");
  m.def("connect_transport", &connect_transport, py::call_guard<py::gil_scoped_release>(),
        "Map the memory of the ranks at these addresses.");
  m.def("leave_transport", [](const std::string& how) { if (transport) gt_leave(transport, how.c_str()); },
        "How this rank is about to end, for the errors of the others.");
  m.def("close_transport", &close_transport);
  m.def("report", [](const std::string& text) { gt_report(transport, text.c_str()); },
        "What this rank was doing when something failed, for the others to show.");
  m.def("collect_reports", &collect_reports,
        "Every rank's report, \"\" for those that gave none within so many seconds.");
  m.def("on_failure", [](py::object hook) { failure_hook = hook.release().ptr(); });
  m.def("on_waiting", [](py::object enter, py::object leave, py::object check) {
    enter_hook = enter.release().ptr();
    leave_hook = leave.release().ptr();
    check_hook = check.release().ptr();
  }, "enter(what, peers, tag) and leave() of every long wait; check() raises where it is a deadlock.");
}

}  // namespace gt
