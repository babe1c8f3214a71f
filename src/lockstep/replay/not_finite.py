"""Finds the first value of a microbatch that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Stage = Literal["batch", "input", "forward", "loss", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NotFinite:
    """A computation on a microbatch whose result has NaN or infinity."""

    stage: Stage
    layer: str = ""
    operation: str = ""
    """Class name of the module, or the name of autograd's node in the backward."""
    is_in_model: bool = True
    """False for a node of the backward that does not belong to the model."""
    parameter: str | None = None
    """Name of a parameter or buffer of the module that is not finite; None if all are finite."""
    samples: Sequence[int | str] = ()
    """Samples whose rows of the result are not finite. Empty if the result has no row for each
    sample."""

    @property
    def place(self) -> tuple[str, str, str]:
        return self.stage, self.layer, self.operation

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "samples": list(self.samples), "text": self.text()}

    def text(self) -> str:
        if self.stage == "batch":
            return "the batch"
        if self.stage == "input":
            return "the model's input, which the script makes from a finite batch"
        if self.stage == "loss":
            return "the loss: the model's output is finite, so the loss function makes it"
        layer = f"layer {self.layer} " if self.layer else "the model's own code "
        if self.stage == "forward":
            of = f", whose {self.parameter} is not finite" if self.parameter else ""
            return f"the output of {layer}({self.operation}) in the forward{of}"
        where = f"in {layer.rstrip()}" if self.is_in_model else "in the loss function"
        return f"the gradient by {self.operation} {where}, in the backward"


def first_words(place: NotFinite | None) -> str:
    if place is None:
        return (
            "the layer of the first value that is not finite is not known; layers are looked at"
            " under replicate, without compile=yes"
        )
    return f"the first value that is not finite is in {place.text()}"


def first_not_finite(
    microbatches: Iterable[tuple[bool, Sequence[NotFinite]]],
) -> list[NotFinite | None]:
    """Return the first computation of each microbatch that is not finite. Skips computations, such
    as masks, that are also not finite in a finite microbatch."""
    given = list(microbatches)
    usual = {each.place for is_finite, places in given if is_finite for each in places}
    return [
        None if is_finite else next((each for each in places if each.place not in usual), None)
        for is_finite, places in given
    ]
