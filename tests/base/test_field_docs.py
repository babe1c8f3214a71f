"""`help()` shows the docstring of each field of the public dataclasses."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
from dataclasses import fields, is_dataclass, make_dataclass, replace

import lockstep as ls
from lockstep.base.field_docs import with_field_docs


def test_every_field_of_a_public_class_is_in_its_help() -> None:
    classes = [kind for name in ls.__all__ if is_dataclass(kind := getattr(ls, name))]
    assert len(classes) > 10
    for kind in classes:
        shown = pydoc.render_doc(kind, renderer=pydoc.plaintext)
        for field in fields(kind):
            doc = inspect.getdoc(getattr(kind, field.name))
            assert doc, f"{kind.__name__}.{field.name}"
            assert doc.split("\n")[0] in shown, f"{kind.__name__}.{field.name}"


def test_what_guides_say_of_metrics_and_weights_is_in_the_help() -> None:
    weight = " ".join((inspect.getdoc(ls.Recipe.weight) or "").split())
    assert "a dict of the denominators of its `Sum`s, by name" in weight
    assert "(model, batch)" in (inspect.getdoc(ls.Evaluation.metrics) or "")
    assert "Called on every rank" in (inspect.getdoc(ls.Gathered.compute) or "")


def test_a_class_with_field_docs_is_copied_and_pickled_as_before() -> None:
    mean = ls.Mean(max)
    assert (
        pickle.loads(pickle.dumps(mean))
        == copy.deepcopy(mean)
        == replace(ls.Mean(min), values=max)
        == mean
    )


def test_a_class_without_a_source_has_no_docs() -> None:
    kind = with_field_docs(make_dataclass("Made", [("field", int)], slots=True))
    assert not inspect.getdoc(kind.field)
