// Connecting to the other ranks: one connection per pair, from the higher rank to the lower, in any order of events.
//
// The socket's name is in the abstract namespace, so nothing is left in a file system. Anyone on the host can connect;
// a peer is who runs as the same user and knows the random number from the address. Both sides send their two memfds
// (control segment, arena) with it, and each then watches the other's process through a pidfd. A rank first connects
// to all lower ranks, which needs nobody's help since all of them listen already, and then takes what comes: no order
// in which ranks arrive can block.
#include "handshake.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

namespace gt {
namespace {

struct Hello {
  uint64_t magic;
  int32_t rank, ranks;
  char nonce[40];           // of the one it is sent to
};

struct Address {
  uint64_t pid_namespace = 0;
  int pid = 0;
  char name[40] = "", nonce[40] = "";
};

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  void reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

std::string random_hex() {
  unsigned char bytes[16];
  size_t have = 0;
  while (have < sizeof(bytes)) {
    ssize_t n = getrandom(bytes + have, sizeof(bytes) - have, 0);
    if (n > 0) have += static_cast<size_t>(n);
  }
  char text[33];
  for (int i = 0; i < 16; ++i) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
  return text;
}

uint64_t pid_namespace() {
  struct stat s;
  return stat("/proc/self/ns/pid", &s) ? 0 : static_cast<uint64_t>(s.st_ino);
}

bool parse(const char* text, Address& a) {
  constexpr const char* kForm = "gt1:%" SCNu64 ":%d:%39[0-9a-f]:%39[0-9a-f]";
  return text && sscanf(text, kForm, &a.pid_namespace, &a.pid, a.name, a.nonce) == 4;
}

socklen_t abstract(const char* name, sockaddr_un& a) {
  memset(&a, 0, sizeof(a));
  a.sun_family = AF_UNIX;
  int n = snprintf(a.sun_path + 1, sizeof(a.sun_path) - 1, "globaltensor-%s", name);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(n));
}

bool send_hello(int fd, gt_transport& t, const char* nonce) {
  Hello hello = {kMagic, t.rank, t.ranks, ""};
  snprintf(hello.nonce, sizeof(hello.nonce), "%s", nonce);
  int files[2] = {t.control_fd, t.arena_fd};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(files))] = {};
  iovec data = {&hello, sizeof(hello)};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof(space);
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(files));
  memcpy(CMSG_DATA(c), files, sizeof(files));
  return sendmsg(fd, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(hello));
}

// 1: there it is; 0: not yet; -1: the other side is gone, or not one of us.
int receive_hello(int fd, Hello& hello, Fd files[2]) {
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int) * 2)];
  iovec data = {&hello, sizeof(hello)};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = space;
  message.msg_controllen = sizeof(space);
  ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (n < 0) return -1;
  size_t got = 0;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int file;
      memcpy(&file, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      Fd keep(file);
      if (got < 2) files[got++] = std::move(keep);
    }
  }
  bool ours = n == static_cast<ssize_t>(sizeof(hello)) && got == 2 && hello.magic == kMagic;
  return ours ? 1 : -1;
}

// Maps what a peer gave. An empty string, or what went wrong.
std::string adopt(gt_transport& t, int rank, int socket, Fd files[2]) {
  ucred who = {};
  socklen_t size = sizeof(who);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) || who.uid != geteuid()) return "is another user's";
  Peer& p = t.peers[static_cast<size_t>(rank)];
  std::string error;
  p.pid = who.pid;
  p.pidfd = static_cast<int>(syscall(SYS_pidfd_open, who.pid, 0));
  if (p.pidfd < 0) return "cannot be watched (pidfd_open: " + std::string(strerror(errno)) + ")";
  p.control_map = segment_map(files[0].get(), error);
  p.arena_map = p.control_map ? segment_map(files[1].get(), error) : nullptr;
  if (!p.arena_map) return "gave memory that cannot be mapped: " + error;
  Control* control = reinterpret_cast<Control*>(p.control_map->base);
  bool fits = p.control_map->size >= Control::bytes(t.ranks) && control->magic == kMagic && control->ranks == t.ranks;
  if (!fits || control->rank != rank) return "has another version of this library, or another number of ranks";
  p.arena = p.arena_map->base;
  p.arena_size = p.arena_map->size;
  p.out = &t.own->lanes[rank];
  p.in = &control->lanes[t.rank];
  p.control = control;
  return "";
}

class Handshake {
 public:
  Handshake(gt_transport& t, const char* const* addresses)
      : t_(t), until_(now() + t.timeout), sockets_(size_t(t.ranks)) {
    addresses_.resize(size_t(t.ranks));
    for (int r = 0; r < t.ranks; ++r) valid_ = valid_ && parse(addresses[r], addresses_[size_t(r)]);
  }

  int run() {
    if (!valid_) return fail(t_, GT_FAILED, -1, "an address is not one of gt_address");
    for (int r = 0; r < t_.rank; ++r)
      if (int status = call(r)) return status;
    while (missing()) {
      if (int status = step()) return status;
      if (missing() && now() > until_) return late();
    }
    return GT_OK;
  }

 private:
  bool known(int r) const { return r == t_.rank || t_.peers[size_t(r)].control; }
  int missing() const {
    int n = 0;
    for (int r = 0; r < t_.ranks; ++r) n += !known(r);
    return n;
  }

  int call(int r) {
    Address& a = addresses_[size_t(r)];
    sockaddr_un name;
    socklen_t size = abstract(a.name, name);
    Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    bool reached = fd.get() >= 0 && !connect(fd.get(), reinterpret_cast<sockaddr*>(&name), size);
    if (!reached || !send_hello(fd.get(), t_, a.nonce))
      return fail(t_, errno == ECONNREFUSED ? GT_DIED : GT_FAILED, r,
                  "rank %d cannot be reached (%s): has it ended, or is it on another host?", r, strerror(errno));
    sockets_[size_t(r)] = std::move(fd);
    return GT_OK;
  }

  // Waits a little for any of the connections, and takes what came.
  int step() {
    std::vector<pollfd> polled = {{t_.listener, POLLIN, 0}};
    std::vector<int> rank = {-1};
    for (int r = 0; r < t_.rank; ++r)
      if (!known(r)) polled.push_back({sockets_[size_t(r)].get(), POLLIN, 0}), rank.push_back(r);
    for (Fd& f : strangers_) polled.push_back({f.get(), POLLIN, 0});
    poll(polled.data(), polled.size(), 50);
    for (size_t i = 1; i < rank.size(); ++i)
      if (polled[i].revents)
        if (int status = answer(rank[i])) return status;
    for (size_t i = 0; i < strangers_.size();) {
      int result = polled[rank.size() + i].revents ? greet(strangers_[i].get()) : 0;
      if (result < 0) return t_.failed;
      if (result == 0) {
        ++i;
        continue;
      }
      polled.erase(polled.begin() + static_cast<long>(rank.size() + i));
      strangers_.erase(strangers_.begin() + static_cast<long>(i));
    }
    if (polled[0].revents) {
      Fd fd(accept4(t_.listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (fd.get() >= 0) strangers_.push_back(std::move(fd));
    }
    return ended();
  }

  // A lower rank answered.
  int answer(int r) {
    Hello hello;
    Fd files[2];
    int socket = sockets_[size_t(r)].get();
    int got = receive_hello(socket, hello, files);
    if (got == 0) return GT_OK;
    if (got < 0) return fail(t_, GT_DIED, r, "rank %d ended before it connected to rank %d", r, t_.rank);
    if (hello.rank != r || t_.nonce != hello.nonce)
      return fail(t_, GT_FAILED, r, "rank %d answered as someone else", r);
    std::string wrong = adopt(t_, r, socket, files);
    sockets_[size_t(r)].reset();
    return wrong.empty() ? GT_OK : fail(t_, GT_FAILED, r, "rank %d %s", r, wrong.c_str());
  }

  // Someone called. 1: dealt with, a peer or not; 0: has not said anything yet; -1: failed.
  int greet(int socket) {
    Hello hello;
    Fd files[2];
    int got = receive_hello(socket, hello, files);
    if (got == 0) return 0;
    if (got < 0 || t_.nonce != hello.nonce) return 1;
    if (hello.rank <= t_.rank || hello.rank >= t_.ranks || known(hello.rank)) return 1;
    std::string wrong = adopt(t_, hello.rank, socket, files);
    if (wrong.empty() && !send_hello(socket, t_, addresses_[size_t(hello.rank)].nonce)) wrong = "ended";
    if (wrong.empty()) return 1;
    fail(t_, GT_FAILED, hello.rank, "rank %d %s", hello.rank, wrong.c_str());
    return -1;
  }

  // Has a higher rank, of which nothing was heard yet, ended?
  int ended() {
    for (int r = t_.rank + 1; r < t_.ranks; ++r) {
      Address& a = addresses_[size_t(r)];
      if (known(r) || a.pid_namespace != pid_namespace()) continue;
      Fd process(static_cast<int>(syscall(SYS_pidfd_open, a.pid, 0)));
      bool gone = process.get() < 0 && errno == ESRCH;
      pollfd end = {process.get(), POLLIN, 0};
      if (!gone && (process.get() < 0 || poll(&end, 1, 0) <= 0)) continue;
      return fail(t_, GT_DIED, r, "rank %d (process %d) ended before it connected to rank %d", r, a.pid, t_.rank);
    }
    return GT_OK;
  }

  int late() {
    std::string who;
    int first = -1;
    for (int r = t_.ranks - 1; r >= 0; --r)
      if (!known(r)) who = std::to_string(first = r) + (who.empty() ? "" : ", ") + who;
    return fail(t_, GT_TIMED_OUT, first, "not connected within %.0f s: rank %s", t_.timeout, who.c_str());
  }

  gt_transport& t_;
  double until_;
  bool valid_ = true;
  std::vector<Address> addresses_;
  std::vector<Fd> sockets_;    // to lower ranks, by rank
  std::vector<Fd> strangers_;  // that called, and have not said who they are
};

}  // namespace

std::string handshake_listen(gt_transport& t) {
  t.name = random_hex();
  t.nonce = random_hex();
  sockaddr_un name;
  socklen_t size = abstract(t.name.c_str(), name);
  t.listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (t.listener < 0 || bind(t.listener, reinterpret_cast<sockaddr*>(&name), size) || listen(t.listener, t.ranks + 16))
    return std::string("unix socket: ") + strerror(errno);
  t.address = "gt1:" + std::to_string(pid_namespace()) + ":" + std::to_string(getpid()) + ":" + t.name + ":" + t.nonce;
  return "";
}

int handshake_connect(gt_transport& t, const char* const* addresses) { return Handshake(t, addresses).run(); }

}  // namespace gt
