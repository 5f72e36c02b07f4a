// WaitRecord for others: spin, then yield, then sleep; and waking them.
//
// Where every rank has a cpu, what is waited for is a fraction of a microsecond away, and a sleep costs 15: so spin for
// long. Where ranks outnumber cpus, the one waited for may need this very cpu: so yield soon. Only a wait that outlasts
// both sleeps, on this rank's own bell, and looks every 10 ms whether the others are alive. It sleeps at once where
// another program has taken this cpu since the last wait: that program needs what a rank that lingers would burn.
//
// No wake is lost: a sleeper says so, then looks again; a poster stores, then looks for sleepers, with a full fence
// between on either side, so that at least one of them sees the other.
#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "arena.h"
#include "state.h"

namespace gt {
namespace {

constexpr double kSpin = 50e3;                 // ns
constexpr double kSpinLongest = 5e6;
constexpr int kPausesCrowded = 50, kYields = 200;
constexpr double kYieldLongest = 1e-3;         // seconds: a yield may cost a whole time slice of another program
constexpr double kLinger = 20e-3;              // seconds: a cpu that sleeps starts cold
constexpr long kSleep = 10 * 1000 * 1000;      // ns

bool spin(const Wanted& w, int pauses) {
  for (int i = 0; i < pauses; ++i) {
    if (w.met()) return true;
    spin_pause();
  }
  return w.met();
}

// How often this thread has had to leave its cpu to another one.
long preemptions() {
  rusage own;
  getrusage(RUSAGE_THREAD, &own);
  return own.ru_nivcsw;
}

// Where this rank should have a cpu of its own, it ends as soon as another thread has run there.
bool yield(const Wanted& w, gt_transport& t, int times, double seconds) {
  double until = now() + seconds;
  for (int i = 0; i < times; ++i) {
    sched_yield();
    if (w.met()) return true;
    if (aborted(t) || now() > until) break;
    if (!t.crowded && preemptions() != t.preemptions) break;
  }
  return false;
}

// What this rank waits for, for others to follow when they look for a ring.
class Published {
 public:
  explicit Published(WaitRecord& w) : waiting_(w) {}
  ~Published() { end(); }
  void begin(const Wanted& w) {
    if (shown_ == &w) return;
    end();
    waiting_.rank.store(w.rank, std::memory_order_relaxed);
    waiting_.kind.store(w.kind, std::memory_order_relaxed);
    waiting_.value.store(w.value, std::memory_order_relaxed);
    waiting_.turn.fetch_add(1, std::memory_order_release);
    shown_ = &w;
  }

 private:
  void end() {
    if (shown_) waiting_.turn.fetch_add(1, std::memory_order_release);
    shown_ = nullptr;
  }
  WaitRecord& waiting_;
  const Wanted* shown_ = nullptr;
};

void sleep_until_rung(gt_transport& t, const Wanted& w) {
  Control& own = *t.own;
  uint32_t bell = own.bell.load(std::memory_order_acquire);
  own.sleeping.store(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!w.met() && !aborted(t)) {
    timespec limit = {0, kSleep};
    syscall(SYS_futex, &own.bell, FUTEX_WAIT, bell, &limit, nullptr, 0);
  }
  own.sleeping.store(0, std::memory_order_relaxed);
}

// The rest of a wait that the spinning did not see the end of.
int outlast(gt_transport& t, size_t from, size_t to, int pauses, const gt_hooks* hooks) {
  const long before = t.preemptions;
  t.preemptions = preemptions();
  const bool alone = !t.crowded && t.preemptions == before;
  if (yield(t.wanted[from], t, kYields, kYieldLongest)) ++from;
  if (from == to) return GT_OK;
  Published published(t.own->waiting);
  Watch watch(t, hooks);
  bool entered = hooks && hooks->enter;
  if (entered) hooks->enter(hooks->context);
  int status = GT_OK;
  while (from < to && status == GT_OK) {
    const Wanted& w = t.wanted[from];
    if (spin(w, pauses)) {
      ++from;
      continue;
    }
    published.begin(w);
    if (alone) yield(w, t, INT_MAX, kLinger);
    while (!w.met() && status == GT_OK) {
      sleep_until_rung(t, w);
      if (!w.met()) status = watch.look(from, to);
    }
  }
  if (entered && hooks->leave) hooks->leave(hooks->context);
  t.preemptions = preemptions();
  return status;
}

}  // namespace

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

int wait_all(gt_transport& t, size_t count, double busy_ns, const gt_hooks* hooks) {
  int pauses = kPausesCrowded;
  if (!t.crowded) pauses = static_cast<int>(std::min(busy_ns + kSpin, kSpinLongest) / t.pause_ns);
  const bool counted = t.waits_counted.load(std::memory_order_relaxed);
  const double began = counted ? now() : 0;
  int status = GT_OK;
  for (size_t i = 0; i < count; ++i) {
    if (spin(t.wanted[i], pauses)) continue;
    status = outlast(t, i, count, pauses, hooks);
    break;
  }
  if (counted) t.waited.store(t.waited.load(std::memory_order_relaxed) + now() - began, std::memory_order_relaxed);
  return status;
}

int begin(gt_transport& t, std::unique_lock<std::mutex>& lock, const gt_hooks* hooks) {
  // A child of fork must not even lock: another thread of the parent may have been in here.
  if (t.generation != arena_generation()) return usable(t);
  lock = std::unique_lock<std::mutex>(t.mutex, std::try_to_lock);
  if (!lock.owns_lock()) {
    if (hooks && hooks->enter) hooks->enter(hooks->context);
    lock.lock();
    if (hooks && hooks->leave) hooks->leave(hooks->context);
  }
  return usable(t);
}

void wake(gt_transport& t, int rank) {
  Control& its = *t.peers[static_cast<size_t>(rank)].control;
  if (__builtin_expect(!its.sleeping.load(std::memory_order_relaxed), 1)) return;
  its.bell.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &its.bell, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace gt

void gt_count_waits(gt_transport* t, int on) { t->waits_counted.store(on != 0, std::memory_order_relaxed); }

double gt_waited(const gt_transport* t) { return t->waited.load(std::memory_order_relaxed); }
