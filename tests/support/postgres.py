"""A PostgreSQL server of one's own, on loopback, from whatever package of it the system has."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest

from mhsa_compile.tuning.measure import rpc_server

REQUIRED = "MHSA_REQUIRE_SYSTEM"
"""The environment variable that is 1 where a missing package is a failure, as in .ci/run."""
_STARTS = 20.0  # seconds
_PASSWORD = "only-for-tests"


def programs() -> Path | None:
    """The folder of `initdb` and `postgres`: Debian keeps them off the path. The newest, None where there is none."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    initdb = shutil.which("initdb")
    folders += [Path(initdb).parent] if initdb else []
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


def require() -> Path:
    """The programs; the test is skipped without them, and fails where they have to be there."""
    folder = programs()
    if folder is None:
        why = "no PostgreSQL server on this machine: apt-get install postgresql"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(why)
        pytest.skip(why)
    return folder


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The URL of an empty database. `folder` has the programs."""
    user = _user()
    with tempfile.TemporaryDirectory(prefix="mhsa-postgres-") as place:
        # Not pytest's folder, which only its owner may enter.
        data, secret = Path(place, "data"), Path(place, "secret")
        secret.write_text(_PASSWORD)
        if user is not None:
            os.chown(place, user.pw_uid, user.pw_gid)
            os.chown(secret, user.pw_uid, user.pw_gid)
        login = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        arguments = [folder / "initdb", "--pgdata", data, "--username", "mhsa", "--auth", "scram-sha-256"]
        options = ["--pwfile", secret, "--encoding", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run([*arguments, *options], check=True, capture_output=True, cwd=place, **login)
        with rpc_server.bind() as free:
            port = free.getsockname()[1]
        settings = {
            "listen_addresses": rpc_server.LOOPBACK,
            "port": port,
            "unix_socket_directories": "",
            "fsync": "off",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with Path(place, "log").open("w") as log:
            process = subprocess.Popen(
                [folder / "postgres", "-D", data, *words], stdout=log, stderr=log, cwd=place, **login
            )
        try:
            _wait(process, port, Path(place, "log"))
            yield f"postgresql+psycopg://mhsa:{_PASSWORD}@{rpc_server.LOOPBACK}:{port}/postgres"
        finally:
            process.send_signal(signal.SIGQUIT)  # at once, whoever is connected
            process.wait()


def _user() -> pwd.struct_passwd | None:
    """Whom the server runs as: it refuses to be root. None is whoever runs this."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("postgres") or names["nobody"]


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    import psycopg

    end = monotonic() + _STARTS
    while True:
        try:
            psycopg.connect(
                host=rpc_server.LOOPBACK, port=port, user="mhsa", password=_PASSWORD, dbname="postgres"
            ).close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or monotonic() > end:
                raise AssertionError(log.read_text()) from None
            sleep(0.05)
