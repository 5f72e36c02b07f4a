// The arena: one large sparse shared file per process. What gt_alloc hands out is in it, for peers to read and write.
#pragma once
#include <stdint.h>

#include <string>

namespace gt {

// The arena's file, which is made at first use; -1 and `error` where that fails. `ranks`: of this host, which map it.
int arena_file(int ranks, std::string& error);

// Where the arena begins: a pointer into it is sent to a peer as its distance from here. Null before first use.
char* arena_base();

// How often this process was forked since it first used the arena: what an earlier process opened is not this one's.
unsigned arena_generation();

// The block that begins at or contains `data` is never handed out again: a peer that this rank gave up on may still
// write there.
void arena_hold(const void* data);

struct ArenaUse {
  uint64_t used, free, top;  // bytes: in runs that are in use, freed but kept in memory, ever used
};
ArenaUse arena_use();

}  // namespace gt
