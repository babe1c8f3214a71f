"""The stand-in accelerator: a device of torch's that computes on the host, for tests of what
lockstep does on devices.

torch loads it in each process whose environment has this folder in PYTHONPATH and the extension's
file in STAND_IN_LIBRARY. There are STAND_IN_DEVICES devices, of type `standin` (default: 2), with
16 GiB each. Their number, and their UUIDs and names in STAND_IN_UUIDS and STAND_IN_NAMES, separated
by commas, are those when a process asks for them.

- Kernels compute at once, but streams have logical clocks: a kernel that touches what another
  stream has touched, without having waited for it, raises. So does memory that is used again while
  another stream may still touch it, and pinned memory that the host changes before it has waited
  for the copy.
- A copy to the host that nobody has waited for holds NaN. New memory holds NaN.
- Every kernel is counted, and every wait of the host for the device, which `host_must_not_wait`
  forbids.
- Random numbers come from a generator of each device, and are others than the CPU's under the same
  seed.
- Collectives are Gloo's, on a stream of their own, with a flight recorder of their own. A group's
  shutdown waits for all of its ranks, as NCCL's does.
- With STAND_IN_HOST_AHEAD=SECONDS, a collective that fails, or does not end within so long, stops
  the device as a collective of NCCL does: the host goes on, what it queues never runs, and where it
  waits for the device it stays.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAME = "standin"
BACKEND = "standin_gloo"


class Counters(NamedTuple):
    """What a process did since it was asked last: calls by operator, and waits of the host by
    cause."""

    kernels: dict[str, int]
    host_waits: dict[str, int]


def register() -> None:
    """Make the device known to torch. torch calls this when it is imported."""
    torch.utils.rename_privateuse1_backend(NAME)
    extension = _load(os.environ["STAND_IN_LIBRARY"])
    torch._register_device_module(NAME, _device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend(BACKEND, _create_backend, devices=[NAME])
        _use_recorder_of_its_own(extension)


def take_counters() -> Counters:
    return Counters(*_extension().take_counters())


@contextmanager
def host_must_not_wait() -> Iterator[None]:
    """Raise where the host waits for the device."""
    _extension().forbid_host_waits(True)
    try:
        yield
    finally:
        _extension().forbid_host_waits(False)


@contextmanager
def capacity(device: int, bytes: int) -> Iterator[None]:
    """Give a device no more than `bytes` of memory."""
    _extension().set_capacity(device, bytes)
    try:
        yield
    finally:
        _extension().set_capacity(device, 2**34)


def on_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor on the memory of a tensor of the device. Nobody waits for anything."""
    return _extension().on_host(tensor)


_loaded: list[ModuleType] = []


def _extension() -> Any:
    return _loaded[0]


def _load(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_stand_in", path)
    spec = importlib.util.spec_from_loader("_stand_in", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    _loaded.append(module)
    return module


def _create_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    # Gloo's `split` knows them of the first group alone
    gloo.options.global_ranks_in_group = list(range(size))
    return _extension().on_streams(gloo, BACKEND, store)


registered: dict[int, int] = {}
"""Memory of the host that counts as pinned: its bytes by its address."""


class _Runtime:
    """What is used of CUDA's runtime library."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        registered[address] = size
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return 0 if registered.pop(address, None) else 1


def _use_recorder_of_its_own(extension: Any) -> None:
    """Give the backend's flight recorder where NCCL's is, and leave its calls of Gloo out of
    Gloo's."""
    module: Any = torch.distributed.distributed_c10d.torch._C._distributed_c10d
    dump = module._dump_fr_trace_json

    def dump_of_gloo(*arguments: Any, **given: Any) -> bytes:
        recorded = json.loads(dump(*arguments, **given))
        recorded["entries"] = [
            entry for entry in recorded.get("entries", []) if entry["process_group"][0]
        ]
        return json.dumps(recorded).encode()

    module._dump_fr_trace_json = dump_of_gloo
    setattr(module, f"_dump_{BACKEND}_trace_json", lambda **_: extension.recorded())


@contextmanager
def _current_stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _device_module(extension: Any) -> ModuleType:
    """Return `torch.standin`, with what torch and its users expect of a device's module."""
    module: Any = ModuleType(f"torch.{NAME}")
    generators = [extension.default_generator(index) for index in range(extension.device_count())]

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(extension.current_device())
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(extension.current_device()) if index is None else index

    def planted(what: str, index: int, otherwise: str) -> str:
        given = os.environ.get(f"STAND_IN_{what}")
        return otherwise if given is None else given.split(",")[index]

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module.default_generators = tuple(generators)
    module.device_count = extension.device_count
    module.current_device = extension.current_device
    module.set_device = lambda device: extension.set_device(index_of(device))
    module.is_available = lambda: extension.device_count() > 0
    module.is_initialized = lambda: True
    module.init = lambda: None
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = manual_seed_all
    module.manual_seed = lambda seed: generators[index_of()].manual_seed(seed)
    module.get_rng_state = lambda device=None: generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[index_of(device)].set_state(state)
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index_of(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(index_of(device))
    module.stream = _current_stream
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.empty_cache = lambda: None
    module.is_bf16_supported = lambda: True
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_device_name = lambda device=None: planted(
        "NAMES", index_of(device), "stand-in accelerator"
    )
    module.get_device_properties = lambda device=None: SimpleNamespace(
        uuid=planted("UUIDS", index_of(device), f"device-{index_of(device)}")
    )
    module.max_memory_allocated = lambda device=None: torch.accelerator.max_memory_allocated(
        index_of(device)
    )
    module.cudart = lambda: _Runtime
    module.memory_allocated = lambda device=None: torch.accelerator.memory_allocated(
        index_of(device)
    )
    return module
