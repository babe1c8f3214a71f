"""Where a process stands is read from the stacks of its threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.audit.runner import waiting_lines

DUMP = """Thread 0x00007f1 (most recent call first):
  File "ROOT/background.py", line 1 in log

Current thread 0x00007f0 (most recent call first):
  File "<frozen runpy>", line 3 in wait
  File "/usr/lib/python3.11/site-packages/torch/distributed/c10d.py", line 4001 in barrier
  File "ROOT/.venv/lib/site-packages/x.py", line 2 in wrapper
  File "ROOT/inner/loop.py", line 14 in each epoch
  File "ROOT/train.py", line 30 in <module>
"""


def test_the_line_is_the_innermost_of_the_users_in_the_main_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a name such as <frozen runpy> is no file in it
    stacks = {7: DUMP.replace("ROOT", str(tmp_path)), 8: DUMP.replace("ROOT", "/elsewhere"), 9: ""}
    assert waiting_lines(stacks, str(tmp_path)) == {7: "inner/loop.py:14, in each epoch"}
