// One rank's side of a transport, and what its files do for each other.
#pragma once
#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "control.h"
#include "segment.h"
#include "transport.h"

namespace gt {

struct Peer {
  Control* control = nullptr;
  char* arena = nullptr;
  uint64_t arena_size = 0;
  Lane* out = nullptr;           // my lane to it
  const Lane* in = nullptr;      // its lane to me
  uint64_t seq = 0;              // of the last entry posted to it
  uint64_t done_seen = 0;        // it is done with my entries up to here, as far as I have looked
  uint64_t checked = 0;          // its entries up to here were compared with mine
  uint64_t sent = 0;             // messages sent to it
  uint64_t acked = 0;            // of these it has received as many, as far as I have looked
  uint64_t received = 0;         // messages from it
  const Mapping *control_map = nullptr, *arena_map = nullptr;
  int pidfd = -1;
  pid_t pid = 0;
  bool ended = false;
  double stopped_since = 0, stopped_seen = 0;
};

// One thing to wait for: `word` must reach `value`. It belongs to a lane of `rank`.
struct Wanted {
  const std::atomic<uint64_t>* word;
  uint64_t value;
  int rank;
  WaitKind kind;

  bool met() const { return word->load(std::memory_order_acquire) >= value; }
};

// A copy of shards that partners may read after the call has returned: in a slot of the transport's, or in a block of
// the arena.
struct StagedCopy {
  void* block = nullptr;         // to be freed
  int slot = -1;
  uint64_t bytes = 0;
  std::vector<uint64_t> until;   // by rank: the entry with which it must be done; 0: it does not read here
};

constexpr int kSlots = 4;
constexpr uint64_t kSlotBytes = 64 * 1024;
constexpr uint64_t kMostStaged = uint64_t{1} << 30;  // bytes that may wait for their readers

}  // namespace gt

struct gt_transport {
  int rank = 0, ranks = 0;
  double timeout = 0;
  unsigned generation = 0;       // of the arena: another one now means that this process is a fork's child
  std::mutex mutex;              // one boxing at a time
  std::string address, name, nonce;
  int listener = -1, control_fd = -1, arena_fd = -1;
  const gt::Mapping* own_map = nullptr;
  gt::Control* own = nullptr;
  bool connected = false, crowded = false;
  double pause_ns = 10;
  long preemptions = -1;         // that the thread which waited last had had by then

  std::vector<gt::Peer> peers;   // by rank; this rank's own entry is unused
  std::vector<gt_shard> sources, targets;
  std::vector<gt::Wanted> wanted;
  std::vector<int32_t> partners; // of a call of several moves
  std::vector<uint8_t> ties;
  std::vector<uint8_t> waits;    // by rank: it waits for my `done`

  char* slot[gt::kSlots] = {};
  uint32_t slots_busy = 0;       // a bit each
  int slot_next = 0;
  uint64_t staged_bytes = 0;
  std::vector<std::unique_ptr<gt::StagedCopy>> idle_copies, staged_copies;

  std::atomic<bool> waits_counted{false};
  std::atomic<double> waited{0};  // seconds, while they are counted

  int failed = GT_OK;            // what ended this rank's use of the transport
  int culprit = -1;
  char blame[512] = "";
  std::vector<uint64_t> ring, ring_before;  // ranks that wait for each other, each with its turn, as last seen
};

namespace gt {

double now();  // seconds

// ---- waiting (wait.cpp)
inline void spin_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
// Until all are met. `busy_ns`: how long the others may be expected to work.
int wait_all(gt_transport&, size_t wanted, double busy_ns, const gt_hooks*);
// After stores to what `rank` may be waiting for, and a fence: wakes it where it sleeps.
void wake(gt_transport&, int rank);
// The beginning of every call: one at a time, and only while the transport can be used. Where another thread is in one,
// that may need what this one holds (the interpreter's lock) to end.
int begin(gt_transport&, std::unique_lock<std::mutex>&, const gt_hooks*);

// ---- watching, while a wait lasts (watch.cpp)
// Entries that this rank had no need to read, because it only sent: are they of the same boxings as mine? Looked at
// when an entry is read again, and while a wait lasts, of which they tell more than that it is endless.
int compare_unread(gt_transport&, int rank);
struct Watch {
  explicit Watch(gt_transport&, const gt_hooks*);
  int look(size_t from, size_t to);  // at the ranks of these wanted; GT_OK: go on waiting

 private:
  int look_at_ranks(size_t from, size_t to, double time);
  double began, looked, ticked, looked_for_stops, looked_for_ring;  // when
  gt_transport& t;
  const gt_hooks* hooks;
};

// ---- copies for partners to read later (staging.cpp)
StagedCopy* staging_acquire(gt_transport&, uint64_t bytes, char** data);  // null: no memory
void staging_reclaim(gt_transport&, bool look);  // `look` at what the others have posted, at the cost of a line each
int staging_wait_for_room(gt_transport&, uint64_t bytes, const gt_hooks*);  // waits while too much is staged already
bool staging_open(gt_transport&);
void staging_close(gt_transport&);

// ---- failing (failure.cpp)
// Ends this rank's use of the transport and tells all others. Returns `status`.
int fail(gt_transport&, int status, int culprit, const char* format, ...) __attribute__((format(printf, 4, 5)));
int aborted(gt_transport&);        // GT_OK, or GT_ABORTED because another rank failed
int usable(gt_transport&);         // the same, and not failed, and connected, and not a fork's child
int disagreed(gt_transport&, int rank, const Entry& its, const Entry& mine);
bool rank_ended(gt_transport&, int rank);  // or closed its side (watch.cpp)

}  // namespace gt
