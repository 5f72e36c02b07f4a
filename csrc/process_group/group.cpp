// How ranks meet: each puts a card into the store, all read all cards, and whoever has met the others says so. Two
// rounds through the store, after which all share memory or none does.
#include "process_group/group.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "process_group/waiting.h"

namespace gt::collective {
namespace {

using Bytes = std::vector<uint8_t>;

// ---- meeting

// What every rank says about a topic, in the order of the ranks.
std::vector<std::string> exchange(c10d::Store& store, const char* topic, int rank, int ranks, const std::string& mine) {
  auto key = [&](int r) { return std::string("globaltensor/") + topic + "/" + std::to_string(r); };
  store.set(key(rank), Bytes(mine.begin(), mine.end()));
  std::vector<std::string> said;
  for (int r = 0; r < ranks; r++) {
    Bytes bytes = store.get(key(r));
    said.emplace_back(bytes.begin(), bytes.end());
  }
  return said;
}

// A rank's first words: which host, which process, and where it listens, or else what is wrong with it.
struct Card {
  std::string host, process, address, trouble;

  static Card mine(const gt_transport* transport, const char* error) {
    Card card;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> card.host;
    char space[64] = "";  // containers may have processes of the same number
    if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) *space = 0;
    card.process = std::string(space) + ":" + std::to_string(getpid());
    if (transport) card.address = gt_address(transport);
    else card.trouble = *error ? error : "no shared memory";
    return card;
  }
  std::string text() const { return host + "\n" + process + "\n" + address + "\n" + trouble; }
  explicit Card(const std::string& text) {
    std::istringstream lines(text);
    for (std::string* line : {&host, &process, &address, &trouble}) std::getline(lines, *line);
  }

 private:
  Card() = default;
};

// Why these ranks cannot share memory; "" where it is worth trying. The same on all ranks.
std::string objection(const std::vector<Card>& cards) {
  for (size_t r = 0; r < cards.size(); r++) {
    std::string name = "rank " + std::to_string(r);
    if (!cards[r].trouble.empty()) return name + ": " + cards[r].trouble;
    if (cards[r].host != cards[0].host) return name + " is on another host than rank 0";
    for (size_t q = 0; q < r; q++)
      if (cards[q].process == cards[r].process) return name + " and rank " + std::to_string(q) + " are one process";
  }
  return "";
}

// "" or what is wrong.
std::string connect(gt_transport* transport, const std::vector<Card>& cards) {
  std::vector<const char*> addresses;
  for (const Card& card : cards) addresses.push_back(card.address.c_str());
  if (gt_connect(transport, addresses.data()) == GT_OK) return "";
  char text[512] = "";
  gt_blame(transport, text, sizeof text);
  return *text ? text : "the ranks could not map each other's memory";
}

}  // namespace

std::string Call::words() const {
  std::string text = name;
  if (numel >= 0) text += " of " + std::to_string(numel) + " " + c10::toString(dtype);
  return text;
}

std::unique_ptr<Group> Group::meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int ranks,
                                   std::chrono::milliseconds timeout, std::string& why) {
  char error[512] = "";
  gt_transport* transport = gt_open(rank, ranks, std::chrono::duration<double>(timeout).count(), error, sizeof error);
  std::unique_ptr<Group> group(transport ? new Group(transport, ranks) : nullptr);
  std::vector<Card> cards;
  for (const std::string& text : exchange(*store, "card", rank, ranks, Card::mine(transport, error).text()))
    cards.emplace_back(text);
  why = objection(cards);
  if (!why.empty()) return nullptr;
  auto met = exchange(*store, "met", rank, ranks, connect(transport, cards) + "\n");  // a store may not keep nothing
  for (int r = 0; r < ranks && why.empty(); r++)
    if (met[r] != "\n") why = "rank " + std::to_string(r) + ": " + met[r].substr(0, met[r].size() - 1);
  return why.empty() ? std::move(group) : nullptr;
}

Group::~Group() { gt_close(transport_); }

// Whoever waits for its turn must not hold the interpreter's lock, which the other may need.
Group::Turn::Turn(Group* group) : group_(group) {
  if (!group) return;
  const std::thread::id me = std::this_thread::get_id();
  if (group->holder_.load(std::memory_order_relaxed) == me) {
    TORCH_CHECK(!group->waits_, "globaltensor: a collective was called by a signal handler, while another one waits");
    group_ = nullptr;
    return;
  }
  if (!group->turn_.try_lock()) {
    std::optional<pybind11::gil_scoped_release> unlocked;
    if (Py_IsInitialized() && PyGILState_Check()) unlocked.emplace();
    group->turn_.lock();
  }
  group->holder_.store(me, std::memory_order_relaxed);
}

Group::Turn::~Turn() {
  if (!group_) return;
  group_->holder_.store(std::thread::id(), std::memory_order_relaxed);
  group_->turn_.unlock();
}

template <class Run>
void Group::waiting(const Call& call, Run run) {
  Wait wait(call.timeout);
  const gt_hooks hooks{[](void* w) { static_cast<Wait*>(w)->enter(); },
                       [](void* w) { return static_cast<int>(static_cast<Wait*>(w)->over()); },
                       [](void* w) { static_cast<Wait*>(w)->leave(); }, &wait};
  waits_ = true;
  int status = run(&hooks);
  waits_ = false;
  if (C10_LIKELY(status == GT_OK)) return;
  wait.raise();
  fail(call, status, wait.late());
}

void Group::box(const Call& call, const gt_move* moves, int32_t count, uint64_t agreement) {
  waiting(call, [&](const gt_hooks* hooks) { return gt_box(transport_, moves, count, agreement, 0, hooks); });
}

void Group::barrier(const Call& call, uint64_t agreement) {
  waiting(call, [&](const gt_hooks* hooks) { return gt_barrier(transport_, agreement, hooks); });
}

// What went wrong, and where ranks call different things, what each of them calls.
void Group::fail(const Call& call, int status, bool late) {
  char text[1024] = "";
  gt_blame(transport_, text, sizeof text);
  std::string message = "globaltensor, " + call.words() + ": ";
  if (late) message += "not done within " + std::to_string(call.timeout.count()) + " ms. ";
  message += *text ? text : "failed with status " + std::to_string(status);
  if (status == GT_TIMED_OUT) message += ", until the timeout of the group";
  gt_tell(transport_, call.words().c_str());
  if (status == GT_DISAGREED) {
    constexpr size_t kEach = 256;
    std::vector<char> told(kEach * ranks_);
    gt_told(transport_, 1.0, told.data(), kEach);
    for (int r = 0; r < ranks_; r++)
      if (told[r * kEach]) message += "\n  rank " + std::to_string(r) + ": " + &told[r * kEach];
  }
  throw c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

}  // namespace gt::collective
