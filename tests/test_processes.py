"""What tests start ends by signals, also under nohup, and does not outlive a test that fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from processes import IGNORED_IN_THE_BACKGROUND, started


@pytest.mark.parametrize("number", IGNORED_IN_THE_BACKGROUND)
def test_signals_that_this_process_ignores_end_what_it_starts(number: signal.Signals) -> None:
    source = f"""
        import signal, subprocess
        from processes import let_signals_end_what_tests_start
        signal.signal({int(number)}, signal.SIG_IGN)
        let_signals_end_what_tests_start()
        signal.raise_signal({int(number)})
        with subprocess.Popen(["sleep", "1000"]) as child:
            child.send_signal({int(number)})
        print(child.returncode)
    """
    ended = subprocess.run(
        [sys.executable, "-c", dedent(source)], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=50, check=False
    )
    assert (ended.stdout, ended.stderr) == (f"{-number}\n", "")


def test_a_command_does_not_outlive_a_test_that_fails() -> None:
    children: list[psutil.Process] = []

    def fails() -> None:
        with started(["sh", "-c", "sleep 1000 & wait"], stdout=subprocess.PIPE) as command:
            while not children:
                children.extend(psutil.Process(command.pid).children())
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fails()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
