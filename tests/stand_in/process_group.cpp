// Collectives of the device: Gloo on the same memory, on a stream of the group's own.
#include "clocks.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

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

// Waiting for it makes the current stream wait. The host stays until Gloo is done, which does not count: a device's
// stream would wait alone.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(int rank, c10d::OpType type, WorkPtr inner, Tensors outputs, c10::Stream stream, VectorClock done)
      : Work(rank, type), inner_(std::move(inner)), outputs_(std::move(outputs)), stream_(stream), done_(std::move(done)) {
    c10::intrusive_ptr<c10::ivalue::Future> inner_future;
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

  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  Tensors result() override {
    return outputs_;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const auto waited = inner_->wait(timeout);
    Times::get().wait(current_stream(stream_.device_index()), done_);
    return waited;
  }
  void abort() override {
    inner_->abort();
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
    return c10::make_intrusive<StreamWork>(getRank(), type, start(), outputs, stream, done);
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
}

}  // namespace stand_in
