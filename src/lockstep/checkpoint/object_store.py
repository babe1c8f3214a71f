"""Checkpoints in an object store such as S3, through fsspec. Needs no torch.

An object store has no rename: writing the manifest last commits a checkpoint. A killed upload may
leave invisible parts that cost money. A lifecycle rule of the bucket can remove the parts of killed
uploads.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.base.errors import RunDirectoryError
from lockstep.base.urls import has_password, without_password
from lockstep.checkpoint.storage import MANIFEST, CheckpointName, FolderStorage, Storage

PART_BYTES = 16 << 20
"""Size of one part of an upload, which is held in memory. S3 allows 10,000 parts."""
WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci")
"""Protocols whose drivers would create a bucket when asked for a folder."""
CALL_SECONDS = 120.0
"""Timeout of one driver call. The upload of a part exceeds this timeout only below 140 KB/s."""
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": 5,
            "read_timeout": 15,
            "retries": {"total_max_attempts": 2, "mode": "standard"},
        }
    }
}
"""Timeouts and retries of the drivers. Most failures are reported long before `CALL_SECONDS`."""
OPTIONS["s3a"] = OPTIONS["s3"]
PACKAGES = {"s3": "'lockstep-train[s3]'", "s3a": "'lockstep-train[s3]'"}


def open_storage(place: Path | str) -> Storage:
    protocol, separator, path = str(place).partition("://")
    if not separator or protocol == "file":
        return FolderStorage(Path(path if separator else place))
    if protocol == "memory":
        raise RunDirectoryError(
            f"{place} is memory of one process, but another process writes the checkpoints; give a"
            " path, or a URL of a store"
        )
    return ObjectStorage(str(place))


class ObjectStorage:
    wait_seconds = 0.5
    readers = 16
    """An object store answers a single request slowly, but many requests at the same time."""

    def __init__(self, url: str) -> None:
        """Does not contact the store."""
        import fsspec  # type: ignore[import-untyped]  # imported here to save memory in writer processes that write to a path
        from fsspec.registry import known_implementations  # type: ignore[import-untyped]

        if has_password(url):
            raise RunDirectoryError(
                f"{without_password(url)} has a password in it, which would stand in run.json and"
                " in messages; drivers read passwords from their own files and variables; leave it"
                " out, and set FSSPEC_SFTP_PASSWORD, say, for sftp://"
            )
        protocol, _, path = url.partition("://")
        if not protocol or (protocol in WITHOUT_FOLDERS and not path.partition("/")[0]):
            raise RunDirectoryError(
                f"{url} names no {'bucket' if protocol else 'store'} (is a variable unset?); give"
                " one like s3://bucket/run"
            )
        try:
            driver = fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            raise RunDirectoryError(
                f"{url}: no driver is known for {protocol}://; give a path, or a URL like"
                " s3://bucket/run"
            ) from error
        except ImportError as error:
            remedy = (
                f"pip install {PACKAGES[protocol]}"
                if protocol in PACKAGES
                else known_implementations.get(protocol, {}).get("err", str(error))
            )
            raise RunDirectoryError(
                f"{url}: the driver of {protocol}:// is not installed; {remedy}"
            ) from error
        self.url = url.rstrip("/")
        try:
            self._fs = driver(use_listings_cache=False, **OPTIONS.get(protocol, {}))
        except Exception as error:  # drivers raise any exception of their libraries
            raise RunDirectoryError(
                f"{url}: {protocol}:// cannot hold checkpoints ({type(error).__name__}: {error});"
                " give a path, or a URL like s3://bucket/run"
            ) from error
        self._makes_folders = protocol not in WITHOUT_FOLDERS

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[CheckpointName]:
        return [name for name in self._all() if self._is_complete(name)]

    def remove_uncommitted(self) -> None:
        for name in self._all():
            if not self._is_complete(name):
                self._ask(self._fs.rm, self._at(name), recursive=True)

    def free_bytes(self) -> int | None:
        return None

    def begin(self, name: CheckpointName) -> None:
        if self._is_complete(name):
            raise FileExistsError(errno.EEXIST, "the checkpoint exists already", self._at(name))
        if self._makes_folders:
            self._ask(self._fs.makedirs, self._at(name), exist_ok=True)

    def write(self, name: CheckpointName, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        opened = self._ask(self._fs.open, self._at(name, file), "wb", block_size=PART_BYTES)
        try:
            for chunk in chunks:
                self._ask(opened.write, chunk)
            self._ask(opened.close)
        except OSError as error:
            opened.closed = True  # otherwise the destructor would try to upload again
            if not isinstance(error, TimeoutError):
                with suppress(OSError):
                    self._ask(opened.discard)  # delete the uploaded parts
            raise

    def read_uncommitted(self, name: CheckpointName, file: str) -> bytes | None:
        try:
            return self.read(name, file)
        except FileNotFoundError:
            return None

    def remove(self, name: CheckpointName, file: str) -> None:
        self._ask(self._fs.rm_file, self._at(name, file))

    def claim(self, name: CheckpointName, file: str) -> bool:
        try:
            self._ask(self._fs.pipe_file, self._at(name, f"{file}.claim"), b"", mode="create")
        except FileExistsError:
            return False
        return True

    def commit(self, name: CheckpointName, manifest: bytes) -> None:
        self.write(name, MANIFEST, [manifest])

    def size(self, name: CheckpointName, file: str) -> int:
        return int(self._ask(self._fs.size, self._at(name, file)))

    def read(
        self, name: CheckpointName, file: str, start: int = 0, stop: int | None = None
    ) -> bytes:
        path = self._at(name, file)
        data: bytes = self._ask(self._fs.cat_file, path, start=start or None, end=stop)
        return data

    def read_into(
        self, name: CheckpointName, file: str, start: int, parts: Iterable[memoryview]
    ) -> Iterator[memoryview]:
        parts = list(parts)
        wanted = sum(map(len, parts))
        try:
            data = memoryview(self.read(name, file, start, start + wanted))
        except (FileNotFoundError, TimeoutError):
            raise
        except OSError:
            if self.size(name, file) > start:
                raise
            return  # object stores refuse to read beyond the end of a file
        at = 0
        for part in parts:
            got = data[at : at + len(part)]
            part[: len(got)] = got
            yield part[: len(got)]
            at += len(got)

    def delete(self, name: CheckpointName) -> None:
        self.remove(name, MANIFEST)
        self._ask(self._fs.rm, self._at(name), recursive=True)

    def _all(self) -> list[CheckpointName]:
        """Includes uncommitted checkpoints."""
        try:
            entries = self._ask(self._fs.ls, self.url, detail=False)
        except FileNotFoundError:
            return []
        lasts = (entry.rstrip("/").rpartition("/")[2] for entry in entries)
        return sorted(filter(None, map(CheckpointName.parse, lasts)))

    def _is_complete(self, name: CheckpointName) -> bool:
        """Does not use the driver's `exists`, which would hide failures."""
        try:
            self.size(name, MANIFEST)
        except FileNotFoundError:
            return False
        return True

    def _at(self, name: CheckpointName, file: str = "") -> str:
        return f"{self.url}/{name}/{file}".rstrip("/")

    def _ask(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call a function of the driver with a timeout, because some drivers wait forever. Raises
        `OSError`."""
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                answer.set_result(call(*given, **named))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, name="lockstep-store", daemon=True).start()
        wait([answer], CALL_SECONDS)
        if not answer.done():
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {CALL_SECONDS:.0f} s", self.url)
        error = answer.exception()
        if error is None:
            return answer.result()
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, str(error), self.url) from error
        if isinstance(error, FileExistsError):
            raise error
        # drivers raise any exception of their libraries
        raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error
