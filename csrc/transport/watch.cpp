// What a long wait looks at: can what it waits for still come?
//
//     every 10 ms     is the failure record written; has a rank that I wait for ended; is it at another boxing
//     every 50 ms     the tick hook
//     every 500 ms    is a process that I wait for stopped, and was it for 6 s
//     every second    do we wait for each other in a ring, the same one as a second ago
//
// A rank that ended after it had given what is waited for has done its part: a condition is looked at once more after
// its process was seen to be gone. A ring is real if none of its ranks moved between two looks: each of them says for
// whom it waits, and whether that has come can be seen in the other's lane, so nothing has to be asked.
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "state.h"

namespace gt {

int compare_unread(gt_transport& t, int rank) {
  constexpr uint64_t kUnread = 6;  // entries back that are compared: fewer than a ring holds
  Peer& p = t.peers[static_cast<size_t>(rank)];
  uint64_t k = p.seq > kUnread ? p.seq - kUnread : 1;
  for (k = k > p.checked ? k : p.checked + 1; k <= p.seq; ++k) {
    const Entry &its = p.in->ring[k % kRing], &mine = p.out->ring[k % kRing];
    if (its.seq.load(std::memory_order_acquire) != k || mine.seq.load(std::memory_order_relaxed) != k) continue;
    bool same = its.agreement.load(std::memory_order_relaxed) == mine.agreement.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (!same && its.seq.load(std::memory_order_relaxed) == k) return disagreed(t, rank, its, mine);
  }
  return GT_OK;
}

namespace {

constexpr double kEnded = 0.005, kTick = 0.05, kStops = 0.5, kStopped = 6, kRings = 1;

Control& control_of(gt_transport& t, int rank) {
  return rank == t.rank ? *t.own : *t.peers[static_cast<size_t>(rank)].control;
}

std::string how_it_ended(gt_transport& t, int rank) {
  Peer& p = t.peers[static_cast<size_t>(rank)];
  char how[512];
  if (p.control->how.get(how, sizeof(how))) return how;
  return "was killed, or crashed (process " + std::to_string(p.pid) + ")";
}

// The state that /proc shows: R, S, D, T, t, Z, ...; 0 where it cannot be told.
char process_state(pid_t pid) {
  char path[40], line[512];
  snprintf(path, sizeof(path), "/proc/%d/stat", static_cast<int>(pid));
  FILE* file = fopen(path, "re");
  if (!file) return 0;
  size_t n = fread(line, 1, sizeof(line) - 1, file);
  fclose(file);
  line[n] = 0;
  const char* name_end = strrchr(line, ')');  // the name may hold anything
  return name_end && name_end[1] ? name_end[2] : 0;
}

// Has this rank's process been stopped for so long that it counts as gone? This process may have been stopped too, so
// only time through which it looked counts.
bool stopped(gt_transport& t, int rank, double time) {
  Peer& p = t.peers[static_cast<size_t>(rank)];
  if (p.pid == getpid()) return false;
  char state = process_state(p.pid);
  bool is = state == 'T' || state == 't';
  if (!is || time - p.stopped_seen > 2 * kStops) p.stopped_since = time;
  p.stopped_seen = is ? time : 0;
  return is && time - p.stopped_since > kStopped;
}

// Whom does this rank wait for, in vain so far? -1: nobody.
int waits_for(gt_transport& t, int rank, uint64_t* turn) {
  WaitRecord& w = control_of(t, rank).waiting;
  *turn = w.turn.load(std::memory_order_acquire);
  int next = w.rank.load(std::memory_order_relaxed);
  WaitKind kind = static_cast<WaitKind>(w.kind.load(std::memory_order_relaxed));
  uint64_t value = w.value.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (!(*turn & 1) || w.turn.load(std::memory_order_relaxed) != *turn) return -1;
  const std::atomic<uint64_t>& word = control_of(t, next).lanes[rank].word(kind, value);
  return word.load(std::memory_order_acquire) < value ? next : -1;
}

// Follows who waits for whom from this rank on; where that leads back here, the ranks and their turns.
void find_ring(gt_transport& t, std::vector<uint64_t>& ring) {
  ring.clear();
  int rank = t.rank;
  for (int steps = 0; steps < t.ranks; ++steps) {
    uint64_t turn;
    int next = waits_for(t, rank, &turn);
    if (next < 0) break;
    ring.push_back(static_cast<uint64_t>(rank));
    ring.push_back(turn);
    if (next == t.rank) return;
    rank = next;
  }
  ring.clear();
}

int ring_found(gt_transport& t) {
  std::string text = "rank " + std::to_string(t.rank);
  for (size_t i = 2; i <= t.ring.size(); i += 2)
    text += std::string(i == 2 ? "" : ", which") + " waits for rank " + std::to_string(t.ring[i % t.ring.size()]);
  return fail(t, GT_DEADLOCKED, -1, "%s", text.c_str());
}

}  // namespace

bool rank_ended(gt_transport& t, int rank) {
  if (rank == t.rank) return false;
  Peer& p = t.peers[static_cast<size_t>(rank)];
  if (p.ended || !p.control) return p.ended;
  pollfd process = {p.pidfd, POLLIN, 0};
  p.ended = p.control->closed.load(std::memory_order_acquire) || poll(&process, 1, 0) > 0;
  return p.ended;
}

Watch::Watch(gt_transport& transport, const gt_hooks* h) : t(transport), hooks(h) {
  began = ticked = looked_for_stops = looked_for_ring = now();
  looked = 0;
  t.ring_before.clear();
}

int Watch::look(size_t from, size_t to) {
  if (aborted(t)) return usable(t);
  double time = now();
  if (hooks && hooks->tick && time - ticked >= kTick) {
    ticked = time;
    if (hooks->tick(hooks->context)) return fail(t, GT_INTERRUPTED, t.rank, "rank %d was interrupted", t.rank);
  }
  if (time - looked < kEnded) return GT_OK;
  looked = time;
  if (int status = look_at_ranks(from, to, time)) return status;
  if (time - looked_for_ring >= kRings) {
    looked_for_ring = time;
    find_ring(t, t.ring);
    if (!t.ring.empty() && t.ring == t.ring_before) return ring_found(t);
    t.ring_before.swap(t.ring);
  }
  if (time - began < t.timeout) return GT_OK;
  int rank = t.wanted[from].rank;
  return fail(t, GT_TIMED_OUT, rank, "rank %d waited %.0f s for rank %d", t.rank, t.timeout, rank);
}

int Watch::look_at_ranks(size_t from, size_t to, double time) {
  bool stops = time - looked_for_stops >= kStops;
  if (stops) looked_for_stops = time;
  for (size_t i = from; i < to; ++i) {
    const Wanted& w = t.wanted[i];
    if (w.met()) continue;
    if (int status = compare_unread(t, w.rank)) return status;
    if (rank_ended(t, w.rank) && !w.met()) {
      if (aborted(t)) return usable(t);  // it ended because another rank failed first
      return fail(t, GT_DIED, w.rank, "rank %d %s", w.rank, how_it_ended(t, w.rank).c_str());
    }
    if (stops && stopped(t, w.rank, time))
      return fail(t, GT_STOPPED, w.rank, "rank %d is stopped (by SIGSTOP, or a debugger): kill -CONT %d lets it go on",
                  w.rank, static_cast<int>(t.peers[static_cast<size_t>(w.rank)].pid));
  }
  return GT_OK;
}

}  // namespace gt
