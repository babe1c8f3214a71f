"""Check the sdist and the wheel in a folder: their files, an installation into an empty
environment, the README's recipe there.

    python tests/dist.py dist

Run by `make dist`, and not by pytest: the installation takes about a minute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FINGERPRINT = re.compile(r"\b[0-9a-f]{64}\b")
PROJECT_FILES = {
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
}
"""What the sdist has besides the package and what setuptools generates."""


def package_files() -> set[str]:
    """Every file of the package in this checkout, as `lockstep/...`."""
    source = ROOT / "src"
    files = {
        path.relative_to(source)
        for path in source.joinpath("lockstep").rglob("*")
        if path.is_file()
    }
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def check_wheel(path: Path) -> None:
    """Check that the wheel has every file of the package, its own metadata and licence, and nothing
    else."""
    names = set(zipfile.ZipFile(path).namelist())
    metadata = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    compare("the wheel", names - metadata, package_files())
    assert "lockstep/py.typed" in names, (
        "the wheel has no py.typed: type checkers would ignore its types"
    )
    assert any(name.endswith("/licenses/LICENSE") for name in metadata), "the wheel has no LICENSE"


def check_sdist(path: Path) -> None:
    """Check that the sdist has the package, the files of `PROJECT_FILES` and what setuptools
    generates. The wheel beside it was built from it."""
    with tarfile.open(path) as archive:
        names = {name.name.partition("/")[2] for name in archive.getmembers() if name.isfile()}
    names = {name for name in names if ".egg-info/" not in name} - {"PKG-INFO", "setup.cfg"}
    compare("the sdist", names, PROJECT_FILES | {f"src/{name}" for name in package_files()})


def compare(what: str, found: set[str], expected: set[str]) -> None:
    assert found == expected, (
        f"{what} lacks {sorted(expected - found)} and should not have {sorted(found - expected)}"
    )


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel into an empty virtual environment in `folder`. Returns the environment's
    programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    programs = folder / "bin"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(programs / "python"),
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [
            *pip,
            "install",
            "--no-compile",
            "--constraint",
            str(ROOT / "constraints.txt"),
            str(wheel),
        ],
        check=True,
    )
    return programs


def check_recipe(programs: Path, folder: Path) -> None:
    """Train the README's recipe with the installed package, from a folder outside of the
    checkout."""
    blocks = re.findall(
        r"^```python\n(.*?)^```",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    (folder / "train.py").write_text("\n".join(blocks), encoding="utf-8")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "LOCKSTEP", "VIRTUAL_ENV"))
    }
    # on busy cores, threads that spin take ten times as long
    environment["OMP_WAIT_POLICY"] = "passive"

    def output(*command: str) -> str:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=True
        ).stdout

    python = str(programs / "python")
    home = Path(output(python, "-c", "import lockstep; print(lockstep.__file__)").strip())
    assert home.is_relative_to(programs.parent), (
        f"lockstep was imported from {home}, not from the wheel"
    )
    for command in ([python], [str(programs / "lockstep"), "run", "--nproc", "2"]):
        printed = output(*command, "train.py")
        assert FINGERPRINT.search(printed), (
            f"{Path(command[0]).name} train.py printed no fingerprint: {printed!r}"
        )


def main(folder: Path) -> None:
    began = time.monotonic()
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    with tempfile.TemporaryDirectory(prefix="lockstep-dist-") as temporary:
        outside = Path(temporary, "outside")
        outside.mkdir()
        check_recipe(install(wheel, Path(temporary, "environment")), outside)
    print(
        f"{wheel.name} installs into an empty environment and trains the README's recipe there"
        f" ({time.monotonic() - began:.0f} s)"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
