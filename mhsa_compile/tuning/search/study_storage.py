"""The database of the studies: whatever Optuna takes, with messages of ours, and the signs of life of its users."""

from __future__ import annotations

import logging
import sqlite3
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from random import random
from time import sleep
from typing import Any

from mhsa_compile.errors import InputError, InstallationError, OutputError
from mhsa_compile.hardware import environment

BEAT, GRACE = 4, 20
"""Seconds from one sign of life to the next, and after which a trial without one is taken from its process."""
OPENINGS = 20
"""Times that a database is opened anew because somebody else is making its tables."""
ANSWER = 10
"""Seconds in which a server answers."""


def open_storage(url: str) -> Any:
    """An `optuna.storages.RDBStorage`, made where there is none. Raises InputError, OutputError and
    InstallationError."""
    environment.require("optuna", extra="tune")
    import optuna

    optuna.logging.set_verbosity(logging.WARNING)
    with named(url), quiet():
        storage = _with_tables(url)
        if url.startswith("sqlite:"):
            _settle_sqlite(storage)
    return storage


class _Unreadable(Exception):
    """What SQLAlchemy or a driver makes of a URL that is none."""


def _with_tables(url: str) -> Any:
    """The storage, whose constructor makes its tables. Of several workers that begin at once all but one find that what
    they are about to make is there, and look again."""
    import sqlalchemy.exc
    from optuna import storages

    for attempt in count(1):
        try:
            return storages.RDBStorage(
                url,
                engine_kwargs=_options(url),
                heartbeat_interval=BEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=storages.RetryHeartbeatStaleTrialCallback(),
            )
        except ValueError as error:  # a port that is no number, a host that is no name, a NUL in a path
            raise _Unreadable(error) from error
        except sqlalchemy.exc.SQLAlchemyError as error:
            is_made_meanwhile = isinstance(error, sqlalchemy.exc.IntegrityError) or "already exists" in str(error)
            if attempt == OPENINGS or not is_made_meanwhile:
                raise
            sleep(0.1 * random())


def _options(url: str) -> dict[str, Any]:
    """Options of SQLAlchemy's engine. A server may have gone since it was last asked; one behind a firewall never
    answers."""
    if url.startswith("sqlite:"):
        return {"connect_args": {"timeout": 60}}
    is_postgres = url.startswith(("postgresql:", "postgresql+psycopg"))
    return {"pool_pre_ping": True, "connect_args": {"connect_timeout": ANSWER} if is_postgres else {}}


def _settle_sqlite(storage: Any) -> None:
    """Gives the database a write-ahead log: whole after a kill at any time, and no waiting for the disk at each of a
    trial's values. And a transaction has the database to itself from its first statement: SQLite knows no SELECT ...
    FOR UPDATE, by which Optuna keeps two workers from drawing the same trial."""
    from sqlalchemy import event

    def prepare(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # Python begins no transactions of its own
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(storage.engine, "connect", prepare)
    event.listen(storage.engine, "begin", begin)
    storage.engine.dispose()  # so that the next connection is prepared


def begin_beats(storage: Any, study_id: int) -> None:
    """Gives a sign of life for each running trial that never had one: its process may be dead, and Optuna counts only
    from the first. It does no harm where its process gives one at the same time."""
    from sqlalchemy import text

    silent = text(
        "SELECT trial_id FROM trials WHERE study_id = :study AND state = 'RUNNING' "
        "AND trial_id NOT IN (SELECT trial_id FROM trial_heartbeats)"
    )
    with storage.engine.connect() as connection:
        trial_ids = connection.execute(silent, {"study": study_id}).scalars().all()
    for trial_id in trial_ids:
        storage.record_heartbeat(trial_id)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings of Optuna at each use of its groups (experimental; the version is pinned), and of
    heartbeats without its own loop (ours beats, too)."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage")
        yield


@contextmanager
def named(url: str) -> Iterator[None]:
    """What a database says becomes one message, without the password. Raises InputError for one that cannot be,
    InstallationError for one without its driver, and OutputError for one that does not answer, or has no room."""
    import optuna
    import sqlalchemy.exc

    text = _without_password(url)
    try:
        yield
    except (sqlalchemy.exc.ArgumentError, sqlalchemy.exc.NoSuchModuleError, _Unreadable) as error:
        hint = "Such as sqlite:////home/me/studies.db or postgresql+psycopg://me@host/database."
        raise InputError("--storage", "a database that SQLAlchemy knows", f"{text!r} ({_first(error)})", hint) from None
    except ImportError as error:
        driver = getattr(error.__cause__ or error, "name", None) or "its driver"
        hint = f"Run: pip install {'psycopg[binary]' if driver == 'psycopg' else driver}"
        raise InstallationError(f"--storage {text!r}", f"{driver} on this machine", "none", hint) from None
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        hint = "Is it running, with room on its disk? What it holds is whole: the same command goes on from there."
        text = f"storage {text!r}"
        raise OutputError(text, "a database that answers", _first(error.__cause__ or error), hint) from error


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
        from optuna.exceptions import StorageInternalError

        while not self._stopped.wait(BEAT):
            with self._lock:
                trials = sorted(self._trials)
            for trial_id in trials:
                try:
                    self._storage.record_heartbeat(trial_id)
                except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError):
                    continue  # whoever needs the database says that it is gone
