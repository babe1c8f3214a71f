from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep.base.nested import map_tensors, tensors_in
from lockstep.data.device import pin, to_device

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True, slots=True)
class Record:
    x: torch.Tensor
    name: str


def batch():
    x = torch.arange(3.0)
    return {
        "list": [x, "text", 3],
        "tuple": (x, None),
        "pair": Pair(x, 1),
        "record": Record(x, "a"),
        "ordered": OrderedDict(x=x),
    }


def test_a_batch_on_the_cpu_stays_what_it_is():
    held = batch()
    assert to_device(held, torch.device("cpu")) is held


def test_every_tensor_goes_to_the_device_and_containers_and_other_values_stay():
    moved = to_device(batch(), torch.device("meta"))
    tensors = [
        moved["list"][0],
        moved["tuple"][0],
        moved["pair"].x,
        moved["record"].x,
        moved["ordered"]["x"],
    ]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert [type(part) for part in moved.values()] == [list, tuple, Pair, Record, OrderedDict]
    assert moved["list"][1:] == ["text", 3]
    assert (moved["pair"].y, moved["record"].name) == (1, "a")


class Encoding(UserDict[str, torch.Tensor]):
    """As a BatchEncoding of transformers: a mapping with a method `to`."""

    def to(self, *args, **kwargs):
        raise AssertionError("its tensors are moved one by one")


def test_a_batch_encoding_is_a_container():
    encoding = Encoding(x=torch.arange(3.0))
    copied = map_tensors(encoding, torch.Tensor.clone)
    copied["x"][0] = 7
    assert type(copied) is Encoding
    assert encoding["x"].tolist() == [0, 1, 2]
    assert len(tensors_in(encoding)) == 1
    assert to_device(encoding, torch.device("meta"))["x"].is_meta


class Output(OrderedDict[str, torch.Tensor]):
    """As the outputs of transformers: a mapping that refuses `update`."""

    def update(self, *args, **kwargs):
        raise Exception("You cannot use ``update``")


def test_a_mapping_of_another_kind_stays_of_its_kind():
    output = Output()
    output["logits"] = torch.ones(2)
    moved = to_device(output, torch.device("meta"))
    assert (type(moved), moved["logits"].device.type) == (Output, "meta")


def test_the_batch_that_is_moved_is_not_changed():
    held = batch()
    to_device(held, torch.device("meta"))
    assert repr(held) == repr(batch())


def test_an_object_with_a_way_to_the_device_of_its_own_takes_it():
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    assert to_device([packed], torch.device("meta"))[0].data.device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_copies_run_beside_the_computation_and_hold_the_same_values():
    device = torch.device("cuda", torch.cuda.current_device())
    large = [torch.full((1 << 20,), float(i)) for i in range(50)]
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    for tensor in large:
        busy = busy @ busy / 50
        moved = to_device({"x": pin(tensor)}, device)
        sums.append(moved["x"].sum())
    assert [each.item() / (1 << 20) for each in sums] == [float(i) for i in range(50)]
    assert pin({"x": large[0]})["x"].is_pinned()
