// The device itself: memory, streams and events, random generators, and what torch asks of an accelerator.
#include "clocks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <set>

#include "generator.h"

namespace stand_in {

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;

c10::DeviceIndex device_count() {
  const auto* asked = std::getenv("STAND_IN_DEVICES");
  return static_cast<c10::DeviceIndex>(std::min(asked ? std::atoi(asked) : 2, kMostDevices));
}

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> this_stream{};
std::array<std::atomic<c10::StreamId>, kMostDevices> streams_made{};

// Memory

struct Memory {
  std::mutex mutex;
  std::map<void*, std::pair<c10::DeviceIndex, size_t>> sizes;
  std::array<c10::CachingAllocator::Stat, kMostDevices> allocated;
  std::array<size_t, kMostDevices> capacity;
  std::array<int64_t, kMostDevices> out_of_memory{};

  Memory() {
    capacity.fill(size_t{16} << 30);
  }
};

Memory& memory() {
  static auto* all = new Memory();
  return *all;
}

size_t rounded(size_t bytes) {
  return (bytes + 511) / 512 * 512;
}

void tell_profiler(void* pointer, c10::DeviceIndex device, int64_t change) {
  const auto allocated = static_cast<size_t>(memory().allocated[device].current);
  c10::reportMemoryUsageToProfiler(pointer, change, allocated, allocated, c10::Device(kDevice, device));
}

void free_device_memory(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto found = memory().sizes.find(pointer);
    memory().allocated[found->second.first].decrease(found->second.second);
    tell_profiler(pointer, found->second.first, -static_cast<int64_t>(found->second.second));
    memory().sizes.erase(found);
  }
  Times::get().free(pointer);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, current_device());
    if (bytes == 0) {
      return {nullptr, nullptr, &free_device_memory, device};
    }
    const auto taken = rounded(bytes);
    {
      std::lock_guard<std::mutex> lock(memory().mutex);
      auto& stat = memory().allocated[device.index()];
      const auto capacity = memory().capacity[device.index()];
      if (static_cast<size_t>(stat.current) + taken > capacity) {
        ++memory().out_of_memory[device.index()];
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "the stand-in device is out of memory. Tried to allocate ", taken, " bytes; ", stat.current, " of ",
            capacity, " are allocated.");
      }
      stat.increase(taken);
    }
    auto* pointer = Times::get().allocate(bytes, current_stream(device.index()));
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().sizes[pointer] = {device.index(), taken};
    tell_profiler(pointer, device.index(), static_cast<int64_t>(taken));
    return {pointer, pointer, &free_device_memory, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_device_memory;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Times::get().record_stream(pointer.get(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory().mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto& stat = memory().allocated[device];
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*each)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)] = stat;
    }
    stats.num_ooms = memory().out_of_memory[device];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().allocated[device].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().allocated[device].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory().mutex);
    const auto capacity = memory().capacity[device];
    return {capacity - static_cast<size_t>(memory().allocated[device].current), capacity};
  }
};

std::mutex pinned_mutex;
std::map<const char*, size_t>& pinned_blocks() {
  static auto* blocks = new std::map<const char*, size_t>();
  return *blocks;
}

void free_pinned_memory(void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned_blocks().erase(static_cast<const char*>(pointer));
  std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 64, std::max<size_t>(bytes, 64)) == 0, "no memory on the host");
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks()[static_cast<const char*>(pointer)] = std::max<size_t>(bytes, 64);
    return {pointer, pointer, &free_pinned_memory, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned_memory;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto found = pinned_blocks().upper_bound(static_cast<const char*>(pointer));
  if (found == pinned_blocks().begin()) {
    return false;
  }
  --found;
  return static_cast<const char*>(pointer) < found->first + found->second;
}

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

// Streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kDevice, this_device);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kDevice, this_device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "there is no device ", device, ", only ", static_cast<int>(device_count()), " of them");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      this_device = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index() < 0 ? this_device : device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device.index() < 0 ? this_device : device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const auto index = device.index() < 0 ? this_device : device.index();
    const auto id = ++streams_made[index] % kMostStreams;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, index), id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    this_stream[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    *static_cast<Event*>(*event) = Times::get().event(stream);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      Times::get().wait(stream, static_cast<Event*>(event)->clock);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Times::get().is_done(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      Times::get().host_wait(*static_cast<Event*>(event));
    }
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Times::get().is_done(Times::get().event(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Times::get().host_wait(Times::get().now(stream), "stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Times::get().host_wait(Times::get().now(device), "device.synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    Times::get().record_stream(pointer.get(), stream);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return 1e-6 * static_cast<double>(static_cast<Event*>(to)->recorded_ns - static_cast<Event*>(from)->recorded_ns);
  }
};

// What torch asks of an accelerator

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kDevice, device});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return this_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kDevice, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 || device >= device_count() ? this_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* generators = [] {
      auto* made = new std::vector<at::Generator>();
      for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
        made->push_back(at::make_generator<GeneratorImpl>(index));
      }
      return made;
    }();
    return generators->at(device < 0 ? this_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? this_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    auto made = bytes == 0 ? c10::DataPtr(nullptr, storage.device()) : device_allocator.allocate(bytes);
    if (const auto kept = std::min(bytes, storage.nbytes())) {
      std::memcpy(made.get(), storage.data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(bytes);
  }
};

Hooks hooks;

}  // namespace

bool is_pinned_memory(const void* pointer) {
  return is_pinned(pointer);
}

c10::DeviceIndex current_device() {
  return this_device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), this_stream[device]);
}

namespace {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

}  // namespace stand_in

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace stand_in;
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator, 100);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("device_count", [] { return static_cast<int>(device_count()); });
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_device", [](int device) { hooks.setCurrentDevice(static_cast<c10::DeviceIndex>(device)); });
  module.def("default_generator", [](int device) {
    return pybind11::reinterpret_borrow<pybind11::object>(
        THPGenerator_Wrap(hooks.getDefaultGenerator(static_cast<c10::DeviceIndex>(device))));
  });
  module.def("set_capacity", [](int device, size_t bytes) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().capacity.at(device) = bytes;
  });
  module.def("on_host", [](const at::Tensor& tensor) { return on_host(tensor); });
  module.def("forbid_host_waits", [](bool forbid) { Times::get().forbid_host_waits(forbid); });
  module.def("take_counters", [] {
    auto taken = Times::get().take_counters();
    return std::make_pair(taken.kernels, taken.host_waits);
  });
  define_process_group(&module);
}
