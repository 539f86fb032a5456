"""The database of the studies: whatever Optuna takes, with messages of ours, and the signs of life of its users."""

from __future__ import annotations

import logging
import sqlite3
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mhsa_compile import installation
from mhsa_compile.errors import InputError, OutputError

BEAT, GRACE = 4, 20
"""Seconds from one sign of life to the next, and after which a trial without one is taken from its process."""


def open_storage(url: str) -> Any:
    """An `optuna.storages.RDBStorage`, made where there is none. Raises InputError, OutputError and
    InstallationError."""
    installation.require("optuna", extra="tune")
    import optuna

    optuna.logging.set_verbosity(logging.WARNING)
    is_sqlite = url.startswith("sqlite:")
    options = {"connect_args": {"timeout": 60}} if is_sqlite else {"pool_pre_ping": True}
    with named(url), quiet():
        storage = optuna.storages.RDBStorage(
            url,
            engine_kwargs=options,
            heartbeat_interval=BEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(),
        )
        if is_sqlite:
            _write_ahead(storage)
    return storage


def _write_ahead(storage: Any) -> None:
    """A write-ahead log: whole after a kill at any time, and no waiting for the disk at each of a trial's values."""
    from sqlalchemy import event

    def prepare(connection: sqlite3.Connection, _: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    event.listen(storage.engine, "connect", prepare)
    storage.engine.dispose()  # so that the next connection is prepared


@contextmanager
def quiet() -> Iterator[None]:
    """Optuna warns at each use of its groups (experimental; the version is pinned), and of heartbeats without its own
    loop (ours beats, too)."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage")
        yield


@contextmanager
def named(url: str) -> Iterator[None]:
    """What a database says becomes one message, without the password. Raises InputError for one that cannot be, and
    OutputError for one that does not answer, or has no room."""
    import optuna
    import sqlalchemy.exc

    said = _without_password(url)
    try:
        yield
    except (sqlalchemy.exc.ArgumentError, sqlalchemy.exc.NoSuchModuleError, ImportError) as error:
        hint = "Such as sqlite:////home/me/studies.db or postgresql+psycopg://host/database; the latter needs psycopg."
        raise InputError("--storage", "a database that SQLAlchemy knows", f"{said!r} ({_first(error)})", hint) from None
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        hint = "Is it running, with room on its disk? What it holds is whole: the same command goes on from there."
        said = f"storage {said!r}"
        raise OutputError(said, "a database that answers", _first(error.__cause__ or error), hint) from error


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _without_password(url: str) -> str:
    before, at, after = url.rpartition("@")
    scheme, _, user = before.partition("://")
    return f"{scheme}://{user.partition(':')[0]}:***@{after}" if at and ":" in user else url


class Heart:
    """Signs of life for trials that are being measured, from a thread: a measurement may take longer than GRACE."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self._trials: set[int] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="mhsa-heart", daemon=True)
        self._thread.start()

    def add(self, trial_id: int) -> None:
        self._storage.record_heartbeat(trial_id)
        with self._lock:
            self._trials.add(trial_id)

    def remove(self, trial_id: int) -> None:
        with self._lock:
            self._trials.discard(trial_id)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        import sqlalchemy.exc

        while not self._stopped.wait(BEAT):
            with self._lock:
                trials = sorted(self._trials)
            for trial_id in trials:
                try:
                    self._storage.record_heartbeat(trial_id)
                except sqlalchemy.exc.SQLAlchemyError:
                    continue  # whoever needs the database says that it is gone
