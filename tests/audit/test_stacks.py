"""Where a process stands is read from the stacks of its threads."""

from __future__ import annotations

from lockstep.audit.stacks import waiting_lines

DUMP = """Thread 0x00007f1 (most recent call first):
  File "/home/me/project/background.py", line 1 in log

Current thread 0x00007f0 (most recent call first):
  File "<frozen runpy>", line 3 in wait
  File "/usr/lib/python3.11/site-packages/torch/distributed/c10d.py", line 4001 in barrier
  File "/home/me/project/.venv/lib/site-packages/x.py", line 2 in wrapper
  File "/home/me/project/inner/loop.py", line 14 in each epoch
  File "/home/me/project/train.py", line 30 in <module>
"""


def test_the_line_is_the_innermost_of_the_users_in_the_main_thread() -> None:
    stacks = {7: DUMP, 8: DUMP.replace("/home/me", "/elsewhere"), 9: ""}
    assert waiting_lines(stacks, "/home/me/project") == {7: "inner/loop.py:14, in each epoch"}
