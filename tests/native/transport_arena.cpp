// The arena: no two blocks overlap, memory is used again, threads and forks are safe.
//
//     transport_arena CASE [SEED]
#include "../../csrc/transport/arena.h"
#include "transport_world.h"

namespace {

using Rng = std::mt19937_64;

struct Block {
  char* data;
  size_t bytes;
  char mark;
};

// Sizes as programs have them: most small, some large, many the same.
size_t draw(Rng& rng) {
  switch (rng() % 8) {
    case 0: return rng() % 64;
    case 1: case 2: return 1 + rng() % 1024;
    case 3: return 4096 * (1 + rng() % 8);
    case 4: return 1 + rng() % (1 << 15);
    case 5: return 1 + rng() % (1 << 18);
    case 6: return 300000;
    default: return 1 + rng() % (1 << 20);
  }
}

void fill(Block& b) {
  b.data[0] = b.data[b.bytes - 1] = b.mark;
  for (size_t i = 0; i < b.bytes; i += 4096) b.data[i] = b.mark;
}

void verify(const Block& b) {
  bool whole = b.data[0] == b.mark && b.data[b.bytes - 1] == b.mark;
  for (size_t i = 0; i < b.bytes; i += 4096) whole = whole && b.data[i] == b.mark;
  CHECK(whole, "a block of %zu bytes was overwritten", b.bytes);
}

// Live blocks are held to `most` bytes; what is in use or kept must stay near that.
void churn(Rng& rng, int64_t times, size_t most) {
  std::vector<Block> live;
  size_t bytes = 0;
  for (int64_t i = 0; i < times; ++i) {
    bool full = bytes > most || (!live.empty() && rng() % 1000 < 450);
    if (full) {
      std::swap(live[rng() % live.size()], live.back());
      verify(live.back());
      bytes -= live.back().bytes;
      gt_free(live.back().data);
      live.pop_back();
    } else {
      Block b = {nullptr, std::max<size_t>(1, draw(rng)), static_cast<char>(rng())};
      b.data = static_cast<char*>(gt_alloc(b.bytes));
      CHECK(b.data, "gt_alloc");
      CHECK(reinterpret_cast<uintptr_t>(b.data) % (b.bytes > 32768 ? 4096 : 64) == 0, "alignment");
      CHECK(gt_in_arena(b.data) && gt_in_arena(b.data + b.bytes - 1), "gt_in_arena");
      fill(b);
      bytes += b.bytes;
      live.push_back(b);
    }
  }
  for (Block& b : live) verify(b), gt_free(b.data);
}

void mixed(uint64_t seed) {
  Rng rng(seed);
  size_t most = 64 << 20;
  churn(rng, 1000000, most);
  gt::ArenaUse use = gt::arena_use();
  printf("%.0f MB touched for %.0f MB live\n", double(use.top) / 1e6, double(most) / 1e6);
  CHECK(use.top < most * 3 / 2, "fragmented");
  CHECK(use.used < 16 << 20, "%llu bytes are still in use", (unsigned long long)use.used);
}

void threads(uint64_t seed) {
  std::vector<std::thread> all;
  for (int i = 0; i < 4; ++i)
    all.emplace_back([=] {
      Rng rng(seed * 10 + static_cast<uint64_t>(i));
      churn(rng, 20000, 8 << 20);
    });
  for (std::thread& t : all) t.join();
}

// The same sizes again and again take the same memory.
void reuse() {
  for (size_t bytes : {1u, 64u, 1000u, 20000u, 100000u, 5000000u}) {
    void* first = gt_alloc(bytes);
    gt_free(first);
    uint64_t top = gt::arena_use().top;
    for (int i = 0; i < 1000; ++i) {
      void* again = gt_alloc(bytes);
      CHECK(again == first, "another block of %zu bytes", bytes);
      gt_free(again);
    }
    CHECK(gt::arena_use().top == top, "it grew");
  }
  gt_free(nullptr);
  CHECK(!gt_alloc(size_t{1} << 60), "too much");
  CHECK(!gt_alloc(~size_t{0}), "far too much");
  int here;
  CHECK(!gt_in_arena(&here) && !gt_in_arena(nullptr), "not in the arena");
}

int64_t resident() {
  FILE* f = fopen("/proc/self/statm", "r");
  long size = 0, pages = 0, shared = 0;
  CHECK(f && fscanf(f, "%ld %ld %ld", &size, &pages, &shared) == 3, "statm");
  fclose(f);
  return shared * 4096;
}

// Free memory is kept up to a mark, and given back beyond it.
void give_back() {
  int64_t memory = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  int64_t keep = std::max<int64_t>(int64_t{1} << 30, memory / 8);
  if (sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE) < 2 * keep) return;
  std::vector<char*> blocks;
  size_t bytes = 64 << 20;
  for (int64_t n = 0; n < keep + keep / 4; n += static_cast<int64_t>(bytes)) {
    blocks.push_back(static_cast<char*>(gt_alloc(bytes)));
    memset(blocks.back(), 1, bytes);
  }
  CHECK(resident() > keep, "it was touched");
  for (char* b : blocks) gt_free(b);
  CHECK(resident() < keep, "%lld bytes stay", (long long)resident());
  CHECK(gt::arena_use().free <= static_cast<uint64_t>(keep), "free");
  for (char*& b : blocks) b = static_cast<char*>(gt_alloc(bytes)), *b = 2;
  for (char* b : blocks) gt_free(b);
}

// A block that a failed boxing may still write to is not handed out again.
void held() {
  for (size_t bytes : {64u, 100000u}) {
    char* block = static_cast<char*>(gt_alloc(bytes));
    gt::arena_hold(block + bytes / 2);
    gt_free(block);
    for (int i = 0; i < 100; ++i) {
      char* other = static_cast<char*>(gt_alloc(bytes));
      CHECK(other != block, "it was");
    }
  }
}

// A child sees its parent's memory as it was, and neither sees what the other does from then on.
void forks(uint64_t seed) {
  pid_t unused = fork();  // before the arena exists: nothing to do
  if (!unused) {
    CHECK(gt_alloc(100), "gt_alloc in a child");
    _exit(0);
  }
  int status = 1;
  waitpid(unused, &status, 0);
  CHECK(status == 0, "child");
  Rng rng(seed);
  std::vector<Block> live;
  for (int i = 0; i < 500; ++i) {
    Block b = {nullptr, std::max<size_t>(1, draw(rng)), static_cast<char>(i)};
    b.data = static_cast<char*>(gt_alloc(b.bytes));
    fill(b);
    live.push_back(b);
    if (rng() % 3 == 0) gt_free(live.back().data), live.pop_back();
  }
  char* untouched = static_cast<char*>(gt_alloc(size_t{4} << 30));  // costs nothing, here or in the child
  int down[2], up[2];
  CHECK(!pipe(down) && !pipe(up), "pipe");
  double began = seconds();
  pid_t child = fork();
  double took = seconds() - began;
  char byte = 0;
  if (!child) {
    CHECK(read(down[0], &byte, 1) == 1, "read");  // until the parent has changed all of it
    for (Block& b : live) verify(b);
    CHECK(untouched[12345678] == 0, "untouched");
    for (Block& b : live) b.mark = 'c', fill(b);
    churn(rng, 2000, 1 << 20);
    pid_t grandchild = fork();
    if (!grandchild) {
      for (Block& b : live) verify(b);
      _exit(0);
    }
    int code = 1;
    waitpid(grandchild, &code, 0);
    CHECK(code == 0, "grandchild");
    for (Block& b : live) gt_free(b.data);
    CHECK(write(up[1], &byte, 1) == 1, "write");
    _exit(0);
  }
  for (Block& b : live) b.mark = 'p', fill(b);
  CHECK(write(down[1], &byte, 1) == 1 && read(up[0], &byte, 1) == 1, "the child failed");
  for (Block& b : live) verify(b), gt_free(b.data);
  waitpid(child, &status, 0);
  CHECK(status == 0, "child");
  printf("fork with %zu blocks: %.1f ms\n", live.size(), took * 1e3);
}

}  // namespace

int main(int count, char** arguments) {
  std::string name = count > 1 ? arguments[1] : "";
  uint64_t seed = count > 2 ? static_cast<uint64_t>(atoll(arguments[2])) : 1;
  const std::map<std::string, std::function<void()>> cases = {
      {"mixed", [=] { mixed(seed); }}, {"threads", [=] { threads(seed); }}, {"reuse", reuse},
      {"give_back", give_back},        {"held", held},                      {"forks", [=] { forks(seed); }},
  };
  CHECK(cases.count(name), "usage: transport_arena CASE [SEED]");
  cases.at(name)();
  return 0;
}
