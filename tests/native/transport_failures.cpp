// What happens when something goes wrong: every rank is told the same culprit, in time, and nobody hangs.
//
//     transport_failures CASE [SEED ROUNDS]
//
// Ranks are processes, and note how their boxing ended on the board: status, culprit, seconds since the mishap. Only
// what this test started is ever killed, by its pid.
#include "transport_world.h"

namespace {

constexpr int kRunning = 1000;  // no status yet
struct Report {              // of a rank, in memory shared with the parent
  std::atomic<int> status, culprit;
  std::atomic<double> when;
  char text[512];
};

struct Reports {
  Report of[16];
  std::atomic<int> calls;
  static Reports* make() {
    void* at = mmap(nullptr, sizeof(Reports), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "mmap");
    auto* r = static_cast<Reports*>(at);
    for (Report& one : r->of) one.status = kRunning;
    return r;
  }
};

void report(Reports* all, gt_transport* t, int rank, int status) {
  Report& r = all->of[rank];
  r.culprit = gt_blame(t, r.text, sizeof(r.text));
  r.when = seconds();
  r.status = status;
}

std::vector<int> everyone(int ranks) {
  std::vector<int> all;
  for (int r = 0; r < ranks; ++r) all.push_back(r);
  return all;
}

using Case = std::function<int(gt_transport*, int rank, Reports*)>;  // the status with which this rank's boxings ended

int rank_body(gt_transport* t, int rank, Reports* reports, const Case& body) {
  int status = body(t, rank, reports);
  report(reports, t, rank, status);
  if (status != GT_OK) {
    double began = seconds();
    int again = gt_barrier(t, 1, nullptr);
    CHECK(again == GT_ABORTED, "rank %d: after a failure: %d", rank, again);
    CHECK(seconds() - began < 0.1, "rank %d: slow after a failure", rank);
  }
  return 0;
}

struct Run {
  Reports* reports = Reports::make();
  Board* board = Board::make();
  std::vector<pid_t> pids;
  int ranks;

  Run(int n, double timeout, const Case& body) : ranks(n) {
    Reports* r = reports;
    pids = start_processes(n, timeout, board,
                           [r, body](gt_transport* t, int rank, Board*) { return rank_body(t, rank, r, body); });
  }
  ~Run() {
    munmap(reports, sizeof(Reports));
    Board::drop(board);
  }
  // Waits for all ranks but `lost`, at most so long.
  void join(double limit, int lost = -1) {
    double until = seconds() + limit;
    for (int r = 0; r < ranks; ++r) {
      if (r == lost) continue;
      int status = 0;
      pid_t done = 0;
      while (!(done = waitpid(pids[size_t(r)], &status, WNOHANG)) && seconds() < until) doze(1e-3);
      if (!done) {
        for (int k = r; k < ranks; ++k) kill(pids[size_t(k)], SIGKILL);
        CHECK(done, "rank %d hangs", r);
      }
      CHECK(status == 0, "rank %d ended with %d", r, status);
    }
  }
  void expect(int rank, std::vector<int> statuses, int culprit, const char* text) {
    Report& r = reports->of[rank];
    int status = r.status;
    CHECK(std::count(statuses.begin(), statuses.end(), status), "rank %d: status %d: %s", rank, status, r.text);
    CHECK(culprit == -2 || r.culprit == culprit, "rank %d blames %d: %s", rank, r.culprit.load(), r.text);
    CHECK(strstr(r.text, text), "rank %d says: %s", rank, r.text);
  }
};

int sums_until_failure(gt_transport* t, int rank, int ranks, Reports* reports, uint64_t seed) {
  std::mt19937_64 rng(seed);
  Sum small(rank, ranks, everyone(ranks), 16), middle(rank, ranks, everyone(ranks), 5000);
  Sum large(rank, ranks, everyone(ranks), 20000);
  Sum chain(rank, ranks, 0, ranks - 1, 30);
  CHECK(gt_barrier(t, 1, nullptr) == GT_OK, "all are connected");
  for (uint64_t call = 1;; ++call) {
    Sum* all[] = {&small, &small, &middle, &large, &chain};
    Sum& sum = *all[rng() % 5];
    if (int status = sum.run(t, call)) return status;
    bool chained = &sum == &chain;
    int64_t expected = chained ? 1 : ranks * (ranks + 1) / 2;
    for (int64_t i = 0; i < sum.n && (!chained || rank == ranks - 1); ++i)
      CHECK(sum.target[i] == expected, "rank %d: %lld", rank, (long long)sum.target[i]);
    if (rank == 0) reports->calls.fetch_add(1);
  }
}

// One of four is killed, or stopped, at a random moment.
void lose_one(int how, uint64_t seed, int rounds) {
  for (int round = 0; round < rounds; ++round, ++seed) {
    std::mt19937_64 rng(seed);
    int ranks = 4, victim = static_cast<int>(rng() % 4);
    double before = 1e-6 * static_cast<double>(rng() % 150000);
    printf("seed %llu: rank %d after %.3f s\n", (unsigned long long)seed, victim, before);
    fflush(stdout);
    Run run(ranks, 60, [&](gt_transport* t, int rank, Reports* r) {
      return sums_until_failure(t, rank, ranks, r, seed);
    });
    while (!run.reports->calls) doze(1e-3);
    doze(before);
    double when = seconds();
    kill(run.pids[size_t(victim)], how);
    run.join(15, victim);
    for (int r = 0; r < ranks; ++r) {
      if (r == victim) continue;
      run.expect(r, {how == SIGKILL ? GT_DIED : GT_STOPPED, GT_ABORTED}, victim, how == SIGKILL ? "killed" : "stopped");
      double took = run.reports->of[r].when - when;
      CHECK(took < (how == SIGKILL ? 1.0 : 10.0), "rank %d took %.2f s", r, took);
    }
    kill(run.pids[size_t(victim)], SIGKILL);
    waitpid(run.pids[size_t(victim)], nullptr, 0);
  }
}

// Two ranks in a boxing of other numbers, from another place, or of other tensors; a third waits for them.
void disagreement(const char* what) {
  bool site = !strcmp(what, "site"), order = !strcmp(what, "order");
  Run run(3, 60, [&](gt_transport* t, int rank, Reports*) {
    Sum all(rank, 3, everyone(3), 10), two(rank, 3, {0, 1}, 10);
    if (int status = all.run(t, 1, 5)) return status;
    if (site) return all.run(t, 2, rank == 1 ? 7 : 6);
    if (!order) return all.run(t, rank == 1 ? 2 : 3);
    if (rank == 2) return all.run(t, 3);
    if (int status = rank ? two.run(t, 2) : all.run(t, 3)) return status;
    return rank ? all.run(t, 3) : two.run(t, 2);
  });
  run.join(5);
  for (int r = 0; r < 3; ++r) run.expect(r, {GT_DISAGREED}, -2, site ? "another place" : "another boxing");
}

// Both only send, and neither looked at what the other was doing: found out at the next wait.
void crossed() {
  Run run(2, 60, [](gt_transport* t, int rank, Reports*) {
    Sum there(rank, 2, 0, 1, 10), back(rank, 2, 1, 0, 10);
    if (int status = rank ? back.run(t, 8) : there.run(t, 7)) return status;
    return rank ? there.run(t, 7) : back.run(t, 8);
  });
  run.join(5);
  for (int r = 0; r < 2; ++r) run.expect(r, {GT_DISAGREED}, -2, "another boxing");
}

void missing(bool raises) {
  Run run(3, 60, [&](gt_transport* t, int rank, Reports*) {
    Sum all(rank, 3, everyone(3), 10);
    if (int status = all.run(t, 1)) return status;
    if (rank == 1 && raises) {
      gt_leave(t, "raised ValueError");
      _exit(0);
    }
    return rank == 1 ? static_cast<int>(GT_OK) : all.run(t, 2);
  });
  run.join(5);
  for (int r : {0, 2}) run.expect(r, {GT_DIED, GT_ABORTED}, 1, raises ? "raised ValueError" : "finished");
}

// A rank that has sent all and ended is not missed.
void early() {
  Run run(2, 60, [](gt_transport* t, int rank, Reports*) {
    Sum small(rank, 2, 0, 1, 50), large(rank, 2, 0, 1, 100000);
    if (rank) doze(0.5);
    for (Sum* sum : {&small, &large, &small})
      if (int status = sum->run(t, 1)) return status;
    if (rank) CHECK(small.target[49] == 1 && large.target[99999] == 1, "values");
    return static_cast<int>(GT_OK);
  });
  run.join(5);
  for (int r = 0; r < 2; ++r) CHECK(run.reports->of[r].status == GT_OK, "rank %d: %s", r, run.reports->of[r].text);
}

// Rank r waits for what rank r - 1 sends only later.
void ring() {
  Run run(4, 60, [](gt_transport* t, int rank, Reports*) {
    int before = (rank + 2) % 3, after = (rank + 1) % 3;
    if (rank == 3) return Sum(rank, 4, 0, 3, 10).run(t, 99);  // waits for one of the ring
    if (int status = Sum(rank, 4, before, rank, 10).run(t, static_cast<uint64_t>(rank) + 1)) return status;
    return Sum(rank, 4, rank, after, 10).run(t, static_cast<uint64_t>(after) + 1);
  });
  double began = seconds();
  run.join(8);
  CHECK(seconds() - began < 5, "took long");
  for (int r = 0; r < 4; ++r) run.expect(r, {GT_DEADLOCKED}, -1, "which waits for rank");
}

void late() {
  Run run(2, 1.0, [](gt_transport* t, int rank, Reports*) {
    if (rank) doze(2.5);
    return Sum(rank, 2, everyone(2), 10).run(t, 1);
  });
  run.join(8);
  run.expect(0, {GT_TIMED_OUT}, 1, "waited 1 s for rank 1");
  run.expect(1, {GT_ABORTED}, 1, "waited 1 s for rank 1");
}

void interrupted() {
  struct Count {
    int enter = 0, tick = 0, leave = 0;
  };
  Run run(2, 60, [](gt_transport* t, int rank, Reports*) {
    Count count;
    gt_hooks hooks = {[](void* c) { static_cast<Count*>(c)->enter++; },
                      [](void* c) { return int(++static_cast<Count*>(c)->tick == 5); },
                      [](void* c) { static_cast<Count*>(c)->leave++; }, &count};
    if (rank) doze(1);
    int status = Sum(rank, 2, everyone(2), 10).run(t, 1, 0, &hooks);
    bool right = count.enter == 1 && count.tick == 5 && count.leave == 1;
    CHECK(rank || right, "%d %d %d", count.enter, count.tick, count.leave);
    return status;
  });
  run.join(5);
  run.expect(0, {GT_INTERRUPTED}, 0, "interrupted");
  run.expect(1, {GT_ABORTED}, 0, "interrupted");
}

void reports() {
  Run run(3, 60, [](gt_transport* t, int rank, Reports*) {
    int status = Sum(rank, 3, everyone(3), 10).run(t, rank ? 2 : 1);
    if (rank != 2) gt_report(t, rank ? "one" : "zero");
    char texts[3][64];
    double began = seconds();
    gt_collect_reports(t, 0.3, texts[0], 64);
    bool right = !strcmp(texts[0], "zero") && !strcmp(texts[1], "one") && !*texts[2];
    CHECK(right, "%s %s %s", texts[0], texts[1], texts[2]);
    CHECK(seconds() - began < 1, "slow");
    return status;
  });
  run.join(5);
}

// fork's child has its own memory, a dead transport, and may open another.
void forked() {
  Run run(2, 60, [](gt_transport* t, int rank, Reports*) {
    Sum sum(rank, 2, everyone(2), 10);
    if (int status = sum.run(t, 1)) return status;
    pid_t child = fork();
    if (!child) {
      alarm(20);
      CHECK(sum.target[3] == 3, "the child's copy");
      sum.target[3] = 77;
      int status = sum.run(t, 2);
      CHECK(status == GT_FAILED, "status %d", status);
      CHECK(sum.run(t, 2) == GT_FAILED || sum.run(t, 2) == GT_ABORTED, "again");
      gt_close(t);
      char error[200];
      gt_transport* alone = gt_open(0, 1, 5, error, sizeof(error));
      CHECK(alone, "%s", error);
      const char* address = gt_address(alone);
      CHECK(gt_connect(alone, &address) == GT_OK && gt_barrier(alone, 1, nullptr) == GT_OK, "alone");
      gt_close(alone);
      _exit(0);
    }
    int code = 1;
    waitpid(child, &code, 0);
    CHECK(code == 0, "the child failed");
    CHECK(sum.target[3] == 3, "the child changed its parent's memory");
    return sum.run(t, 2);
  });
  run.join(20);
  for (int r = 0; r < 2; ++r) CHECK(run.reports->of[r].status == GT_OK, "rank %d: %s", r, run.reports->of[r].text);
}

// Sends run ahead of their receiver only as far as a ring holds, and none is lost or overwritten.
void ahead() {
  Run run(2, 60, [](gt_transport* t, int rank, Reports*) {
    Sum small(rank, 2, 0, 1, 40), large(rank, 2, 0, 1, 30000);
    if (rank) doze(0.2);
    double began = seconds();
    for (int64_t i = 0; i < 200; ++i) {
      Sum& sum = i % 5 ? small : large;
      for (int64_t k = 0; k < sum.n; ++k) sum.source[k] = i;
      if (int status = sum.run(t, static_cast<uint64_t>(i))) return status;
      if (rank) CHECK(sum.target[0] == i && sum.target[sum.n - 1] == i, "call %lld", (long long)i);
      if (!rank && i == 15) CHECK(seconds() - began < 0.15, "a send waited");
    }
    return static_cast<int>(GT_OK);
  });
  run.join(20);
  for (int r = 0; r < 2; ++r) CHECK(run.reports->of[r].status == GT_OK, "rank %d: %s", r, run.reports->of[r].text);
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count > 1, "usage: transport_failures CASE [SEED ROUNDS]");
  std::string name = arguments[1];
  uint64_t seed = count > 2 ? static_cast<uint64_t>(atoll(arguments[2])) : 1;
  int rounds = count > 3 ? atoi(arguments[3]) : 1;
  const std::map<std::string, std::function<void()>> cases = {
      {"kill", [=] { lose_one(SIGKILL, seed, rounds); }},
      {"stop", [=] { lose_one(SIGSTOP, seed, rounds); }},
      {"agreement", [] { disagreement("agreement"); }},
      {"site", [] { disagreement("site"); }},
      {"order", [] { disagreement("order"); }},
      {"crossed", crossed},
      {"finished", [] { missing(false); }},
      {"raised", [] { missing(true); }},
      {"early", early},
      {"ring", ring},
      {"late", late},
      {"interrupted", interrupted},
      {"reports", reports},
      {"forked", forked},
      {"ahead", ahead},
  };
  CHECK(cases.count(name), "no such case");
  cases.at(name)();
  return 0;
}
