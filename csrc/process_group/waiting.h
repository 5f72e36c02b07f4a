// Waiting for other processes inside a Python program: without the interpreter's lock, and heeding Ctrl-C.
#pragma once
#include <chrono>
#include <exception>
#include <optional>

#include <torch/csrc/utils/pybind.h>

namespace gt::collective {

class Wait {
 public:
  using Clock = std::chrono::steady_clock;
  Wait() = default;
  explicit Wait(std::chrono::milliseconds most) {  // not positive: without end
    if (most.count() > 0) until_ = Clock::now() + most;
  }
  Wait(const Wait&) = delete;
  ~Wait() { leave(); }

  void enter() {  // before the first sleep
    if (Py_IsInitialized() && PyGILState_Check()) lock_ = PyEval_SaveThread();
  }
  void leave() {
    if (PyThreadState* mine = std::exchange(lock_, nullptr)) PyEval_RestoreThread(mine);
  }
  // Now and then. True: give up, because time is over (`late`), or because a signal handler raised.
  bool over() {
    if (until_ && Clock::now() > *until_) return late_ = true;
    if (!Py_IsInitialized()) return false;
    pybind11::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() == 0) return false;
    raised_ = std::make_exception_ptr(pybind11::error_already_set());
    return true;
  }
  bool late() const { return late_; }
  void raise() const {  // what a handler raised, if one did
    if (raised_) std::rethrow_exception(raised_);
  }

 private:
  std::optional<Clock::time_point> until_;
  PyThreadState* lock_ = nullptr;
  std::exception_ptr raised_;
  bool late_ = false;
};

}  // namespace gt::collective
