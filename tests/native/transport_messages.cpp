// Messages between ranks: every byte of them, and what ends a wait for one.
//
//     transport_messages CASE [threads|processes RANKS SEED ROUNDS]
//
// In `values` all ranks follow one random sequence of sends, receives and boxings, and know the contents of every
// message. A sender overwrites its memory as soon as gt_acked counts the message, which shows any read that comes too
// late.
// The other cases have ranks of their own, each of which checks how its last call ended; `killed` takes processes.
#include "transport_world.h"

#include <deque>

namespace {

using Rng = std::mt19937_64;

int64_t below(Rng& rng, int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); }

void well(gt_transport* t, int status, const char* what) {
  char text[512];
  int culprit = gt_blame(t, text, sizeof(text));
  CHECK(status == GT_OK, "%s: %d, rank %d: %s", what, status, culprit, text);
}

// ---- boxings

// The same with numbers that differ, whose result can be checked.
struct Boxing : Sum {
  Boxing(int rank, int ranks, const std::vector<int>& group, int64_t count) : Sum(rank, ranks, group, count) {
    fill(rank);
  }
  Boxing(int rank, int ranks, int from, int to, int64_t count) : Sum(rank, ranks, from, to, count) { fill(rank); }
  Boxing(const Boxing&) = delete;
  ~Boxing() {
    gt_free(source);
    gt_free(target);
  }
  void fill(int rank) {
    CHECK(source && target, "memory");
    for (int64_t i = 0; i < n; ++i) source[i] = rank + 1 + i, target[i] = -1;
  }
  void check(int rank) {
    for (const Part& part : step.parts)
      for (int64_t i = 0; part.by == rank && i < n; ++i) {
        int64_t sum = 0;
        for (const ShardSlice& b : part.from) sum += b.rank + 1 + i;
        CHECK(target[i] == sum, "rank %d: %lld instead of %lld", rank, (long long)target[i], (long long)sum);
      }
  }
};

// ---- messages of which both sides know what is in them

struct Content {
  uint64_t bytes, tag;
  uint8_t at(uint64_t i) const { return static_cast<uint8_t>(tag + i * 151 + (i >> 8) * 31); }
};

Content content(uint64_t seed, int from, int to, uint64_t number) {
  std::minstd_rand rng(static_cast<uint32_t>(seed * 7919 + static_cast<uint64_t>(from * 64 + to) * 104729 + number));
  rng.discard(3);
  uint64_t most = rng() % 8 == 0 ? 0 : rng() % 8 == 0 ? 300 * 1024 : rng() % 2 ? 3000 : 40;
  uint64_t bytes = rng() % (most + 1);
  return {bytes, (uint64_t{rng()} << 32) + rng()};
}

std::vector<uint64_t> cut(Rng& rng, uint64_t bytes, int64_t pieces) {
  if (!pieces && !bytes) return {};
  std::vector<uint64_t> ends = {0, bytes}, sizes;
  for (int64_t i = 1; i < pieces; ++i)  // some pieces are empty
    ends.push_back(below(rng, 4) ? static_cast<uint64_t>(below(rng, static_cast<int64_t>(bytes) + 1)) : ends.back());
  std::sort(ends.begin(), ends.end());
  for (size_t i = 1; i < ends.size(); ++i) sizes.push_back(ends[i] - ends[i - 1]);
  return sizes;
}

// One rank's messages, to and from all others.
struct Mailbox {
  gt_transport* t;
  int rank;
  uint64_t seed;
  Rng mine;
  std::vector<uint64_t> sent, received;    // to whom, from whom
  std::vector<uint64_t> seen;              // by whom: what gt_acked said last
  std::vector<std::deque<std::vector<gt_run>>> unacked;  // to whom: memory that may still be read

  Mailbox(gt_transport* transport, int r, int ranks, uint64_t s)
      : t(transport), rank(r), seed(s), mine(s * 31 + static_cast<uint64_t>(r)) {
    sent.resize(size_t(ranks));
    received.resize(size_t(ranks));
    seen.resize(size_t(ranks));
    unacked.resize(size_t(ranks));
  }

  // A message's memory: a block for each run, none for an empty one.
  std::vector<gt_run> write(const Content& c) {
    std::vector<gt_run> runs;
    uint64_t at = 0;
    for (uint64_t n : cut(mine, c.bytes, below(mine, GT_RUNS + 1))) {
      auto* data = static_cast<uint8_t*>(n ? gt_alloc(n) : nullptr);
      CHECK(data || !n, "memory");
      for (uint64_t i = 0; i < n; ++i) data[i] = c.at(at + i);
      runs.push_back({data, n});
      at += n;
    }
    return runs;
  }

  int try_send(int to, const gt_hooks* hooks = nullptr) {
    Content c = content(seed, rank, to, sent[size_t(to)] + 1);
    std::vector<gt_run> runs = write(c);
    int status = gt_send(t, to, runs.data(), static_cast<int32_t>(runs.size()), c.tag, hooks);
    sent[size_t(to)] += status == GT_OK;
    unacked[size_t(to)].push_back(std::move(runs));
    if (status == GT_OK) collect(to);
    return status;
  }
  void send(int to) { well(t, try_send(to), "gt_send"); }

  // Overwrites and frees what was received; at least so many must have been.
  void collect(int to, uint64_t least = 0) {
    uint64_t most = sent[size_t(to)], before = seen[size_t(to)];
    CHECK(gt_sent(t, to) == most, "%llu, not %llu", (unsigned long long)gt_sent(t, to), (unsigned long long)most);
    uint64_t now = seen[size_t(to)] = gt_acked(t, to);
    CHECK(now >= before && now >= least && now <= most, "%llu after %llu, of %llu, at least %llu",
          (unsigned long long)now, (unsigned long long)before, (unsigned long long)most, (unsigned long long)least);
    for (; before < now; ++before) {
      for (gt_run& run : unacked[size_t(to)].front()) {
        if (run.bytes) memset(run.data, 0xab, run.bytes);
        gt_free(run.data);
      }
      unacked[size_t(to)].pop_front();
    }
  }

  void wait_acked(int to) {
    well(t, gt_wait_acked(t, to, nullptr), "gt_wait_acked");
    collect(to, sent[size_t(to)]);
  }

  int try_recv(int from, const gt_hooks* hooks = nullptr) {
    constexpr uint64_t kGap = 16;  // between the runs: must stay as it is
    Content c = content(seed, from, rank, received[size_t(from)] + 1);
    for (int64_t times = below(mine, 3); times > 0; --times) {
      uint64_t bytes = 1;
      if (int status = gt_probe(t, from, &bytes, hooks)) return status;
      CHECK(bytes == c.bytes, "%llu, not %llu", (unsigned long long)bytes, (unsigned long long)c.bytes);
    }
    std::vector<uint64_t> sizes = cut(mine, c.bytes, below(mine, 20));
    uint64_t all = c.bytes + kGap * (sizes.size() + 1), at = kGap;
    bool arena = below(mine, 2);
    auto* memory = static_cast<uint8_t*>(arena ? gt_alloc(all) : malloc(all));
    CHECK(memory, "memory");
    memset(memory, 0xee, all);
    std::vector<gt_run> runs;
    for (uint64_t n : sizes) {
      runs.push_back({n ? memory + at : nullptr, n});
      at += n + kGap;
    }
    int status = gt_recv(t, from, runs.data(), static_cast<int32_t>(runs.size()), c.tag, hooks);
    if (status == GT_OK) {
      received[size_t(from)]++;
      check(c, memory, sizes, kGap, from);
    }
    arena ? gt_free(memory) : free(memory);
    return status;
  }
  void recv(int from) { well(t, try_recv(from), "gt_recv"); }

  void check(const Content& c, const uint8_t* memory, const std::vector<uint64_t>& sizes, uint64_t gap, int from) {
    uint64_t at = 0, wrong = 0;
    for (uint64_t i = 0; i < gap; ++i) wrong += *memory++ != 0xee;
    for (uint64_t n : sizes) {
      for (uint64_t i = 0; i < n; ++i) wrong += memory[i] != c.at(at + i);
      for (uint64_t i = n; i < n + gap; ++i) wrong += memory[i] != 0xee;
      at += n;
      memory += n + gap;
    }
    CHECK(!wrong, "message %llu of %d to %d, of %llu bytes: %llu are wrong",
          (unsigned long long)received[size_t(from)], from, rank, (unsigned long long)c.bytes,
          (unsigned long long)wrong);
  }
};

// ---- values

// What all ranks agree on: how many messages were sent and received so far, from whom to whom.
struct Plan {
  Rng rng;
  int ranks;
  std::vector<std::vector<int64_t>> sent, received;

  Plan(uint64_t seed, int n) : rng(seed), ranks(n) {
    sent.assign(size_t(n), std::vector<int64_t>(size_t(n)));
    received = sent;
  }
  int64_t pending(int a, int b) { return sent[size_t(a)][size_t(b)] - received[size_t(a)][size_t(b)]; }
  std::vector<int> group() {
    std::vector<int> all;
    for (int r = 0; r < ranks; ++r) all.push_back(r);
    std::shuffle(all.begin(), all.end(), rng);
    all.resize(size_t(2 + below(rng, ranks - 1)));
    return all;
  }
};

int play(gt_transport* t, int rank, int ranks, uint64_t seed, int64_t rounds) {
  Plan plan(seed, ranks);
  Mailbox mailbox(t, rank, ranks, seed);
  uint64_t event = 0;
  auto send = [&](int a, int b, int64_t n) {
    plan.sent[size_t(a)][size_t(b)] += n;
    for (; rank == a && n > 0; --n) mailbox.send(b);
  };
  auto recv = [&](int a, int b, int64_t n) {
    plan.received[size_t(a)][size_t(b)] += n;
    for (; rank == b && n > 0; --n) mailbox.recv(a);
  };
  auto run = [&](Boxing&& boxing) {
    well(t, boxing.run(t, event), "gt_run_moves");
    boxing.check(rank);
  };
  auto step = [&] {
    ++event;
    int64_t kind = below(plan.rng, 200);
    std::vector<int> group = plan.group();
    int a = group[0], b = group[1];
    if (kind < 90) {
      int64_t n = below(plan.rng, 6) ? 1 : 1 + below(plan.rng, 25);
      send(a, b, std::min(n, GT_MESSAGES - plan.pending(a, b)));
    } else if (kind < 165) {
      recv(a, b, below(plan.rng, 2) ? plan.pending(a, b) : below(plan.rng, plan.pending(a, b) + 1));
    } else if (kind < 177) {
      int64_t n = below(plan.rng, 2) ? 10 : 9000;  // staged, or read in place
      if (std::count(group.begin(), group.end(), rank)) run(Boxing(rank, ranks, group, n));
    } else if (kind < 187) {
      int64_t n = below(plan.rng, 2) ? 10 : 9000;
      if (rank == a || rank == b) run(Boxing(rank, ranks, a, b, n));
    } else if (kind < 192) {
      well(t, gt_barrier(t, event, nullptr), "gt_barrier");
      for (int r = 0; r < ranks; ++r)
        if (r != rank) mailbox.collect(r, static_cast<uint64_t>(plan.received[size_t(rank)][size_t(r)]));
    } else if (kind < 197) {
      recv(a, b, plan.pending(a, b));
      if (rank == a) mailbox.wait_acked(b);
    } else if (kind < 198) {  // more than there is room for, to one that begins late
      if (rank == b) doze(0.03);
      send(a, b, 3 * GT_MESSAGES);
      recv(a, b, plan.pending(a, b));
    }
  };
  for (int64_t round = 0; round < rounds; ++round) {
    for (int i = 0; i < 10; ++i) step();
    if (!below(mailbox.mine, 100)) doze(1e-3 * static_cast<double>(below(mailbox.mine, 20)));
  }
  for (int a = 0; a < ranks; ++a)
    for (int b = 0; b < ranks; ++b)
      if (a != b) recv(a, b, plan.pending(a, b));
  for (int b = 0; b < ranks; ++b)
    if (b != rank) mailbox.wait_acked(b);
  return 0;
}

// ---- failures

// Numbers on the board: when the mishap was, in ns, and how many ranks are ready for it.
enum { kWhen, kReady, kGone };

void mishap(Board* board) { board->number[kWhen] = static_cast<int64_t>(seconds() * 1e9); }

// How this rank's last call ended; `within` seconds since the mishap. Nothing may run after it.
int expect(gt_transport* t, int rank, Board* board, int status, std::vector<int> statuses, int culprit,
           const char* text, double within = 1) {
  double took = seconds() - static_cast<double>(board->number[kWhen]) * 1e-9;
  char said[512];
  int blamed = gt_blame(t, said, sizeof(said));
  CHECK(std::count(statuses.begin(), statuses.end(), status), "rank %d: status %d: %s", rank, status, said);
  CHECK(blamed == culprit, "rank %d blames %d: %s", rank, blamed, said);
  CHECK(strstr(said, text), "rank %d says: %s", rank, said);
  CHECK(took < within, "rank %d took %.2f s", rank, took);
  double began = seconds();
  int other = rank ? 0 : 1;
  uint64_t bytes;
  bool over = gt_send(t, other, nullptr, 0, 1, nullptr) == GT_ABORTED &&
              gt_recv(t, other, nullptr, 0, 1, nullptr) == GT_ABORTED &&
              gt_probe(t, other, &bytes, nullptr) == GT_ABORTED && gt_wait_acked(t, other, nullptr) == GT_ABORTED &&
              gt_barrier(t, 1, nullptr) == GT_ABORTED;
  CHECK(over && seconds() - began < 0.1, "rank %d: after a failure", rank);
  CHECK(gt_acked(t, other) <= gt_sent(t, other), "rank %d: counts after a failure", rank);
  return 0;
}

void all_well(int failures) { CHECK(!failures, "%d ranks failed", failures); }

// Rank 1 expects something else than rank 0 sent; rank 2 waits for its message, 3 for a boxing with 2, and 0 for its
// own message to be received.
void wrong(Kind kind) {
  for (std::string what : {"tag", "less", "more", "none"})
    all_well(run_ranks(kind, 4, [&](gt_transport* t, int rank, Board* board) {
      const char* text = what == "tag" ? "rank 0 sent another message than rank 1 expects"
                                           : "rank 0 sent a message of 100 bytes, rank 1 expects one of";
      auto done = [&](int status) { return expect(t, rank, board, status, {GT_DISAGREED}, 0, text); };
      gt_run run = {gt_alloc(200), 100};
      memset(run.data, 5, 200);
      Boxing pair(rank, 4, {2, 3}, 10);
      mishap(board);
      if (rank == 2) return done(gt_recv(t, 1, &run, 1, 7, nullptr));
      if (rank == 3) return done(pair.run(t, 7));
      if (rank == 0) {
        well(t, gt_send(t, 1, &run, 1, 7, nullptr), "gt_send");
        return done(gt_wait_acked(t, 1, nullptr));
      }
      doze(0.2);  // the others sleep by now
      memset(run.data, 6, 200);
      if (what == "less") run.bytes = 99;
      if (what == "more") run.bytes = 101;
      mishap(board);
      int status = gt_recv(t, 0, &run, what == "none" ? 0 : 1, what == "tag" ? 8 : 7, nullptr);
      for (int i = 0; i < 200; ++i) CHECK(static_cast<char*>(run.data)[i] == 6, "%d was written", i);
      return done(status);
    }));
}

// What cannot be sent.
void refused(Kind kind) {
  for (bool many : {false, true})
    all_well(run_ranks(kind, 2, [&](gt_transport* t, int rank, Board* board) {
      mishap(board);
      const char* text = many ? "a message of 15 runs" : "not in memory from gt_alloc";
      if (rank) return expect(t, rank, board, gt_probe(t, 0, nullptr, nullptr), {GT_ABORTED}, 0, text);
      std::vector<char> here(10);
      gt_run foreign = {here.data(), here.size()};
      std::vector<gt_run> empty(GT_RUNS + 1);
      int status = many ? gt_send(t, 1, empty.data(), GT_RUNS + 1, 7, nullptr) : gt_send(t, 1, &foreign, 1, 7, nullptr);
      return expect(t, rank, board, status, {GT_FAILED}, 0, text);
    }));
}

// A send waits as soon as there is no room, and no longer than that.
void room(Kind kind) {
  auto body = [](gt_transport* t, int rank, Board* board) {
    auto reach = [&](int64_t n) {
      for (double until = seconds() + 8; board->number[kReady] < n; doze(1e-3)) CHECK(seconds() < until, "no room");
    };
    Mailbox mailbox(t, rank, 2, 4);
    if (!rank) {
      double began = seconds();
      for (int i = 0; i < GT_MESSAGES; ++i) mailbox.send(1);
      CHECK(seconds() - began < 1, "there was room");
      board->number[kReady] = 1;
      mailbox.send(1);
      CHECK(board->number[kReady] == 2, "there was no room");
      board->number[kReady] = 3;
      mailbox.wait_acked(1);
      return 0;
    }
    reach(1);
    doze(0.2);
    board->number[kReady] = 2;
    mailbox.recv(0);
    reach(3);
    for (int i = 0; i < GT_MESSAGES; ++i) mailbox.recv(0);
    return 0;
  };
  all_well(run_ranks(kind, 2, body, 5));
}

// A rank that sent its messages and ended is not missed, until one more is waited for.
void early(Kind kind) {
  all_well(run_ranks(kind, 2, [&](gt_transport* t, int rank, Board* board) {
    Mailbox mailbox(t, rank, 2, 3);
    for (int i = 0; !rank && i < 20; ++i) mailbox.send(1);  // its memory stays as it is
    if (!rank) return 0;
    doze(0.3);
    for (int i = 0; i < 20; ++i) mailbox.recv(0);
    mishap(board);
    return expect(t, rank, board, mailbox.try_recv(0), {GT_DIED}, 0, "finished");
  }));
}

// One of four is killed while the others wait for it, or for those that do.
void killed(uint64_t seed, int rounds) {
  for (int round = 0; round < rounds; ++round, ++seed) {
    enum { kAwaited, kSent, kStreams, kReceives } how = static_cast<decltype(how)>(seed % 4);
    Rng rng(seed);
    double before = 0.1 + 1e-6 * static_cast<double>(below(rng, 100000));
    printf("seed %llu: %d after %.3f s\n", (unsigned long long)seed, how, before);
    fflush(stdout);
    Board* board = Board::make();
    auto body = [&](gt_transport* t, int rank, Board*) {
      Mailbox mailbox(t, rank, 4, seed);
      Boxing pair(rank, 4, {2, 3}, 10);
      auto done = [&](int status) { return expect(t, rank, board, status, {GT_DIED, GT_ABORTED}, 0, "killed"); };
      well(t, gt_barrier(t, 1, nullptr), "all are connected");
      if (rank == 0) {
        for (int i = 0; i < 20 && how != kReceives; ++i) mailbox.send(1);
        board->number[kReady]++;
        while (how == kStreams) mailbox.send(1);
        while (true) doze(1);
      }
      const int sends = how != kReceives ? 0 : rank == 1 ? GT_MESSAGES : rank == 2;  // rank 1: until there is no room
      for (int i = 0; i < sends; ++i) mailbox.send(0);
      board->number[kReady]++;                       // after what must be done before the mishap
      while (how == kSent && rank == 1 && !board->number[kGone]) doze(1e-3);
      int status = GT_OK;
      if (how == kReceives && rank == 1) return done(mailbox.try_send(0));
      if (how == kReceives && rank == 2) return done(gt_wait_acked(t, 0, nullptr));
      if (rank == 1) {
        for (int i = 0; i < 20; ++i) mailbox.recv(0);
        while (status == GT_OK) status = mailbox.try_recv(0);
        return done(status);
      }
      return done(rank == 2 ? mailbox.try_recv(1) : pair.run(t, 2));
    };
    std::vector<pid_t> pids = start_processes(4, 60, board, body);
    while (board->number[kReady] < 4) doze(1e-3);
    doze(before);
    mishap(board);
    kill(pids[0], SIGKILL);
    waitpid(pids[0], nullptr, 0);
    board->number[kGone] = 1;
    int failures = 0;
    for (int r = 1; r < 4; ++r) {
      int status = 0;
      waitpid(pids[size_t(r)], &status, 0);
      failures += status != 0;
    }
    all_well(failures);
    Board::drop(board);
  }
}

// Ranks that wait for each other, for messages and boxings; rank 3 waits for one of them.
void ring(Kind kind) {
  for (std::string what : {"messages", "boxing", "full", "all"})
    all_well(run_ranks(kind, 4, [&](gt_transport* t, int rank, Board* board) {
      Mailbox mailbox(t, rank, 4, 5);
      Boxing with_0(rank, 4, {0, what == "all" ? 2 : 1}, 10);
      auto done = [&](int status) {
        return expect(t, rank, board, status, {GT_DEADLOCKED}, -1, "which waits for rank", 5);
      };
      mishap(board);
      if (rank == 3 || (rank == 2 && what != "all")) return done(mailbox.try_recv(0));
      if (what == "full") {
        for (int i = 0; i < GT_MESSAGES; ++i) mailbox.send(1 - rank);
        return done(mailbox.try_send(1 - rank));
      }
      if (what == "all" && rank == 1) {  // 0 waits for 1's message, 1 for 2 to receive its own, 2 for 0 in a boxing
        mailbox.send(2);
        return done(gt_wait_acked(t, 2, nullptr));
      }
      if (what == "messages" || rank == 0) return done(mailbox.try_recv(rank ? 0 : 1));
      return done(with_0.run(t, 1));
    }));
}

// Ranks that wait long for one that comes late, but not for each other.
void chain(Kind kind) {
  all_well(run_ranks(kind, 3, [&](gt_transport* t, int rank, Board*) {
    Mailbox mailbox(t, rank, 3, 6);
    if (rank < 2) mailbox.send(rank + 1);
    if (rank == 2) doze(2.5);
    if (rank < 2) mailbox.recv(rank + 1);
    if (rank) mailbox.send(rank - 1);
    if (rank) mailbox.recv(rank - 1);
    if (rank < 2) mailbox.wait_acked(rank + 1);
    return 0;
  }));
}

void interrupted(Kind kind) {
  struct Count {
    Board* board;
    int enter = 0, tick = 0, leave = 0;
  };
  auto tick = [](void* c) {
    auto* count = static_cast<Count*>(c);
    if (++count->tick == 5) mishap(count->board);
    return int(count->tick == 5);
  };
  for (std::string what : {"recv", "probe", "send", "wait_acked"})
    all_well(run_ranks(kind, 3, [&](gt_transport* t, int rank, Board* board) {
      Mailbox mailbox(t, rank, 3, 7);
      Count count{board};
      gt_hooks hooks = {[](void* c) { static_cast<Count*>(c)->enter++; }, tick,
                        [](void* c) { static_cast<Count*>(c)->leave++; }, &count};
      while (rank == 1 && !board->number[kWhen]) doze(0.01);   // or all would wait for each other
      if (rank) return expect(t, rank, board, mailbox.try_recv(0), {GT_ABORTED}, 0, "rank 0 was interrupted");
      for (int i = 0; i < GT_MESSAGES && (what == "send" || what == "wait_acked"); ++i) mailbox.send(1);
      uint64_t bytes;
      gt_run none = {};
      int status = what == "recv"    ? gt_recv(t, 1, &none, 1, 7, &hooks)
                   : what == "probe" ? gt_probe(t, 1, &bytes, &hooks)
                   : what == "send"  ? mailbox.try_send(1, &hooks)
                                     : gt_wait_acked(t, 1, &hooks);
      CHECK(count.enter == 1 && count.tick == 5 && count.leave == 1, "%d %d %d", count.enter, count.tick, count.leave);
      return expect(t, rank, board, status, {GT_INTERRUPTED}, 0, "rank 0 was interrupted");
    }));
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count > 1, "usage: transport_messages CASE [threads|processes RANKS SEED ROUNDS]");
  std::string name = arguments[1];
  Kind kind = count > 2 && !strcmp(arguments[2], "threads") ? kThreads : kProcesses;
  int ranks = count > 3 ? atoi(arguments[3]) : 4;
  uint64_t seed = count > 4 ? static_cast<uint64_t>(atoll(arguments[4])) : 1;
  int rounds = count > 5 ? atoi(arguments[5]) : 4;
  const std::map<std::string, std::function<void()>> cases = {
      {"values", [=] { all_well(run_ranks(kind, ranks, [=](gt_transport* t, int rank, Board*) {
                         return play(t, rank, ranks, seed, rounds);
                       })); }},
      {"wrong", [=] { wrong(kind); }},
      {"refused", [=] { refused(kind); }},
      {"room", [=] { room(kind); }},
      {"early", [=] { early(kind); }},
      {"killed", [=] { killed(seed, rounds); }},
      {"ring", [=] { ring(kind); }},
      {"chain", [=] { chain(kind); }},
      {"interrupted", [=] { interrupted(kind); }},
  };
  CHECK(cases.count(name), "no such case");
  printf("%s %s %d, seed %llu, %d rounds\n", name.c_str(),
         kind == kThreads ? "threads" : "processes", ranks, (unsigned long long)seed, rounds);
  fflush(stdout);
  cases.at(name)();
  return 0;
}
