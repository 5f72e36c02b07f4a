// How the ranks of a group connect: each puts its address into the store, all read all addresses, and each says whether
// it could map the others' memory. Two rounds through the store, after which all share memory or none does.
#include "process_group/group.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "common/gil_free_wait.h"

namespace gt::collective {
namespace {

using Bytes = std::vector<uint8_t>;

// ---- connecting

// What every rank says about a topic, in the order of the ranks.
std::vector<std::string> exchange(c10d::Store& store, const char* topic, int rank, int ranks, const std::string& mine) {
  auto key = [&](int r) { return std::string("globaltensor/") + topic + "/" + std::to_string(r); };
  store.set(key(rank), Bytes(mine.begin(), mine.end()));
  std::vector<std::string> replies;
  for (int r = 0; r < ranks; r++) {
    Bytes bytes = store.get(key(r));
    replies.emplace_back(bytes.begin(), bytes.end());
  }
  return replies;
}

// What a rank tells the others first: its host, its process, where it listens, or else what is wrong with it.
struct RankInfo {
  std::string host, process, address, trouble;

  static RankInfo mine(const gt_transport* transport, const char* error) {
    RankInfo info;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> info.host;
    char space[64] = "";  // containers may have processes of the same number
    if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) *space = 0;
    info.process = std::string(space) + ":" + std::to_string(getpid());
    if (transport) info.address = gt_address(transport);
    else info.trouble = *error ? error : "no shared memory";
    return info;
  }
  std::string text() const { return host + "\n" + process + "\n" + address + "\n" + trouble; }
  explicit RankInfo(const std::string& text) {
    std::istringstream lines(text);
    for (std::string* line : {&host, &process, &address, &trouble}) std::getline(lines, *line);
  }

 private:
  RankInfo() = default;
};

// Why these ranks cannot share memory; "" where it is worth trying. The same on all ranks.
std::string why_not_shared(const std::vector<RankInfo>& infos) {
  for (size_t r = 0; r < infos.size(); r++) {
    std::string name = "rank " + std::to_string(r);
    if (!infos[r].trouble.empty()) return name + ": " + infos[r].trouble;
    if (infos[r].host != infos[0].host) return name + " is on another host than rank 0";
    for (size_t q = 0; q < r; q++)
      if (infos[q].process == infos[r].process) return name + " and rank " + std::to_string(q) + " are one process";
  }
  return "";
}

// "" or what is wrong.
std::string map_peers(gt_transport* transport, const std::vector<RankInfo>& infos) {
  std::vector<const char*> addresses;
  for (const RankInfo& info : infos) addresses.push_back(info.address.c_str());
  if (gt_connect(transport, addresses.data()) == GT_OK) return "";
  char text[512] = "";
  gt_blame(transport, text, sizeof text);
  return *text ? text : "the ranks could not map each other's memory";
}

}  // namespace

std::string CollectiveCall::words() const {
  std::string text = name;
  if (numel >= 0) text += " of " + std::to_string(numel) + " " + c10::toString(dtype);
  return text;
}

std::unique_ptr<Group> Group::connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int ranks,
                                   std::chrono::milliseconds timeout, std::string& why) {
  char error[512] = "";
  gt_transport* transport = gt_open(rank, ranks, std::chrono::duration<double>(timeout).count(), error, sizeof error);
  std::unique_ptr<Group> group(transport ? new Group(transport, ranks) : nullptr);
  std::vector<RankInfo> infos;
  for (const std::string& text : exchange(*store, "info", rank, ranks, RankInfo::mine(transport, error).text()))
    infos.emplace_back(text);
  why = why_not_shared(infos);
  if (!why.empty()) return nullptr;
  // Never an empty value, which some stores do not keep.
  auto replies = exchange(*store, "connected", rank, ranks, map_peers(transport, infos) + "\n");
  for (int r = 0; r < ranks && why.empty(); r++)
    if (replies[r] != "\n") why = "rank " + std::to_string(r) + ": " + replies[r].substr(0, replies[r].size() - 1);
  return why.empty() ? std::move(group) : nullptr;
}

Group::~Group() { gt_close(transport_); }

// Whoever waits for the lock must not hold the interpreter's lock, which the other may need.
Group::CallLock::CallLock(Group* group) : group_(group) {
  if (!group) return;
  const std::thread::id me = std::this_thread::get_id();
  if (group->holder_.load(std::memory_order_relaxed) == me) {
    TORCH_CHECK(!group->waits_, "globaltensor: a collective was called by a signal handler, while another one waits");
    group_ = nullptr;
    return;
  }
  if (!group->lock_.try_lock()) {
    std::optional<pybind11::gil_scoped_release> unlocked;
    if (Py_IsInitialized() && PyGILState_Check()) unlocked.emplace();
    group->lock_.lock();
  }
  group->holder_.store(me, std::memory_order_relaxed);
}

Group::CallLock::~CallLock() {
  if (!group_) return;
  group_->holder_.store(std::thread::id(), std::memory_order_relaxed);
  group_->lock_.unlock();
}

template <class Run>
void Group::waiting(const CollectiveCall& call, Run run) {
  GilFreeWait wait(call.timeout);
  waits_ = true;
  int status = run(wait.hooks());
  waits_ = false;
  if (C10_LIKELY(status == GT_OK)) return;
  wait.rethrow();
  fail(call, status, wait.timed_out());
}

void Group::run_moves(const CollectiveCall& call, const gt_move* moves, int32_t count, uint64_t agreement) {
  waiting(call, [&](const gt_hooks* hooks) { return gt_run_moves(transport_, moves, count, agreement, 0, hooks); });
}

void Group::barrier(const CollectiveCall& call, uint64_t agreement) {
  waiting(call, [&](const gt_hooks* hooks) { return gt_barrier(transport_, agreement, hooks); });
}

// What went wrong, and where ranks call different things, what each of them calls.
void Group::fail(const CollectiveCall& call, int status, bool timed_out) {
  char text[1024] = "";
  gt_blame(transport_, text, sizeof text);
  std::string message = "globaltensor, " + call.words() + ": ";
  if (timed_out) message += "not done within " + std::to_string(call.timeout.count()) + " ms. ";
  message += *text ? text : "failed with status " + std::to_string(status);
  if (status == GT_TIMED_OUT) message += ", until the timeout of the group";
  gt_report(transport_, call.words().c_str());
  if (status == GT_DISAGREED) {
    constexpr size_t kEach = 256;
    std::vector<char> reports(kEach * ranks_);
    gt_collect_reports(transport_, 1.0, reports.data(), kEach);
    for (int r = 0; r < ranks_; r++)
      if (reports[r * kEach]) message += "\n  rank " + std::to_string(r) + ": " + &reports[r * kEach];
  }
  throw c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

}  // namespace gt::collective
