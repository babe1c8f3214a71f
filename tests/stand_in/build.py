"""Builds the stand-in accelerator, and gives the environment in which torch loads it."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCES = Path(__file__).parent
ROOT = SOURCES.parents[1]
PATH = SOURCES / "path"
"""In sys.path when torch is imported, it makes torch load the device."""
FLAGS = ["-std=c++20", "-O0", "-fPIC", "-DTORCH_EXTENSION_NAME=_stand_in"]
# The compiler collects its garbage seldom: a quarter less time, and 1 GiB of memory.
FLAGS += ["--param", "ggc-min-expand=400", "--param", "ggc-min-heapsize=2000000"]


def environment(devices: int) -> dict[str, str]:
    """Return environment variables with which a process has that many devices of type `standin`."""
    return {
        "PYTHONPATH": f"{PATH}:{ROOT / 'src'}",
        "STAND_IN_LIBRARY": str(library()),
        "STAND_IN_DEVICES": str(devices),
    }


def library() -> Path:
    """Return the extension's file. It is built once for this torch and these sources, in about 25 s
    on two cores."""
    sources = sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.sha256(torch.__version__.encode() + " ".join(FLAGS).encode())
    for path in (*sources, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "stand_in" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "_stand_in.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            includes = [*include_paths(), sysconfig.get_paths()["include"], str(SOURCES)]
            linked = folder / "linked.so"
            command = ["g++", "-shared", *FLAGS, *(f"-I{path}" for path in includes)]
            command += ["-x", "c++", "-", *(f"-L{path}" for path in library_paths())]
            command += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-o", str(linked)]
            # One translation unit: torch's headers take longer to parse than these files.
            text = "".join(f'#include "{path.name}"\n' for path in sources)
            subprocess.run(command, input=text.encode(), check=True)
            linked.rename(built)
    return built


if __name__ == "__main__":
    print(library())
