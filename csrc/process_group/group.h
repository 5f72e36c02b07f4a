// The ranks of a process group that share this host, connected through torch's store.
//
// `Group` owns a transport and stands between it and torch: addresses go through the store, waiting gives the
// interpreter's lock away and listens to Ctrl-C, and what goes wrong is thrown as torch's DistBackendError.
#pragma once
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "transport/transport.h"

namespace gt::collective {

// What is being done, for errors: cheap to make, put into words only where it is shown.
struct CollectiveCall {
  const char* name;
  int64_t numel = -1;  // -1: not to be mentioned
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::chrono::milliseconds timeout = std::chrono::milliseconds(-1);  // where positive: for this call alone
  std::string words() const;
};

class Group {
 public:
  // Collective over the ranks of the store. Null where they cannot share memory, all of them or none, and then `why`.
  static std::unique_ptr<Group> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int ranks,
                                        std::chrono::milliseconds timeout, std::string& why);
  ~Group();

  // One call at a time, from its first line to its last. Reentrant, but not while this thread waits inside a call:
  // that is when signal handlers run.
  class CallLock {
   public:
    explicit CallLock(Group* group);  // null: nothing to wait for
    CallLock(const CallLock&) = delete;
    ~CallLock();
    bool outermost() const { return group_; }  // not one within another

   private:
    Group* group_;
  };

  // Results are there when it returns. Throws c10::DistBackendError, or what a signal handler raised.
  void run_moves(const CollectiveCall& call, const gt_move* moves, int32_t count, uint64_t agreement);
  void barrier(const CollectiveCall& call, uint64_t agreement);
  void leave(const char* how) { gt_leave(transport_, how); }

 private:
  Group(gt_transport* transport, int ranks) : transport_(transport), ranks_(ranks) {}
  [[noreturn]] void fail(const CollectiveCall& call, int status, bool timed_out);
  template <class Run>
  void waiting(const CollectiveCall& call, Run run);

  gt_transport* const transport_;
  const int ranks_;
  std::mutex lock_;
  std::atomic<std::thread::id> holder_{};  // of lock_
  bool waits_ = false;
};

}  // namespace gt::collective
