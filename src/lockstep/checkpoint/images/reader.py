"""Read memory images under any plan, on any number of ranks, each of which may see only its
machine's parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.images.slots import Part, parts_in
from lockstep.checkpoint.load import copies_by_shard, fill
from lockstep.checkpoint.manifest import Manifest, merge_objects
from lockstep.checkpoint.storage import CheckpointName
from lockstep.checkpoint.tensor_shards import ShardCopy, TensorShard, torch_dtype
from lockstep.comm.mesh import to_local
from lockstep.comm.world import World


class Images:
    """The images whose parts are all seen, each by some rank."""

    def __init__(self, parts: Sequence[Part], world: World) -> None:
        """Every rank makes one from the parts that it sees, after all writers have stopped."""
        self._world = world
        self._mine: dict[tuple[CheckpointName, int], dict[int, Part]] = {}
        for part in parts:
            self._mine.setdefault((part.header.name, part.header.size), {})[part.header.rank] = part
        seen = sorted(
            [name.step, name.attempt, size, sorted(ranks)]
            for (name, size), ranks in self._mine.items()
        )
        places: dict[tuple[CheckpointName, int], dict[int, list[int]]] = {}
        for place, theirs in enumerate(world.gather_values(seen)):
            for step, attempt, size, ranks in theirs:
                for rank in ranks:
                    places.setdefault((CheckpointName(step, attempt), size), {}).setdefault(
                        rank, []
                    ).append(place)
        self._complete = {
            name: [ranks[rank] for rank in range(size)]
            for (name, size), ranks in sorted(places.items())
            if len(ranks) == size
        }
        """For each old rank, the ranks that see its part."""

    @property
    def names(self) -> list[CheckpointName]:
        """The oldest first."""
        return list(self._complete)

    @property
    def newest(self) -> CheckpointName | None:
        return max(self._complete, default=None)

    def reader(self, name: CheckpointName) -> ImageReader:
        """Return a reader of one image. Every rank calls it for the same one."""
        places = self._complete[name]
        return ImageReader(name, self._mine.get((name, len(places)), {}), places, self._world)


class ImageReader:
    """Reads the whole state of one step for one rank."""

    def __init__(
        self,
        name: CheckpointName,
        mine: Mapping[int, Part],
        places: Sequence[Sequence[int]],
        world: World,
    ) -> None:
        """`mine`: the parts that this rank sees, by old rank. `places`: for each old rank, the
        ranks that see its part."""
        sources = {
            rank: seen_by[0] for rank, seen_by in enumerate(places) if len(seen_by) != world.size
        }
        texts = _texts(mine, sources, world)
        self.name = name
        self.manifest = Manifest(
            step=name.step,
            files={},
            values=merge_objects([text["values"] for text in texts]),
            metadata=texts[0]["metadata"],
        )
        self._saved: dict[TensorShard, int | None] = {}
        """Shard -> the rank that sends it to ranks that do not see it; None if all see it."""
        self._seen: dict[TensorShard, Tensor] = {}
        """Memory of the shards that this rank sees."""
        for rank, text in enumerate(texts):
            file = mine[rank].file if rank in mine else None
            for *described, start in text["shards"]:
                shard = TensorShard.from_json(described)
                self._saved[shard] = sources.get(rank)
                if file is not None:
                    self._seen[shard] = (
                        file[start : start + shard.bytes]
                        .view(torch_dtype(shard.dtype))
                        .view(shard.lengths)
                    )

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> dtype and shape of each saved tensor."""
        return {shard.name: (shard.dtype, shard.shape) for shard in self._saved}

    @torch.no_grad()
    def load_into(self, state: Mapping[str, Tensor], world: World) -> None:
        """Copy the values into this rank's tensors; names and shapes are among the saved ones.
        Every rank calls it. Parts that some rank does not see are sent, shard by shard."""
        copies = copies_by_shard(state, list(self._saved))
        for shard, wanted in copies.items():
            if shard in self._seen:
                _take(state, wanted, self._seen[shard])
        sent = {shard: source for shard, source in self._saved.items() if source is not None}
        if not sent:
            return
        lacked = torch.tensor(
            [[shard in copies and shard not in self._seen for shard in sent]], dtype=torch.uint8
        )
        is_lacked = world.gather_rows(lacked, [1] * world.size).any(0)
        for (shard, source), some_lack_it in zip(sent.items(), is_lacked.tolist(), strict=True):
            if not some_lack_it:
                continue
            values = (
                self._seen[shard]
                if world.rank == source
                else torch.empty(shard.lengths, dtype=torch_dtype(shard.dtype))
            )
            world.broadcast(values.reshape(-1).view(torch.uint8), source)
            if shard not in self._seen:
                _take(state, copies.get(shard, ()), values)


def open_images(paths: Sequence[str], world: World) -> Images:
    """Map the images behind `paths`, such as /proc/4711/fd/12. Raises `OSError`.

    Every rank calls it. Of each start of the run, an image counts if all its parts are seen on
    ranks of `world`.
    """
    return Images([part for path in paths for part in parts_in(path)], world)


def _take(state: Mapping[str, Tensor], copies: Sequence[ShardCopy], values: Tensor) -> None:
    """Copy one shard's values to this rank's tensors."""
    for copy in copies:
        fill(to_local(state[copy.shard.name]).detach()[copy.target], values[copy.source])


def _texts(
    mine: Mapping[int, Part], sources: Mapping[int, int], world: World
) -> list[dict[str, Any]]:
    """Return the text of each old rank's part. `sources`: the rank that sends a text that not all
    see."""
    texts = {rank: json.loads(part.text) for rank, part in mine.items()}
    if sources:
        told = world.gather_values(
            [[rank, texts[rank]] for rank, source in sources.items() if source == world.rank]
        )
        texts.update((rank, text) for each in told for rank, text in each)
    return [texts[rank] for rank in sorted(texts)]
