"""An S3 server on loopback, and a proxy to it that can disconnect."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from processes import reserved_port

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "anyone",
    "AWS_SECRET_ACCESS_KEY": "anything",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def s3() -> Iterator[int]:
    """Gives its port. It has no buckets."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p"]
    null = subprocess.DEVNULL
    with (
        reserved_port() as port,
        subprocess.Popen([*command, str(port)], stdout=null, stderr=null) as server,
    ):
        try:
            while not _answers(port):
                assert server.poll() is None
                time.sleep(0.05)
            yield port
        finally:
            server.kill()


def _answers(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextmanager
def environment(port: int) -> Iterator[None]:
    """Set the variables with which s3:// is the server at this port; end fsspec's thread
    afterwards."""
    ours = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        end_fsspec()


def end_fsspec() -> None:
    """End the thread of fsspec's drivers, and their connections."""
    import fsspec
    from fsspec import asyn

    if asyn.loop[0] is None:
        return
    import s3fs

    for file_system in list(s3fs.S3FileSystem._cache.values()):
        if file_system._s3 is not None:
            s3fs.S3FileSystem.close_session(asyn.loop[0], file_system._s3)
    fsspec.asyn.loop[0].call_soon_threadsafe(asyn.loop[0].stop)
    asyn.iothread[0].join()
    asyn.loop[0].close()
    asyn.loop[0] = asyn.iothread[0] = None
    s3fs.S3FileSystem.clear_instance_cache()


class Line:
    """A proxy on loopback. Once disconnected it resets its connections and accepts no more."""

    def __init__(self, to: int, *, disconnect_after_bytes: int | None = None) -> None:
        """`disconnect_after_bytes`: bytes sent to the server after which it disconnects."""
        self._to = to
        self._left = disconnect_after_bytes
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.was_cut = False
        self._start(self._accept)

    def disconnect(self) -> None:
        self.was_cut = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.disconnect()
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            self._open += [near, far]
            self._start(self._carry, near, far, True)
            self._start(self._carry, far, near, False)

    def _carry(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                if counts and self._left is not None:
                    self._left -= len(data)
                    if self._left < 0 and not self.was_cut:
                        self.disconnect()
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
