// Meeting and parting: ranks that come late or never, strangers, many transports, and memory that outlives its own.
//
//     transport_handshake CASE [TIMES]
#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <new>

#include "transport_world.h"

// Counts what the library allocates on the heap.
static std::atomic<int64_t> allocations{0};
void* operator new(size_t bytes) {
  allocations++;
  if (void* p = malloc(bytes)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { free(p); }
void operator delete(void* p, size_t) noexcept { free(p); }

namespace {

struct Side {
  gt_transport* t;
  char text[512] = "";
  int culprit = -2;

  Side(int rank, int ranks, double timeout, Board* board) {
    char error[256];
    t = gt_open(rank, ranks, timeout, error, sizeof(error));
    CHECK(t, "%s", error);
    snprintf(board->address[rank], sizeof(board->address[rank]), "%s", gt_address(t));
    board->ready++;
  }
  int connect(Board* board, int ranks) {
    while (board->ready < ranks) doze(1e-4);
    std::vector<const char*> addresses;
    for (int r = 0; r < ranks; ++r) addresses.push_back(board->address[r]);
    int status = gt_connect(t, addresses.data());
    culprit = gt_blame(t, text, sizeof(text));
    return status;
  }
};

// Every rank but `odd`, which does something else, tries to connect and must fail like this.
void fails(int odd, const std::function<void(Board*, Side&)>& something, int status, const char* text, double within) {
  Board* board = Board::make();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 3; ++rank) {
    pid_t pid = fork();
    if (!pid) {
      Side side(rank, 3, 1.0, board);
      if (rank == odd) something(board, side), _exit(0);
      double began = seconds();
      int got = side.connect(board, 3);
      bool other = got == GT_DIED && side.culprit != odd;  // the third may have given up first
      CHECK(other || (got == status && side.culprit == odd), "rank %d: %d, %d: %s", rank, got, side.culprit, side.text);
      CHECK(other || strstr(side.text, text), "rank %d: %s", rank, side.text);
      CHECK(seconds() - began < within, "slow");
      CHECK(gt_barrier(side.t, 1, nullptr) == GT_ABORTED, "it goes on");
      gt_close(side.t);
      exit(0);
    }
    pids.push_back(pid);
  }
  for (pid_t pid : pids) {
    int code = 1;
    waitpid(pid, &code, 0);
    CHECK(code == 0, "a rank failed");
  }
  Board::drop(board);
}

int connect_to(const char* address) {
  char name[40], nonce[40];
  unsigned long long space;
  int pid;
  CHECK(sscanf(address, "gt1:%llu:%d:%39[^:]:%39s", &space, &pid, name, nonce) == 4, "the address: %s", address);
  sockaddr_un a = {};
  a.sun_family = AF_UNIX;
  int n = snprintf(a.sun_path + 1, sizeof(a.sun_path) - 1, "globaltensor-%s", name);
  int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  socklen_t size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size_t(n));
  CHECK(!connect(fd, reinterpret_cast<sockaddr*>(&a), size), "connect");
  return fd;
}

// Some that say nothing, something, or hang up do not disturb a meeting.
void strangers() {
  int failures = run_ranks(kProcesses, 3, [](gt_transport* t, int, Board*) { return gt_barrier(t, 1, nullptr); });
  CHECK(failures == 0, "without strangers");
  Board* board = Board::make();
  std::vector<std::thread> ranks;
  std::vector<Side> sides;
  for (int r = 0; r < 3; ++r) sides.emplace_back(r, 3, 20, board);
  char noise[200] = "noise";
  std::vector<int> open;
  for (int r = 0; r < 3; ++r)
    for (int i = 0; i < 3; ++i) {
      open.push_back(connect_to(board->address[r]));
      if (i) CHECK(send(open.back(), noise, i == 1 ? 5 : sizeof(noise), 0) > 0, "send");
    }
  close(open[4]);
  for (int r = 0; r < 3; ++r)
    ranks.emplace_back([&, r] {
      int status = sides[size_t(r)].connect(board, 3);
      CHECK(status == GT_OK, "rank %d: %d %s", r, status, sides[size_t(r)].text);
      CHECK(gt_barrier(sides[size_t(r)].t, 1, nullptr) == GT_OK, "barrier");
      gt_close(sides[size_t(r)].t);
    });
  for (std::thread& t : ranks) t.join();
}

// Arguments that cannot be right.
void wrong() {
  char error[100] = "";
  CHECK(!gt_open(2, 2, 1, error, sizeof(error)) && *error, "rank 2 of 2");
  gt_transport* t = gt_open(0, 2, 1, error, sizeof(error));
  const char* addresses[] = {gt_address(t), "tcp://somewhere:80"};
  CHECK(gt_connect(t, addresses) == GT_FAILED, "no address");
  gt_close(t);
  t = gt_open(0, 2, 1, error, sizeof(error));
  CHECK(gt_barrier(t, 1, nullptr) == GT_FAILED, "not connected");
  gt_close(t);
}

int entries(const char* folder) {
  DIR* d = opendir(folder);
  int n = 0;
  while (readdir(d)) ++n;
  closedir(d);
  return n;
}

int lines(const char* file) {
  FILE* f = fopen(file, "r");
  int n = 0;
  for (int c; (c = fgetc(f)) != EOF;) n += c == '\n';
  fclose(f);
  return n;
}

Step send(int64_t n) {
  Step s;
  s.parts.push_back({1, {n, 1}, {{0, {0, 0}}}, {{1, {0, 0}}}});
  return s;
}

// Transports come and go, and leave no descriptor and no mapping.
void again() {
  int files = 0, maps = 0;
  for (int round = 0; round < 60; ++round) {
    int failures = run_ranks(kThreads, 3, [](gt_transport* t, int rank, Board*) {
      Program p(send(50), rank, 3);
      int64_t data[2][50] = {};
      gt_move m = ready(p, data[0], static_cast<int64_t*>(gt_alloc(400)), 50);
      int status = rank < 2 ? gt_run_moves(t, &m, 1, 1, 0, nullptr) : static_cast<int>(GT_OK);
      gt_free(m.target);
      return status ? status : gt_barrier(t, 1, nullptr);
    });
    CHECK(failures == 0, "round %d", round);
    if (round == 10) files = entries("/proc/self/fd"), maps = lines("/proc/self/maps");
  }
  CHECK(entries("/proc/self/fd") <= files, "%d descriptors, %d before", entries("/proc/self/fd"), files);
  CHECK(lines("/proc/self/maps") <= maps + 8, "%d mappings, %d before", lines("/proc/self/maps"), maps);
}

// What was sent is there when its sender has closed its transport, and used its memory for other things.
void outlives() {
  int failures = run_ranks(kThreads, 2, [](gt_transport* t, int rank, Board* board) {
    for (int64_t n : {20, 3000, 100000}) {
      Program p(send(n), rank, 2);
      auto* data = static_cast<int64_t*>(gt_alloc(size_t(n) * 8));
      for (int64_t i = 0; i < n; ++i) data[i] = rank ? -1 : i;
      gt_move m = ready(p, data, data, n);
      if (rank) while (board->number[0] == 0) doze(1e-3);
      CHECK(gt_run_moves(t, &m, 1, 1, 0, nullptr) == GT_OK, "send of %lld", (long long)n);
      for (int64_t i = 0; rank && i < n; ++i) CHECK(data[i] == i, "%lld: %lld", (long long)i, (long long)data[i]);
      gt_free(data);
    }
    if (rank) return 0;
    gt_close(t);
    std::vector<void*> other;
    for (size_t bytes : {200, 2000, 24000, 70000, 262144, 800000})
      for (int k = 0; k < 20; ++k) other.push_back(memset(gt_alloc(bytes), 255, bytes));
    board->number[0] = 1;
    doze(0.3);
    for (void* o : other) gt_free(o);
    return -1;
  });
  CHECK(failures == 0, "%d ranks failed", failures);
}

int64_t resident_pages() {
  FILE* f = fopen("/proc/self/statm", "r");
  long size, pages;
  CHECK(fscanf(f, "%ld %ld", &size, &pages) == 2, "statm");
  fclose(f);
  return pages;
}

// Any number of boxings allocates nothing, and takes no more memory than the first thousand.
void steady(int64_t times) {
  int failures = run_ranks(kProcesses, 2, [=](gt_transport* t, int rank, Board*) {
    Step sum, apart = send(200);
    for (int r = 0; r < 2; ++r) sum.parts.push_back({r, {200, 1}, {{0, {0, 0}}, {1, {0, 0}}}, {{r, {0, 0}}}});
    Program p(sum, rank, 2), q(apart, rank, 2);
    auto* source = static_cast<int64_t*>(gt_alloc(1600));
    auto* target = static_cast<int64_t*>(gt_alloc(1600));
    auto* large = static_cast<int64_t*>(gt_alloc(100000 * 8));
    memset(large, 0, 100000 * 8);
    gt_move m[2] = {ready(p, source, target, 200), ready(q, source, target, 200)};
    gt_move big = ready(q, large, large, 100000);
    int64_t pages = 0, allocated = 0;
    for (int64_t i = 0; i < times; ++i) {
      if (i == 1000) pages = resident_pages(), allocated = allocations;
      source[0] = i;
      int status = i % 1000 == 7 ? gt_run_moves(t, &big, 1, 3, 0, nullptr)
                                 : gt_run_moves(t, m, i % 10 ? 1 : 2, 2, 0, nullptr);
      CHECK(status == GT_OK, "call %lld: %d", (long long)i, status);
      CHECK(i % 1000 == 7 || i % 10 == 0 || target[0] == 2 * i, "call %lld: %lld", (long long)i, (long long)target[0]);
    }
    CHECK(allocations == allocated, "%lld allocations", (long long)(allocations - allocated));
    CHECK(resident_pages() - pages < 400, "%lld pages more", (long long)(resident_pages() - pages));
    return 0;
  });
  CHECK(failures == 0, "%d ranks failed", failures);
}

void many() {
  int failures = run_ranks(kProcesses, 24, [](gt_transport* t, int, Board*) { return gt_barrier(t, 1, nullptr); });
  CHECK(failures == 0, "%d ranks failed", failures);
}

// Two threads of a rank, each of which holds a lock of the program's while they run moves.
void shared() {
  int failures = run_ranks(kProcesses, 2, [](gt_transport* t, int rank, Board*) {
    static std::mutex lock;
    gt_hooks hooks = {[](void*) { lock.unlock(); }, [](void*) { return 0; }, [](void*) { lock.lock(); }, nullptr};
    std::atomic<int> bad{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i)
      threads.emplace_back([&] {
        for (int k = 0; k < 3000; ++k) {
          std::lock_guard<std::mutex> guard(lock);
          bad += gt_barrier(t, 1, &hooks) != GT_OK;
          if (k % 500 == 250 * rank) doze(2e-3);
        }
      });
    for (std::thread& th : threads) th.join();
    return bad.load();
  });
  CHECK(failures == 0, "%d ranks failed", failures);
}

}  // namespace

int main(int count, char** arguments) {
  std::string name = count > 1 ? arguments[1] : "";
  auto ends = [](Board*, Side&) { doze(0.05); };
  auto dozes = [](Board*, Side&) { doze(1.6); };
  const std::map<std::string, std::function<void()>> cases = {
      {"absent", [&] { fails(2, ends, GT_DIED, "ended", 0.9), fails(0, ends, GT_DIED, "", 0.9); }},
      {"late", [&] { fails(2, dozes, GT_TIMED_OUT, "not connected within 1 s: rank 2", 1.5); }},
      {"wrong", wrong},
      {"strangers", strangers},
      {"again", again},
      {"outlives", outlives},
      {"steady", [=] { steady(count > 2 ? atoll(arguments[2]) : 50000); }},
      {"shared", shared},
      {"many", many},
  };
  CHECK(cases.count(name), "usage: transport_handshake CASE [TIMES]");
  cases.at(name)();
  return 0;
}
