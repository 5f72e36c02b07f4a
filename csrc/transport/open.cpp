// The life of a transport: opened, connected, left, closed.
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "arena.h"
#include "handshake.h"

namespace gt {
namespace {

// Ranks per cpu that any of them may run on: do they outnumber the cpus?
bool is_crowded(gt_transport& t) {
  uint64_t cpus[16] = {};
  for (int r = 0; r < t.ranks; ++r) {
    const Control* c = r == t.rank ? t.own : t.peers[static_cast<size_t>(r)].control;
    for (int i = 0; i < 16; ++i) cpus[i] |= c->cpus[i];
  }
  int n = 0;
  for (uint64_t word : cpus) n += __builtin_popcountll(word);
  return t.ranks > n;
}

double pause_cost() {
  constexpr int kTimes = 1000;
  double best = 1;
  for (int i = 0; i < 5; ++i) {
    double began = now();
    for (int k = 0; k < kTimes; ++k) spin_pause();
    best = std::min(best, now() - began);
  }
  return std::max(1.0, best / kTimes * 1e9);
}

void note_cpus(gt_transport& t) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set))  // more cpus than fit: take it that this rank may run on any
    for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN) && i < CPU_SETSIZE; ++i) CPU_SET(static_cast<size_t>(i), &set);
  static_assert(sizeof(set) == sizeof(t.own->cpus), "1024 cpus");
  memcpy(t.own->cpus, &set, sizeof(set));
}

std::string open_own(gt_transport& t) {
  std::string error;
  t.arena_fd = arena_file(t.ranks, error);
  if (t.arena_fd < 0) return error;
  t.control_fd = segment_make("globaltensor-control", Control::bytes(t.ranks), error);
  if (t.control_fd < 0) return error;
  t.own_map = segment_map(t.control_fd, error);
  if (!t.own_map) return error;
  t.own = reinterpret_cast<Control*>(t.own_map->base);
  t.own->rank = t.rank;
  t.own->ranks = t.ranks;
  t.own->magic = kMagic;
  note_cpus(t);
  return handshake_listen(t);
}

void make_tables(gt_transport& t) {
  size_t n = static_cast<size_t>(t.ranks);
  t.peers.resize(n);
  t.sources.resize(n);
  t.targets.resize(n);
  t.wanted.resize(n);
  t.partners.resize(n);
  t.ties.resize(2 * n);
  t.waits.resize(n);
  t.ring.reserve(2 * n);
  t.ring_before.reserve(2 * n);
}

void close_fd(int& fd) {
  if (fd >= 0) close(fd);
  fd = -1;
}

// ---- transports that are closed, but whose copies a partner has yet to read

std::mutex lingering_lock;
std::vector<gt_transport*>& lingering() {
  static auto* all = new std::vector<gt_transport*>;
  return *all;
}

void destroy(gt_transport* t) {
  if (t->generation == arena_generation()) {
    staging_close(*t);
    for (Peer& p : t->peers) {
      segment_unmap(p.control_map);
      segment_unmap(p.arena_map);
    }
    segment_unmap(t->own_map);
  }
  for (Peer& p : t->peers) close_fd(p.pidfd);
  delete t;
}

// Destroys those that nobody reads from any more.
void bury() {
  std::lock_guard<std::mutex> guard(lingering_lock);
  auto& all = lingering();
  for (size_t i = 0; i < all.size();) {
    gt_transport* t = all[i];
    if (t->generation == arena_generation()) {
      for (int r = 0; r < t->ranks; ++r) rank_ended(*t, r);
      staging_reclaim(*t, true);
      if (!t->staged_copies.empty()) {
        ++i;
        continue;
      }
    }
    destroy(t);
    all[i] = all.back();
    all.pop_back();
  }
}

}  // namespace
}  // namespace gt

using namespace gt;

extern "C" {

gt_transport* gt_open(int rank, int ranks, double timeout_s, char* error, size_t error_size) {
  bury();
  gt_transport* t = nullptr;
  std::string wrong;
  try {
    if (ranks < 1 || rank < 0 || rank >= ranks || ranks > 65536) {
      wrong = "there is no such rank";
    } else {
      t = new gt_transport;
      t->rank = rank;
      t->ranks = ranks;
      t->timeout = timeout_s;
      make_tables(*t);
      wrong = open_own(*t);
      t->generation = arena_generation();
    }
  } catch (const std::bad_alloc&) {
    wrong = "out of memory";
  }
  if (wrong.empty()) return t;
  if (error_size) snprintf(error, error_size, "%s", wrong.c_str());
  if (t) gt_close(t);
  return nullptr;
}

const char* gt_address(const gt_transport* t) { return t->address.c_str(); }

int gt_connect(gt_transport* t, const char* const* addresses) {
  if (t->generation != arena_generation()) return usable(*t);
  if (t->failed != GT_OK || t->connected) return GT_ABORTED;
  try {
    if (int status = handshake_connect(*t, addresses)) return status;
    if (!staging_open(*t)) return fail(*t, GT_NO_MEMORY, t->rank, "rank %d is out of memory", t->rank);
  } catch (const std::bad_alloc&) {
    return fail(*t, GT_NO_MEMORY, t->rank, "rank %d is out of memory", t->rank);
  }
  close_fd(t->listener);
  close_fd(t->control_fd);
  t->crowded = is_crowded(*t);
  t->pause_ns = pause_cost();
  t->connected = true;
  return GT_OK;
}

void gt_leave(gt_transport* t, const char* how) {
  if (t->generation == arena_generation() && t->own) t->own->how.set(how);
}

void gt_close(gt_transport* t) {
  if (!t) return;
  close_fd(t->listener);
  close_fd(t->control_fd);
  bool mine = t->generation == arena_generation() && t->own;
  if (mine) {
    char how[4];
    if (!t->own->how.get(how, sizeof(how))) t->own->how.set("finished");
    t->own->closed.store(1, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (int r = 0; r < t->ranks; ++r)
      if (t->peers[static_cast<size_t>(r)].control) wake(*t, r);
  }
  {
    std::lock_guard<std::mutex> guard(lingering_lock);
    lingering().push_back(t);
  }
  bury();
}

}  // extern "C"
