"""Opens and locks the database of a search."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from lockstep.base.errors import LaunchError
from lockstep.base.files import open_below, try_lock
from lockstep.base.urls import without_password
from lockstep.search.results import Direction

_LOCKS = {
    "postgresql": "SELECT pg_advisory_lock(('x' || :name)::bit(64)::bigint)",
    "mysql": "SELECT GET_LOCK(:name, 1000000)",
}
"""Maps SQL dialects to statements that wait for a lock. The database releases a lock when the
connection ends."""
_PACKAGES = {
    "MySQLdb": "mysqlclient",
    "psycopg": "'psycopg[binary]'",
    "psycopg2": "psycopg2-binary",
}
_CONNECT_SECONDS = 10


def opened_study(url: str, name: str, direction: Direction) -> optuna.Study:
    is_sqlite = parsed(url).get_backend_name() == "sqlite"
    arguments: dict[str, Any] = {
        "connect_args": _connect_arguments(parsed(url)),
        **({} if is_sqlite else {"pool_pre_ping": True}),
    }
    with _studies(url):
        return optuna.create_study(
            study_name=name,
            storage=RDBStorage(url, engine_kwargs=arguments),
            direction=direction,
            load_if_exists=True,
        )


def existing_study(url: str, name: str) -> optuna.Study:
    """Open a study for reading. The function creates no tables."""
    address = parsed(url)
    if address.get_backend_name() == "sqlite" and address.database:
        return study_in_file(Path(address.database).resolve(), name)
    with _studies(url):
        arguments = _connect_arguments(address)
        _check_schema(
            url,
            set(
                inspect(
                    create_engine(address, poolclass=NullPool, connect_args=arguments)
                ).get_table_names()
            ),
        )
        storage = RDBStorage(
            url, engine_kwargs={"connect_args": arguments}, skip_table_creation=True
        )
        return optuna.load_study(study_name=name, storage=storage)


def study_in_file(path: Path, name: str) -> optuna.Study:
    """Open an SQLite file that may be untrusted. The file is opened read-only, and refused if it
    contains anything but tables."""

    def connect() -> sqlite3.Connection:
        os.close(open_below(path.parent, path.name))
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=60, check_same_thread=False
        )

    with _studies(str(path)):
        with closing(connect()) as connection:
            found = connection.execute(
                "SELECT type, name, sql FROM sqlite_master WHERE type != 'index'"
            ).fetchall()
        if strange := [
            name for kind, name, sql in found if kind != "table" or "VIRTUAL" in str(sql).upper()
        ]:
            raise LaunchError(
                f"{path} holds {strange[0]!r}, which is not a table; a search writes tables only;"
                " it is not read"
            )
        _check_schema(str(path), {table for _, table, _ in found})
        storage = RDBStorage(
            "sqlite://", engine_kwargs={"creator": connect}, skip_table_creation=True
        )
        return optuna.load_study(study_name=name, storage=storage)


def _check_schema(url: str, tables: set[str]) -> None:
    """Refuse a database without Optuna's tables. Optuna would add its tables to any other
    database."""
    if not {"studies", "trials", "version_info", "alembic_version"} <= tables:
        raise LaunchError(
            f"{without_password(url)} holds no search; it may be another file or database; give"
            " the one in which the search was made"
        )


@contextmanager
def _studies(url: str) -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    shown = without_password(url)
    try:
        with reachable(url):
            yield
    except KeyError:
        raise LaunchError(
            f"{shown} does not have that search; it may be another file or database; give the one"
            " in which the search was made"
        ) from None
    except RuntimeError as error:  # the tables belong to another version of Optuna
        raise LaunchError(
            f"--storage {shown} cannot be used: {' '.join(str(error).split())}"
        ) from error


@contextmanager
def alone(url: str, name: str) -> Iterator[None]:
    """Hold an exclusive lock of a study, so that two `lockstep search` processes cannot start the
    same trial."""
    address = parsed(url)
    backend = "mysql" if address.get_backend_name() == "mariadb" else address.get_backend_name()
    if backend == "sqlite" and address.database:
        with _file_locked(url, Path(f"{address.database}.lock")):
            yield
    elif backend in _LOCKS:
        digest = blake2b(f"lockstep {name}".encode(), digest_size=8).hexdigest()
        with reachable(url):
            connection = create_engine(
                address, poolclass=NullPool, connect_args=_connect_arguments(address)
            ).connect()
            connection.execute(text(_LOCKS[backend]), {"name": digest})
        try:
            yield
        finally:
            with suppress(SQLAlchemyError):  # the database is gone, and its lock too
                connection.close()
    else:
        yield


@contextmanager
def reachable(url: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise _without_driver(url, error) from error
    except (StorageInternalError, SQLAlchemyError, sqlite3.Error, OSError) as error:
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
    return LaunchError(
        f"--storage {without_password(url)} needs the module {error.name}; install it: pip install"
        f" {package}"
    )


def _unreachable(url: str, error: BaseException) -> LaunchError:
    found = (
        error if isinstance(error, OSError) or hasattr(error, "orig") else error.__cause__ or error
    )
    text = (
        f"{error.strerror}: {error.filename}"
        if isinstance(error, OSError)
        else str(getattr(found, "orig", None) or found)
    )
    cause = text.strip().partition("\n")[0]
    return LaunchError(
        f"--storage {without_password(url)} cannot be reached: {cause}; correct the address, or"
        " start the database; the same command continues"
    )


def parsed(url: str) -> URL:
    try:
        address = make_url(url)
        address.get_dialect()
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise LaunchError(
            f"--storage {without_password(url)!r}; it must be the URL of a database:"
            " sqlite:///search.db, postgresql://user@host/name or mysql://user@host/name; correct"
            " it"
        ) from error
    except ModuleNotFoundError as error:
        raise _without_driver(url, error) from error
    return address


def shown(url: str | None) -> str:
    """Return the URL of a storage without its password."""
    return "its own SQLite file" if url is None else without_password(url)
