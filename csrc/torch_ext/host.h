// The ranks of this host, as the process that drives one of them sees them: its transport, waiting, and failures.
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <string>

#include "../common/gil_free_wait.h"
#include "../transport/transport.h"

namespace gt {

gt_transport* host_transport();                      // null where this process drives all ranks

// A wait of which the watch for deadlocks is told: whom it waits for, and what for.
class WatchedWait final : public GilFreeWait {
 public:
  // The partners of all these programs, which are looked at only where the wait is long.
  WatchedWait(const std::string& what, uint64_t tag, c10::ArrayRef<gt_program> programs)
      : what_(what), tag_(tag), programs_(programs) {}
  WatchedWait(const std::string& what, uint64_t tag, c10::ArrayRef<int32_t> peers)
      : what_(what), tag_(tag), peers_(peers) {}

 protected:
  void on_enter() override;
  bool on_tick() override;
  void on_leave() override;

 private:
  void call_watching(PyObject* hook, pybind11::tuple arguments);

  const std::string& what_;
  uint64_t tag_;
  c10::ArrayRef<gt_program> programs_;
  c10::ArrayRef<int32_t> peers_;
};

// Raises what a signal handler raised during the wait, or what a failed call of the transport means: what the Python
// hook makes of the status.
void raise_if_failed(int status, const std::string& what, const GilFreeWait* wait = nullptr);

void count_waits(bool on);                           // of this process's transport, now or to come
double seconds_waited();

uint64_t hash_text(const std::string& text);         // the same number in every process

void bind_host(pybind11::module_& m);
void bind_p2p(pybind11::module_& m);

}  // namespace gt
