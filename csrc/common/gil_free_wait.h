// Waiting for other processes inside a Python program: other Python threads run meanwhile, and Ctrl-C is answered.
//
//     GilFreeWait wait(timeout);
//     int status = gt_barrier(transport, agreement, wait.hooks());
//     wait.rethrow();          // what a signal handler raised, if one did
//
// All of it happens only once a wait has outlasted the spinning, so that a short one costs nothing.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <optional>
#include <utility>

#include "wait_hooks.h"

namespace gt {

class GilFreeWait {
 public:
  using Clock = std::chrono::steady_clock;

  explicit GilFreeWait(std::chrono::milliseconds timeout = {}) {  // not positive: without end
    if (timeout.count() > 0) deadline_ = Clock::now() + timeout;
  }
  GilFreeWait(const GilFreeWait&) = delete;
  GilFreeWait& operator=(const GilFreeWait&) = delete;
  virtual ~GilFreeWait() { reacquire(); }

  const gt_hooks* hooks() const { return &hooks_; }

  // Before the first sleep.
  void enter() {
    on_enter();
    if (Py_IsInitialized() && PyGILState_Check()) released_ = PyEval_SaveThread();
  }
  // Now and then. True: give up, because time is over (`timed_out`), or because something raised.
  bool tick() {
    if (raised_) return true;                        // on_enter has kept something
    if (deadline_ && Clock::now() > *deadline_) return timed_out_ = true;
    if (!Py_IsInitialized()) return false;
    pybind11::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() == 0 && on_tick()) return false;
    keep_error();
    return true;
  }
  // After the last sleep.
  void leave() {
    reacquire();
    on_leave();
  }

  bool timed_out() const { return timed_out_; }
  void rethrow() const {
    if (raised_) throw *raised_;
  }

 protected:
  virtual void on_enter() {}
  virtual bool on_tick() { return true; }            // with the interpreter's lock; false: it raised a Python error
  virtual void on_leave() {}
  // Keeps the interpreter's current error for `rethrow`, with its lock; the first counts.
  void keep_error() {
    pybind11::error_already_set error;
    if (!raised_) raised_.emplace(std::move(error));
  }

 private:
  static GilFreeWait& of(void* context) { return *static_cast<GilFreeWait*>(context); }
  void reacquire() {
    if (PyThreadState* mine = std::exchange(released_, nullptr)) PyEval_RestoreThread(mine);
  }

  const gt_hooks hooks_{[](void* w) { of(w).enter(); }, [](void* w) { return static_cast<int>(of(w).tick()); },
                        [](void* w) { of(w).leave(); }, this};
  std::optional<Clock::time_point> deadline_;
  std::optional<pybind11::error_already_set> raised_;
  PyThreadState* released_ = nullptr;
  bool timed_out_ = false;
};

}  // namespace gt
