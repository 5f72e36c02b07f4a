// A device for torch's key PrivateUse1 that stands for any accelerator: several devices whose memory is the host's.
//
// Its kernels are the CPU's: one boxed fallback lends them the memory of a call's tensors and takes the results back.
// Otherwise that memory is locked (mprotect), so that who reads it from the CPU, as if it were ordinary memory, ends
// by SIGSEGV, and who mixes tensors of two devices in an op gets the error that an accelerator gives.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <unistd.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

c10::DeviceIndex device_count() {
  const char* text = std::getenv("STAND_IN_DEVICES");
  return static_cast<c10::DeviceIndex>(text ? std::atoi(text) : 4);
}
thread_local c10::DeviceIndex current = 0;

// ---- memory
struct Block { size_t bytes; int users, file; };
constexpr size_t kShared = 1 << 20;                  // from here on, memory is of a file, which others can map
std::mutex mutex;
int lent_whole = 0;                                  // calls of kernels that get bare addresses
std::map<char*, Block>& blocks() {
  static auto* all = new std::map<char*, Block>();
  return *all;
}

void lend(char* at, int users) {                     // +1: a kernel begins to use it, -1: it has ended
  std::lock_guard<std::mutex> lock(mutex);
  auto found = blocks().find(at);
  if (found == blocks().end()) return;
  Block& block = found->second;
  const bool before = block.users > 0;
  block.users += users;
  if (before != (block.users > 0)) mprotect(at, block.bytes, block.users > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void release(void* at) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = blocks().find(static_cast<char*>(at));
  munmap(at, found->second.bytes);
  if (found->second.file >= 0) close(found->second.file);
  blocks().erase(found);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, current);
    if (!bytes) return {nullptr, device};
    bytes = (bytes + 4095) / 4096 * 4096;
    const int file = bytes < kShared ? -1 : memfd_create("stand-in", MFD_CLOEXEC);
    TORCH_CHECK(file < 0 || ftruncate(file, static_cast<off_t>(bytes)) == 0, "the stand-in cannot share memory");
    void* at = mmap(nullptr, bytes, PROT_NONE, file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, at != MAP_FAILED, "the stand-in has no memory for ", bytes, " bytes");
    std::lock_guard<std::mutex> lock(mutex);
    blocks()[static_cast<char*>(at)] = {bytes, lent_whole, file};
    if (lent_whole) mprotect(at, bytes, PROT_READ | PROT_WRITE);
    return {at, at, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    lend(static_cast<char*>(to), 1), lend(static_cast<char*>(const_cast<void*>(from)), 1);
    memcpy(to, from, bytes);
    lend(static_cast<char*>(to), -1), lend(static_cast<char*>(const_cast<void*>(from)), -1);
  }
} allocator;

// ---- devices, streams, generators
thread_local int64_t current_stream[64];
std::map<std::pair<int64_t, int64_t>, int> waits;       // of the one stream for the other

c10::Device indexed(c10::Device device) { return {kDevice, device.has_index() ? device.index() : current}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "the stand-in has no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    device = indexed(device);
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, indexed(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> last = 0;
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), ++last);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  // Kernels end before they return, so there is nothing to order; but who waits for whom can be asked.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(stream.id() + 1);
  }
  void block(void* event, const c10::Stream& stream) const override {
    waits[std::pair(stream.id(), reinterpret_cast<int64_t>(event) - 1)]++;
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) { stand_on(c10::Device(kDevice, index)); }
  void stand_on(c10::Device device) { device_ = device; }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex i = 0; i < device_count(); i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }());
  return all->at(index < 0 ? current : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard on(storage.device());
    c10::DataPtr data = allocator.allocate(bytes);
    if (data.get() && storage.data())
      allocator.copy_data(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

// ---- kernels: those of the CPU
bool is_here(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }

// One call: for each of its tensors one of the CPU in the same memory, which is lent for so long.
class Lent {
 public:
  ~Lent() {
    for (const Loan& loan : loans_) lend(loan.at, -1);
  }

  at::Tensor cpu(const at::Tensor& t) {
    if (!is_here(t)) return t;
    for (const Loan& loan : loans_)
      if (loan.own.is_same(t)) return loan.cpu;
    if (!device_) device_ = t.device();
    auto* at = static_cast<char*>(const_cast<void*>(t.storage().data()));
    lend(at, 1);
    c10::Storage storage = storage_of(t, at);
    at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    lie_as(alias, t);
    loans_.push_back({t, alias, at});
    return alias;
  }

  // What an op that was given such tensors returned: one of them, a view of one, or new.
  at::Tensor own(const at::Tensor& result) {
    if (!result.defined() || result.device().type() != c10::kCPU) return result;
    for (const Loan& loan : loans_)
      if (loan.cpu.is_same(result)) return loan.own;
    for (const Loan& loan : loans_) {
      if (!loan.cpu.storage().is_alias_of(result.storage())) continue;
      at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(loan.own.storage()), loan.own.key_set(), result.dtype());
      lie_as(view, result);
      return view;
    }
    at::Tensor made = at::detail::empty_strided_generic(
        result.sizes(), result.strides(), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        result.scalar_type());
    if (made.storage().nbytes() && result.storage().data()) {
      const auto* from = static_cast<const char*>(result.storage().data()) +
                         result.storage_offset() * result.itemsize();
      allocator.copy_data(const_cast<void*>(made.storage().data()), from, made.storage().nbytes());
    }
    lie_as(made, result, 0);
    return made;
  }

  // What the op did to the tensors themselves: memory of another size, other sizes and strides.
  void take_back() {
    for (Loan& loan : loans_) {
      const auto& storage = loan.cpu.storage();
      if (storage.data() != loan.at || storage.nbytes() != loan.own.storage().nbytes()) {
        const c10::DeviceGuard on(loan.own.device());
        c10::DataPtr data = allocator.allocate(storage.nbytes());
        if (data.get()) allocator.copy_data(data.get(), storage.data(), storage.nbytes());
        lend(std::exchange(loan.at, nullptr), -1);
        loan.own.storage().set_data_ptr_noswap(std::move(data));
        loan.own.storage().set_nbytes(storage.nbytes());
      }
      if (loan.cpu.sizes() != loan.own.sizes() || loan.cpu.strides() != loan.own.strides()) lie_as(loan.own, loan.cpu);
    }
  }

  std::optional<c10::Device> device() const { return device_; }

 private:
  struct Loan { at::Tensor own, cpu; char* at; };
  std::vector<Loan> loans_;
  std::optional<c10::Device> device_;

  c10::Storage storage_of(const at::Tensor& t, char* at) {
    for (const Loan& loan : loans_)                  // two views of one storage are that for the CPU, too
      if (loan.own.storage().is_alias_of(t.storage())) return loan.cpu.storage();
    return c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                        c10::DataPtr(at, c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
  }
  static void lie_as(const at::Tensor& t, const at::Tensor& like, int64_t offset = -1) {
    t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                   offset < 0 ? like.storage_offset() : offset);
    t._set_conj(like.is_conj());
    t._set_neg(like.is_neg());
  }
};

// One device for all, as accelerators have it: of the CPU only numbers in tensors, and what indexes.
void check_devices(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  const std::string& name = op.schema().name();
  if (name.rfind("aten::_foreach", 0) == 0) return;
  std::optional<c10::Device> first;
  auto look = [&](const at::Tensor& t, bool may_be_cpu) {
    if (!t.defined() || (!is_here(t) && (t.dim() == 0 || may_be_cpu))) return;
    if (!first) first = t.device();
    TORCH_CHECK(t.device() == *first, name, ": expected all tensors to be on the same device, but found at least two, ",
                *first, " and ", t.device());
  };
  for (const c10::IValue& arg : args) {
    if (arg.isTensor()) look(arg.toTensor(), false);
    if (arg.isTensorList())
      for (const at::Tensor& t : arg.toTensorVector()) look(t, false);
    if (arg.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : arg.toOptionalTensorVector())
        if (t) look(*t, true);
  }
}

// The random numbers of an op come from the generator that it is given, or from its device's default one.
class Drawing {
 public:
  Drawing(const c10::OperatorHandle& op, c10::IValue* args, c10::Device device) {
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    generator_ = default_generator(device.index());
    for (size_t i = 0; i < op.schema().arguments().size(); i++)
      if (args[i].isGenerator()) generator_ = args[i].toGenerator(), at_ = &args[i];
    if (generator_.device().type() != kDevice) return;
    device_ = generator_.device();
    lent()->stand_on(c10::Device(c10::kCPU));
    if (at_) return;
    std::lock_guard<std::mutex> lock(of_cpu().mutex());
    before_ = of_cpu().get_state();
    of_cpu().set_state(generator_.get_state());
  }
  ~Drawing() {
    if (!device_) return;
    lent()->stand_on(*device_);
    if (at_) return;
    std::lock_guard<std::mutex> lock(of_cpu().mutex());
    generator_.set_state(of_cpu().get_state());
    of_cpu().set_state(before_);
  }

 private:
  at::Generator generator_;
  c10::IValue* at_ = nullptr;
  std::optional<c10::Device> device_;
  at::Tensor before_;

  Generator* lent() { return static_cast<Generator*>(generator_.unsafeGetGeneratorImpl()); }
  static at::Generator of_cpu() { return at::detail::getDefaultCPUGenerator(); }
};

template <class F> c10::List<at::Tensor> each(const c10::IValue& tensors, const F& f) {
  c10::List<at::Tensor> results;
  for (const at::Tensor& t : tensors.toTensorVector()) results.push_back(f(t));
  return results;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size(), first = stack->size() - count;
  check_devices(op, c10::ArrayRef<c10::IValue>(stack->data() + first, count));
  Lent lent;
  std::optional<c10::Device> asked;
  for (size_t i = first; i < stack->size(); i++) {
    c10::IValue& arg = (*stack)[i];
    if (arg.isTensor()) {
      arg = lent.cpu(arg.toTensor());
    } else if (arg.isTensorList()) {
      arg = each(arg, [&](const at::Tensor& t) { return lent.cpu(t); });
    } else if (arg.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : arg.toOptionalTensorVector())
        list.push_back(t ? std::optional<at::Tensor>(lent.cpu(*t)) : t);
      arg = list;
    } else if (arg.isDevice() && arg.toDevice().type() == kDevice) {
      asked = arg.toDevice();
      arg = c10::Device(c10::kCPU);
    }
  }
  const c10::Device device = lent.device().value_or(asked.value_or(c10::Device(kDevice, current)));
  const c10::DeviceGuard on(device);
  {
    Drawing drawing(op, stack->data() + first, device);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  lent.take_back();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
    c10::IValue& result = (*stack)[i];
    if (result.isTensor()) {
      result = lent.own(result.toTensor());
    } else if (result.isTensorList()) {
      result = each(result, [&](const at::Tensor& t) { return lent.own(t); });
    }
  }
}

// ---- what is not an op of the CPU
at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic_symint(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_symint_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  Lent lent;
  lent.cpu(to).copy_(lent.cpu(from));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Tensor& set_storage(at::Tensor& t, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  }
  return t;
}
at::Tensor& set_whole_storage(at::Tensor& t, c10::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / t.itemsize());
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_storage_offset(0);
  t.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return t;
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(source.storage()));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return t;
}
at::Tensor& set_nothing(at::Tensor& t) {
  const c10::DeviceGuard on(t.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  return set_whole_storage(t, std::move(none));
}

// torch asks a backend of its own for these by names of their own.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  Lent lent;
  const auto cpu_bias = bias ? std::optional<at::Tensor>(lent.cpu(*bias)) : std::nullopt;
  const c10::DeviceGuard on(x.device());
  return lent.own(at::convolution_symint(lent.cpu(x), lent.cpu(weight), cpu_bias, stride, padding, dilation, transposed,
                                         output_padding, groups));
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  Lent lent;
  const c10::SymInt channels = grad.sym_size(1);
  const c10::DeviceGuard on(x.device());
  auto [for_x, for_weight, for_bias] = at::convolution_backward_symint(
      lent.cpu(grad), lent.cpu(x), lent.cpu(weight), c10::SymIntArrayRef(&channels, 1), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {lent.own(for_x), lent.own(for_weight), lent.own(for_bias)};
}

const bool registered = [] {
  c10::SetAllocator(kDevice, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// For kernels that get bare addresses: all memory is lent between the two.
extern "C" __attribute__((visibility("default"))) void stand_in_lend(int users) {
  std::lock_guard<std::mutex> lock(mutex);
  lent_whole += users;
  for (auto& [at, block] : blocks()) {
    const bool before = block.users > 0;
    block.users += users;
    if (before != (block.users > 0)) mprotect(at, block.bytes, block.users > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}

// The file of the block that an address is in, and where in it that is; -1: others cannot map it.
extern "C" __attribute__((visibility("default"))) int stand_in_file(char* at, size_t* offset, size_t* bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = blocks().upper_bound(at);
  if (found == blocks().begin()) return -1;
  --found;
  *offset = static_cast<size_t>(at - found->first), *bytes = found->second.bytes;
  return *offset < *bytes ? found->second.file : -1;
}

// How often one stream was told to wait for another.
extern "C" __attribute__((visibility("default"))) int stand_in_waits(int64_t stream, int64_t of) {
  return waits[std::pair(stream, of)];
}
