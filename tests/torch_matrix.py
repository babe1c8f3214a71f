"""Runs the tests on several versions of torch, one after another, and prints a table.

    python tests/torch_matrix.py [--python PYTHON] [--tests PATH...] VERSION...

Each version has a virtual environment of its own, build/torch-VERSION-pythonX.Y, which is kept.
With the libraries of CUDA it takes 5 GB. The output of the tests is in a .log beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
PYTEST = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider"]


def environment(version: str, python: str) -> Path:
    """Return the virtual environment with this torch, which is made if it is not there."""
    asked = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    )
    folder = BUILD / f"torch-{version}-python{asked.stdout.strip()}"
    if not (folder / "installed").exists():
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        pins = folder / "constraints.txt"
        pins.write_text(
            "".join(
                line for line in (ROOT / "constraints.txt").open() if not line.startswith("torch==")
            )
        )
        install = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--constraint",
            str(pins),
            f"torch=={version}",
        ]
        subprocess.run([*install, "--editable", f"{ROOT}[dev]"], check=True)
        (folder / "installed").touch()
    return folder


def tested(environment: Path, tests: list[str]) -> str:
    """Run the tests, and return a row of the table."""
    began, python = time.monotonic(), environment / "bin" / "python"
    output = BUILD / f"{environment.name}.log"
    with output.open("w", encoding="utf-8") as log:
        status = subprocess.run(
            [str(python), "-m", "pytest", *PYTEST, *tests],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            check=False,
        ).returncode
    *_, last = output.read_text(encoding="utf-8").splitlines()
    described = subprocess.run(
        [
            str(python),
            "-c",
            "import platform, torch; print(platform.python_version(), torch.__version__)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    number, torch = described.stdout.split()
    minutes = (time.monotonic() - began) / 60
    return (
        f"| {torch} | {number} | {'passes' if status == 0 else 'FAILS'} | {last.strip('= ')} |"
        f" {minutes:.0f} min |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--tests", nargs="*", default=[], metavar="PATH")
    given = parser.parse_args()
    rows = []
    for version in given.versions:
        rows.append(tested(environment(version, given.python), given.tests))
        print(rows[-1], flush=True)
    print(
        "\n| torch | Python | tests | pytest says | |\n| --- | --- | --- | --- | --- |",
        *rows,
        sep="\n",
    )
    return int(any("FAILS" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
