"""Memory that a device copies to is given back only once no device may still copy to it."""

from __future__ import annotations

import pytest
import torch

from lockstep.base import accelerator
from lockstep.checkpoint import saver
from lockstep.checkpoint.tensor_shards import FileLayout
from lockstep.checkpoint.writer import SharedFile


class Event:
    def __init__(self, answer: bool | None) -> None:
        self._answer = answer

    def query(self) -> bool:
        if self._answer is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._answer


@pytest.mark.parametrize(
    ("first", "second", "gives_back"),
    [(True, True, True), (True, False, False), (True, None, False)],
)
def test_memory_stays_registered_while_any_device_may_copy_to_it(
    monkeypatch: pytest.MonkeyPatch, first: bool, second: bool | None, gives_back: bool
) -> None:
    given_back, left = list[int](), list[tuple[SharedFile, torch.Tensor]]()

    def unregister(memory: torch.Tensor, *_: object) -> bool:
        given_back.append(memory.nbytes)
        return True

    monkeypatch.setattr(accelerator, "can_register_memory", lambda device: True)
    monkeypatch.setattr(accelerator, "register_memory", lambda memory, device: None)
    monkeypatch.setattr(accelerator, "unregister_memory", unregister)
    monkeypatch.setattr(saver, "END_SECONDS", 0.0)
    monkeypatch.setattr(saver, "_never_freed", left)
    content = saver._FileContent(FileLayout([]), torch.device("cpu"), [])
    monkeypatch.setattr(
        content, "_copies", [(Event(True), Event(first)), (Event(True), Event(second))]
    )
    content.close()
    assert (len(given_back), len(left)) == ((1, 0) if gives_back else (0, 1))
    for file, _ in left:
        file.close()
