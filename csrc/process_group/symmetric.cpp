// torch's symmetric memory on CPUs: tensors that are at the same offset in a file of every rank.
//
// torch has the plug (SymmetricMemoryAllocator, one per device type) and the shapes of things; this fills it for the
// CPU. An allocation is a memfd: the tensor, then a signal pad of one word per channel and rank. A rendezvous tells the
// others, by the store, which file of which process it is; they open it through /proc, which the kernel allows to
// processes of the same user. A signal is a word that one rank turns from 0 to 1 and the other back again.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>

#include "common/gil_free_wait.h"
#include "process_group/bind.h"

namespace gt::collective {
namespace {

namespace sm = c10d::symmetric_memory;
using Signal = std::atomic<uint32_t>;

constexpr size_t kPage = 4096;
constexpr int kSpins = 2000, kYields = 200;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// A file in memory, mapped; of this process or of another one.
class MemoryFile {
 public:
  MemoryFile(int fd, size_t bytes) : fd_(fd), bytes_(bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) close(fd);
    TORCH_CHECK(data != MAP_FAILED, "symmetric memory: cannot map ", bytes, " bytes: ", std::strerror(errno));
    data_ = static_cast<char*>(data);
  }
  MemoryFile(const MemoryFile&) = delete;
  ~MemoryFile() {
    munmap(data_, bytes_);
    close(fd_);
  }

  static std::shared_ptr<MemoryFile> create(size_t bytes) {
    int fd = static_cast<int>(syscall(SYS_memfd_create, "globaltensor", 1u));  // 1: close on exec
    TORCH_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0, "symmetric memory: cannot create a file of ",
                bytes, " bytes in memory: ", std::strerror(errno));
    return std::make_shared<MemoryFile>(fd, bytes);
  }
  static std::shared_ptr<MemoryFile> of(int pid, int number, size_t bytes) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
    int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK(fd >= 0, "symmetric memory: cannot open ", path, ": ", std::strerror(errno),
                ". All ranks must be processes of one user on one host");
    return std::make_shared<MemoryFile>(fd, bytes);
  }

  char* data() const { return data_; }
  int fd() const { return fd_; }

 private:
  const int fd_;
  const size_t bytes_;
  char* data_;
};

// An allocation of this rank.
struct Block {
  size_t size, pad;  // of the tensor; of the signal pad, which begins at the page after it
  std::shared_ptr<MemoryFile> file;
  std::map<std::string, c10::intrusive_ptr<sm::SymmetricMemory>> handles;  // by group

  size_t pad_begin() const { return whole_pages(size); }
  size_t bytes() const { return pad_begin() + whole_pages(pad); }
};

// The same allocation of all ranks of a group.
class Symmetric final : public sm::SymmetricMemory {
 public:
  Symmetric(int rank, size_t size, size_t pad) : rank_(rank), size_(size), pad_size_(pad) {}
  ~Symmetric() override {
    for (int fd : processes_)
      if (fd >= 0) close(fd);
  }
  void add(const std::shared_ptr<MemoryFile>& file, size_t pad_begin, int process) {
    files_.push_back(file);
    processes_.push_back(process);
    buffers_.push_back(file->data());
    pads_.push_back(file->data() + pad_begin);
  }

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pads_; }
  void** get_buffer_ptrs_dev() override { return buffers_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pads_.data(); }
  size_t get_buffer_size() override { return size_; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return rank_; }
  int get_world_size() override { return static_cast<int>(files_.size()); }
  c10::Device get_device() override { return c10::Device(c10::kCPU); }
  bool world_within_direct_access() override { return true; }

  void barrier(int channel, size_t timeout_ms) override {
    for (int r = 0; r < get_world_size(); r++)
      if (r != rank_) put_signal(r, channel, timeout_ms);
    for (int r = 0; r < get_world_size(); r++)
      if (r != rank_) wait_signal(r, channel, timeout_ms);
  }
  void put_signal(int to, int channel, size_t timeout_ms) override {
    flip(signal(to, channel, rank_), 0, to, timeout_ms, "to take an earlier signal");
  }
  void wait_signal(int from, int channel, size_t timeout_ms) override {
    flip(signal(rank_, channel, from), 1, from, timeout_ms, "to send a signal");
  }

 private:
  // In the pad of `owner`, from rank `from`.
  Signal& signal(int owner, int channel, int from) {
    const int world = get_world_size();
    const size_t most = pad_size_ / sizeof(Signal) / world;
    TORCH_CHECK_INDEX(owner >= 0 && owner < world && from >= 0 && from < world, "symmetric memory: no such rank");
    TORCH_CHECK_INDEX(channel >= 0 && static_cast<size_t>(channel) < most, "symmetric memory: channel ", channel,
                      " of ", most, "; torch's set_signal_pad_size makes room for more");
    return static_cast<Signal*>(pads_[owner])[static_cast<size_t>(channel) * world + from];
  }

  // Flips the word from `before` into the other of 0 and 1, once it is `before`.
  void flip(Signal& word, uint32_t before, int other, size_t timeout_ms, const char* what) {
    auto flipped = [&] {
      uint32_t expected = before;
      return word.load(std::memory_order_relaxed) == before &&
             word.compare_exchange_strong(expected, 1 - before, std::memory_order_acq_rel);
    };
    for (int i = 0; i < kSpins; i++)
      if (flipped()) return;
    GilFreeWait wait{std::chrono::milliseconds(timeout_ms)};
    wait.enter();
    auto looked = GilFreeWait::Clock::now();
    for (int i = 0; !flipped(); i++) {
      if (i < kYields) sched_yield();
      else usleep(50);
      if (GilFreeWait::Clock::now() - looked < std::chrono::milliseconds(50)) continue;
      looked = GilFreeWait::Clock::now();
      const bool ended = has_ended(other);
      if (!wait.tick() && !ended) continue;
      wait.leave();
      wait.rethrow();
      TORCH_CHECK_WITH(DistBackendError, false, "symmetric memory: rank ", rank_, " waited for rank ", other, " ", what,
                       ended ? ", but that process has ended" : ", longer than " + std::to_string(timeout_ms) + " ms");
    }
  }

  bool has_ended(int rank) const {
    pollfd process{processes_[rank], POLLIN, 0};
    return process.fd >= 0 && poll(&process, 1, 0) > 0;
  }

  const int rank_;
  const size_t size_, pad_size_;
  std::vector<std::shared_ptr<MemoryFile>> files_;
  std::vector<int> processes_;  // to see them end; -1: this one
  std::vector<void*> buffers_, pads_;
};

// What a rank tells the others about its block.
struct BlockAddress {
  int pid = 0, fd = 0;
  size_t size = 0, pad = 0;

  std::string text() const {
    std::ostringstream out;
    out << pid << ' ' << fd << ' ' << size << ' ' << pad;
    return out.str();
  }
  static BlockAddress from(const std::vector<uint8_t>& bytes) {
    BlockAddress address;
    std::istringstream text(std::string(bytes.begin(), bytes.end()));
    text >> address.pid >> address.fd >> address.size >> address.pad;
    return address;
  }
};

class Allocator final : public sm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int, const std::optional<std::string>&) override {
    Block block{size, sm::get_signal_pad_size(), nullptr, {}};
    block.file = MemoryFile::create(block.bytes());
    std::lock_guard<std::mutex> guard(mutex_);
    void* data = block.file->data();
    blocks_.emplace(data, std::move(block));
    return data;
  }
  void free(void* data) override {
    std::lock_guard<std::mutex> guard(mutex_);
    blocks_.erase(data);
  }
  size_t get_alloc_size(void* data) override {
    std::lock_guard<std::mutex> guard(mutex_);
    return blocks_.at(data).size;
  }
  bool has_allocation(void* data) {  // torch 2.11 does not ask
    std::lock_guard<std::mutex> guard(mutex_);
    return blocks_.count(data);
  }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return "globaltensor"; }

  // Collective over the group: the n-th rendezvous of every rank belong together.
  c10::intrusive_ptr<sm::SymmetricMemory> rendezvous(void* data, const std::optional<std::string>& group) override {
    TORCH_CHECK_VALUE(group.has_value(), "symmetric memory: rendezvous needs a group");
    std::lock_guard<std::mutex> guard(mutex_);
    auto at = blocks_.find(data);
    if (at == blocks_.end()) return nullptr;
    Block& block = at->second;
    c10::intrusive_ptr<sm::SymmetricMemory>& handle = block.handles[*group];
    if (!handle) handle = map_peers(block, info(*group), rendezvous_[*group]++);
    return handle;
  }

 private:
  // What a program told torch about the group; most do not, for NCCL's groups do so themselves.
  static sm::GroupInfo info(const std::string& group) {
    try {
      return sm::get_group_info(group);
    } catch (const c10::Error&) {
      auto registered = c10d::resolve_process_group(group);
      return {registered->getRank(), registered->getSize(), registered->getStore()};
    }
  }

  static c10::intrusive_ptr<sm::SymmetricMemory> map_peers(const Block& block, const sm::GroupInfo& group, int number) {
    auto key = [&](int r) { return "globaltensor/symmetric/" + std::to_string(number) + "/" + std::to_string(r); };
    const std::string mine = BlockAddress{getpid(), block.file->fd(), block.size, block.pad}.text();
    group.store->set(key(group.rank), std::vector<uint8_t>(mine.begin(), mine.end()));
    auto handle = c10::make_intrusive<Symmetric>(group.rank, block.size, block.pad);
    for (int r = 0; r < group.world_size; r++) {
      const BlockAddress theirs = BlockAddress::from(group.store->get(key(r)));
      TORCH_CHECK_VALUE(theirs.size == block.size && theirs.pad == block.pad, "symmetric memory: rank ", r, " has ",
                        theirs.size, " bytes, rank ", group.rank, " has ", block.size);
      const bool own = r == group.rank;
      handle->add(own ? block.file : MemoryFile::of(theirs.pid, theirs.fd, block.bytes()), block.pad_begin(),
                  own ? -1 : static_cast<int>(syscall(SYS_pidfd_open, theirs.pid, 0)));
    }
    // A file may only be closed once all have opened it.
    const std::string ready = "globaltensor/symmetric/" + std::to_string(number) + "/ready";
    if (group.store->add(ready, 1) == group.world_size) group.store->set(ready + "/all", std::vector<uint8_t>{1});
    group.store->wait({ready + "/all"});
    return handle;
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::map<std::string, int> rendezvous_;  // how many of each group there were
};

void enable() {
  if (!sm::has_allocator(c10::kCPU)) sm::register_allocator(c10::kCPU, c10::make_intrusive<Allocator>());
}

}  // namespace
}  // namespace gt::collective

namespace gt {

void bind_symmetric_memory(pybind11::module_& module) {
  module.def("enable_symmetric_memory", &collective::enable, "Let torch's symmetric memory work on CPUs.");
}

}  // namespace gt
