#include "waiting.h"

#include <set>

namespace py = pybind11;

namespace gt {
namespace {

PyObject *on_enter = nullptr, *on_leave = nullptr, *on_tick = nullptr;

}  // namespace

void Waiting::hook(py::object enter, py::object leave, py::object found) {
  on_enter = enter.release().ptr();
  on_leave = leave.release().ptr();
  on_tick = found.release().ptr();
}

void Waiting::enter(void* context) {
  auto* self = static_cast<Waiting*>(context);
  const bool locked = PyGILState_Check();
  PyGILState_STATE state = PyGILState_Ensure();
  std::set<int32_t> peers;
  for (size_t i = 0; i < self->count_; i++)
    peers.insert(self->program_[i].partner, self->program_[i].partner + self->program_[i].partners);
  if (on_enter) {
    py::object ranks = py::cast(std::vector<int32_t>(peers.begin(), peers.end()));
    PyObject* done = PyObject_CallFunction(on_enter, "sOK", self->what_.c_str(), ranks.ptr(), self->tag_);
    if (!done) PyErr_WriteUnraisable(on_enter);
    Py_XDECREF(done);
  }
  PyGILState_Release(state);
  if (locked) self->released_ = PyEval_SaveThread();
}

int Waiting::tick(void*) {
  PyGILState_STATE state = PyGILState_Ensure();
  int stop = PyErr_CheckSignals() != 0;
  if (!stop && on_tick) {
    PyObject* found = PyObject_CallNoArgs(on_tick);
    stop = !found;
    Py_XDECREF(found);
  }
  PyGILState_Release(state);
  return stop;
}

void Waiting::leave(void* context) {
  auto* self = static_cast<Waiting*>(context);
  if (self->released_) PyEval_RestoreThread(self->released_);
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);                // an error of tick is on its way
  if (on_leave) Py_XDECREF(PyObject_CallNoArgs(on_leave));
  PyErr_Restore(type, value, trace);
  PyGILState_Release(state);
}

}  // namespace gt
