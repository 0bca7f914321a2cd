"""Putting a member together: identity, policy, data, journal, agent. What `edge_client run` does."""

import asyncio
import contextlib
import fcntl
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import structlog

import secure_agg
from edge_client.cache import BlobCache
from edge_client.data import DataInvalid, Example, read_examples
from edge_client.home import HomeUnusable, MemberIdentity, home_path
from edge_client.journal import Journal
from edge_client.privacy.budget import Budget, open_budget
from edge_client.privacy.ledger import LedgerError
from edge_client.privacy.policy import Policy
from edge_client.session.agent import Agent, AgentStopped, Observer
from edge_client.session.preparation import Preparer
from edge_client.session.states import Environment
from edge_client.training.device import DeviceUnavailable, pick_device
from tacit.console import ExitCode, fail
from tacit.documents import DocumentInvalid
from tacit.logs import configure
from tacit.verification import Verification

log = structlog.get_logger("edge_client")

__all__ = ["Member", "RunOptions", "load_member", "run_member"]


@dataclass(frozen=True)
class RunOptions:
    """The options of `edge_client run`."""

    data: Path
    text: str = "text"
    label: str = "label"
    jobs: tuple[str, ...] = ()
    device: str = "auto"
    policy: Path | None = None
    home: Path | None = None
    until_finished: bool = False
    log_format: Literal["console", "json"] | None = None
    as_json: bool = False
    # The member's own name for the data: one privacy ledger for each.
    data_name: str = "data"
    metrics_port: int | None = None


@dataclass(frozen=True)
class Member:
    """A member, ready to connect: everything was read and checked."""

    home: Path
    identity: MemberIdentity
    policy: Policy
    examples: list[Example]
    device: str


def load_member(options: RunOptions) -> Member:
    """Reads and checks identity, policy and data.

    Raises:
        CommandFailed: a sentence for whatever is wrong.
    """
    home = home_path(options.home)
    try:
        identity = MemberIdentity.load(home)
    except HomeUnusable as error:
        fail(str(error), ExitCode.USAGE)
    try:
        policy, _ = Policy.load(home, options.policy)
        examples = read_examples(options.data, text=options.text, label=options.label)
        device = pick_device(options.device)
    except (DocumentInvalid, DataInvalid, DeviceUnavailable) as error:
        fail(str(error), ExitCode.USAGE)
    return Member(home, identity, policy, examples, device)


@contextmanager
def _alone(home: Path) -> Iterator[IO[str]]:
    """One process a home: two would answer for one member and lose each other's secrets."""
    with (home / "run.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail(
                f"another `edge_client run` uses {home}; end it, or give this one another --home",
                ExitCode.USAGE,
            )
        yield file


def run_member(options: RunOptions, observer: Observer | None = None) -> None:
    """Runs until interrupted, or until every job is over if that was asked for.

    Raises:
        CommandFailed: input that cannot be used, or a coordinator that refuses this member for good.
    """
    terminal = observer is None and options.log_format is None and sys.stderr.isatty() and not options.as_json
    configure("json" if options.as_json else options.log_format or "console", "warning" if terminal else "info")
    member = load_member(options)
    with _alone(member.home):
        try:
            journal = Journal(member.home / "journal.db", member.identity.federation)
        except ValueError as error:
            fail(str(error), ExitCode.USAGE)
        texts = (example.text for example in member.examples)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(journal))
            try:
                budget = stack.enter_context(
                    open_budget(member.home, member.identity, member.policy, texts, name=options.data_name)
                )
            except LedgerError as error:
                fail(str(error), ExitCode.REFUSED)
            watcher = stack.enter_context(_watching(observer, terminal))
            if options.metrics_port is not None:
                watcher = stack.enter_context(_metered(watcher, options.metrics_port))
            try:
                asyncio.run(_run(member, journal, budget, watcher, options))
            except AgentStopped as stopped:
                fail(stopped.sentence, ExitCode.REFUSED)


@contextmanager
def _watching(observer: Observer | None, terminal: bool) -> Iterator[Observer]:
    if observer is not None:
        yield observer
    elif terminal:
        from edge_client.watching import TerminalWatcher

        with TerminalWatcher() as watcher:
            yield watcher
    else:
        from edge_client.watching import LogWatcher

        yield LogWatcher()


@contextmanager
def _metered(watcher: Observer, port: int) -> Iterator[Observer]:
    from edge_client.metrics import MemberMetrics
    from edge_client.watching import MeteredWatcher

    metrics = MemberMetrics()
    try:
        server = metrics.serve(port)
    except OSError as error:
        fail(f"metrics cannot be served on port {port}: {error.strerror}; choose another one", ExitCode.USAGE)
    log.info("metrics_served", port=server.server_port)
    try:
        yield MeteredWatcher(watcher, metrics)
    finally:
        server.shutdown()
        server.server_close()


async def _run(member: Member, journal: Journal, budget: Budget, observer: Observer, options: RunOptions) -> None:
    verification = Verification(member.identity.root)
    environment = Environment(
        identity=member.identity,
        federation=member.identity.federation,
        verify=verification.verify,
        key_of=verification.key_of,
        random=secure_agg.SystemRandom(),
        policy=member.policy,
        certificate_of=verification.certificate_of,
    )
    if not member.policy.peers:
        # Who holds the authority's key can enrol members of its own making: without pins the bound on corrupt members
        # rests on its not doing so.
        log.info("enrolment_is_trusted", federation=member.identity.federation.hex()[:16])
    cache = BlobCache(member.home / "cache")
    cache.trim()
    preparer = Preparer(
        member.examples,
        member.identity.federation,
        member.identity.member,
        member.policy,
        budget,
        environment.random,
        cache,
        member.device,
        observer,
    )
    agent = Agent(
        member.identity,
        environment,
        journal,
        preparer,
        budget,
        observer,
        admits=options.jobs,
        until_finished=options.until_finished,
    )
    task = asyncio.ensure_future(agent.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
