"""A PostgreSQL server of Debian's packages, for a test."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2

_BINARIES = max(
    Path("/usr/lib/postgresql").glob("*/bin"),
    default=Path("/nowhere"),
    key=lambda path: float(path.parent.name),
)
_AS_ROOT = os.geteuid() == 0


def why_not() -> str:
    """Return why no server can be started here. Empty if one can."""
    if not (_BINARIES / "initdb").exists():
        return "no PostgreSQL here: Debian's package postgresql has it (apt-get install postgresql)"
    if _AS_ROOT and "postgres" not in {user.pw_name for user in pwd.getpwall()}:
        return "the server does not run as root, and there is no user postgres"
    return ""


def _as_user() -> dict[str, Any]:
    """The server refuses to run as root."""
    return {"user": "postgres", "group": "postgres", "extra_groups": []} if _AS_ROOT else {}


def initialise(folder: Path) -> None:
    """Make the data of a server that has none yet."""
    options = ["--username", "tester", "--auth", "trust", "--no-sync", "--locale=C"]
    subprocess.run(
        [_BINARIES / "initdb", "--pgdata", folder / "data", *options],
        check=True,
        capture_output=True,
        cwd=folder,
        **_as_user(),
    )


class Server:
    """A server on a socket in a folder of its own."""

    def __init__(self, folder: Path, initialised: Path) -> None:
        self._folder = folder
        subprocess.run(["cp", "-a", initialised / "data", folder], check=True)
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql+psycopg2://tester@/postgres?host={self._folder}"

    def start(self) -> None:
        # A killed server leaves nothing in /dev/shm so.
        settings = [
            "listen_addresses=",
            f"unix_socket_directories={self._folder}",
            "fsync=off",
            "dynamic_shared_memory_type=mmap",
        ]
        options = [word for setting in settings for word in ("-c", setting)]
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [_BINARIES / "postgres", "-D", self._folder / "data", *options],
                cwd=self._folder,
                stdout=log,
                stderr=log,
                **_as_user(),
            )
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg2.connect(host=str(self._folder), user="tester", dbname="postgres").close()
                return
            except psycopg2.OperationalError:
                assert self._process.poll() is None, (self._folder / "log").read_text()
                assert time.monotonic() < deadline, (self._folder / "log").read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        """Stop it at once: connections are broken."""
        self._process.send_signal(3)  # SIGQUIT: the "immediate" shutdown
        try:
            self._process.wait(20)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    @property
    def folder(self) -> Path:
        return self._folder

    def require_password(self, password: str) -> None:
        """Let nobody in without a password from now on."""
        (self._folder / "data" / "pg_hba.conf").write_text("local all all scram-sha-256\n")
        connection = psycopg2.connect(host=str(self._folder), user="tester", dbname="postgres")
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("ALTER USER tester PASSWORD %s", [password])
            cursor.execute("SELECT pg_reload_conf()")
        connection.close()

    def query(self, text: str) -> list[Any]:
        connection = psycopg2.connect(host=str(self._folder), user="tester", dbname="postgres")
        try:
            with connection.cursor() as cursor:
                cursor.execute(text)
                return list(cursor.fetchall())
        finally:
            connection.close()


@contextmanager
def folder_of_server() -> Iterator[Path]:
    """A folder that the server's user can read, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-postgres-", dir="/tmp"))
    try:
        if _AS_ROOT:
            shutil.chown(folder, "postgres", "postgres")
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def serving(initialised: Path) -> Iterator[Server]:
    """A new server."""
    with folder_of_server() as folder:
        server = Server(folder, initialised)
        try:
            yield server
        finally:
            server.stop()
