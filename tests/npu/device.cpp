// A second device for torch, made of host memory: everything of it happens on CPUs, but its tensors
// are of another device type, and its work is queued as that of an accelerator.
//
// - Every operation that has no kernel below runs the CPU's kernel on tensors that look at the same
//   memory (`run`). Tensors of the host beside those of the device are refused, as an accelerator
//   refuses them.
// - Each stream is a queue with a thread (`Queue`). In asynchronous mode, copies from and to pinned
//   memory, updates in place and collectives are queued, and begun as late as they may be: when
//   somebody waits for them, or when a delay is over. Other operations wait for their own stream
//   only, and their results arrive as late. So whoever forgets an event finds old values, always.
// - Memory is filled with NaNs when it is given out and when it is given back (`Pool`), which is
//   when the streams that use it, by allocation or record_stream, are through with it. A queued
//   task that touches memory that is no longer anybody's is a fault, which tests ask for.

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace npu {

using Clock = std::chrono::steady_clock;

constexpr c10::DeviceIndex DEVICES = 2;
constexpr int STREAMS = 1024; // of each device, so that none is shared; 0 is the default one
constexpr auto TYPE = c10::DeviceType::PrivateUse1;

std::atomic<int64_t> total{int64_t(4) << 30}; // bytes of each device
std::atomic<bool> is_asynchronous{false};
std::atomic<double> longest_delay{0.02};
std::atomic<int64_t> late_tasks{0};
std::atomic<bool> has_float64{false};

// ---- who waits ----------------------------------------------------------------------------------

std::mutex watcher_mutex;
std::shared_ptr<const Watcher> the_watcher;

void set_watcher(Watcher watcher) {
  std::lock_guard<std::mutex> hold(watcher_mutex);
  the_watcher = watcher ? std::make_shared<const Watcher>(std::move(watcher)) : nullptr;
}

// The host is about to wait for the device: said before any queue is locked.
void host_waits(const std::string& what) {
  std::shared_ptr<const Watcher> watcher;
  {
    std::lock_guard<std::mutex> hold(watcher_mutex);
    watcher = the_watcher;
  }
  if (watcher) {
    (*watcher)(what);
  }
}

// ---- faults -------------------------------------------------------------------------------------

std::mutex fault_mutex;
std::vector<std::string> found_faults;

void tell(std::string fault) {
  std::lock_guard<std::mutex> lock(fault_mutex);
  found_faults.push_back(std::move(fault));
}

std::vector<std::string> faults() {
  std::lock_guard<std::mutex> lock(fault_mutex);
  return std::exchange(found_faults, {});
}

// ---- queues -------------------------------------------------------------------------------------

class Queue {
 public:
  uint64_t put(
      std::function<void()> task, Haste haste, std::optional<Point> awaits = std::nullopt) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!is_asynchronous && given_ == done_) { // in the order of a CPU
      given_ += 1;
      lock.unlock();
      run(task);
      lock.lock();
      done_ += 1;
      changed_.notify_all();
      return done_;
    }
    auto due = Clock::now();
    if (haste == Haste::late) {
      late_tasks += 1;
      std::uniform_real_distribution<double> share(0.0, 1.0);
      double longest = longest_delay;
      due = std::isinf(longest) // only when somebody waits
          ? Clock::time_point::max()
          : due + std::chrono::duration_cast<Clock::duration>(
                std::chrono::duration<double>(longest * share(random_)));
    }
    tasks_.push_back({std::move(task), due, awaits});
    given_ += 1;
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { work(); }).detach();
    }
    changed_.notify_all();
    return given_;
  }

  uint64_t given() {
    std::lock_guard<std::mutex> lock(mutex_);
    return given_;
  }

  bool has_done(uint64_t number) {
    return done_.load() >= number;
  }

  void wait(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = std::max(wanted_, number);
    changed_.notify_all();
    changed_.wait(lock, [&] { return done_ >= number; });
    if (error_) {
      auto error = std::exchange(error_, nullptr);
      lock.unlock();
      std::rethrow_exception(error);
    }
  }

 private:
  struct Task {
    std::function<void()> act;
    Clock::time_point due;
    std::optional<Point> awaits;
  };

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      auto is_wanted = [&] { return wanted_ > done_; };
      changed_.wait_until(lock, tasks_.front().due, is_wanted);
      // To wait for another stream is no reason for it to hurry, unless somebody waits for this one.
      auto awaits = tasks_.front().awaits;
      while (awaits && !awaits->is_reached() && !is_wanted()) {
        changed_.wait_for(lock, std::chrono::milliseconds(1), is_wanted);
      }
      auto act = std::move(tasks_.front().act);
      tasks_.pop_front();
      lock.unlock();
      run(act);
      act = nullptr;
      lock.lock();
      done_ += 1;
      changed_.notify_all();
    }
  }

  void run(const std::function<void()>& act) {
    try {
      act();
    } catch (...) {
      std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) {
        error_ = std::current_exception();
      }
    }
  }

  std::mutex mutex_, error_mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::atomic<uint64_t> given_{0}, done_{0};
  uint64_t wanted_ = 0;
  bool has_thread_ = false;
  std::exception_ptr error_;
  std::minstd_rand random_{17};
};

// Never destroyed: threads may still wait in them when the process ends.
Queue* const queues = new Queue[DEVICES * STREAMS];
std::atomic<int> streams_made[DEVICES];

int number_of(c10::Stream stream) {
  return stream.device_index() * STREAMS + static_cast<int>(stream.id());
}

bool Point::is_reached() const {
  return queues[queue].has_done(number);
}

void Point::wait_on_host() const {
  if (!is_reached()) {
    queues[queue].wait(number);
  }
}

Point put(c10::Stream stream, std::function<void()> task, Haste haste) {
  int queue = number_of(stream);
  return {queue, queues[queue].put(std::move(task), haste)};
}

Point end_of(c10::Stream stream) {
  int queue = number_of(stream);
  return {queue, queues[queue].given()};
}

void follow(c10::Stream stream, Point point) {
  if (!point.is_reached() && point.queue != number_of(stream)) {
    auto wait = [point] { queues[point.queue].wait(point.number); };
    queues[number_of(stream)].put(wait, Haste::now, point);
  }
}

void drain(c10::Stream stream) {
  queues[number_of(stream)].wait(end_of(stream).number);
}

void synchronize(c10::DeviceIndex device) {
  for (int id = 0; id < STREAMS; ++id) {
    drain(c10::Stream(c10::Stream::UNSAFE, {TYPE, device}, id));
  }
}

void set_asynchronous(bool is_on) {
  for (c10::DeviceIndex device = 0; device < DEVICES; ++device) {
    synchronize(device);
  }
  is_asynchronous = is_on;
}

void set_total(int64_t nbytes) {
  total = nbytes;
}

void set_delay(double seconds) {
  longest_delay = seconds;
}

void sleep(double seconds) {
  auto stop = [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); };
  put(current_stream(-1), stop, Haste::now);
}

void set_has_float64(bool has) {
  has_float64 = has;
}

int64_t number_of_late_tasks() {
  return late_tasks;
}

// ---- the current device and stream --------------------------------------------------------------

thread_local c10::DeviceIndex the_device = 0;
thread_local int the_streams[DEVICES] = {0};

c10::DeviceIndex current_device() {
  return the_device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  device = device < 0 ? the_device : device;
  return c10::Stream(c10::Stream::UNSAFE, {TYPE, device}, the_streams[device]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto before = current_stream(stream.device_index());
  the_streams[stream.device_index()] = static_cast<int>(stream.id());
  return before;
}

c10::Stream new_stream(c10::DeviceIndex device) {
  device = device < 0 ? the_device : device;
  int id = 1 + streams_made[device]++ % (STREAMS - 1);
  return c10::Stream(c10::Stream::UNSAFE, {TYPE, device}, id);
}

void set_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < DEVICES, "invalid device ordinal ", int(device), " of npu");
  the_device = device;
}

// ---- memory -------------------------------------------------------------------------------------

struct Block {
  size_t nbytes;
  int device; // -1: pinned memory of the host
  std::vector<int> streams; // the queues that use it
  bool is_free = false; // nobody's, though queues may still work in it
  bool is_dead = false; // and no queue works in it any more
  std::vector<Point> last;
};

class Pool {
 public:
  char* take(size_t nbytes, int device) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    retire();
    if (device >= 0) {
      auto& used = used_[device];
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          used.current + int64_t(nbytes) <= total,
          "npu out of memory: tried to allocate ", nbytes, " bytes beside ", used.current);
      used.increase(nbytes);
      counts_[device].increase(1);
      reserved_[device].increase(std::max<int64_t>(0, used.current - reserved_[device].current));
    }
    void* place = nullptr;
    TORCH_CHECK(!posix_memalign(&place, 4096, std::max<size_t>(nbytes, 1)), "no memory");
    std::memset(place, 0xff, nbytes);
    Block block{nbytes, device};
    if (device >= 0) {
      block.streams.push_back(number_of(current_stream(device)));
    }
    blocks_[static_cast<char*>(place)] = std::move(block);
    return static_cast<char*>(place);
  }

  bool give_back(void* place) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto found = blocks_.find(static_cast<char*>(place));
    if (found == blocks_.end() || found->second.is_free) {
      return false;
    }
    auto& block = found->second;
    block.is_free = true;
    for (int queue : block.streams) {
      block.last.push_back({queue, queues[queue].given()});
    }
    if (block.device >= 0) {
      used_[block.device].decrease(block.nbytes);
      counts_[block.device].decrease(1);
    }
    leaving_.push_back(found->first);
    retire();
    return true;
  }

  void keep(const void* place, int queue) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (auto* block = block_of(place)) {
      for (int known : block->streams) {
        if (known == queue) {
          return;
        }
      }
      block->streams.push_back(queue);
    }
  }

  bool is_pinned(const void* place) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto* block = block_of(place);
    return block != nullptr && block->device < 0 && !block->is_dead;
  }

  int device_of(const void* place) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto* block = block_of(place);
    return block == nullptr ? -1 : block->device;
  }

  bool is_dead(const void* place) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    retire();
    auto* block = block_of(place);
    return block != nullptr && block->is_dead;
  }

  c10::CachingDeviceAllocator::DeviceStats stats(int device) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.active_bytes[0] = stats.requested_bytes[0] = used_[device];
    stats.allocation[0] = stats.active[0] = counts_[device];
    stats.reserved_bytes[0] = reserved_[device];
    return stats;
  }

  void reset(int device, bool peak) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (auto* stat : {&used_[device], &reserved_[device], &counts_[device]}) {
      peak ? stat->reset_peak() : stat->reset_accumulated();
    }
  }

  void empty() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    retire();
    for (int device = 0; device < DEVICES; ++device) {
      reserved_[device].decrease(reserved_[device].current - used_[device].current);
    }
  }

  size_t used(int device) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return used_[device].current;
  }

 private:
  Block* block_of(const void* place) {
    auto found = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(place)));
    if (found == blocks_.begin()) {
      return nullptr;
    }
    --found;
    auto beyond = found->first + std::max<size_t>(found->second.nbytes, 1);
    return place < static_cast<void*>(beyond) ? &found->second : nullptr;
  }

  // Fill what nobody uses any more with NaNs, and let go of it once no queue can touch it.
  void retire() {
    std::vector<char*> still;
    for (char* place : leaving_) {
      auto& block = blocks_[place];
      bool is_over = true;
      for (auto& point : block.last) {
        is_over = is_over && point.is_reached();
      }
      if (!is_over) {
        still.push_back(place);
        continue;
      }
      block.is_dead = true;
      std::memset(place, 0xff, block.nbytes);
      dead_.push_back(place);
      dead_nbytes_ += block.nbytes;
    }
    leaving_ = std::move(still);
    if (dead_nbytes_ < (size_t(1) << 23) && dead_.size() < 4096) {
      return;
    }
    for (int queue = 0; queue < DEVICES * STREAMS; ++queue) {
      if (!queues[queue].has_done(queues[queue].given())) {
        return;
      }
    }
    for (char* place : dead_) {
      blocks_.erase(place);
      std::free(place);
    }
    dead_.clear();
    dead_nbytes_ = 0;
  }

  std::recursive_mutex mutex_;
  std::map<char*, Block> blocks_;
  std::vector<char*> leaving_, dead_;
  size_t dead_nbytes_ = 0;
  c10::CachingAllocator::Stat used_[DEVICES], reserved_[DEVICES], counts_[DEVICES];
};

Pool& pool = *new Pool;
c10::Allocator* plain_allocator = nullptr;

void release(void* place) {
  if (!pool.give_back(place)) {
    plain_allocator->raw_deallocate(place);
  }
}

c10::DataPtr taken(size_t nbytes, int device, c10::Device told) {
  if (nbytes == 0) {
    return {nullptr, nullptr, &c10::detail::deleteNothing, told};
  }
  void* place = pool.take(nbytes, device);
  return {place, place, &release, told};
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return taken(nbytes, the_device, {TYPE, the_device});
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* out, const void* in, size_t nbytes) const override {
    default_copy_data(out, in, nbytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    pool.empty();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    pool.keep(data.get(), number_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return pool.stats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    pool.reset(device, false);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    pool.reset(device, true);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {std::max<int64_t>(0, total - int64_t(pool.used(device))), total};
  }
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return taken(nbytes, -1, {c10::kCPU});
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* out, const void* in, size_t nbytes) const override {
    default_copy_data(out, in, nbytes);
  }
};

// While a thread runs a CPU's kernel for a device, all memory that it takes is the device's.
thread_local int works_for = -1;

class HostMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return works_for < 0 ? plain_allocator->allocate(nbytes)
                         : taken(nbytes, works_for, {c10::kCPU});
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* out, const void* in, size_t nbytes) const override {
    default_copy_data(out, in, nbytes);
  }
};

DeviceMemory& device_memory = *new DeviceMemory;
PinnedMemory& pinned_memory = *new PinnedMemory;
HostMemory& host_memory = *new HostMemory;

struct WorksFor {
  explicit WorksFor(int device) : before(std::exchange(works_for, device)) {}
  ~WorksFor() {
    works_for = before;
  }
  int before;
};

struct OnDevice {
  explicit OnDevice(c10::DeviceIndex device) : before(the_device) {
    set_device(device < 0 ? the_device : device);
  }
  ~OnDevice() {
    the_device = before;
  }
  c10::DeviceIndex before;
};

// ---- tensors of the host that look at the device's memory ---------------------------------------

// As on Ascend's, Apple's and some of Intel's devices.
void refuse_double(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      has_float64 || (dtype != at::kDouble && dtype != at::kComplexDouble),
      "npu has no float64: make the tensor on the host, or of float32");
}

bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == TYPE;
}

using Storages = std::unordered_map<c10::StorageImpl*, c10::Storage>;

at::Tensor host_view_of(const at::Tensor& tensor, Storages& storages) {
  auto* own = tensor.storage().unsafeGetStorageImpl();
  auto& storage = storages[own];
  if (!storage) {
    storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(),
        own->nbytes(),
        c10::DataPtr(own->mutable_data(), c10::Device(c10::kCPU)),
        &host_memory,
        /*resizable=*/true));
  }
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  auto* base = tensor.unsafeGetTensorImpl();
  if (base->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  at::Tensor made(std::move(impl));
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

// Of tensors of the host too: a thread that lets go of one that Python knows asks for its lock.
at::Tensor host_view(const at::Tensor& tensor) {
  Storages storages;
  return host_view_of(tensor, storages);
}

void check(const std::vector<at::Tensor>& views, const std::string& who) {
  for (auto& view : views) {
    if (view.defined() && view.numel() && pool.is_dead(view.const_data_ptr())) {
      tell(c10::str(who, " works in memory that was given back: ", view.numel(), " elements of ",
                    view.dtype()));
    }
  }
}

void keep_until(const at::Tensor& tensor, c10::Stream stream) {
  pool.keep(tensor.storage().data(), number_of(stream));
}

// ---- random numbers -----------------------------------------------------------------------------

class Random final : public c10::GeneratorImpl {
 public:
  explicit Random(c10::DeviceIndex device, at::Generator inside)
      : c10::GeneratorImpl({TYPE, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inside(std::move(inside)) {}
  void set_current_seed(uint64_t seed) override {
    inside.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "npu's generators have no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "npu's generators have no offset");
  }
  uint64_t current_seed() const override {
    return inside.current_seed();
  }
  uint64_t seed() override {
    return inside.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inside.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inside.unsafeGetGeneratorImpl()->get_state();
  }
  at::Generator inside; // a CPU's

 private:
  Random* clone_impl() const override {
    return new Random(device().index(), inside.clone());
  }
};

at::Generator made_generator(c10::DeviceIndex device) {
  return at::make_generator<Random>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex each = 0; each < DEVICES; ++each) {
      made.push_back(made_generator(each));
    }
    return made;
  }();
  return all.at(device < 0 ? the_device : device);
}

const at::Generator& inside_of(const at::Generator& generator) {
  return static_cast<Random*>(generator.unsafeGetGeneratorImpl())->inside;
}

// Kernels that take no generator use the host's: the device's stands in for it meanwhile.
struct StandsIn {
  StandsIn(bool is_needed, c10::DeviceIndex device) : is_needed(is_needed), device(device) {
    if (is_needed) {
      auto host = at::detail::getDefaultCPUGenerator();
      before = host.get_state();
      host.set_state(inside_of(default_generator(device)).get_state());
    }
  }
  ~StandsIn() {
    if (is_needed) {
      auto host = at::detail::getDefaultCPUGenerator();
      auto own = inside_of(default_generator(device));
      own.set_state(host.get_state());
      host.set_state(before);
    }
  }
  bool is_needed;
  c10::DeviceIndex device;
  at::Tensor before;
};

// ---- running the CPU's kernels ------------------------------------------------------------------

const std::unordered_set<std::string> takes_indices = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};

// One call: its tensors of the device, and what looks at their memory meanwhile.
struct Call {
  explicit Call(const c10::OperatorHandle& op) : op(op), schema(op.schema()) {}

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  c10::DeviceIndex device = -1;
  Storages storages;
  std::unordered_map<c10::StorageImpl*, c10::Storage> own; // by the storage that looks at it
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals; // by the tensor that does
  std::vector<at::Tensor> views, hosts;

  void see(const at::Tensor& tensor) {
    if (is_here(tensor)) {
      auto index = tensor.device().index();
      TORCH_CHECK(
          device < 0 || device == index || tensor.dim() == 0,
          "Expected all tensors to be on the same device, but found npu:", int(device), " and npu:",
          int(index), " in ", schema.name());
      device = device < 0 ? index : device;
    } else if (tensor.defined()) {
      hosts.push_back(tensor);
    }
  }

  at::Tensor shown(const at::Tensor& tensor, bool is_written) {
    if (!is_here(tensor)) {
      TORCH_CHECK(
          !tensor.defined() || !is_written,
          "Expected all tensors to be on the same device, but ", schema.name(),
          " is to write from npu into a tensor on ", tensor.device());
      return tensor;
    }
    auto view = host_view_of(tensor, storages);
    own[view.storage().unsafeGetStorageImpl()] = tensor.storage();
    originals.emplace(view.unsafeGetTensorImpl(), tensor);
    views.push_back(view);
    return view;
  }

  // Tensors of the host that are no numbers have no place beside those of the device.
  void refuse_hosts() {
    if (takes_indices.count(schema.name())) {
      return;
    }
    for (auto& tensor : hosts) {
      TORCH_CHECK(
          tensor.dim() == 0,
          "Expected all tensors to be on the same device, but found at least two devices, npu:",
          int(device), " and ", tensor.device(), ", in ", schema.name());
    }
  }

  at::Tensor result(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != c10::kCPU) {
      return tensor;
    }
    auto known = originals.find(tensor.unsafeGetTensorImpl());
    if (known != originals.end()) {
      return known->second;
    }
    refuse_double(tensor.scalar_type());
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto& mine = own[storage];
    if (!mine) {
      mine = moved(tensor.storage());
    }
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        c10::Storage(mine), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.dtype());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      impl->set_wrapped_number(true);
    }
    at::Tensor made(std::move(impl));
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
  }

  // What the kernel has made becomes the device's.
  c10::Storage moved(const c10::Storage& storage) {
    auto* from = storage.unsafeGetStorageImpl();
    c10::DataPtr data;
    if (from->nbytes() && is_asynchronous) { // who does not wait for this stream finds NaNs
      OnDevice on(device);
      data = device_memory.allocate(from->nbytes());
      put(
          current_stream(device),
          [storage, place = data.get()] {
            std::memcpy(place, storage.data(), storage.nbytes());
          },
          Haste::late);
    } else if (from->nbytes() && from->data_ptr().get_deleter() != &release) {
      OnDevice on(device); // no memory of the pool's: a constant of torch's, or somebody's own
      data = device_memory.allocate(from->nbytes());
      std::memcpy(data.get(), from->data(), from->nbytes());
    } else {
      auto* place = from->mutable_data();
      auto* keeps = new c10::Storage(storage);
      data = c10::DataPtr(
          place, keeps, [](void* held) { delete static_cast<c10::Storage*>(held); },
          c10::Device(TYPE, device));
    }
    return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), from->nbytes(), std::move(data), &device_memory, true));
  }

  // Shapes that the kernel has changed, and memory that it has given more room.
  void settle() {
    for (auto& [own_impl, storage] : storages) {
      auto* view = storage.unsafeGetStorageImpl();
      if (view->data() != own_impl->data() || view->nbytes() != own_impl->nbytes()) {
        if (view->data() != own_impl->data()) {
          auto moved_storage = moved(storage);
          auto* from = moved_storage.unsafeGetStorageImpl();
          own_impl->set_data_ptr_noswap(std::move(from->mutable_data_ptr()));
        }
        own_impl->set_nbytes(view->nbytes());
      }
    }
    for (auto& view : views) {
      auto& original = originals.at(view.unsafeGetTensorImpl());
      if (view.sizes() != original.sizes() || view.strides() != original.strides() ||
          view.storage_offset() != original.storage_offset()) {
        original.unsafeGetTensorImpl()->set_sizes_and_strides(
            view.sizes(), view.strides(), view.storage_offset());
      }
    }
  }
};

template <class Act>
c10::IValue each_tensor(const c10::IValue& value, Act&& act) {
  if (value.isTensor()) {
    return act(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      made.push_back(act(tensor));
    }
    return made;
  }
  if (value.isList() && !value.isIntList() && !value.isDoubleList()) {
    auto list = value.toList();
    if (list.elementType()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
      c10::List<std::optional<at::Tensor>> made;
      for (const c10::IValue& one : value.toListRef()) {
        made.push_back(
            one.isNone() ? std::optional<at::Tensor>()
                         : std::optional<at::Tensor>(act(one.toTensor())));
      }
      return made;
    }
  }
  return value;
}

// Whether no value is read or written.
bool is_view(const c10::OperatorHandle& op) {
  auto& schema = op.schema();
  for (auto& argument : schema.arguments()) {
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      return false;
    }
  }
  for (auto& returned : schema.returns()) {
    if (returned.alias_info() == nullptr) {
      return false;
    }
  }
  return !schema.returns().empty();
}

// Whether nothing but values changes, so that nobody needs the result at once.
bool may_be_queued(const c10::OperatorHandle& op) {
  auto& schema = op.schema();
  if (schema.name().back() != '_' || op.hasTag(at::Tag::inplace_view) ||
      op.hasTag(at::Tag::nondeterministic_seeded)) {
    return false;
  }
  static const std::unordered_set<std::string> never = {
      "aten::resize_", "aten::resize_as_", "aten::set_", "aten::_resize_output_"};
  if (never.count(schema.name())) {
    return false;
  }
  for (auto& returned : schema.returns()) {
    if (returned.alias_info() == nullptr || !returned.alias_info()->isWrite()) {
      return false;
    }
  }
  for (auto& argument : schema.arguments()) {
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

// Whether the host is given something that hangs on values: a number, or a shape.
bool is_read(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
}

// Indices of the host are copied to the device, and masks are counted.
void tell_index(const c10::OperatorHandle& op, const c10::IValue& indices) {
  each_tensor(indices, [&](const at::Tensor& index) {
    auto dtype = index.defined() ? index.scalar_type() : at::kLong;
    if (index.defined() && !is_here(index) && index.dim()) {
      host_waits("copy to the device");
    }
    if (dtype == at::kBool || dtype == at::kByte) {
      host_waits(op.schema().name());
    }
    return index;
  });
}

// Whether the caller has said how long the result of `repeat_interleave` is, its last argument.
bool knows_size(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return op.schema().name() == "aten::repeat_interleave" && !stack.back().isNone();
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (takes_indices.count(op.schema().name())) {
    tell_index(op, (*stack)[stack->size() - op.schema().arguments().size() + 1]);
  } else if (is_read(op) && !knows_size(op, *stack)) {
    host_waits(op.schema().name());
  }
  Call call(op);
  auto& arguments = call.schema.arguments();
  size_t count = arguments.size(), first = stack->size() - count;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    each_tensor(value, [&](const at::Tensor& tensor) {
      call.see(tensor);
      return tensor;
    });
    if (value.isDevice() && value.toDevice().type() == TYPE) {
      call.device = call.device < 0 ? value.toDevice().index() : call.device;
      value = c10::Device(c10::kCPU);
    }
  }
  call.device = call.device < 0 ? the_device : call.device;
  call.refuse_hosts();
  bool takes_generator = false;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    auto* alias = arguments[i].alias_info();
    value = each_tensor(value, [&](const at::Tensor& tensor) {
      return call.shown(tensor, alias != nullptr && alias->isWrite());
    });
    auto& type = arguments[i].type();
    if (type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      takes_generator = true;
      auto given = value.isNone() ? default_generator(call.device) : value.toGenerator();
      TORCH_CHECK(
          given.device().type() == TYPE,
          "Expected a 'npu' device type for generator but found '", given.device().type(), "'");
      value = inside_of(given);
    }
  }
  auto stream = current_stream(call.device);
  if (is_asynchronous && may_be_queued(op)) {
    torch::jit::Stack later(stack->end() - count, stack->end());
    for (auto& value : later) { // the host may change its own at once
      value = each_tensor(value, [&](const at::Tensor& tensor) {
        bool is_host = tensor.defined() && !call.originals.count(tensor.unsafeGetTensorImpl());
        return is_host ? tensor.clone() : tensor;
      });
    }
    put(
        stream,
        [&op = call.op, views = call.views, later, device = call.device]() mutable {
          check(views, op.schema().name());
          at::AutoDispatchBelowADInplaceOrView guard;
          WorksFor works(device);
          op.callBoxed(&later);
        },
        Haste::late);
    std::vector<c10::IValue> results;
    size_t written = 0;
    for (size_t i = 0; i < count && results.size() < call.schema.returns().size(); ++i) {
      if (arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite()) {
        results.push_back((*stack)[first + i]);
        written += 1;
      }
    }
    torch::jit::drop(stack, count);
    for (auto& value : results) {
      stack->push_back(
          each_tensor(value, [&](const at::Tensor& tensor) { return call.result(tensor); }));
    }
    return;
  }
  if (!is_view(op)) {
    drain(stream);
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    WorksFor works(call.device);
    StandsIn random(
        !takes_generator && op.hasTag(at::Tag::nondeterministic_seeded), call.device);
    op.callBoxed(stack);
  }
  call.settle();
  size_t returned = call.schema.returns().size(), start = stack->size() - returned;
  for (size_t i = 0; i < returned; ++i) {
    auto& value = (*stack)[start + i];
    value = each_tensor(value, [&](const at::Tensor& tensor) { return call.result(tensor); });
  }
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run(op, stack);
}

// ---- kernels of its own -------------------------------------------------------------------------

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool> pinned,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  refuse_double(dtype.value_or(c10::get_default_dtype_as_scalartype()));
  OnDevice on(device ? device->index() : -1);
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  refuse_double(dtype.value_or(c10::get_default_dtype_as_scalartype()));
  OnDevice on(device ? device->index() : -1);
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

// From anywhere to anywhere; the host waits, unless its memory is pinned and it does not want to.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& out, bool non_blocking) {
  auto stream = current_stream((is_here(out) ? out : self).device().index());
  auto from = host_view(self), to = host_view(out);
  bool inside = is_here(self) && is_here(out);
  auto& host = is_here(self) ? out : self;
  bool is_pinned = !inside && host.numel() && pool.is_pinned(host.const_data_ptr());
  auto copy = [from, to] {
    check({from, to}, "a copy");
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  };
  if (is_asynchronous && (inside || (non_blocking && is_pinned))) {
    if (!inside) {
      keep_until(host, stream);
    }
    put(stream, copy, Haste::late);
  } else {
    if (!inside && !(non_blocking && is_pinned) && host.numel()) {
      host_waits(is_here(self) ? "copy to the host" : "copy to the device");
    }
    drain(stream);
    copy();
  }
  return out;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& out) {
  out.resize_(self.sizes());
  return copy_from(self, out, false);
}

at::Tensor& set_storage(
    at::Tensor& self,
    at::Storage storage,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(storage.device().type() == TYPE, "Expected a storage on npu, not on ", storage.device());
  impl->set_storage_keep_dtype(std::move(storage));
  std::vector<int64_t> strides = stride.vec();
  if (stride.empty()) {
    strides.assign(size.size(), 1);
    for (size_t i = size.size(); i-- > 1;) {
      strides[i - 1] = strides[i] * std::max<int64_t>(size[i], 1);
    }
  }
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t length = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, {length}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto none = at::empty({0}, self.options());
  return set_storage(self, none.storage(), 0, {0}, {});
}

void record_stream(at::Tensor& self, at::Stream stream) {
  keep_until(self, stream);
}

// ---- autocast -----------------------------------------------------------------------------------

void cast_first(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    value = each_tensor(value, [&](const at::Tensor& tensor) {
      return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, TYPE) : tensor;
    });
  }
  op.callBoxed(stack);
}

void to_lower(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_first(op, stack, at::autocast::get_autocast_dtype(TYPE));
}

void to_float(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_first(op, stack, at::kFloat);
}

// ---- streams, events, devices -------------------------------------------------------------------

struct Mark {
  Point point;
  std::shared_ptr<std::atomic<double>> seconds = std::make_shared<std::atomic<double>>(0.0);
};

double now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {TYPE, the_device};
  }
  void setDevice(c10::Device device) const override {
    set_device(device.has_index() ? device.index() : the_device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    the_device = device.has_index() ? device.index() : the_device;
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    auto index = device.has_index() ? device.index() : the_device;
    return c10::Stream(c10::Stream::UNSAFE, {TYPE, index}, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const {
    return &queues[number_of(stream)];
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return end_of(stream).is_reached();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits("stream");
    drain(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits("device");
    synchronize(device < 0 ? the_device : device);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (*event == nullptr) {
      *event = new Mark;
    }
    auto* mark = static_cast<Mark*>(*event);
    mark->seconds = std::make_shared<std::atomic<double>>(0.0);
    mark->point = put(stream, [seconds = mark->seconds] { *seconds = now(); }, Haste::now);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      follow(stream, static_cast<Mark*>(event)->point);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Mark*>(event)->point.is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      host_waits("event");
      static_cast<Mark*>(event)->point.wait_on_host();
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  double elapsedTime(void* earlier, void* later, const c10::DeviceIndex) const override {
    return 1e3 * (*static_cast<Mark*>(later)->seconds - *static_cast<Mark*>(earlier)->seconds);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory.recordStream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return the_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = the_device;
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return made_generator(device < 0 ? the_device : device);
  }
  bool isPinnedPtr(const void* data) const override {
    return pool.is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    return {TYPE, static_cast<c10::DeviceIndex>(pool.device_of(data))};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    OnDevice on(impl->device().index()); // the host does not wait
    auto data = device_memory.allocate(nbytes);
    auto common = std::min(nbytes, impl->nbytes());
    if (common) {
      auto copy = [out = data.get(), in = impl->data(), common] { std::memcpy(out, in, common); };
      put(current_stream(the_device), copy, Haste::late);
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Registered {
  Registered() {
    plain_allocator = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&host_memory, 100);
    c10::SetAllocator(TYPE, &device_memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  }
} registered;

} // namespace npu

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&npu::by_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &npu::empty);
  m.impl("empty_strided", &npu::empty_strided);
  m.impl("_copy_from", &npu::copy_from);
  m.impl("_copy_from_and_resize", &npu::copy_from_and_resize);
  m.impl("set_", &npu::set_nothing);
  m.impl("set_.source_Tensor", &npu::set_tensor);
  m.impl("set_.source_Storage", &npu::set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &npu::set_storage);
  m.impl("record_stream", &npu::record_stream);
  // What torch would make of other operations, though the CPU has a kernel.
  for (auto* name : {"native_layer_norm", "native_group_norm", "addr"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&npu::by_cpu>());
  }
  auto& all = c10::Dispatcher::singleton();
  for (auto& name : all.getAllOpNames()) {
    auto op = all.findOp(name);
    if (op && name.name.rfind("aten::", 0) == 0 &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(
            c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) {
      auto known = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      m.impl(known.c_str(), torch::CppFunction::makeFromBoxedFunction<&npu::by_cpu>());
    }
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto* name : {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&npu::to_lower>());
  }
  for (auto* name : {"mse_loss", "layer_norm", "softmax.int", "log_softmax.int"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&npu::to_float>());
  }
}
