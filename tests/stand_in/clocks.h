// Logical time of the stand-in accelerator: streams, events, the memory they touch, and what the host has waited for.
//
// Kernels compute at once, on the host. What is asynchronous is their *order*: each stream has a vector clock, as has the
// host. A kernel that touches memory which another stream has touched, without having waited for it, is a race, whether
// or not the values are right today: it raises. What is copied to the host arrives when the host learns that it has. The
// device is kBehind kernels behind the host: the host learns without waiting what was queued before them, or by asking
// as often.
//
// Where the host goes ahead (STAND_IN_HOST_AHEAD), a collective that fails, or does not end within so many seconds, stops
// its stream for good. Kernels behind it, on all streams that wait for it, are queued and never run: they write nothing.
// A host that waits for one waits for ever.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace stand_in {

using Tick = uint64_t;

constexpr size_t kHost = 0;  // the host's line of time; streams follow
constexpr int64_t kMostStreams = 1024;  // of one device
constexpr int64_t kBehind = 16;

inline size_t line_of(const c10::Stream& stream) {
  return 1 + static_cast<size_t>(stream.device_index()) * kMostStreams + static_cast<size_t>(stream.id());
}

class VectorClock {
 public:
  Tick of(size_t line) const {
    auto found = ticks_.find(line);
    return found == ticks_.end() ? 0 : found->second;
  }
  Tick advance(size_t line) {
    return ++ticks_[line];
  }
  void join(const VectorClock& other) {
    for (auto& [line, tick] : other.ticks_) {
      auto& mine = ticks_[line];
      mine = std::max(mine, tick);
    }
  }

 private:
  std::unordered_map<size_t, Tick> ticks_;
};

// Bytes that a kernel reads or writes.
struct Range {
  const char* begin;
  const char* end;
};

inline Range range_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return {nullptr, nullptr};
  }
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  auto begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.itemsize())};
}

struct Access {
  Range range;
  size_t line;
  Tick tick;
  bool write;
  const char* kernel;
};

struct Block {
  size_t bytes;
  c10::DeviceIndex device;
  size_t home;  // the stream that the memory was allocated on
  std::vector<Access> accesses;
  std::vector<size_t> recorded;  // by record_stream
};

struct Event {
  VectorClock clock;
  size_t line = 0;
  int64_t recorded_ns = 0;
  int64_t launched = 0;  // kernels of all streams before it
};

// A copy between pinned memory and a device that the host has not yet waited for.
struct Copy {
  size_t line;
  Tick tick;
  at::Tensor host;
  at::Tensor values;  // to the host: what will be written; from the host: what was read
  bool to_host;
};

struct Counters {
  std::map<std::string, int64_t> kernels;
  std::map<std::string, int64_t> host_waits;
};

// All times of this process. Every method locks.
class Times {
 public:
  static Times& get();

  // Counts a kernel on `stream`. Raises if it touches what another stream has touched and it has not waited for.
  VectorClock launch(
      const c10::Stream& stream,
      const char* kernel,
      const std::vector<at::Tensor>& reads,
      const std::vector<at::Tensor>& writes);
  // True if what is queued on `stream` now never runs.
  bool is_stopped(const c10::Stream& stream);
  // What `clock` has reached on `stream` never ends.
  void stop(const c10::Stream& stream, const VectorClock& clock);
  // `stream` waits for all that `clock` knows.
  void wait(const c10::Stream& stream, const VectorClock& clock);
  // The host waits for all that `clock` knows. Raises where the host must not wait.
  void host_wait(const VectorClock& clock, const std::string& why);
  // The host waits for an event, unless it is done.
  void host_wait(const Event& event);
  // True if the host knows the event to be done, or learns it now.
  bool is_done(const Event& event);
  Event event(const c10::Stream& stream);
  VectorClock now(const c10::Stream& stream);
  VectorClock now(c10::DeviceIndex device);  // all its streams
  void add(const Copy& copy);

  void* allocate(size_t bytes, const c10::Stream& stream);
  void free(void* memory);
  void record_stream(const void* memory, const c10::Stream& stream);

  Counters take_counters();
  void forbid_host_waits(bool forbid);

 private:
  void check(Block& block, const Access& access, const VectorClock& clock);
  void settle();
  bool never_ends(const VectorClock& clock);
  VectorClock& clock_of(size_t line) {
    return clocks_[line];
  }

  std::recursive_mutex mutex_;
  std::unordered_map<size_t, VectorClock> clocks_;
  std::map<const char*, Block> blocks_;
  std::vector<Block> freed_;  // with accesses that the stream of the block had not waited for
  std::vector<Copy> copies_;
  std::vector<std::pair<size_t, Tick>> stopped_;  // lines of time, and where they ended
  Counters counters_;
  int64_t launched_ = 0;
  bool forbids_host_waits_ = false;
};

// Streams and devices of this thread.
c10::DeviceIndex current_device();
c10::Stream current_stream(c10::DeviceIndex device);

// A CPU tensor on the memory of a tensor of the device. It keeps that memory.
at::Tensor on_host(const at::Tensor& tensor);

void define_process_group(void* module);

}  // namespace stand_in
