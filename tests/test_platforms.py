"""macOS and Windows: one process trains, saves, resumes and reports there; what needs Linux is
refused in words.

`native` runs on whatever system this is: the workflow has it run on macOS and Windows. On Linux it
is slow: other tests train, resume and report there, and `darwin` runs the same program. The others
show on Linux what can be shown there (tests/scripts/other_system.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ran

SCRIPTS = Path(__file__).parent / "scripts"
PORTABLE = SCRIPTS / "portable.py"
LINUX_ALONE = pytest.mark.skipif(sys.platform != "linux", reason="it plays another system on Linux")


def found_on(system: str, folder: Path) -> dict[str, Any]:
    # The processes that multiprocessing starts on Windows cannot be had on Linux.
    played = {
        "native": [],
        "darwin": [SCRIPTS / "other_system.py", "darwin"],
        "win32": [SCRIPTS / "other_system.py", "win32"],
    }[system]
    command = [
        sys.executable,
        *played,
        PORTABLE,
        folder,
        *(["--without-workers"] if system == "win32" else []),
    ]
    ended = ran(list(map(str, command)), cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert "could not be deleted" not in ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "system",
    [
        pytest.param("native", marks=pytest.mark.slow if sys.platform == "linux" else ()),
        pytest.param("darwin", marks=LINUX_ALONE),
        pytest.param("win32", marks=LINUX_ALONE),
    ],
)
def test_one_process_trains_and_what_needs_linux_is_refused_in_words(
    system: str, tmp_path: Path
) -> None:
    found = found_on(system, tmp_path)
    platform = found["platform"]
    assert platform == (sys.platform if system == "native" else system)
    assert found["longer"] == found["whole"], "a resumed run is the same run"
    assert {"resumed", "checkpoint-saved"} <= set(found["events"])
    assert "run-failed" not in found["events"]
    assert set(found["helps"]) == {0}
    assert (found["inspect"], found["report"], found["export"]) == (0, 0, 0)
    assert found["imported"] > 200
    if system != "win32":
        assert found["workers"] == found["whole"]
        pickles = (
            "LaunchError: loader workers on" in found["lambda"]
            and "plan workers=0" in found["lambda"]
        )
        assert pickles if platform != "linux" else found["lambda"] == "no error"
    if platform != "linux":
        assert found["doctor"].startswith(
            f"LaunchError: lockstep doctor on {platform}; it reads Linux's /proc"
        )
    if platform == "win32":
        refused = {
            "run": "lockstep run",
            "verify": "lockstep verify",
            "audit": "lockstep audit",
            "spawn": "ls.spawn",
            "torchrun": "a run of 2 processes",
        }
        for name, what in refused.items():
            assert found[name].startswith(f"LaunchError: {what} on Windows; "), found[name]
            assert "train on one process (python train.py)" in found[name]
