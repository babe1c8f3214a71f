"""What several modules of whole commands compare with, made once a session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOCKSTEP = str(Path(sys.executable).parent / "lockstep")
ELASTIC = str(Path(__file__).parent.parent / "scripts" / "elastic.py")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of the run of scripts/elastic.py on one process, to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([LOCKSTEP, "run", "--run-dir", "run", ELASTIC, "0"], cwd=folder, env=environment, check=True, capture_output=True)
    found: str = json.loads((folder / "run" / "result.json").read_text())["fingerprint"]
    return found
