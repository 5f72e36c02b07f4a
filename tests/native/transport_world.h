// Many ranks for a test, as threads of one process or as processes, and the programs they run.
//
//     int failures = run_ranks(kProcesses, 4, [](gt_transport* t, int rank) { ...; return 0; });
//
// A Step is a boxing seen from above: which rank makes which slice of whose new shard out of which slices of whose
// shards. Each rank's program and its ties follow from it.
#pragma once
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/transport/transport.h"

#define CHECK(condition, ...)                                         \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      fprintf(stderr, __VA_ARGS__);                                   \
      fprintf(stderr, "\n");                                          \
      _exit(1);                                                       \
    }                                                                 \
  } while (0)

enum Kind { kThreads, kProcesses };

inline double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

inline void doze(double s) {
  timespec t = {static_cast<time_t>(s), static_cast<long>((s - static_cast<double>(static_cast<time_t>(s))) * 1e9)};
  nanosleep(&t, nullptr);
}

// What the ranks of a test share besides the transport: a page for addresses, and some numbers.
struct Board {
  std::atomic<int> ready, connected;
  char address[64][256];
  std::atomic<int64_t> number[256];
  static Board* make() {
    void* at = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "mmap");
    return static_cast<Board*>(at);
  }
  static void drop(Board* board) { munmap(board, sizeof(Board)); }
};

inline gt_transport* meet(Board* board, int rank, int ranks, double timeout) {
  char error[256] = "";
  gt_transport* t = gt_open(rank, ranks, timeout, error, sizeof(error));
  CHECK(t, "gt_open: %s", error);
  snprintf(board->address[rank], sizeof(board->address[rank]), "%s", gt_address(t));
  board->ready.fetch_add(1);
  while (board->ready.load() % ranks) doze(1e-4);
  std::vector<const char*> addresses;
  for (int r = 0; r < ranks; ++r) addresses.push_back(board->address[r]);
  int status = gt_connect(t, addresses.data());
  char text[512];
  int culprit = gt_blame(t, text, sizeof(text));
  CHECK(status == GT_OK, "gt_connect: %d, rank %d: %s", status, culprit, text);
  board->connected.fetch_add(1);  // who ended before another one connects could not be watched
  while (board->connected.load() % ranks) doze(1e-4);
  return t;
}

using Body = std::function<int(gt_transport*, int rank, Board*)>;

// Starts the ranks as processes; each ends with what `body` returns. Negative: it is well, and closed its transport.
inline std::vector<pid_t> start_processes(int ranks, double timeout, Board* board, const Body& body) {
  std::vector<pid_t> pids;
  for (int r = 0; r < ranks; ++r) {
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid == 0) {
      gt_transport* t = meet(board, r, ranks, timeout);
      int code = body(t, r, board);
      if (code >= 0) gt_close(t);
      exit(code < 0 ? 0 : code);
    }
    pids.push_back(pid);
  }
  return pids;
}

// How many ranks returned more than 0.
inline int run_ranks(Kind kind, int ranks, const Body& body, double timeout = 60) {
  Board* board = Board::make();
  int failures = 0;
  if (kind == kThreads) {
    std::vector<std::thread> threads;
    std::atomic<int> failed{0};
    for (int r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] {
        gt_transport* t = meet(board, r, ranks, timeout);
        int code = body(t, r, board);
        failed += code > 0;
        if (code >= 0) gt_close(t);
      });
    for (std::thread& t : threads) t.join();
    failures = failed;
  } else {
    for (pid_t pid : start_processes(ranks, timeout, board, body)) {
      int status = 0;
      waitpid(pid, &status, 0);
      failures += status != 0;
    }
  }
  Board::drop(board);
  return failures;
}

// ---- boxings seen from above

struct ShardSlice {                       // of the shard of a rank
  int rank;
  int64_t start[2];
};

struct Part {                      // done by `by`: the sum of `from` into each of `to`
  int by;
  int64_t size[2];
  std::vector<ShardSlice> from, to;
};

struct Step {
  std::vector<Part> parts;
  std::vector<std::array<int64_t, 2>> source, target;  // the sizes of all ranks' shards
};

struct Program {
  std::vector<gt_region> regions;
  std::vector<gt_corner> corners;
  std::vector<int32_t> partner;
  std::vector<uint8_t> tie;
  gt_program view;

  Program(const Step& step, int rank, int ranks) {
    std::vector<uint8_t> ties(static_cast<size_t>(ranks));
    for (const Part& part : step.parts) {
      for (const ShardSlice& b : part.from) {
        if (part.by == rank) ties[static_cast<size_t>(b.rank)] |= GT_I_READ;
        if (b.rank == rank) ties[static_cast<size_t>(part.by)] |= GT_IT_READS;
      }
      for (const ShardSlice& b : part.to) {
        if (part.by == rank) ties[static_cast<size_t>(b.rank)] |= GT_I_WRITE;
        if (b.rank == rank) ties[static_cast<size_t>(part.by)] |= GT_IT_WRITES;
      }
      if (part.by == rank) add(part);
    }
    for (int r = 0; r < ranks; ++r)
      if (r != rank && ties[static_cast<size_t>(r)]) {
        partner.push_back(r);
        tie.push_back(ties[static_cast<size_t>(r)]);
      }
    view = {regions.data(), static_cast<int64_t>(regions.size()), corners.data(), GT_SUM,
            static_cast<int32_t>(partner.size()), partner.data(), tie.data()};
  }
  Program(const Program&) = delete;

 private:
  void add(const Part& part) {
    gt_region r = {};
    r.ndim = 2;
    r.sources = static_cast<int32_t>(part.from.size());
    r.targets = static_cast<int32_t>(part.to.size());
    r.parts = 1;
    r.first = static_cast<int32_t>(corners.size());
    std::copy(part.size, part.size + 2, r.size);
    regions.push_back(r);
    for (const std::vector<ShardSlice>* slices : {&part.from, &part.to})
      for (const ShardSlice& b : *slices) corners.push_back({b.rank, {b.start[0], b.start[1]}});
  }
};

// A move of n numbers of this rank.
inline gt_move ready(const Program& p, int64_t* source, int64_t* target, int64_t n) {
  gt_move m = {};
  m.program = &p.view;
  m.ndim = 2;
  m.source = source;
  m.target = target;
  m.source_size[0] = n;
  m.source_size[1] = 1;
  m.source_stride[0] = m.source_stride[1] = m.target_stride[0] = m.target_stride[1] = 1;
  m.source_dtype = m.target_dtype = GT_I64;
  return m;
}

// An all-reduce of n numbers over these ranks, kept ready.
struct Sum {
  Step step;
  std::unique_ptr<Program> program;
  int64_t* source = nullptr;
  int64_t* target = nullptr;
  gt_move move = {};
  int64_t n;

  Sum(int rank, int ranks, const std::vector<int>& group, int64_t count) : n(count) {
    step.source.resize(static_cast<size_t>(ranks));
    step.target.resize(static_cast<size_t>(ranks));
    std::vector<ShardSlice> all;
    for (int r : group) all.push_back({r, {0, 0}});
    for (int r : group) step.parts.push_back({r, {n, 1}, all, {{r, {0, 0}}}});
    make(rank, ranks);
  }
  Sum(int rank, int ranks, int from, int to, int64_t count) : n(count) {  // a send
    step.parts.push_back({to, {n, 1}, {{from, {0, 0}}}, {{to, {0, 0}}}});
    make(rank, ranks);
  }
  void make(int rank, int ranks) {
    program = std::make_unique<Program>(step, rank, ranks);
    source = static_cast<int64_t*>(gt_alloc(static_cast<size_t>(n) * 8));
    target = static_cast<int64_t*>(gt_alloc(static_cast<size_t>(n) * 8));
    for (int64_t i = 0; i < n; ++i) source[i] = rank + 1, target[i] = 0;
    move = ready(*program, source, target, n);
  }
  int run(gt_transport* t, uint64_t agreement, uint64_t site = 0, const gt_hooks* hooks = nullptr) {
    return gt_run_moves(t, &move, 1, agreement, site, hooks);
  }
};
