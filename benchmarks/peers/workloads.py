"""The workloads: each is defined once and used by all contenders.

The order of samples is lockstep's. It is computed beforehand and given to all others as a list over
the whole run: there is one epoch. An image's augmentation depends on its index alone. Models start
from the values in one file.
"""

from __future__ import annotations

import functools
import io
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

SEED = 0
CLIP_NORM = 1.0
CONTEXT = 128
"""Context of the GPT, in bytes."""
PICTURES = 2000
PICTURE = 256
"""Side of a decoded image, in pixels."""
CROP = 64
"""Side of the model's input image, in pixels."""
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class Size:
    batch: int
    """Samples per step, over all processes."""
    turn: int
    """Steps per turn."""
    microbatches: int = 1
    """Microbatches per step, over all processes. 1: one per process."""
    workers: bool = False
    """True if loader processes read the data: cores ÷ processes for each process, at least 1."""


SIZES = {
    "mlp": Size(batch=64, turn=400),
    "wide": Size(batch=32, turn=8),
    "gpt": Size(batch=16, turn=4),
    "accumulate": Size(batch=32, turn=2, microbatches=8),
    "images": Size(batch=32, turn=24, workers=True),
}


@dataclass(frozen=True)
class Task:
    """A contender's task, as JSON on its processes' command line."""

    workload: str
    processes: int
    steps: int
    folder: str
    """Folder of the data, their order and the model's initial values."""
    scratch: str
    """An empty folder for this contender alone."""
    own_launcher: bool
    """True if it was started by its own launcher, not by torchrun with equal threads."""


@dataclass(frozen=True)
class Workload:
    task: Task
    build: Callable[[], nn.Module]
    data: Any
    """A map-style dataset."""
    collate: Callable[[Any], Any] | None
    """Collate function for the DataLoader. None: its default."""
    inputs: Callable[[Any], Tensor]
    loss: Callable[[Tensor, Any], Tensor]
    """(output, batch) -> mean loss over a microbatch."""

    def __reduce__(self) -> Any:
        return load, (self.task,)

    @property
    def size(self) -> Size:
        return SIZES[self.task.workload]

    @property
    def accumulated(self) -> int:
        """Microbatches per step in each process."""
        return max(1, self.size.microbatches // self.task.processes)

    @property
    def microbatch(self) -> int:
        """Samples in one forward and backward."""
        return self.size.batch // max(self.size.microbatches, self.task.processes)

    @property
    def workers(self) -> int:
        """Loader processes per process."""
        return max(1, (os.cpu_count() or 1) // self.task.processes) if self.size.workers else 0

    @property
    def values(self) -> Path:
        """State dict of the initial values."""
        return Path(self.task.folder) / "values.pt"

    def model(self) -> nn.Module:
        model = self.build()
        model.load_state_dict(torch.load(self.values))
        return model

    def optimizer(self, model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)

    def order(self) -> np.ndarray:
        """Samples of the whole run, in order."""
        return np.load(Path(self.task.folder) / "order.npy")

    def loader(self, rank: int | None = None) -> DataLoader[Any]:
        """Return the microbatches of process `rank`: a contiguous part of each step's samples, as
        lockstep assigns them.

        None: those of all processes, one after another, for frameworks that distribute a loader's
        batches themselves.
        """
        order = self.order()
        if rank is not None:
            order = order.reshape(self.task.steps, self.task.processes, -1)[:, rank].reshape(-1)
        return DataLoader(
            self.data,
            sampler=Given(order),
            batch_size=self.microbatch,
            num_workers=self.workers,
            collate_fn=self.collate,
        )


class Given(Sampler[int]):
    """A batch sampler with a fixed list of batches."""

    def __init__(self, order: np.ndarray) -> None:
        self.order = order.tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class Pictures:
    """A dataset of encoded images. `__getitem__` decodes, crops and mirrors an image by its
    index."""

    def __init__(self, folder: Path) -> None:
        self.encoded, self.ends, self.labels = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("encoded", "ends", "labels")
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image, ImageOps

        begin = self.ends[index - 1] if index else 0
        picture = Image.open(io.BytesIO(self.encoded[begin : self.ends[index]].tobytes()))
        chance = random.Random(int(index))
        left, top, side = (
            chance.randrange(PICTURE // 2),
            chance.randrange(PICTURE // 2),
            chance.randint(PICTURE // 4, PICTURE // 2),
        )
        picture = picture.resize(
            (CROP, CROP), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side)
        )
        if chance.random() < 0.5:
            picture = ImageOps.mirror(picture)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div_(255).sub_(0.5)
        return pixels, int(self.labels[index])


def prepare(task: Task) -> None:
    """Write the data, the order and the initial values to the task's folder."""
    from lockstep.order import Order  # contenders must not import it

    folder = Path(task.folder)
    length = _write_data(task.workload, folder)
    _, order = Order(length, SEED).samples(np.arange(task.steps * SIZES[task.workload].batch))
    np.save(folder / "order.npy", order)
    work = load(task)
    torch.manual_seed(SEED)
    torch.save(work.build().state_dict(), work.values)


def _write_data(workload: str, folder: Path) -> int:
    """Return the number of samples."""
    chance = np.random.default_rng(SEED)
    if workload in ("gpt", "accumulate"):
        text = _gpt().read_text()[0]
        (folder / "text").write_bytes(text)
        return len(_gpt().Windows(text, CONTEXT))
    if workload == "images":
        _draw(folder, chance)
        return PICTURES
    rows, width, classes = {"mlp": (60_000, 784, 10), "wide": (8192, 1024, 1024)}[workload]
    np.save(folder / "features.npy", chance.standard_normal((rows, width), dtype=np.float32))
    np.save(folder / "labels.npy", chance.integers(classes, size=rows))
    return rows


def _draw(folder: Path, chance: np.random.Generator) -> None:
    from PIL import Image

    encoded, ends, labels = bytearray(), [], chance.integers(10, size=PICTURES)
    for _ in range(PICTURES):
        coarse = Image.fromarray(chance.integers(256, size=(32, 32, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((PICTURE, PICTURE), Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
        encoded += file.getvalue()
        ends.append(len(encoded))
    for name, array in (
        ("encoded", np.frombuffer(encoded, np.uint8)),
        ("ends", np.array(ends)),
        ("labels", labels),
    ):
        np.save(folder / f"{name}.npy", array)


def load(task: Task) -> Workload:
    """Return the workload. Called in a contender's process."""
    folder = Path(task.folder)
    if task.workload in ("gpt", "accumulate"):
        gpt = _gpt()
        data = gpt.Windows((folder / "text").read_bytes(), CONTEXT)
        build = functools.partial(
            gpt.GPT, layers=4, width=128, heads=4, context=CONTEXT, dropout=0.0
        )
        return Workload(
            task, build, data, _as_it_is, lambda batch: batch[:, :-1], gpt.cross_entropy
        )
    data = Pictures(folder) if task.workload == "images" else _rows(folder)
    build = {
        "mlp": functools.partial(_perceptron, 784, 256, 10),
        "wide": functools.partial(_perceptron, 1024, 4096, 1024),
    }.get(task.workload, _convolutions)
    return Workload(
        task,
        build,
        data,
        None,
        lambda batch: batch[0],
        lambda logits, batch: F.cross_entropy(logits, batch[1]),
    )


def _rows(folder: Path) -> TensorDataset:
    # Memory-mapped, so that all contenders share one copy. "c": torch needs arrays that can be
    # written to.
    return TensorDataset(
        *(
            torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))
            for name in ("features", "labels")
        )
    )


def _perceptron(features: int, width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _as_it_is(batch: Any) -> Any:
    return batch


def _gpt() -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import gpt

    return gpt
