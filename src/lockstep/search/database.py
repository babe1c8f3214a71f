"""The database of a search: its address, whether it can be reached, and being alone at it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from lockstep.base.errors import LaunchError
from lockstep.base.file_lock import try_lock
from lockstep.search.results import Direction

_LOCKS = {"postgresql": "SELECT pg_advisory_lock(('x' || :name)::bit(64)::bigint)", "mysql": "SELECT GET_LOCK(:name, 1000000)"}
"""Waits for a lock that the database releases when the connection ends."""
_PACKAGES = {"MySQLdb": "mysqlclient", "psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary"}
"""Which package has a module, where their names differ."""
_CONNECT_SECONDS = 10


def opened_study(url: str, name: str, direction: Direction | None) -> optuna.Study:
    """Return the study, made if it is not there. `direction`: None if it must be there. Raises `LaunchError`."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    is_sqlite = parsed(url).get_backend_name() == "sqlite"
    arguments: dict[str, Any] = {"connect_args": _connect_arguments(parsed(url)), **({} if is_sqlite else {"pool_pre_ping": True})}
    try:
        with reachable(url):
            storage = RDBStorage(url, engine_kwargs=arguments)
            if direction is None:
                return optuna.load_study(study_name=name, storage=storage)
            return optuna.create_study(study_name=name, storage=storage, direction=direction, load_if_exists=True)
    except KeyError:
        raise LaunchError(f"{shown(url)} has no search {name!r}; it may be another file or database; give the one it was made in") from None
    except RuntimeError as error:  # tables of another version of Optuna
        raise LaunchError(f"--storage {shown(url)} cannot be used: {' '.join(str(error).split())}") from error


@contextmanager
def alone(url: str, name: str) -> Iterator[None]:
    """Keep other searches of the study `name` in this database waiting. Raises `LaunchError`.

    Nothing less keeps two searches from taking one trial: neither SQLite's transactions, nor a lock of the trial's row,
    since whose it is stands in another row.
    """
    address = parsed(url)
    backend = "mysql" if address.get_backend_name() == "mariadb" else address.get_backend_name()
    if backend == "sqlite" and address.database:
        with _file_locked(url, Path(f"{address.database}.lock")):
            yield
    elif backend in _LOCKS:
        digest = blake2b(f"lockstep {name}".encode(), digest_size=8).hexdigest()
        with reachable(url):
            connection = create_engine(address, poolclass=NullPool, connect_args=_connect_arguments(address)).connect()
            connection.execute(text(_LOCKS[backend]), {"name": digest})
        try:
            yield
        finally:
            with suppress(SQLAlchemyError):  # the database is gone, and the lock with it
                connection.close()
    else:
        yield


@contextmanager
def reachable(url: str) -> Iterator[None]:
    """Raise `LaunchError` if the database fails within."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _without_driver(shown(url), error) from error
    except (StorageInternalError, SQLAlchemyError) as error:
        raise _unreachable(url, error) from error


@contextmanager
def _file_locked(url: str, path: Path) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unreachable(url, error) from error
    try:
        while True:
            with suppress(BlockingIOError):
                try_lock(descriptor)
                break
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _connect_arguments(address: URL) -> dict[str, Any]:
    driver = address.get_dialect().driver
    if driver in ("psycopg2", "psycopg", "pymysql", "mysqldb"):
        return {"connect_timeout": _CONNECT_SECONDS}
    return {"timeout": 60} if address.get_backend_name() == "sqlite" else {}


def _without_driver(url: str, error: ModuleNotFoundError) -> LaunchError:
    package = _PACKAGES.get(str(error.name), error.name)
    return LaunchError(f"--storage {url} needs the module {error.name}; install it: pip install {package}")


def _unreachable(url: str, error: BaseException) -> LaunchError:
    found = error if isinstance(error, OSError) or hasattr(error, "orig") else error.__cause__ or error
    text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(getattr(found, "orig", None) or found)
    cause = text.strip().partition("\n")[0]
    return LaunchError(
        f"--storage {shown(url)} cannot be reached: {cause}; correct the address, or start the database; the same command goes on"
    )


def parsed(url: str) -> URL:
    """Return the parts of a URL. Raises `LaunchError` if it is not that of a database."""
    try:
        address = make_url(url)
        address.get_dialect()
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise LaunchError(
            f"--storage {url!r}; it is the URL of a database: sqlite:///search.db, postgresql://user@host/name or mysql://user@host/name; "
            "correct it"
        ) from error
    except ModuleNotFoundError as error:
        raise _without_driver(repr(url), error) from error
    return address


def shown(url: str | None) -> str:
    """Return a URL without its password."""
    return "its own SQLite file" if url is None else parsed(url).render_as_string(hide_password=True)
