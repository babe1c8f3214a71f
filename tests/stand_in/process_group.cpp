// Collectives of the device: Gloo on the same memory, on a stream of the group's own.
#include "clocks.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <optional>
#include <sstream>
#include <thread>

namespace stand_in {

namespace {

using c10d::Backend;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors made;
  for (auto& tensor : tensors) {
    made.push_back(tensor.is_cpu() ? tensor : stand_in::on_host(tensor));
  }
  return made;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> made;
  for (auto& list : lists) {
    made.push_back(on_host(list));
  }
  return made;
}

Tensors joined(const std::vector<Tensors>& lists) {
  Tensors all;
  for (auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

// Seconds after which the host goes on although a collective has not ended. None: it stays until Gloo is done.
std::optional<double> host_ahead() {
  static const auto seconds = [] {
    const auto* asked = std::getenv("STAND_IN_HOST_AHEAD");
    return asked ? std::optional<double>(std::atof(asked)) : std::nullopt;
  }();
  return seconds;
}

// What the backend notes of its collectives, as NCCL does: Gloo's own recorder is not the device's.
class FlightRecorder {
 public:
  struct Entry {
    size_t id;
    std::string group;
    std::string description;
    uint64_t collectives;
    uint64_t transfers;
    std::string name;
    Tensors inputs;  // without values
    int64_t created_ns;
    bool is_transfer;
    bool is_done;
    WorkPtr work;  // until it is done: it holds tensors

    void look() {
      if (work && work->isCompleted()) {
        is_done = true;
        work.reset();
      }
    }
  };

  static FlightRecorder& get() {
    static auto* recorder = new FlightRecorder();
    return *recorder;
  }

  size_t add(Entry entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    entry.id = next_++;
    entries_.push_back(std::move(entry));
    if (entries_.size() > 2000) {
      entries_.pop_front();
    }
    return next_ - 1;
  }

  void set_work(size_t id, const WorkPtr& work) {
    change(id, [&](Entry& entry) { entry.work = work; });
  }

  void set_done(size_t id) {
    change(id, [](Entry& entry) {
      entry.is_done = true;
      entry.work.reset();
    });
  }

  std::string json() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::ostringstream text;
    text << "{\"entries\":[";
    for (auto& entry : entries_) {
      entry.look();
      text << (&entry == &entries_.front() ? "" : ",") << "{\"record_id\":" << entry.id << ",\"process_group\":[\"" << entry.group
           << "\",\"" << entry.description << "\"],\"collective_seq_id\":" << entry.collectives
           << ",\"p2p_seq_id\":" << entry.transfers << ",\"profiling_name\":\"standin_gloo:" << entry.name << "\",\"input_sizes\":[";
      for (auto& input : entry.inputs) {
        text << (&input == &entry.inputs.front() ? "" : ",") << "[";
        for (int64_t dim = 0; dim < input.dim(); ++dim) {
          text << (dim ? "," : "") << input.size(dim);
        }
        text << "]";
      }
      text << "],\"input_dtypes\":[";
      for (auto& input : entry.inputs) {
        text << (&input == &entry.inputs.front() ? "" : ",") << "\"" << c10::toString(input.scalar_type()) << "\"";
      }
      text << "],\"time_created_ns\":" << entry.created_ns << ",\"is_p2p\":" << (entry.is_transfer ? "true" : "false")
           << ",\"state\":\"" << (entry.is_done ? "completed" : "scheduled") << "\",\"retired\":" << (entry.is_done ? "true" : "false")
           << "}";
    }
    text << "]}";
    return text.str();
  }

 private:
  template <typename Change>
  void change(size_t id, const Change& change) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!entries_.empty() && id >= entries_.front().id) {
      change(entries_[id - entries_.front().id]);
    }
  }

  std::mutex mutex_;
  std::deque<Entry> entries_;
  size_t next_ = 0;
};

// Waiting for it makes the current stream wait. The host stays until Gloo is done, which does not count: a device's
// stream would wait alone. Without an inner one, it never ends, and the host goes on.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(int rank, c10d::OpType type, WorkPtr inner, Tensors outputs, c10::Stream stream, VectorClock done, size_t entry)
      : Work(rank, type),
        inner_(std::move(inner)),
        outputs_(std::move(outputs)),
        stream_(stream),
        done_(std::move(done)),
        entry_(entry) {
    c10::intrusive_ptr<c10::ivalue::Future> inner_future;
    if (!inner_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
      const c10::StreamGuard guard(stream);
      future_->markCompleted(c10::IValue(outputs_));
      return;
    }
    try {
      inner_future = inner_->getFuture();
    } catch (const c10::Error&) {  // Gloo has none for send and recv
      return;
    }
    const auto tensors = c10::ListType::create(c10::TensorType::get());
    future_ = c10::make_intrusive<c10::ivalue::Future>(tensors, std::vector<c10::Device>{stream.device()});
    inner_future->addCallback([future = future_, outputs = outputs_, stream](c10::ivalue::Future& done) {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
        return;
      }
      const c10::StreamGuard guard(stream);
      future->markCompleted(c10::IValue(outputs));
    });
  }

  ~StreamWork() override {
    if (inner_ && inner_->isCompleted()) {
      FlightRecorder::get().set_done(entry_);
    }
  }

  bool isCompleted() override {
    return inner_ && inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_ && inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_ ? inner_->exception() : nullptr;
  }
  int sourceRank() const override {
    return inner_ ? inner_->sourceRank() : -1;
  }
  Tensors result() override {
    return outputs_;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const auto waited = !inner_ || inner_->wait(timeout);
    if (inner_) {
      FlightRecorder::get().set_done(entry_);
    }
    Times::get().wait(current_stream(stream_.device_index()), done_);
    return waited;
  }
  void abort() override {
    if (inner_) {
      inner_->abort();
    }
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK(future_, "this work has no future");
    return future_;
  }

 private:
  WorkPtr inner_;
  Tensors outputs_;
  c10::Stream stream_;
  VectorClock done_;
  size_t entry_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Options that Gloo does not know, as NCCL's.
struct StreamOptions final : Backend::Options {
  using Options::Options;
};

class StreamBackend final : public Backend {
 public:
  StreamBackend(c10::intrusive_ptr<Backend> inner, std::string name, c10::intrusive_ptr<c10d::Store> store)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), name_(std::move(name)), store_(std::move(store)) {}

  const std::string getBackendName() const override {
    return name_;
  }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<StreamOptions>(name_, inner_->getBackendOptions()->timeout);
  }
  bool supportsSplitting() const override {
    return true;
  }
  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<Backend::Options>& options) override {
    auto made = inner_->split(store, ranks, options);
    if (!made) {
      return nullptr;
    }
    made->setTimeout(options->timeout);
    return c10::make_intrusive<StreamBackend>(made, name_, store);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    inner_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    inner_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return inner_->getSequenceNumberForGroup();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = on_host(tensors);
    return queued(c10d::OpType::BROADCAST, tensors, tensors, [&] { return inner_->broadcast(hosts, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto hosts = on_host(tensors);
    return queued(c10d::OpType::ALLREDUCE, tensors, tensors, [&] { return inner_->allreduce(hosts, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto hosts = on_host(tensors);
    return queued(c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors, [&] { return inner_->allreduce_coalesced(hosts, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto hosts = on_host(tensors);
    return queued(c10d::OpType::REDUCE, tensors, tensors, [&] { return inner_->reduce(hosts, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return queued(c10d::OpType::ALLGATHER, inputs, joined(outputs), [&] { return inner_->allgather(out, in, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto out = stand_in::on_host(output), in = stand_in::on_host(input);
    return queued(c10d::OpType::_ALLGATHER_BASE, {input}, {output}, [&] { return inner_->_allgather_base(out, in, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = on_host(outputs), in = on_host(inputs);
    return queued(
        c10d::OpType::COALESCED, inputs, outputs, [&] { return inner_->allgather_into_tensor_coalesced(out, in, options); });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return queued(c10d::OpType::GATHER, inputs, joined(outputs), [&] { return inner_->gather(out, in, options); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return queued(c10d::OpType::SCATTER, joined(inputs), outputs, [&] { return inner_->scatter(out, in, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto out = on_host(outputs);
    auto in = on_host(inputs);
    return queued(c10d::OpType::REDUCE_SCATTER, joined(inputs), outputs, [&] { return inner_->reduce_scatter(out, in, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto out = stand_in::on_host(output), in = stand_in::on_host(input);
    return queued(c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output}, [&] { return inner_->_reduce_scatter_base(out, in, options); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto out = on_host(outputs), in = on_host(inputs);
    return queued(
        c10d::OpType::COALESCED, inputs, outputs, [&] { return inner_->reduce_scatter_tensor_coalesced(out, in, options); });
  }
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    // as NCCL does; Gloo does only from torch 2.15 on
    c10d::checkSplitSizes(output_sizes, output, getSize());
    c10d::checkSplitSizes(input_sizes, input, getSize());
    auto out = stand_in::on_host(output), in = stand_in::on_host(input);
    return queued(c10d::OpType::ALLTOALL_BASE, {input}, {output}, [&] {
      return inner_->alltoall_base(out, in, output_sizes, input_sizes, options);
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto hosts = on_host(tensors);
    return queued(c10d::OpType::SEND, tensors, {}, [&] { return inner_->send(hosts, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto hosts = on_host(tensors);
    return queued(c10d::OpType::RECV, {}, tensors, [&] { return inner_->recv(hosts, from, tag); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto hosts = on_host(tensors);
    return queued(c10d::OpType::RECVANYSOURCE, {}, tensors, [&] { return inner_->recvAnysource(hosts, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions on_host = options;
    on_host.device = std::nullopt;
    on_host.device_ids.clear();
    return inner_->barrier(on_host);
  }
  // Returns when all ranks have called it, as NCCL's does.
  void shutdown() override {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    try {
      store_->add("shut down", 1);
      while (store_->add("shut down", 0) < getSize() && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    } catch (const std::exception&) {  // the process with the store has ended: after its own shutdown
    }
    inner_->shutdown();
  }
  void abort() override {
    inner_->abort();
  }

 private:
  // Queues a collective on the group's stream, behind all that is queued on the current one.
  template <typename Start>
  WorkPtr queued(c10d::OpType type, const Tensors& inputs, const Tensors& outputs, const Start& start) {
    const auto device = (inputs.empty() ? outputs : inputs).at(0).device();
    for (const auto& tensors : {inputs, outputs}) {
      for (auto& tensor : tensors) {
        TORCH_CHECK(tensor.device() == device, name_, ": expected all tensors on ", device, ", found one on ", tensor.device());
      }
    }
    const c10::DeviceGuard guard(device);
    const auto stream = stream_of(device);
    Times::get().wait(stream, Times::get().now(current_stream(device.index())));
    auto done = Times::get().launch(stream, "a collective", inputs, outputs);
    const auto entry = record(type, inputs);
    if (Times::get().is_stopped(stream)) {
      return c10::make_intrusive<StreamWork>(getRank(), type, nullptr, outputs, stream, done, entry);
    }
    auto work = start();
    FlightRecorder::get().set_work(entry, work);
    if (host_ahead() && !is_transfer(type) && !ends_in(*work, *host_ahead())) {
      Times::get().stop(stream, done);
      unfinished_.push_back(std::move(work));
      return c10::make_intrusive<StreamWork>(getRank(), type, nullptr, outputs, stream, done, entry);
    }
    return c10::make_intrusive<StreamWork>(getRank(), type, std::move(work), outputs, stream, done, entry);
  }

  static bool is_transfer(c10d::OpType type) {
    return type == c10d::OpType::SEND || type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
  }

  // False if the work fails, or does not end within some seconds.
  static bool ends_in(c10d::Work& work, double seconds) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!work.isCompleted() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return work.isCompleted() && work.isSuccess();
  }

  size_t record(c10d::OpType type, const Tensors& inputs) {
    ++(is_transfer(type) ? transfers_ : collectives_);
    Tensors shapes;
    for (auto& input : inputs) {
      shapes.push_back(at::empty(input.sizes(), input.options().device(at::kMeta)));
    }
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return FlightRecorder::get().add(
        {0, getGroupUid(), getGroupDesc(), collectives_, transfers_, c10d::opTypeToString(type), shapes,
         std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), is_transfer(type), false, nullptr});
  }

  c10::Stream stream_of(c10::Device device) {
    auto found = streams_.find(device.index());
    if (found == streams_.end()) {
      found = streams_.emplace(device.index(), c10::impl::getDeviceGuardImpl(device.type())->getNewStream(device)).first;
    }
    return found->second;
  }

  c10::intrusive_ptr<Backend> inner_;
  std::string name_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::vector<WorkPtr> unfinished_;
  uint64_t collectives_ = 0;
  uint64_t transfers_ = 0;
};

}  // namespace

void define_process_group(void* given) {
  auto& module = *static_cast<pybind11::module_*>(given);
  pybind11::module_::import("torch._C._distributed_c10d");
  pybind11::class_<StreamOptions, c10::intrusive_ptr<StreamOptions>, Backend::Options>(module, "StreamOptions")
      .def("__deepcopy__", [](const StreamOptions& options, const pybind11::object&) {
        return c10::make_intrusive<StreamOptions>(options);
      });
  // Each rank of a group calls this for a new group that it is not in, as with NCCL.
  pybind11::class_<StreamBackend, c10::intrusive_ptr<StreamBackend>, Backend>(module, "StreamBackend")
      .def_property_readonly("options", &StreamBackend::getBackendOptions)
      .def("perform_nocolor_split", [](StreamBackend&, const c10::Device&) {});
  module.def(
      "on_streams",
      [](const c10::intrusive_ptr<Backend>& inner, const std::string& name, const c10::intrusive_ptr<c10d::Store>& store)
          -> c10::intrusive_ptr<Backend> { return c10::make_intrusive<StreamBackend>(inner, name, store); });
  module.def("recorded", [] { return pybind11::bytes(FlightRecorder::get().json()); });
}

}  // namespace stand_in
