"""examples/notebook.ipynb, executed as Jupyter does; and as it is in the repository.

    python tests/examples/test_notebook.py [FILE]

executes it in FILE's folder and writes FILE; without one, the notebook in the repository, without
the report, which GitHub does not show and which names this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
MOST_BYTES = 50_000
"""Size of the notebook in the repository."""


def executed(folder: Path) -> Any:
    """The notebook with its outputs. Raises if a cell does."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=100, coalesce_streams=True, resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which would change with each execution
    return notebook


def texts(notebook: Any) -> str:
    return "".join(
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream"
    )


def shown(notebook: Any, kind: str) -> list[str]:
    outputs = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output
    ]
    return [output["data"][kind] for output in outputs if kind in output["data"]]


def check(notebook: Any) -> None:
    """Check all outputs but the report."""
    assert "400/400 ━━━" in texts(notebook), "the progress display is not there"
    assert "evaluation at step 200/400" in texts(notebook)
    assert "on the true wave, fingerprint" in texts(notebook)
    assert len(shown(notebook, "image/png")) == 1
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), (
        "cells were executed out of order, or not at all"
    )


@pytest.mark.command
@pytest.mark.timeout(150)
def test_the_notebook_runs_and_shows_progress_a_picture_and_the_report(tmp_path: Path) -> None:
    # In a process of its own: the client of a kernel leaves an event loop open.
    (tmp_path / "tmp").mkdir()
    own = {
        "IPYTHONDIR": "ipython",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "MPLCONFIGDIR": "matplotlib",
        "TMPDIR": "tmp",
    }
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **{name: str(tmp_path / folder) for name, folder in own.items()},
    }
    written = tmp_path / "executed.ipynb"
    ended = subprocess.run(
        [sys.executable, __file__, written],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    notebook = nbformat.read(written, as_version=4)
    check(notebook)
    (report,) = [text for text in shown(notebook, "text/html") if "<iframe" in text]
    assert "&lt;svg" in report


def test_the_notebook_in_the_repository_has_its_outputs_and_is_small() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    check(notebook)
    assert not shown(notebook, "text/html"), (
        "python tests/examples/test_notebook.py writes it without the report"
    )
    assert NOTEBOOK.stat().st_size < MOST_BYTES


def main() -> None:
    if len(sys.argv) > 1:
        nbformat.write(executed(Path(sys.argv[1]).parent), sys.argv[1])
        return
    notebook = executed(NOTEBOOK.parent)
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [
                output for output in cell.outputs if "text/html" not in output.get("data", {})
            ]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
