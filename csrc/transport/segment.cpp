// Making and mapping sealed memfds, each at most once per process. segment.h explains.
#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <list>
#include <mutex>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace gt {
namespace {

struct KnownMapping : Mapping {
  dev_t device;
  ino_t inode;
  int users;
  bool forever;
};

struct MappingTable {
  std::mutex lock;
  std::list<KnownMapping> known;
};

MappingTable& table() {
  static MappingTable* t = new MappingTable;  // never destroyed: other threads may still be mapping as the process ends
  return *t;
}

std::string failed(const char* what) { return std::string(what) + ": " + strerror(errno); }

}  // namespace

int segment_make(const char* label, uint64_t size, std::string& error) {
  int fd = memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING);  // Linux before 6.3
  if (fd < 0) {
    error = failed("memfd_create");
    return -1;
  }
  if (ftruncate(fd, static_cast<off_t>(size)) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) {
    error = failed("memfd");
    close(fd);
    return -1;
  }
  return fd;
}

const Mapping* segment_map(int fd, std::string& error) {
  struct stat s;
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &s)) {
    error = "a file that could shrink was offered as shared memory";
    return nullptr;
  }
  std::lock_guard<std::mutex> guard(table().lock);
  for (KnownMapping& k : table().known)
    if (k.device == s.st_dev && k.inode == s.st_ino) {
      ++k.users;
      return &k;
    }
  uint64_t size = static_cast<uint64_t>(s.st_size);
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    error = failed("mmap of shared memory");
    return nullptr;
  }
  madvise(base, size, MADV_DONTFORK);  // a child is nobody's peer
  KnownMapping k;
  k.base = static_cast<char*>(base);
  k.size = size;
  k.device = s.st_dev;
  k.inode = s.st_ino;
  k.users = 1;
  k.forever = false;
  table().known.push_front(k);
  return &table().known.front();
}

void segment_unmap(const Mapping* mapping) {
  if (!mapping) return;
  std::lock_guard<std::mutex> guard(table().lock);
  for (auto k = table().known.begin(); k != table().known.end(); ++k) {
    if (&*k != mapping) continue;
    if (--k->users == 0 && !k->forever) {
      munmap(k->base, k->size);
      table().known.erase(k);
    }
    return;
  }
}

bool segment_known(int fd, char* base, uint64_t size) {
  struct stat s;
  if (fstat(fd, &s)) return false;
  std::lock_guard<std::mutex> guard(table().lock);
  KnownMapping k;
  k.base = base;
  k.size = size;
  k.device = s.st_dev;
  k.inode = s.st_ino;
  k.users = 1;
  k.forever = true;
  table().known.push_front(k);
  return true;
}

void segment_forget() { table().known.clear(); }
void segment_lock() { table().lock.lock(); }
void segment_unlock() { table().lock.unlock(); }

}  // namespace gt
