"""The container that a process is in: a real one, and what other engines leave behind in files and
variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from containers import container
from processes import ran

from lockstep.base.container import (
    container_engine,
    ends_with_container,
    mount_of,
    process_id_space,
)

ASK = """
import os, pathlib
from lockstep.base.container import container_engine, ends_with_container, process_id_space
paths = map(pathlib.Path, os.sys.argv[1:])
print(container_engine(os.environ), *(ends_with_container(path, os.environ) for path in paths), process_id_space(), sep="|")
"""


def answer(before: list[str], *paths: Path) -> list[str]:
    line = [*before, sys.executable, "-c", ASK, *map(str, paths)]
    environ = {name: value for name, value in os.environ.items() if name != "container"}
    ended = ran(line, env=environ)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip().split("|")


def test_a_container_is_known_and_what_is_lost_with_it(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    with container(tmp_path / "box", volume=volume) as before:
        engine, here, there, shared, ids = answer(before, Path("/tmp"), Path("/dev/shm"), volume)
    assert engine == "Docker"
    assert (
        here == "/tmp is in the container's own file system (overlay on /), and is lost when the"
        " container is removed"
    )
    assert (
        there
        == "/dev/shm is in memory (tmpfs on /dev/shm), and is lost when the container is removed"
    )
    assert shared == "None"
    boot, space = process_id_space()
    assert ids.startswith(f"['{boot}', ")
    assert str(space) not in ids


def test_outside_of_a_container_an_overlay_and_a_file_of_docker_s_say_nothing(
    tmp_path: Path,
) -> None:
    """As in a virtual machine that was made from an image, or a live system."""
    names = ("low", "up", "work", "all")
    for name in names:
        (tmp_path / name).mkdir()
    low, up, work, over = (tmp_path / name for name in names)
    mount = f"mount -t overlay overlay -o lowerdir={low},upperdir={up},workdir={work} {over}"
    line = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs tmpfs {tmp_path} && mkdir {low} {up} {work} {over} && {mount}; exec "$@"',
        "sh",
    ]
    engine, here, ids = answer(line, over)
    assert (engine, here, ids) == ("None", "None", str(process_id_space()))


FIRST = {"pid": 4026531836, "ipc": 4026531839, "uts": 4026531838, "cgroup": 4026531835}
OWN = FIRST | {"pid": 4026532180}


@pytest.mark.parametrize(
    ("namespaces", "made", "environ", "engine"),
    [
        (FIRST, [], {}, None),
        (FIRST, [".dockerenv"], {}, None),
        (OWN, [], {}, None),
        (OWN, [".dockerenv"], {}, "Docker"),
        (OWN, ["run/.containerenv"], {"container": "podman"}, "Podman"),
        (OWN, [], {"container": "lxc"}, "a container"),
        (FIRST, [], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        (FIRST, [], {"APPTAINER_CONTAINER": "/a.sif"}, "Apptainer"),
        ({}, [".dockerenv"], {}, None),
    ],
)
def test_engines_are_told_by_what_they_leave(
    tmp_path: Path,
    namespaces: dict[str, int],
    made: list[str],
    environ: dict[str, str],
    engine: str | None,
) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/mounts").write_text("/dev/sda1 / ext4 rw 0 0\n")
    for name, number in namespaces.items():
        (tmp_path / "proc/self/ns" / name).symlink_to(f"{name}:[{number}]")
    for name in made:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert container_engine(environ, tmp_path) == engine
    assert ends_with_container(Path("/runs"), environ, tmp_path) is None


def test_a_root_of_layers_makes_a_container_of_no_known_engine_and_a_volume_in_it_is_kept(
    tmp_path: Path,
) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[1]")
    (tmp_path / "proc/mounts").write_text(
        "overlay / overlay rw 0 0\nserver:/x /with\\040blank nfs4 rw 0 0\n"
    )
    assert container_engine({}, tmp_path) == "a container"
    assert mount_of(Path("/with blank/runs"), tmp_path) == ("/with blank", "nfs4")
    assert ends_with_container(Path("/with blank/runs"), {}, tmp_path) is None
    assert (
        ends_with_container(Path("/runs/a"), {}, tmp_path)
        == "/runs/a is in the container's own file system (overlay on /), and is lost when the"
        " container is removed"
    )


def test_mount_points_may_have_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    lines = ("overlay / overlay rw 0 0", "server:/x /donn\u00e9es\u00a0\u3000\\040a nfs4 rw 0 0")
    latin = "/donn\u00e9es".encode("latin-1")
    (tmp_path / "proc/mounts").write_bytes(
        "\n".join(lines).encode() + b"\nserver:/y " + latin + b" cifs rw 0 0\n"
    )
    assert mount_of(Path("/donn\u00e9es\u00a0\u3000 a/runs"), tmp_path)[1] == "nfs4"
    assert mount_of(Path(os.fsdecode(latin)) / "runs", tmp_path)[1] == "cifs"
