"""Puts a member together for `edge_client run`: identity, policy, data, journal, agent."""

import asyncio
import contextlib
import fcntl
import functools
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import structlog

import secure_agg
from edge_client.approval.desk import Describe, Desk
from edge_client.canaries import CanaryBook
from edge_client.corpus_release.releaser import Releaser
from edge_client.downloads.backbones import Backbones, named_folders
from edge_client.downloads.cache import BlobCache
from edge_client.identity.home import HomeUnusable, MemberIdentity, home_path
from edge_client.identity.renewal import Renewer
from edge_client.ledger.budget import Budget
from edge_client.ledger.ledger import LedgerError, ledger_path
from edge_client.ledger.opening import open_budget
from edge_client.policy.conditions import read_conditions
from edge_client.policy.policy import Policy
from edge_client.policy.rules import witnesses_needed
from edge_client.private_store import PrivateStore, StoreError, StoreKey, store_key
from edge_client.private_store.errors import KeyUnusable
from edge_client.private_store.features import FeatureFile
from edge_client.roster.book import RosterBook, RosterUnusable, book_path
from edge_client.roster.following import Follower
from edge_client.runtime import Runtime, RuntimeUnavailable, pick_runtime
from edge_client.session.agent import WITHDREW_FOR_GOOD, Agent, JobsUnfinished, Observer
from edge_client.session.answers import HeldAnswers
from edge_client.session.idle import Idle, IdleInvalid
from edge_client.session.journal import Journal
from edge_client.session.keeping import Keeper
from edge_client.session.kept_back import KeptBack
from edge_client.session.link import AgentStopped
from edge_client.session.preparation import Preparer
from edge_client.session.states import Environment
from edge_client.withdrawal.folder import WithdrawalFolder, WithdrawalsUnreadable
from learning.prompts.features import FeatureStore
from learning.text.data import Rows, Skipped, read_data
from learning.text.examples import DataInvalid, Example, RowInvalid
from learning.text.persons import population_of, unit_of_job, units_of
from learning.text.tables import TableInvalid, width_of
from learning.training.device import DeviceUnavailable, pick_device
from tacit import __version__
from tacit.documents import DocumentInvalid
from tacit.identity import Trust
from tacit.job import JobDocument
from tacit.traces import SPAN_BYTES
from tacit.verification import Verification
from toolkit.console import ExitCode, fail
from toolkit.logs import configure, configure_beside

log = structlog.get_logger("edge_client")

__all__ = ["Member", "RunOptions", "Table", "load_member", "run_member"]


@dataclass(frozen=True)
class RunOptions:
    """The options of `edge_client run`. `export` and `evaluate` share those on the data and the machine."""

    data: Path
    # The rows themselves, if a program holds them; then `data` is only a word for them.
    rows: tuple[Example, ...] | None = None
    # Whether a program runs the member, which keeps its own logs, output and signals.
    embedded: bool = False
    # Addresses of the federation's coordinators in place of those of the enrolment, in the order in which to dial them.
    coordinators: tuple[str, ...] = ()
    text: str = "text"
    label: str = "label"
    # Skips and counts rows that cannot be read, instead of failing.
    skip_invalid: bool = False
    # The column of a pair's second text; None: `text_b`, if the file has it.
    text_b: str | None = None
    # The columns of dialogues; None: `prompt`, `response` and `messages`, if the file has them.
    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    # The column that names whose row it is; None if rows stand for themselves.
    person: str | None = None
    jobs: tuple[str, ...] = ()
    device: str = "auto"
    # torch or device; auto: by what is installed.
    runtime: str = "auto"
    policy: Path | None = None
    home: Path | None = None
    until_finished: bool = False
    log_format: Literal["console", "json"] | None = None
    as_json: bool = False
    # The member's own name for the data. Each name has its own privacy ledger.
    data_name: str = "data"
    metrics_port: int | None = None
    metrics_file: Path | None = None
    traces_to: str | None = None
    # Word vectors that private embeddings start from.
    embedding: Path | None = None
    # The key file that seals private states on disk.
    private_key_file: Path | None = None
    # Folders to look in for frozen models of prompted jobs, besides those of TACIT_BACKBONES.
    backbones: tuple[Path, ...] = ()
    # Keeps the features of a head's rows on disk, sealed with the private key if there is one.
    keep_features: bool = False
    # A command whose exit code 0 means: be connected. None: always.
    idle: str | None = None


@dataclass(frozen=True)
class Table:
    """The file of word vectors that the member names with `--embedding`, and the length of each vector."""

    path: Path
    width: int


@dataclass(frozen=True)
class Member:
    """A member that is ready to connect: everything is read and checked."""

    home: Path
    identity: MemberIdentity
    policy: Policy
    examples: list[Example]
    device: str
    # False if the data is a table without a column for a pair's second text.
    second_column: bool = True
    table: Table | None = None
    # The member's own name for the data.
    data_name: str = "data"
    # The rows that were skipped. They are not in `examples`, and so do not count towards N.
    skipped: Skipped = field(default_factory=Skipped)
    # The column that names whose row it is; None if rows stand for themselves.
    person: str | None = None
    # What trains here.
    runtime: Runtime = "torch"
    # False if the data is a table without columns for prompts and responses, or for dialogues.
    dialogue_columns: bool = True

    def population(self, job: JobDocument) -> int:
        """N of this job: the member's rows or persons, as the job protects the one or the other, and its canaries."""
        return self.canaries.examples(job, population_of(self.examples, unit_of_job(job)))

    @property
    def withdrawals(self) -> WithdrawalFolder:
        """What this member withdrew from."""
        return WithdrawalFolder(self.home, self.identity.federation, self.identity.member)

    @property
    def canaries(self) -> CanaryBook:
        """The canaries planted in this data."""
        return CanaryBook(self.home, self.data_name, self.policy.max_canaries)


def load_member(options: RunOptions, *, takes_part: bool = False) -> Member:
    """Reads and checks identity, policy and data; if the member takes part, also whether the policy's unit needs a
    column of persons.

    Raises:
        CommandFailed: Something is wrong; the sentence says what.
    """
    home = home_path(options.home)
    try:
        identity = MemberIdentity.load(home)
        if options.coordinators:
            identity = identity.at(options.coordinators)
    except HomeUnusable as error:
        fail(str(error), ExitCode.USAGE)
    try:
        ledger_path(home, options.data_name)
    except LedgerError as error:
        # Before the data is read, which may take long.
        fail(str(error), ExitCode.USAGE)
    try:
        policy, _ = Policy.load(home, options.policy)
        if takes_part:
            _check_persons(policy, options.person)
        rows = _rows_of(options)
        runtime = pick_runtime(options.runtime)
        if options.idle is not None:
            # A mistyped command is refused here, before anything is opened.
            Idle(options.idle)
        device = pick_device(options.device) if runtime == "torch" else "cpu"
        table = None
        if options.embedding is not None:
            # The file is read only in a job's first round. Without this check, a mistyped path would make the member
            # decline that round, hours later.
            width = width_of(options.embedding, named="--embedding, a GloVe file or a checkpoint's folder")
            table = Table(options.embedding, width)
        if missing := [str(each) for each in options.backbones if not each.exists()]:
            raise DataInvalid(
                f"{missing[0]} does not exist; give --backbone a folder that transformers' save_pretrained wrote"
            )
    except RowInvalid as error:
        fail(f"{error}; or skip such rows with --skip-invalid", ExitCode.USAGE)
    except (DocumentInvalid, DataInvalid, TableInvalid, DeviceUnavailable, RuntimeUnavailable, IdleInvalid) as error:
        fail(str(error), ExitCode.USAGE)
    return Member(
        home,
        identity,
        policy,
        rows.examples,
        device,
        rows.second_column,
        table,
        options.data_name,
        rows.skipped,
        options.person,
        runtime,
        rows.dialogue_columns,
    )


def _rows_of(options: RunOptions) -> Rows:
    """The member's rows: those that a program holds, or the file's.

    Raises:
        DataInvalid: As `read_data`.
    """
    if options.rows is not None:
        # As with JSON lines, no form of the data says whether there are second texts.
        return Rows(list(options.rows), second_column=True)
    return read_data(
        options.data,
        text=options.text,
        label=options.label,
        text_b=options.text_b,
        prompt=options.prompt,
        response=options.response,
        messages=options.messages,
        person=options.person,
        skip_invalid=options.skip_invalid,
        # The jobs to come are not known yet.
        rows_for="texts or dialogues",
    )


def _check_persons(policy: Policy, column: str | None) -> None:
    """Raises DataInvalid unless persons are named exactly if they are what the policy protects."""
    if policy.unit == "person" and column is None:
        raise DataInvalid(
            'the policy protects persons (unit = "person"), and nothing says whose each row is; name the column with '
            "--person"
        )
    if policy.unit != "person" and column is not None:
        raise DataInvalid(
            f"--person names persons, and the policy protects one {policy.unit}; write unit = "
            '"person" in policy.toml, or leave the option out'
        )


@contextmanager
def _alone(home: Path) -> Iterator[IO[str]]:
    """Allows one process per home. Two would answer for the same member and lose each other's secrets."""
    try:
        lock = (home / "run.lock").open("w")
    except OSError as error:
        fail(
            f"{home} cannot be written ({error.strerror}); check free space and the folder's permissions: a member "
            "records what it sends before it sends it",
            ExitCode.USAGE,
        )
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail(
                f"another `edge_client run` uses {home}; stop it, or give this one another --home",
                ExitCode.USAGE,
            )
        yield file


@contextmanager
def _sentences(home: Path) -> Iterator[None]:
    """Turns what keeps a home from being used into CommandFailed."""
    try:
        yield
    except KeyUnusable as error:
        fail(str(error), ExitCode.USAGE)
    except (LedgerError, StoreError, RosterUnusable) as error:
        fail(str(error), ExitCode.REFUSED)
    except OSError as error:
        fail(
            f"{error.filename or home} cannot be used ({error.strerror}); check free space, and what is in {home}",
            ExitCode.USAGE,
        )


def run_member(
    options: RunOptions,
    observer: Observer | None = None,
    *,
    describe: Callable[[Member], Describe],
    started: Callable[[Callable[[], None] | None], None] = lambda _: None,
) -> None:
    """Runs the member until it is interrupted or, with `until_finished`, until every job is over.

    Args:
        options: The options of `edge_client run`.
        observer: Watches the member; None: the terminal or the log.
        describe: How the member describes a job to its stewards, if its policy asks them (`dry_run.describing`).
        started: Called with a function that ends the member, which any thread may call, and with None once it ended.

    Raises:
        CommandFailed: The input cannot be used, the coordinator refuses this member for good, or too many members
            declined the jobs.
    """
    terminal = observer is None and _on_a_terminal(options)
    _set_up_logs(options, terminal)
    withdrawals = _still_taking_part(options)
    member = load_member(options, takes_part=True)
    if skipped := member.skipped:
        # A warning, so that a terminal shows it as well.
        log.warning("rows_skipped", skipped=skipped.rows, kept=len(member.examples), first=list(skipped.first))
    with _alone(member.home):
        try:
            journal = Journal(member.home / "journal.db", member.identity.federation)
        except ValueError as error:
            fail(str(error), ExitCode.USAGE)
        texts = (example.texts for example in member.examples)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(journal))
            with _sentences(member.home):
                budget = stack.enter_context(
                    open_budget(
                        member.home,
                        member.identity,
                        member.policy,
                        texts,
                        name=options.data_name,
                        persons=None if member.person is None else units_of(member.examples),
                        column=member.person,
                    )
                )
                kept_back = KeptBack.of(member.home, member.policy, member.examples)
                key = store_key(options.private_key_file)
                store = PrivateStore(member.home, member.identity.federation, options.data_name, key)
                keeper = Keeper(stack.enter_context(store), member.examples, options.embedding)
                keeper.recover(journal.memory(), member.identity.member)
                path = book_path(member.home, member.identity.federation)
                book = stack.enter_context(contextlib.closing(RosterBook(path, member.identity.authorities.history)))
                features = _features_of(member, options, key)
                cache = BlobCache(member.home / "cache")
                cache.trim()
            watcher = stack.enter_context(_watching(observer, terminal))
            if options.traces_to is not None:
                watcher = stack.enter_context(_traced(watcher, member.identity, options.traces_to))
            if options.metrics_port is not None or options.metrics_file is not None:
                watcher = stack.enter_context(_metered(watcher, member.identity, options))
            try:
                desk = _desk(member, budget, describe)
                asyncio.run(
                    _run(
                        member,
                        journal,
                        book,
                        budget,
                        keeper,
                        cache,
                        watcher,
                        options,
                        features,
                        desk,
                        kept_back,
                        withdrawals,
                        started,
                    )
                )
            except AgentStopped as stopped:
                fail(stopped.sentence, ExitCode.REFUSED)
            except JobsUnfinished as unfinished:
                fail(unfinished.sentence, ExitCode.FAILED)


def _on_a_terminal(options: RunOptions) -> bool:
    """Whether lines for a person are shown. Beside them, standard output would no longer be a program's own."""
    return options.log_format is None and not options.as_json and not options.embedded and sys.stderr.isatty()


def _set_up_logs(options: RunOptions, terminal: bool) -> None:
    if options.embedded:
        configure_beside("edge_client")
    else:
        form = "json" if options.as_json else options.log_format or "console"
        configure(form, "warning" if terminal else "info")


def _still_taking_part(options: RunOptions) -> WithdrawalFolder:
    """What the member withdrew from. A withdrawal from all that the coordinator has not taken lets it start, to say so.

    Raises:
        CommandFailed: it withdrew from all jobs and the coordinator has taken that, or that cannot be read.
    """
    try:
        identity = MemberIdentity.load(home_path(options.home))
        found = WithdrawalFolder(identity.home, identity.federation, identity.member)
        for_good = found.for_good
    except HomeUnusable as error:
        fail(str(error), ExitCode.USAGE)
    except WithdrawalsUnreadable as error:
        fail(f"nobody knows what this member withdrew from, so it takes part in nothing: {error}", ExitCode.REFUSED)
    if for_good is not None and for_good.answer is not None:
        fail(WITHDREW_FOR_GOOD, ExitCode.REFUSED)
    return found


def _desk(member: Member, budget: Budget, describe: Callable[[Member], Describe]) -> Desk | None:
    """The desk that asks the stewards about each job. None: the policy asks nobody."""
    if not member.policy.asks:
        return None
    return Desk(
        member.home,
        member.policy,
        budget,
        federation=member.identity.federation,
        member=member.identity.member,
        data=member.data_name,
        describe=describe(member),
    )


def _features_of(member: Member, options: RunOptions, key: StoreKey | None) -> FeatureStore:
    """The features of the member's rows: in memory, and on its disk if it asks; if not, they are removed there."""
    kept = FeatureFile(member.home, options.data_name, key, warn=lambda why: log.warning("features_unusable", why=why))
    if options.keep_features:
        return FeatureStore(keeper=kept)
    kept.remove()
    return FeatureStore()


@contextmanager
def _watching(observer: Observer | None, terminal: bool) -> Iterator[Observer]:
    if observer is not None:
        yield observer
    elif terminal:
        from edge_client.agent.watching import TerminalWatcher

        with TerminalWatcher() as watcher:
            yield watcher
    else:
        from edge_client.agent.watching import LogWatcher

        yield LogWatcher()


@contextmanager
def _traced(watcher: Observer, identity: MemberIdentity, collector: str) -> Iterator[Observer]:
    from edge_client.agent.tracing import TracedWatcher
    from toolkit.spans import SpansUnusable, sending

    about = {"service.version": __version__, "service.instance.id": identity.member}
    with contextlib.ExitStack() as stack:
        try:
            spans = stack.enter_context(sending(collector, "edge_client", about))
        except SpansUnusable as error:
            fail(f"--traces-to: {error}", ExitCode.USAGE)
        new_id = functools.partial(secrets.token_bytes, SPAN_BYTES)
        yield TracedWatcher(watcher, spans, identity.federation, time.time_ns, new_id)


@contextmanager
def _metered(watcher: Observer, identity: MemberIdentity, options: RunOptions) -> Iterator[Observer]:
    from edge_client.agent.metrics import MemberMetrics
    from edge_client.agent.metrics_file import MetricsFile, MetricsFileUnusable
    from edge_client.agent.watching import MeteredWatcher

    metrics, port = MemberMetrics(), options.metrics_port
    metrics.certificate_expires(identity.expires.timestamp())
    with contextlib.ExitStack() as stack:
        if port is not None:
            try:
                server = metrics.serve(port)
            except OSError as error:
                fail(f"metrics cannot be served on port {port}: {error.strerror}; choose another port", ExitCode.USAGE)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            log.info("metrics_served", port=server.server_port)
        if options.metrics_file is not None:
            try:
                stack.enter_context(MetricsFile(options.metrics_file, metrics))
            except MetricsFileUnusable as error:
                fail(str(error), ExitCode.USAGE)
        yield MeteredWatcher(watcher, metrics)


async def _run(
    member: Member,
    journal: Journal,
    book: RosterBook,
    budget: Budget,
    keeper: Keeper,
    cache: BlobCache,
    observer: Observer,
    options: RunOptions,
    features: FeatureStore,
    desk: Desk | None,
    kept_back: KeptBack | None,
    withdrawals: WithdrawalFolder,
    started: Callable[[Callable[[], None] | None], None],
) -> None:
    verification = Verification(member.identity.trust)

    def trusted(trust: Trust) -> None:
        verification.trust = trust
        # Heads that a server of an earlier authority signed stay valid.
        book.trust = Trust(trust.federation, tuple(dict.fromkeys((*trust.roots, *book.trust.roots))))

    renewer = Renewer(member.identity, trusted=trusted)
    if options.metrics_port is not None or options.metrics_file is not None:
        from edge_client.agent.watching import MeteredWatcher

        if isinstance(observer, MeteredWatcher):
            metered = observer
            renewer.listeners.append(lambda identity: metered.certificate_expires(identity.expires.timestamp()))
    idle = None if options.idle is None else Idle(options.idle)
    environment = Environment(
        identity=member.identity,
        federation=member.identity.federation,
        verify=verification.verify,
        key_of=verification.key_of,
        random=secure_agg.SystemRandom(),
        policy=member.policy,
        certificate_of=verification.certificate_of,
        roster=book,
        approved=None if desk is None else desk.check,
        withdrawn=withdrawals.check,
    )
    if not member.policy.peers:
        # The holder of the authority's key can enrol members of its own making. Without pins, the bound on corrupt
        # members assumes that it does not.
        log.info("enrolment_is_trusted", federation=member.identity.federation.hex()[:16])
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
        keeper,
        Backbones(cache, folders=named_folders(options.backbones), allowed=member.policy.backbones),
        second_column=member.second_column,
        dialogue_columns=member.dialogue_columns,
        features=features,
        desk=desk,
        canaries=member.canaries,
        kept_back=kept_back,
        withdrawn=withdrawals,
        answers=HeldAnswers(member.home, member.data_name),
        runtime=member.runtime,
    )
    agent = Agent(
        member.identity,
        environment,
        journal,
        preparer,
        budget,
        observer,
        keeper,
        admits=options.jobs,
        until_finished=options.until_finished,
        renewer=renewer,
        desk=desk,
        withdrawals=withdrawals,
        idle=idle,
        follower=Follower(
            book,
            member.identity,
            tuple(member.policy.witnesses.values()),
            wants_signatures=witnesses_needed(member.policy) > 0,
        ),
        releaser=Releaser(
            member.home,
            member.identity,
            member.policy,
            budget,
            member.examples,
            environment.random,
            desk=desk,
            jobs=options.jobs,
            conditions=functools.partial(read_conditions, member.device),
        ),
    )
    log.info("runtime", runtime=member.runtime, device=member.device)
    task = asyncio.ensure_future(agent.run())
    loop = asyncio.get_running_loop()
    if not options.embedded:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)

    asked = False

    def stop() -> None:
        nonlocal asked
        asked = True
        loop.call_soon_threadsafe(task.cancel)

    started(stop)
    try:
        await task
    except asyncio.CancelledError:
        # A program's own Ctrl-C ends the program, too: asyncio raises it again.
        if options.embedded and not asked:
            raise
    finally:
        started(None)
