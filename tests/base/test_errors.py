"""Tests of how an exception that nobody catches is shown."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest
from processes import ran

from lockstep.base.errors import (
    DataError,
    DivergenceError,
    WrongResultError,
    install_excepthook,
)


@pytest.mark.parametrize(
    ("kind", "status"), [(DataError, 2), (DivergenceError, 1), (WrongResultError, 1)]
)
def test_an_error_of_lockstep_is_one_message(
    kind: type[Exception],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    others: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: others.append(kind))
    install_excepthook()
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(kind, kind("value; rule; remedy"), None)
    assert ended.value.code == status
    assert capsys.readouterr().err == f"lockstep: {kind.__name__}: value; rule; remedy\n"
    sys.excepthook(KeyError, KeyError("x"), None)
    assert others == [KeyError]


def test_an_error_of_lockstep_does_not_end_an_interactive_python() -> None:
    lines = """
    from lockstep.base.errors import DivergenceError, install_excepthook
    install_excepthook()
    raise DivergenceError("value; rule; remedy")
    print("goes on")
    """
    ended = ran([sys.executable, "-i", "-q"], input=dedent(lines))
    assert (ended.returncode, ended.stdout) == (0, "goes on\n")
    assert "lockstep: DivergenceError: value; rule; remedy\n" in ended.stderr
