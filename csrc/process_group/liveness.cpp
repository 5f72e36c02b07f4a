// What the watch over waits (runtime/deadlock.py) cannot do in Python: a heart that beats while the interpreter's lock
// is held, an end to a wait inside torch, and to live on where a thread of gloo has failed.
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <typeinfo>
#include <vector>

#include "process_group/bind.h"

namespace gt {
namespace {

// Writes one beat after the other under a key of a store, in a thread of its own, until it is stopped or the store is
// gone. The beats were signed in Python, which may be busy when it is their turn.
class Heart {
 public:
  Heart(c10::intrusive_ptr<c10d::Store> store, std::string key, double period)
      : store_(std::move(store)), key_(std::move(key)), period_(period), thread_([this] { run(); }) {}

  void feed(const std::vector<std::string>& beats) {
    std::lock_guard<std::mutex> lock(mutex_);
    beats_.insert(beats_.end(), beats.begin(), beats.end());
  }
  size_t left() {
    std::lock_guard<std::mutex> lock(mutex_);
    return beats_.size();
  }
  bool forked() const { return process_ != getpid(); }  // the thread is the parent's
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!wake_.wait_for(lock, period_, [this] { return stopped_; })) {
      if (beats_.empty()) continue;
      const std::vector<uint8_t> beat(beats_.front().begin(), beats_.front().end());
      beats_.pop_front();
      lock.unlock();
      try {
        store_->set(key_, beat);
      } catch (const std::exception&) {
        return;  // the process that kept the store has ended, and the job with it: each wait says so
      }
      lock.lock();
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_;
  const std::chrono::duration<double> period_;
  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = false;
  std::deque<std::string> beats_;
  std::thread thread_;  // the last member: it uses the others
};

Heart* heart = nullptr;  // never deleted: a process may end at any moment

void stop_heart() {
  if (heart && !heart->forked()) heart->stop();
  heart = nullptr;
}

// Where a peer sends more than was asked for, because it is doing something else, gloo throws in the thread that serves
// its connections. That would end the process before anybody has said what the ranks do. Instead the thread stops where
// it is, for ever: the watch finds that the ranks wait for each other in vain, and all of them raise. What gloo has
// cannot be freed then, as that thread keeps its locks; so the process ends without the destructors of libraries.
std::atomic<bool> gloo_failed{false};
char gloo_error[512] = "";
std::terminate_handler terminate_before = nullptr;

bool from_gloo() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  return type && std::strstr(type->name(), "4gloo") && getpid() != gettid();
}

// A thread of Python's that returns from C++ while the interpreter ends is unwound by it, which C++ takes for an end of
// the process: it stops there instead, and the process ends as it would have.
bool unwound_by_python() {
#if PY_VERSION_HEX >= 0x030d0000
  const bool ending = Py_IsFinalizing();
#else
  const bool ending = _Py_IsFinalizing();
#endif
  return ending && !abi::__cxa_current_exception_type() && getpid() != gettid();
}

void on_terminate() {
  while (unwound_by_python()) pause();
  if (!from_gloo()) {
    if (terminate_before) terminate_before();
    std::abort();
  }
  try {
    std::rethrow_exception(std::current_exception());
  } catch (const std::exception& error) {
    std::snprintf(gloo_error, sizeof gloo_error, "%s", error.what());
  } catch (...) {
  }
  on_exit([](int status, void*) {
    std::fflush(nullptr);
    _exit(status);
  }, nullptr);
  gloo_failed = true;
  for (;;) pause();
}

void outlive_gloo() {
  if (std::get_terminate() != on_terminate) terminate_before = std::set_terminate(on_terminate);
}

}  // namespace

void bind_liveness(pybind11::module_& m) {
  namespace py = pybind11;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("start_heart", [](const c10::intrusive_ptr<c10d::Store>& store, const std::string& key, double period) {
    stop_heart();
    heart = new Heart(store, key, period);
  }, Unlocked(), "Write one beat after the other under a key of a store, every so many seconds.");
  m.def("feed_heart", [](const std::vector<py::bytes>& beats) {
    if (heart) heart->feed(std::vector<std::string>(beats.begin(), beats.end()));
  }, "Beats to come.");
  m.def("beats_left", [] { return heart ? heart->left() : 0; }, "How many beats it still has.");
  m.def("stop_heart", &stop_heart, Unlocked());
  m.def("abort_work", [](const c10::intrusive_ptr<c10d::Work>& work) { work->abort(); }, Unlocked(),
        "End the wait for a send or a receive of gloo: it returns False.");
  m.def("outlive_gloo", &outlive_gloo, "From now on, a thread of gloo that fails does not end the process.");
  m.def("gloo_error", [] { return std::string(gloo_failed ? gloo_error : ""); },
        "Why a thread of gloo has failed, and nothing of gloo can be freed any more; \"\" where none has.");
}

}  // namespace gt
