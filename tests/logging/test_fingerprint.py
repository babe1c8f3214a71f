"""The fingerprint: the layout that its docstring states, for every kind of tensor, however it lies
in memory."""

from __future__ import annotations

import hashlib
import struct
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from lockstep.base.errors import RecipeError
from lockstep.logging import fingerprint as module
from lockstep.logging.fingerprint import fingerprint

NUMPY_TYPES = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "complex64": "<c8",
    "complex128": "<c16",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "<i1",
    "uint8": "<u1",
    "bool": "?",
}


def element_bytes(tensor: Tensor, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (
            (np.array(tensor.float().tolist(), dtype="<f4").view("<u4") >> 16)
            .astype("<u2")
            .tobytes()
        )
    return np.array(tensor.tolist(), dtype=NUMPY_TYPES[dtype]).tobytes()


def by_the_docstring(state: dict[str, Any]) -> str:
    """The layout once more, written from the docstring."""
    stream = b""
    for name in sorted(state, key=lambda name: name.encode("utf-8")):
        tensor = state[name]
        dtype = {torch.bfloat16: "bfloat16"}.get(tensor.dtype) or str(tensor.dtype).split(".")[1]
        data = element_bytes(tensor, dtype)
        stream += struct.pack("<Q", len(name.encode("utf-8"))) + name.encode("utf-8")
        stream += struct.pack("<Q", len(dtype)) + dtype.encode("ascii")
        stream += struct.pack("<Q", tensor.ndim) + b"".join(
            struct.pack("<Q", size) for size in tensor.shape
        )
        stream += struct.pack("<Q", len(data)) + data
    return hashlib.sha256(stream).hexdigest()


def sample(dtype: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    values = (
        torch.randn(
            shape,
            generator=generator,
            dtype=torch.complex128 if dtype.startswith("complex") else torch.float64,
        )
        * 50
    )
    return (
        values.abs().to(getattr(torch, dtype))
        if dtype.startswith("uint")
        else values.to(getattr(torch, dtype))
    )


@pytest.mark.parametrize("dtype", [*NUMPY_TYPES, "bfloat16"])
def test_every_type_is_hashed_as_the_docstring_says(dtype: str) -> None:
    state = {
        "b": sample(dtype, 3, 5),
        "a.scalar": sample(dtype),
        "empty": sample(dtype, 0, 4),
        "ä": sample(dtype, 2),
        "z": sample(dtype, 1),
    }
    assert fingerprint(state) == by_the_docstring(state)


@given(
    dtype=st.sampled_from([*NUMPY_TYPES, "bfloat16"]),
    shape=st.lists(st.integers(0, 5), max_size=4),
    data=st.data(),
    piece_bytes=st.sampled_from([16, 24, 100]),
)
def test_strides_and_pieces_do_not_change_it(
    dtype: str, shape: list[int], data: st.DataObject, piece_bytes: int
) -> None:
    tensor = sample(dtype, *shape).permute(data.draw(st.permutations(range(len(shape)))))
    if tensor.ndim:
        tensor = (
            tensor[:: data.draw(st.integers(1, 3))]
            .unsqueeze(1)
            .expand(-1, data.draw(st.integers(1, 3)), *tensor.shape[1:])
        )
    expected = by_the_docstring({"w": tensor})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_BYTES", piece_bytes)
        assert fingerprint({"w": tensor}) == expected
        assert fingerprint({"w": tensor.contiguous()}) == expected


def test_pieces_hold_no_more_than_their_limit_and_a_contiguous_tensor_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 64)
    for tensor in (
        torch.arange(100.0),
        torch.arange(100.0).reshape(4, 25).t(),
        torch.arange(100.0).reshape(25, 4).t(),
    ):
        pieces = list(module._pieces(tensor))
        assert max(piece.nbytes for piece in pieces) <= 64
        assert torch.equal(torch.cat(pieces), tensor.reshape(-1))
    whole = torch.arange(100.0)
    assert [piece.data_ptr() for piece in module._pieces(whole)] == [
        whole.data_ptr() + start for start in range(0, 400, 64)
    ]


def test_conjugate_and_negative_views_are_hashed_by_their_values() -> None:
    values = sample("complex64", 3, 4)
    state = {
        "conjugate": values.conj(),
        "negative": values.conj().imag,
        "real": values.real,
        "plain": values,
    }
    state["negative and contiguous"] = values[:1, :1].conj().imag
    assert state["negative and contiguous"].is_contiguous()
    assert values.conj().is_conj()
    assert values.conj().imag.is_neg()
    assert fingerprint(state) == by_the_docstring(state)


def test_a_module_is_hashed_by_its_state_dict_with_tied_weights_under_each_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.norm = nn.BatchNorm1d(3)

        def get_extra_state(self) -> dict[str, int]:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None: ...

    model = Tied()
    state = model.state_dict()
    assert "_extra_state" in state
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    assert {"embedding.weight", "head.weight", "norm.num_batches_tracked"} <= tensors.keys()
    assert fingerprint(model) == fingerprint(state) == by_the_docstring(tensors)
    assert fingerprint(model) != by_the_docstring(
        {name: value for name, value in tensors.items() if name != "head.weight"}
    )


def test_names_types_shapes_order_and_bits_all_count() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    others: list[dict[str, Any]] = [
        {"a": torch.zeros(3, 2), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(1)},
        {"a": -torch.zeros(2, 3), "b": torch.ones(1)},
        {"a": torch.ones(1), "b": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "c": torch.ones(1)},
        {"a": torch.zeros(2, 3)},
        {},
    ]
    prints = [fingerprint(state) for state in (base, *others)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(dict(reversed(base.items()))) == prints[0]
    assert fingerprint({name: nn.Parameter(value) for name, value in base.items()}) == prints[0]


def test_the_layout_stays_as_it_is() -> None:
    state = {
        "weight": torch.tensor([[1.0, -2.0], [0.5, 0.0]], dtype=torch.bfloat16),
        "steps": torch.tensor(7),
    }
    assert fingerprint(state) == "b11a8492ccfcb9a1c520c1090061179ef3b3bac0514f7925195aaa2221fe8fc2"
    assert fingerprint({}) == hashlib.sha256(b"").hexdigest()


def test_on_a_machine_of_the_other_byte_order_elements_are_turned_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    for dtype in ("<f4", "<c8", "<i2", "?"):
        values = np.arange(6).astype(dtype)
        assert (
            bytes(module._bytes(torch.from_numpy(values)))
            == values.astype(values.dtype.newbyteorder(">")).tobytes()
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_does_not_count() -> None:
    state = {"a": sample("float32", 100, 7).t(), "b": sample("bfloat16", 5)}
    assert fingerprint({name: value.cuda() for name, value in state.items()}) == by_the_docstring(
        state
    )


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.zeros(2, device="meta"), "layout torch.strided, type torch.float32, on device meta"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo, type torch.float32, on device cpu"),
    ],
)
def test_a_tensor_without_dense_bytes_is_refused(tensor: Tensor, what: str) -> None:
    with pytest.raises(RecipeError) as refused:
        fingerprint({"fine": torch.zeros(1), "w": tensor})
    assert (
        str(refused.value)
        == f"state dict entry 'w' is a tensor of {what}; a fingerprint hashes dense bytes;"
        " materialise it, or make it dense"
    )
