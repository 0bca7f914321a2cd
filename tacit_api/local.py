"""A real federation on this machine, for notebooks and trials: `tacit.local_federation`."""

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from tacit_api.joining import Member
from tacit_api.operating import Coordinator, Job
from tacit_api.rows import Data
from toolkit.console import CommandFailed, ExitCode
from toolkit.several import check_several
from toolkit.whole import whole

if TYPE_CHECKING:
    from edge_client.agent.runner import RunOptions

__all__ = ["LocalFederation", "local_federation"]

# Seconds until the coordinator must serve, and until it must have ended.
_STARTS, _ENDS = 60.0, 20.0
# Seconds between looks at whether the members still run.
_LOOKS = 0.2
_POLICY = """\
# Only for a federation on one machine: it allows jobs without noise, which protect nobody.
schema = 1
mechanisms = ["dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian", "none"]
"""


class LocalFederation:
    """A coordinator in a process of its own, and members in threads of this one.

    Attributes:
        folder: holds the coordinator's folder and the members' homes.
        coordinator: operates it.
        members: by name.
    """

    def __init__(self, folder: Path, coordinator: Coordinator, members: Mapping[str, Member]) -> None:
        self.folder, self.coordinator, self.members = folder, coordinator, dict(members)

    def train(
        self,
        job: Job,
        data: Mapping[str, Data] | Sequence[Data],
        *,
        backbones: str | Path | None = None,
        **columns: Any,
    ) -> dict[str, Any]:
        """Creates a job, lets every member take part with its rows, and waits until it is over.

        Args:
            job: a job file, its content as a mapping, or a `JobSpec`.
            data: rows of each member, by name or in the order of `members`.
            backbones: a folder of backbones.
            columns: options of `Member.run`, such as `text` and `label`.

        Returns:
            The job, as `Coordinator.job`.

        Raises:
            CommandFailed: a member ended, too few members take part, or the job did not finish.
            ValueError: the rows are not those of members, or cannot be read. There is then no job.
        """
        rows = dict(data) if isinstance(data, Mapping) else self._in_order(data)
        if unknown := sorted(rows.keys() - self.members.keys()):
            raise ValueError(f"there is no member {unknown[0]!r}; there are {', '.join(self.members)}")
        # Before the job is there, whose name nobody may use again.
        planned = {member: self._planned(member, own, columns) for member, own in rows.items()}
        name = str(self.coordinator.create(job, backbones=backbones)["name"])
        with ExitStack() as running:
            for member, options in planned.items():
                running.enter_context(self.members[member]._begin(replace(options, jobs=(name,))))
            self._wait(name, {member: self.members[member] for member in rows})
        return self.coordinator.job(name)

    def _planned(self, member: str, rows: Data, columns: Mapping[str, Any]) -> "RunOptions":
        from learning.text.examples import DataInvalid

        try:
            return self.members[member]._options(rows, ledger="local", until_finished=False, **columns)
        except DataInvalid as error:
            raise DataInvalid(f"{member}: {error}") from None

    def _in_order(self, data: Sequence[Data]) -> dict[str, Data]:
        """The rows of each member. Raises ValueError unless there are as many."""
        check_several(data, "data")
        if len(data) != len(self.members):
            raise ValueError(
                f"{len(data)} {'set' if len(data) == 1 else 'sets'} of rows for {len(self.members)} members: "
                f"{', '.join(self.members)}; give each its own, in this order or by name"
            )
        return dict(zip(self.members, data, strict=True))

    def _wait(self, job: str, members: Mapping[str, Member]) -> None:
        """Waits until the job is over, a member ended before it, or too few members take part."""
        over: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def finished() -> None:
            try:
                self.coordinator.finished(job, members=members.keys())
            except BaseException as error:  # noqa: BLE001  raised again below
                over.put(error)
            else:
                over.put(None)

        threading.Thread(target=finished, daemon=True).start()
        while True:
            with suppress(queue.Empty):
                if (failed := over.get(timeout=_LOOKS)) is not None:
                    raise failed
                return
            for name, member in members.items():
                if not member.running:
                    member.wait()
                    raise CommandFailed(f"{name} ended before job {job} was over", ExitCode.FAILED)


@contextmanager
def local_federation(
    members: int | Sequence[str] = 3, *, folder: str | Path | None = None, policy: str = _POLICY
) -> Iterator[LocalFederation]:
    """Starts a real coordinator and enrols members, on loopback, and ends everything afterwards.

    >>> import tacit
    >>> with tacit.local_federation(3) as town:
    ...     job = town.train("job.toml", [north, east, south])  # doctest: +SKIP

    Args:
        members: how many, or their names; 0 starts the coordinator alone.
        folder: where it lies; one that exists goes on with its members. None: a temporary one, which is removed.
        policy: of each new member (TOML). By default jobs with and without noise are allowed, since the rows of this
            federation are all on this machine.

    Raises:
        CommandFailed: the coordinator does not start.
        ValueError: `members` is one string, no number of members, or names somebody twice.
    """
    names = _names(members)
    kept = None if folder is not None else tempfile.mkdtemp(prefix="tacit-federation-")
    place = Path(kept or str(folder))
    try:
        place.mkdir(parents=True, exist_ok=True)
        own = place / "coordinator"
        if not own.exists():
            ports = [f"--{kind}-port={port}" for kind, port in zip(_PORTS, _free(len(_PORTS)), strict=True)]
            _done(_command("coordinator", "init", own, *ports, "--host", "localhost", "--host", "127.0.0.1"))
        with _serving(own, place / "coordinator.log"), Coordinator(own / "operator") as coordinator:
            found = {}
            for name in names:
                home = place / name
                if not home.exists():
                    Member.enrol(home, coordinator.invite(name))
                    (home / "policy.toml").write_text(policy, encoding="utf-8")
                found[name] = Member(home)
            town = LocalFederation(place, coordinator, found)
            try:
                yield town
            finally:
                # Every member ends, whatever one of them says.
                with ExitStack() as ending:
                    for member in found.values():
                        ending.push(member)
    finally:
        if kept is not None:
            shutil.rmtree(kept, ignore_errors=True)


def _names(members: object) -> tuple[str, ...]:
    check_several(members, "members")
    if not isinstance(members, Iterable):
        return tuple(f"member-{number}" for number in range(1, whole(members, "members", 0) + 1))
    names = tuple(members)
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"members names {name!r} twice; give each member its own name")
    return names


_PORTS = ("enrolment", "federation", "metrics")


@contextmanager
def _serving(folder: Path, log: Path) -> Iterator[None]:
    """The coordinator's process."""
    _wait_until_free(folder)
    with log.open("ab") as lines:
        since = lines.tell()
        process = subprocess.Popen(
            _command("coordinator", "serve", "--dir", folder, "--log-format", "json", ends_with_input=True),
            stdin=subprocess.PIPE,
            stdout=lines,
            stderr=lines,
            # Ctrl-C in a notebook is for this process, which then ends the coordinator.
            start_new_session=True,
        )
    try:
        _wait_until_served(process, log, since)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(OSError):
            cast(IO[bytes], process.stdin).close()
        try:
            process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_free(folder: Path) -> None:
    """Waits while the port answers, but not for ever: the coordinator of a program that just ended may still be ending.

    If it is another program's, then our coordinator says so.
    """
    from coordinator.config import load_config

    port, until = load_config(folder).federation_port, time.monotonic() + _ENDS
    while time.monotonic() < until:
        with socket.socket() as tried:
            tried.settimeout(0.2)
            if tried.connect_ex(("127.0.0.1", port)) != 0:
                return
        time.sleep(0.05)


def _wait_until_served(process: "subprocess.Popen[bytes]", log: Path, since: int) -> None:
    """Waits until the process itself says that it serves. Whoever answers on its port may be another one.

    Args:
        process: the coordinator.
        log: where it writes.
        since: the size of the log before it began, in bytes.
    """
    until = time.monotonic() + _STARTS
    while time.monotonic() < until:
        # In this order: what it wrote before it ended is read.
        ended = process.poll() is not None
        with log.open("rb") as lines:
            lines.seek(since)
            told = lines.read().decode(errors="replace")
        if ended:
            raise CommandFailed(
                f"the coordinator ended at once: {' '.join(told.splitlines()[-1:])}; see {log}", ExitCode.FAILED
            )
        # Within a value of a line of JSON, the quotation marks would be escaped.
        if '"event": "serving"' in told:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    raise CommandFailed(f"the coordinator does not serve after {_STARTS:.0f} s; see {log}", ExitCode.FAILED)


# The operating system closes the pipe when this process ends, however it ends.
_ENDS_WITH_INPUT = """\
import os, signal, threading
def wait():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=wait, daemon=True).start()
"""


def _command(program: str, *words: object, ends_with_input: bool = False) -> list[str]:
    """The command of this environment, whatever PATH says.

    Args:
        program: the command's package.
        words: its arguments.
        ends_with_input: whether it ends as with SIGTERM once its standard input is closed.
    """
    start = f"import sys; sys.argv[0] = {program!r}; from {program}.cli import main; main()"
    return [sys.executable, "-c", (_ENDS_WITH_INPUT if ends_with_input else "") + start, *map(str, words)]


def _done(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=dict(os.environ))
    if done.returncode:
        raise CommandFailed(done.stderr.strip().removeprefix("error: "), ExitCode.FAILED)


def _free(count: int) -> list[int]:
    """Ports that are free now; all are held until all are known, so that they differ."""
    with ExitStack() as held:
        found = []
        for _ in range(count):
            tried = held.enter_context(socket.socket())
            tried.bind(("127.0.0.1", 0))
            found.append(int(tried.getsockname()[1]))
        return found
