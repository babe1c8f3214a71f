// Random numbers of the device: a generator of its own, whose numbers are others than the CPU's under the same seed.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace stand_in {

struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        numbers(at::detail::createCPUGenerator(c10::default_rng_seed_val ^ kOther)) {}

  static constexpr uint64_t kOther = 0x5DEECE66D;

  void set_current_seed(uint64_t seed) override {
    numbers.set_current_seed(seed ^ kOther);
  }
  uint64_t current_seed() const override {
    return numbers.current_seed() ^ kOther;
  }
  uint64_t seed() override {
    return numbers.seed() ^ kOther;
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "the stand-in's generator has no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "the stand-in's generator has no offset");
  }
  void set_state(const c10::TensorImpl& state) override {
    numbers.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers.unsafeGetGeneratorImpl()->get_state();
  }
  static c10::DeviceType device_type() {
    return c10::DeviceType::PrivateUse1;
  }

  at::Generator numbers;

 private:
  GeneratorImpl* clone_impl() const override {
    auto* made = new GeneratorImpl(device().index());
    made->numbers = numbers.clone();
    return made;
  }
};

}  // namespace stand_in
