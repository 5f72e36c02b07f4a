// Failing together: the first rank that cannot go on writes who is to blame into the control segment of every rank.
//
// Nothing runs on a transport after a failure: a rank that gave up may have been read from or written to at that
// moment, so nobody can tell any more who has what. Every wait looks at its own rank's record, and so does every new
// boxing; each rank that learns of the failure passes it on before it returns, so that a rank whose data was in
// use when its owner gave up knows of it before the owner can change that data.
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "arena.h"
#include "state.h"

namespace gt {

static void ring_bell(gt_transport& t, int rank) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake(t, rank);
}

static void abort_others(gt_transport& t) {
  for (int r = 0; r < t.ranks; ++r) {
    Control* its = r == t.rank ? t.own : t.peers[static_cast<size_t>(r)].control;
    if (!its) continue;
    uint32_t none = 0;
    if (!its->abort.state.compare_exchange_strong(none, 1)) continue;
    const bool theirs = t.failed == GT_DISAGREED || t.failed == GT_DEADLOCKED || t.failed == GT_STOPPED;
    its->abort.status.store(theirs ? t.failed : GT_ABORTED, std::memory_order_relaxed);
    its->abort.culprit.store(t.culprit, std::memory_order_relaxed);
    its->abort.text.set(t.blame);
    its->abort.state.store(2, std::memory_order_release);
    if (r != t.rank) ring_bell(t, r);
  }
}

int fail(gt_transport& t, int status, int culprit, const char* format, ...) {
  if (t.failed != GT_OK) return status;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(t.blame, sizeof(t.blame), format, arguments);
  va_end(arguments);
  t.failed = status;
  t.culprit = culprit;
  if (t.own) abort_others(t);
  return status;
}

int aborted(gt_transport& t) {
  return __builtin_expect(t.own->abort.state.load(std::memory_order_acquire) == 0, 1) ? GT_OK : GT_ABORTED;
}

// Learns from this rank's record what happened.
static int learn(gt_transport& t) {
  Abort& record = t.own->abort;
  for (int i = 0; i < 100 && record.state.load(std::memory_order_acquire) != 2; ++i) {
    timespec moment = {0, 10 * 1000};
    nanosleep(&moment, nullptr);
  }
  char text[sizeof(t.blame)];
  record.text.get(text, sizeof(text));
  const int status = record.status.load(std::memory_order_relaxed);
  return fail(t, status == GT_OK ? GT_ABORTED : status, record.culprit.load(std::memory_order_relaxed), "%s", text);
}

int usable(gt_transport& t) {
  if (__builtin_expect(t.generation != arena_generation(), 0)) {
    t.own = nullptr;  // its memory is the parent's, and not mapped here
    for (Peer& p : t.peers) p.control = nullptr;
    return fail(t, GT_FAILED, -1, "this process was forked from the one that opened the transport: open another here");
  }
  if (t.failed != GT_OK) return GT_ABORTED;
  if (!t.connected) return fail(t, GT_FAILED, -1, "the transport is not connected");
  return aborted(t) == GT_OK ? GT_OK : learn(t);
}

int disagreed(gt_transport& t, int rank, const Entry& its, const Entry& mine) {
  const char* how = its.agreement != mine.agreement ? "is at another boxing than"
                    : its.moves != mine.moves       ? "boxes another number of tensors than"
                                                    : "comes from another place in the program than";
  return fail(t, GT_DISAGREED, rank, "rank %d %s rank %d", rank, how, t.rank);
}

}  // namespace gt

using namespace gt;

extern "C" {

int gt_blame(const gt_transport* transport, char* text, size_t size) {
  if (size) snprintf(text, size, "%s", transport->blame);
  return transport->culprit;
}

void gt_report(gt_transport* t, const char* text) {
  if (t->generation == arena_generation() && t->own) t->own->report.set(text);
}

void gt_collect_reports(gt_transport* t, double seconds, char* texts, size_t each) {
  double until = now() + seconds;
  for (int r = 0; r < t->ranks; ++r) {
    char* text = texts + static_cast<size_t>(r) * each;
    if (each) *text = 0;
    if (t->generation != arena_generation()) continue;
    Control* its = r == t->rank ? t->own : t->peers[static_cast<size_t>(r)].control;
    while (its && !its->report.get(text, each) && !rank_ended(*t, r) && now() < until) {
      timespec moment = {0, 500 * 1000};
      nanosleep(&moment, nullptr);
    }
    if (its) its->report.get(text, each);  // it may have reported just before it ended
  }
}

}  // extern "C"
