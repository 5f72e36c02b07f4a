// What the watch over waits (runtime/deadlock.py) cannot do in Python: a heart that beats while the interpreter's lock
// is held, and an end to a wait inside torch.
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "process_group/bind.h"

namespace gt {
namespace {

// Counts in a store, in a thread of its own, until it is stopped or the store is gone.
class Heart {
 public:
  Heart(c10::intrusive_ptr<c10d::Store> store, std::string key, double period)
      : store_(std::move(store)), key_(std::move(key)), period_(period), thread_([this] { run(); }) {}

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
      lock.unlock();
      try {
        store_->add(key_, 1);
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
  std::thread thread_;  // the last member: it uses the others
};

Heart* heart = nullptr;  // never deleted: a process may end at any moment

void stop_heart() {
  if (heart && !heart->forked()) heart->stop();
  heart = nullptr;
}

}  // namespace

void bind_liveness(pybind11::module_& m) {
  namespace py = pybind11;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("start_heart", [](const c10::intrusive_ptr<c10d::Store>& store, const std::string& key, double period) {
    stop_heart();
    heart = new Heart(store, key, period);
  }, Unlocked(), "Count under a key of a store, every so many seconds.");
  m.def("stop_heart", &stop_heart, Unlocked());
  m.def("abort_work", [](const c10::intrusive_ptr<c10d::Work>& work) { work->abort(); }, Unlocked(),
        "End the wait for a send or a receive of gloo: it returns False.");
}

}  // namespace gt
