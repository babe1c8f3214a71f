#include "clocks.h"

#include <c10/core/GradMode.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace stand_in {

namespace {

bool overlap(const Range& one, const Range& other) {
  return one.begin < other.end && other.begin < one.end;
}

bool within(const Range& inner, const Range& outer) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

std::string name_of(size_t line) {
  if (line == kHost) {
    return "the host";
  }
  return c10::str("stream ", (line - 1) % kMostStreams, " of device ", (line - 1) / kMostStreams);
}

}  // namespace

Times& Times::get() {
  static auto* times = new Times();  // never destroyed: tensors outlive it otherwise
  return *times;
}

VectorClock Times::launch(
    const c10::Stream& stream,
    const char* kernel,
    const std::vector<at::Tensor>& reads,
    const std::vector<at::Tensor>& writes) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto line = line_of(stream);
  auto& clock = clock_of(line);
  clock.join(clock_of(kHost));
  const auto tick = clock.advance(line);
  ++counters_.kernels[kernel];
  ++launched_;
  if (never_ends(clock)) {
    return clock;
  }
  const auto touch = [&](const at::Tensor& tensor, bool write) {
    const auto range = range_of(tensor);
    auto found = blocks_.upper_bound(range.begin);
    if (range.begin == nullptr || found == blocks_.begin()) {
      return;
    }
    check((--found)->second, {range, line, tick, write, kernel}, clock);
  };
  for (auto& tensor : reads) {
    touch(tensor, false);
  }
  for (auto& tensor : writes) {
    touch(tensor, true);
  }
  return clock;
}

void Times::check(Block& block, const Access& access, const VectorClock& clock) {
  auto& accesses = block.accesses;
  for (auto& before : accesses) {
    if ((access.write || before.write) && overlap(access.range, before.range) && clock.of(before.line) < before.tick) {
      TORCH_CHECK(
          false, "race: ", access.kernel, " on ", name_of(access.line), access.write ? " writes" : " reads", " what ", before.kernel,
          " on ", name_of(before.line), before.write ? " writes" : " reads", ", without having waited for it");
    }
  }
  const auto superseded = [&](const Access& before) {
    return within(before.range, access.range) && (access.write || (!before.write && before.line == access.line));
  };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), superseded), accesses.end());
  accesses.push_back(access);
}

bool Times::never_ends(const VectorClock& clock) {
  return std::any_of(stopped_.begin(), stopped_.end(), [&](const auto& end) { return clock.of(end.first) >= end.second; });
}

bool Times::is_stopped(const c10::Stream& stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return never_ends(clock_of(line_of(stream)));
}

void Times::stop(const c10::Stream& stream, const VectorClock& clock) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  stopped_.emplace_back(line_of(stream), clock.of(line_of(stream)));
}

void Times::wait(const c10::Stream& stream, const VectorClock& clock) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  clock_of(line_of(stream)).join(clock);
}

void Times::host_wait(const VectorClock& clock, const std::string& why) {
  std::unique_lock<std::recursive_mutex> lock(mutex_);
  if (never_ends(clock)) {
    lock.unlock();
    while (true) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  ++counters_.host_waits[why];
  TORCH_CHECK(!forbids_host_waits_, "the host waits for the device, where it must not: ", why);
  clock_of(kHost).join(clock);
  settle();
}

bool Times::is_done(const Event& event) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& host = clock_of(kHost);
  if (host.of(event.line) >= event.clock.of(event.line)) {
    return true;
  }
  if (never_ends(event.clock) || ++launched_ - event.launched < kBehind) {
    return false;
  }
  host.join(event.clock);
  settle();
  return true;
}

void Times::host_wait(const Event& event) {
  if (!is_done(event)) {
    host_wait(event.clock, "event.synchronize");
  }
}

Event Times::event(const c10::Stream& stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  return {clock_of(line_of(stream)), line_of(stream), now, launched_};
}

VectorClock Times::now(const c10::Stream& stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return clock_of(line_of(stream));
}

VectorClock Times::now(c10::DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  VectorClock all;
  for (auto& [line, clock] : clocks_) {
    if (line != kHost && (line - 1) / kMostStreams == static_cast<size_t>(device)) {
      all.join(clock);
    }
  }
  return all;
}

void Times::add(const Copy& copy) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  copies_.push_back(copy);
}

// Finishes the copies that the host knows to be done.
void Times::settle() {
  std::vector<Copy> waiting, done;
  for (auto& copy : copies_) {
    (clock_of(kHost).of(copy.line) >= copy.tick ? done : waiting).push_back(copy);
  }
  copies_ = std::move(waiting);
  for (auto& copy : done) {
    if (copy.to_host) {
      const c10::NoGradGuard guard;
      copy.host.copy_(copy.values);
    } else {
      const auto bytes = copy.values.nbytes();
      const auto same = std::memcmp(copy.host.contiguous().const_data_ptr(), copy.values.const_data_ptr(), bytes) == 0;
      TORCH_CHECK(same, "race: pinned memory was changed before the copy from it to the device was done");
    }
  }
}

void* Times::allocate(size_t bytes, const c10::Stream& stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto home = line_of(stream);
  auto& clock = clock_of(home);
  std::vector<Block> rest;
  for (auto& block : freed_) {
    if (block.home != home) {
      rest.push_back(block);
      continue;
    }
    for (auto& access : block.accesses) {
      const auto safe = access.line == home || clock.of(access.line) >= access.tick ||
          std::find(block.recorded.begin(), block.recorded.end(), access.line) != block.recorded.end();
      const auto kernel = std::string(access.kernel);
      const auto line = access.line;
      if (!safe) {
        freed_.clear();
        TORCH_CHECK(
            false, "race: memory of ", name_of(home), " is used again, which ", kernel, " on ", name_of(line),
            " may still touch; record_stream, or a wait before it is freed, would have prevented that");
      }
    }
  }
  freed_ = std::move(rest);
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, 64, std::max<size_t>(bytes, 64)) == 0, "no memory on the host");
  std::memset(memory, 0xFF, bytes);  // NaN for floating-point numbers
  blocks_[static_cast<const char*>(memory)] = {bytes, stream.device_index(), home, {}, {}};
  return memory;
}

void Times::free(void* memory) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto found = blocks_.find(static_cast<const char*>(memory));
  auto& block = found->second;
  const auto& clock = clock_of(block.home);
  for (auto& access : block.accesses) {
    if (access.line != block.home && clock.of(access.line) < access.tick) {
      freed_.push_back(block);
      break;
    }
  }
  blocks_.erase(found);
  std::free(memory);
}

void Times::record_stream(const void* memory, const c10::Stream& stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto found = blocks_.find(static_cast<const char*>(memory));
  if (found != blocks_.end()) {
    found->second.recorded.push_back(line_of(stream));
  }
}

Counters Times::take_counters() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto taken = std::move(counters_);
  counters_ = {};
  return taken;
}

void Times::forbid_host_waits(bool forbid) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  forbids_host_waits_ = forbid;
}

}  // namespace stand_in
