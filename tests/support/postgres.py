"""PostgreSQL servers for tests, from Debian's package, on a free loopback port and in a temporary folder.

Each is a real server from the package's own program. When tests run as root, the server runs as the package's user,
because PostgreSQL refuses root.
"""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from coordinator.storage.database import open_database
from tests.support.debian import install
from tests.support.processes import PATIENCE

__all__ = ["Postgres", "programs", "running_postgres"]

_VERSIONS = Path("/usr/lib/postgresql")
_USER = "postgres"
# Each database is a thousand files. A slow disk takes minutes to delete those of a run, and memory a moment. The server
# keeps less than a gigabyte there.
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2 * 1024**3  # noqa: S108


@cache
def programs() -> Path:
    """The folder with `initdb` and `pg_ctl`. A CI machine installs the package; elsewhere, the test is skipped."""
    why = install("postgresql", lambda: _newest() is not None)
    if (found := _newest()) is not None:
        return found
    if os.environ.get("CI"):
        raise AssertionError(why)
    pytest.skip(why)


def _newest() -> Path | None:
    found = sorted(_VERSIONS.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class Postgres:
    """A server. `stop` and `start` may be called repeatedly; committed data stays."""

    def __init__(self, folder: Path) -> None:
        self._bin = programs()
        self._data = folder / "data"
        self._log = folder / "log"
        self._template = ""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        if os.geteuid() == 0:
            account = pwd.getpwnam(_USER)
            os.chown(folder, account.pw_uid, account.pw_gid)
        self._run("initdb", "--pgdata", self._data, "--auth=trust", "--username=tacit", "--encoding=UTF8", "--no-sync")
        self.start()

    def _run(self, program: str, *words: str | Path) -> None:
        command = [str(self._bin / program), *map(str, words)]
        if os.geteuid() == 0:
            command = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", *command]
        # Output goes to a file. The server would keep pipes open, and its caller would wait for their end.
        with self._log.with_suffix(".words").open("ab") as words_file:
            done = subprocess.run(
                command,
                stdout=words_file,
                stderr=words_file,
                stdin=subprocess.DEVNULL,
                cwd="/",
                timeout=PATIENCE,
                check=False,
            )
        assert done.returncode == 0, f"{command}: {self._log.with_suffix('.words').read_text()}"

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        # Without fsync, a commit survives everything but a power cut.
        options = f"-c listen_addresses=127.0.0.1 -c unix_socket_directories='' -p {self.port} -c fsync=off"
        self._run("pg_ctl", "start", "--wait", "--pgdata", self._data, "--log", self._log, "--options", options)

    def stop(self, mode: str = "fast") -> None:
        """Stops the server if it runs, and cuts its connections. Mode `immediate` acts like a crash."""
        if not (self._data / "postmaster.pid").exists():
            return
        self._run("pg_ctl", "stop", "--wait", "--pgdata", self._data, "--mode", mode)

    def database(self, *, migrated: bool = False) -> str:
        """Makes a database and returns its URL.

        Args:
            migrated: with today's schema and no rows, in place of empty. It is a copy of one that was migrated once,
                because a migration costs 0.1 seconds of CPU.
        """
        if migrated and not self._template:
            made = self.database()
            open_database(made).close()
            self._template = make_url(made).database
        name = f"tacit_{uuid.uuid4().hex[:12]}"
        # Without FILE_COPY, the server writes every page of the template to its log.
        like = f" TEMPLATE {self._template} STRATEGY FILE_COPY" if migrated else ""
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}{like}"))
        engine.dispose()
        return self.url(name)

    def url(self, name: str) -> str:
        """The URL of one of the server's databases."""
        return f"postgresql+psycopg://tacit@127.0.0.1:{self.port}/{name}"


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Runs a server until the block ends."""
    # Not pytest's folder, which other users cannot enter: the server runs as another user.
    roomy = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
    with tempfile.TemporaryDirectory(prefix="tacit-postgres-", dir=_MEMORY if roomy else None) as folder:
        server = Postgres(Path(folder))
        try:
            yield server
        finally:
            server.stop("immediate")
