// Operators of the device: each is a kernel on the current stream, computed by the CPU's kernel on the same memory.
#include "clocks.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

#include "generator.h"

namespace stand_in {

bool is_pinned_memory(const void* pointer);

at::Tensor on_host(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr memory(
      const_cast<void*>(storage.data()), new c10::Storage(storage), [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::kCPU);
  c10::Storage mirror(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetCPUAllocator(), true);
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(mirror), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return at::Tensor(std::move(impl));
}

namespace {

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

// Operators whose result the host must read before it can go on.
bool makes_host_wait(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
      "aten::bincount", "aten::repeat_interleave", "aten::is_nonzero", "aten::histc"};
  return names.count(name) > 0;
}

// Operators that take a tensor of the CPU beside those of the device. Others take one without dimensions: a number.
bool takes_host_tensors(const std::string& name) {
  return name.find("aten::index") == 0 || name.find("aten::_index") == 0 || name.find("aten::record_stream") == 0;
}

// One call of an operator: its arguments on the host, and back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack), first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    for (size_t index = 0; index < op_.schema().arguments().size(); ++index) {
      find_device((*stack_)[first_ + index]);
    }
    const c10::DeviceGuard guard(c10::Device(c10::DeviceType::PrivateUse1, device_ < 0 ? current_device() : device_));
    device_ = current_device();
    is_stopped_ = Times::get().is_stopped(current_stream(device_));
    for (size_t index = 0; index < op_.schema().arguments().size(); ++index) {
      const auto* alias = op_.schema().arguments()[index].alias_info();
      (*stack_)[first_ + index] = replaced((*stack_)[first_ + index], alias != nullptr && alias->isWrite());
    }
    const auto& name = op_.schema().name();
    const auto stream = current_stream(device_);
    auto clock = Times::get().launch(stream, name.c_str(), reads_, writes_);
    if (makes_host_wait(name)) {
      Times::get().host_wait(clock, name);
    }
    compute();
    for (size_t index = 0; index < originals_.size(); ++index) {
      take_resize(originals_[index], aliases_[index]);
    }
    const auto returned = op_.schema().returns().size();
    for (size_t index = stack_->size() - returned; index < stack_->size(); ++index) {
      (*stack_)[index] = result((*stack_)[index]);
    }
  }

 private:
  void find_device(const c10::IValue& value) {
    if (value.isTensor() && is_ours(value.toTensor())) {
      check_device(value.toTensor().device());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& each : value.toListRef()) {
        find_device(each);
      }
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      check_device(value.toDevice());
    }
  }

  void check_device(c10::Device device) {
    const auto index = device.index() < 0 ? current_device() : device.index();
    TORCH_CHECK(
        device_ < 0 || device_ == index, op_.schema().name(), ": expected all tensors to be on the same device, but found devices ",
        static_cast<int>(device_), " and ", static_cast<int>(index));
    device_ = index;
  }

  c10::IValue replaced(const c10::IValue& value, bool written) {
    if (value.isTensor()) {
      return value.toTensor().defined() ? c10::IValue(replaced_tensor(value.toTensor(), written)) : value;
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const auto& each : value.toTensorVector()) {
        made.push_back(each.defined() ? replaced_tensor(each, written) : each);
      }
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const c10::IValue& each : value.toListRef()) {
        made.push_back(each.isNone() ? std::optional<at::Tensor>() : replaced_tensor(each.toTensor(), written));
      }
      return made;
    }
    if (value.isDevice()) {
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator()) {
      const auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().is_privateuseone(), op_.schema().name(), ": expected a generator of the stand-in device, found one of ",
          generator.device());
      return c10::IValue(static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->numbers);
    }
    return value;
  }

  at::Tensor replaced_tensor(const at::Tensor& tensor, bool written) {
    if (!is_ours(tensor)) {
      TORCH_CHECK(
          tensor.dim() == 0 || takes_host_tensors(op_.schema().name()), op_.schema().name(),
          ": expected all tensors to be on the same device, but found one on the CPU, of shape ", tensor.sizes());
      return tensor;
    }
    (written ? writes_ : reads_).push_back(tensor);
    originals_.push_back(tensor);
    const auto alias = on_host(tensor);
    aliases_.push_back(written && is_stopped_ ? alias.clone() : alias);
    return aliases_.back();
  }

  // Random numbers come from the device's generator, also where a CPU kernel would take the CPU's default one.
  void compute() {
    static std::mutex mutex;
    const auto host = c10::DispatchKeySet(c10::DispatchKey::CPU);
    const auto& tags = op_.getTags();
    if (op_.schema().name().find("aten::_fused_") == 0 && op_.schema().returns().empty()) {
      update_in_whole_vectors();
      return;
    }
    if (std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) == tags.end()) {
      op_.redispatchBoxed(host, stack_);
      return;
    }
    std::lock_guard<std::mutex> lock(mutex);
    auto ours = at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::PrivateUse1, device_));
    auto hosts = at::detail::getDefaultCPUGenerator();
    const auto before = hosts.get_state();
    hosts.set_state(ours.get_state());
    op_.redispatchBoxed(host, stack_);
    ours.set_state(hosts.get_state());
    hosts.set_state(before);
  }

  // A GPU's fused optimizer computes each element alike. A CPU's rounds differently at the end of a tensor, where no
  // whole vector is left: so it gets longer tensors.
  void update_in_whole_vectors() {
    std::vector<std::pair<at::Tensor, at::Tensor>> padded;
    for (size_t index = 0; index < op_.schema().arguments().size(); ++index) {
      auto& value = (*stack_)[first_ + index];
      if (!value.isTensorList() || op_.schema().arguments()[index].name() == "state_steps") {
        continue;
      }
      c10::List<at::Tensor> longer;
      for (const auto& each : value.toTensorVector()) {
        longer.push_back(at::zeros({(each.numel() + 63) / 64 * 64}, each.options()));
        padded.emplace_back(each, longer.get(longer.size() - 1).narrow(0, 0, each.numel()).view(each.sizes()));
        padded.back().second.copy_(each);
      }
      value = longer;
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    for (const auto& [tensor, updated] : padded) {
      tensor.copy_(updated);
    }
  }

  // An `out=` argument may have been given another shape.
  void take_resize(const at::Tensor& original, const at::Tensor& alias) const {
    if (original.sizes() == alias.sizes() && (is_stopped_ || original.storage().data() == alias.storage().data())) {
      return;
    }
    original.resize_(alias.sizes());
    on_host(original).copy_(alias);
  }

  c10::IValue result(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      return on_device(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const auto& each : value.toTensorVector()) {
        made.push_back(on_device(each));
      }
      return made;
    }
    return value;
  }

  at::Tensor on_device(const at::Tensor& tensor) {
    for (size_t index = 0; index < aliases_.size(); ++index) {
      if (tensor.unsafeGetTensorImpl() == aliases_[index].unsafeGetTensorImpl()) {
        return originals_[index];
      }
      if (tensor.storage().unsafeGetStorageImpl() == aliases_[index].storage().unsafeGetStorageImpl()) {
        return at::as_strided(originals_[index], tensor.sizes(), tensor.strides(), tensor.storage_offset());
      }
    }
    auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::PrivateUse1, device_));
    on_host(made).copy_(tensor);
    return made;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  size_t first_;
  c10::DeviceIndex device_ = -1;
  bool is_stopped_ = false;  // the call is queued, and never runs: it has results of the right shape, and writes nothing
  std::vector<at::Tensor> originals_, aliases_, reads_, writes_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

// Memory

at::Tensor filled(at::Tensor made) {
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) {
    at::native::fill_empty_deterministic_(made);
  }
  return made;
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool> pinned,
    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "only memory of the host can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return filled(
      at::detail::empty_generic(size, c10::GetAllocator(c10::DeviceType::PrivateUse1), keys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return filled(
      at::detail::empty_strided_generic(size, stride, c10::GetAllocator(c10::DeviceType::PrivateUse1), keys, c10::dtype_or_default(dtype)));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, stride);
  return self;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  Times::get().record_stream(self.storage().data(), stream);
}

// Copies

// Between devices, a copy waits for both of their streams, and both go on after it.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  const auto stream = current_stream(from.device().index()), other = current_stream(to.device().index());
  Times::get().wait(stream, Times::get().now(other));
  auto done = Times::get().launch(stream, "copy", {from}, {to});
  if (!Times::get().is_stopped(stream)) {
    on_host(to).copy_(on_host(from));
  }
  Times::get().wait(other, done);
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto stream = current_stream(to.device().index());
  auto done = Times::get().launch(stream, "copy to the device", {}, {to});
  if (!Times::get().is_stopped(stream)) {
    on_host(to).copy_(from);
  }
  if (!non_blocking) {
    Times::get().host_wait(done, "a copy to the device");
  } else if (from.numel() > 0 && is_pinned_memory(from.const_data_ptr())) {
    Times::get().add({line_of(stream), done.of(line_of(stream)), from, from.clone(at::MemoryFormat::Contiguous), false});
  }
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto stream = current_stream(from.device().index());
  auto done = Times::get().launch(stream, "copy to the host", {from}, {});
  if (!non_blocking) {
    Times::get().host_wait(done, "a copy to the host");
    to.copy_(on_host(from));
    return;
  }
  auto values = on_host(from).to(to.scalar_type(), false, true).expand(to.sizes());
  if (to.is_contiguous()) {
    std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());
  }
  Times::get().add({line_of(stream), done.of(line_of(stream)), to, values, true});
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) {
    return to;
  }
  const c10::NoGradGuard no_grad;
  if (is_ours(from) && is_ours(to)) {
    copy_between_devices(from, to);
  } else if (is_ours(to)) {
    copy_to_device(from, to, non_blocking);
  } else {
    copy_to_host(from, to, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  auto done = Times::get().launch(current_stream(self.device().index()), "item", {self}, {});
  Times::get().host_wait(done, "item()");
  return on_host(self).item();
}

// Operators that torch has no kernel for, on a device of its kind

int64_t attention_by_formula(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0;
}

at::Tensor as_result(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) {
    return tensor;
  }
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  on_host(made).copy_(tensor);
  return made;
}

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  std::vector<at::Tensor> read = {input, weight};
  std::optional<at::Tensor> bias_on_host;
  if (bias && bias->defined()) {
    read.push_back(*bias);
    bias_on_host = on_host(*bias);
  }
  Times::get().launch(current_stream(input.device().index()), "convolution", read, {});
  auto made = at::convolution(on_host(input), on_host(weight), bias_on_host, stride, padding, dilation, transposed, output_padding, groups);
  return as_result(made, input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  Times::get().launch(current_stream(input.device().index()), "convolution_backward", {gradient, input, weight}, {});
  const auto biases = std::vector<int64_t>{gradient.size(1)};
  auto [for_input, for_weight, for_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), biases, stride, padding, dilation, transposed, output_padding, groups, wanted);
  const auto device = input.device();
  return {as_result(for_input, device), as_result(for_weight, device), as_result(for_bias, device)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", [](const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("unfold", [](const at::Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); });
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return at::native::set_tensor_(self, source);
  });
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& { return at::native::set_(self, source); });
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  // As between the CPU and CUDA: a parameter that moves to the device stays the same object, and tied ones stay tied.
  m.impl("_has_compatible_shallow_copy_type", [](const at::Tensor&, const at::Tensor&) { return true; });
  m.impl("_fused_sdp_choice", attention_by_formula);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// Autocast, by the lists of CUDA

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace

}  // namespace stand_in
