// What ranks see of each other: one control segment per rank, which the others map and, failures apart, only read.
//
// Every ordered pair of ranks has a lane in the first one's segment: a ring of entries, and how many of the other's
// entries it has finished with. There are no groups: a boxing is one entry to, and one from, each partner, and both
// sides count them alike. The n-th entry from a to b is in slot n % kRing of lane a -> b; it is complete once its `seq`
// is n.
//
//     rank a                                     rank b
//     fill entry 7 of lane a->b, seq = 7         fill entry 7 of lane b->a, seq = 7
//     wait for entry 7 of lane b->a, read        wait for entry 7 of lane a->b, read
//     what it points to; done (a->b) = 7         what it points to; done (b->a) = 7
//     wait for done (b->a) where it must         ...
//
// A lane also carries messages, one way, received in the order in which they were sent:
//
//     rank a                                     rank b
//     fill message 3 of lane a->b, seq = 3       wait for message 3 of lane a->b, copy what it
//     go on, while b is less than kMessages      points to; acked (b->a) = 3
//     behind
//
// An entry may be overwritten once the other is done with it, a message once it is acked. Each line is written by one
// rank only. `seq` and `done` are released by a plain store; what a rank sleeps on is its own `bell`, which others ring
// if they see it `sleeping`.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <atomic>

#include "../kernels/region.h"

namespace gt {

constexpr uint64_t kMagic = 0x6774'7472'616e'0002;  // the last digits count the changes to what is below
constexpr uint64_t kRing = 16;
constexpr uint64_t kInlineBytes = 64;               // a shard of up to so many travels in the entry itself
constexpr uint64_t kMessages = 512;                 // of these, only slots that were ever used take memory
constexpr int kRuns = 14;                           // pieces of memory in a message

// Where a shard and its successor are: distances from the beginning of the owner's arena, strides in elements.
struct Place {
  uint64_t source, target;
  int64_t source_stride[GT_DIMS], target_stride[GT_DIMS];
};

enum EntryFlag : uint8_t {
  kIWait = 1,   // for your `done`, before this boxing ends here
  kInline = 2,  // the source is in `inline_data`
  kPacked = 4,  // the source's strides are in `packed`: small shards then take one line of 64 bytes, beside their data
  kOnlyYou = 8, // I wait for nobody else before I read
};

// What can be waited for in a lane.
enum WaitKind : int32_t { kEntry, kDone, kMessage, kAcked };

struct alignas(64) Entry {
  std::atomic<uint64_t> seq;
  std::atomic<uint64_t> agreement;  // watch.cpp may look at an old entry while a new one overwrites it
  uint64_t site;
  uint64_t done;             // a copy of the lane's, for those that are reading here anyway
  uint64_t source;           // of the only move; of several, where their Places are
  uint16_t packed[GT_DIMS];
  int32_t moves;
  uint8_t flags;
  union {
    int64_t source_stride[GT_DIMS];
    char inline_data[kInlineBytes];
  };
  int64_t target_stride[GT_DIMS];
  uint64_t target;
};
static_assert(offsetof(Entry, source_stride) == 64 && sizeof(Entry) == 256, "a small shard takes the first line only");

struct alignas(64) Message {
  std::atomic<uint64_t> seq;
  uint64_t tag;
  int32_t runs;
  struct {
    uint64_t source, bytes;  // a distance from the beginning of the owner's arena
  } run[kRuns];
};

struct alignas(128) Lane {
  std::atomic<uint64_t> done;
  alignas(128) std::atomic<uint64_t> acked;
  alignas(128) Entry ring[kRing];
  alignas(128) Message messages[kMessages];

  const std::atomic<uint64_t>& word(WaitKind kind, uint64_t value) const {
    switch (kind) {
      case kDone: return done;
      case kAcked: return acked;
      case kMessage: return messages[value % kMessages].seq;
      default: return ring[value % kRing].seq;
    }
  }
};

// A sentence that one side writes and the other may read at any time: torn at worst, never a data race.
template <int N>
struct Note {
  std::atomic<uint32_t> written;
  std::atomic<char> text[N];

  void set(const char* from) {
    int i = 0;
    for (; i < N - 1 && from[i]; ++i) text[i].store(from[i], std::memory_order_relaxed);
    text[i].store(0, std::memory_order_relaxed);
    written.store(1, std::memory_order_release);
  }
  bool get(char* to, size_t size) const {
    if (size) *to = 0;
    if (!written.load(std::memory_order_acquire)) return false;
    size_t i = 0;
    for (; i + 1 < size && i + 1 < size_t{N}; ++i)
      if (!(to[i] = text[i].load(std::memory_order_relaxed))) break;
    if (size) to[i] = 0;
    return true;
  }
};

// The first failure that a rank had or was told of; any rank may write it, once.
struct Abort {
  std::atomic<uint32_t> state;  // 0: none, 1: being written, 2: written
  std::atomic<int32_t> status;  // what this rank returns
  std::atomic<int32_t> culprit;
  Note<512> text;
};

// What a rank that sleeps waits for: this word of lane rank -> it must reach `value`.
struct WaitRecord {
  std::atomic<uint64_t> turn;   // odd while it waits
  std::atomic<int32_t> rank;
  std::atomic<int32_t> kind;    // WaitKind
  std::atomic<uint64_t> value;
};

struct Control {
  uint64_t magic;
  int32_t rank, ranks;
  uint64_t cpus[16];                                // the affinity mask
  alignas(128) std::atomic<uint32_t> sleeping;
  alignas(128) std::atomic<uint32_t> bell;          // a futex
  alignas(128) WaitRecord waiting;
  alignas(128) Abort abort;
  alignas(128) std::atomic<uint32_t> closed;
  Note<512> how;                                    // this rank ends, or has ended
  alignas(128) Note<1024> report;
  alignas(128) Lane lanes[1];                       // one per rank

  static uint64_t bytes(int ranks) { return sizeof(Control) + sizeof(Lane) * static_cast<uint64_t>(ranks); }
};

}  // namespace gt
