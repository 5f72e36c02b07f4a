// Memory of one process that others map: a sealed memfd, which has no name and dies with those that hold it.
//
// A process that meets the same file twice (ranks that are threads) gets the same mapping, by inode: two threads then
// see the same addresses, which is what a race detector needs to follow them.
#pragma once
#include <stdint.h>

#include <string>

namespace gt {

struct Mapping {
  char* base;
  uint64_t size;
};

// A sparse file of that size, which nobody can shrink under those that map it. -1 and `error` where it fails.
int segment_make(const char* label, uint64_t size, std::string& error);

// Maps such a file, whole; null and `error` where it fails or where its size could still be changed.
const Mapping* segment_map(int fd, std::string& error);
void segment_unmap(const Mapping*);

// Says that this process has the file mapped at `base` already, for good.
bool segment_known(int fd, char* base, uint64_t size);

// In a fork's child: nothing is mapped any more.
void segment_forget();
void segment_lock();  // around a fork
void segment_unlock();

}  // namespace gt
