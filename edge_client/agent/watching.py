"""Shows a member at work: progress bars on a terminal, log events elsewhere, and metrics beside either."""

import contextlib
import time
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import structlog
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TaskID

from edge_client.agent.progress import ProgressLine
from edge_client.ledger.budget import Figures
from edge_client.session.agent import OVER, Observer
from learning.mechanisms.contribution import Update
from tacit.attempt import AttemptId
from tacit.messages import Assignment, AttemptEnded, JobEnded
from tacit.reason import FINISHED, Reason, sentence, word
from tacit.rounding import percent_left, rounded_down, rounded_up
from toolkit.console import printable

if TYPE_CHECKING:
    from edge_client.agent.metrics import MemberMetrics

__all__ = ["LogWatcher", "MeteredWatcher", "TerminalWatcher"]

log = structlog.get_logger("edge_client")

_LOG_SECONDS = 5.0


class LogWatcher:
    """Logs one line an event; during training, one every few seconds."""

    def __init__(self) -> None:
        self._last_training = 0.0

    def connected(self, federation: str) -> None:
        """Logs that a session is open."""
        log.info("connected", federation=federation[:16])

    def disconnected(self, sentence: str, seconds: float) -> None:
        """Logs that a session broke or could not be opened."""
        log.warning("disconnected", why=sentence, next_try_seconds=f"{seconds:.2f}")

    def assigned(self, assignment: Assignment) -> None:
        """Does nothing: the state machine already logs that a round begins."""

    def training(self, job: str, round: int, step: int, steps: int, loss: float) -> None:
        """Logs a training step, at most every few seconds and always the last."""
        now = time.monotonic()
        if step == steps or now - self._last_training >= _LOG_SECONDS:
            self._last_training = now
            log.info("training", job=job, round=round, step=step, steps=steps, loss=f"{loss:.4f}")

    def reading(self, job: str, round: int, done: int, rows: int) -> None:
        """Logs how many rows a frozen backbone has read, at most every few seconds and always the last."""
        now = time.monotonic()
        if done == rows or now - self._last_training >= _LOG_SECONDS:
            self._last_training = now
            log.info("reading", job=job, round=round, done=done, rows=rows)

    def training_failing(self, job: str, round: int, why: str) -> None:
        """Logs that the training went wrong, although its update is sent."""
        log.warning("training_failing", job=job, round=round, why=why)

    def ready(self, job: str, round: int, update: Update) -> None:
        """Logs that the update is trained."""
        # Under a mechanism, training computes nothing but the change, so there is no accuracy.
        measured = {"accuracy": f"{update.correct / update.count:.4f}"} if update.count else {}
        log.info("ready", job=job, round=round, examples=update.examples, **measured)

    def declined(self, job: str, reason: Reason) -> None:
        """Does nothing: the state machine already logs it, with its detail."""

    def privacy(self, figures: Figures) -> None:
        """Logs what the ledger says now."""
        left = f"{rounded_down(figures.share_left, 4):g}"
        log.info("privacy", epsilon=f"{rounded_up(figures.epsilon, 4):g}", limit=figures.limit, share_left=left)

    def encoded(self, attempt: AttemptId, vector: NDArray[np.uint32]) -> None:
        """The vector is about to be masked."""

    def uploading(self, attempt: AttemptId, sent: int, total: int) -> None:
        """Bytes handed to the network."""

    def attempt_ended(self, attempt: AttemptId, ended: AttemptEnded) -> None:
        """Logs how an attempt ended."""
        outcome = "published" if ended.published else "abandoned"
        reason = "" if ended.published else word(ended.reason)
        log.info("attempt_ended", attempt=str(attempt), outcome=outcome, reason=reason, result=ended.result)

    def job_over(self, ended: JobEnded) -> None:
        """Logs that a job is finished, paused or aborted."""
        log.info("job_over", job=ended.job, reason=word(ended.reason), version=ended.final_version)


class _MayGo:
    """A terminal that may be closed while the member runs. What it does not take is dropped.

    An error would reach the training that reports a step: it would count as failed, and be charged.
    """

    def __init__(self, terminal: IO[str]) -> None:
        self._terminal = terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._terminal.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._terminal.flush()


class TerminalWatcher:
    """Shows a progress line for training and sending, and a sentence for everything else."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True, highlight=False)
        console.file = cast(IO[str], _MayGo(console.file))
        self.progress = Progress(ProgressLine(), console=console, transient=True)
        self._bars: dict[tuple[str, str], TaskID] = {}

    def __enter__(self) -> "TerminalWatcher":
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def _bar(self, job: str, round: int, phase: str, done: int, total: int, note: str) -> None:
        fields: dict[str, Any] = {"job": job, "round": round, "phase": phase, "note": note}
        if (job, phase) not in self._bars:
            self._bars[job, phase] = self.progress.add_task("", total=total, **fields)
        self.progress.update(self._bars[job, phase], completed=done, total=total, **fields)
        if done >= total:
            self.progress.remove_task(self._bars.pop((job, phase)))

    def _line(self, text: str) -> None:
        self.progress.console.print(printable(text), markup=False)

    def connected(self, federation: str) -> None:
        """Prints that a session is open."""
        self._line(f"connected to the federation {federation[:16]}...")

    def disconnected(self, sentence: str, seconds: float) -> None:
        """Prints why a session broke or could not be opened."""
        self._line(f"not connected: {sentence}. Trying again in {seconds:.0f} s.")

    def assigned(self, assignment: Assignment) -> None:
        """Prints that a round begins."""
        self._line(f"{assignment.job}: round {assignment.round} from version {assignment.version_number}")

    def training(self, job: str, round: int, step: int, steps: int, loss: float) -> None:
        """Moves the progress line of training."""
        self._bar(job, round, "training", step, steps, f"loss {loss:.3f}")

    def reading(self, job: str, round: int, done: int, rows: int) -> None:
        """Moves the progress line of reading: rows whose features are computed."""
        self._bar(job, round, "reading", done, rows, f"{done:,} of {rows:,} rows")

    def training_failing(self, job: str, round: int, why: str) -> None:
        """Prints that the training went wrong, although its update is sent."""
        self._line(f"{job}: round {round}: {why}.")

    def ready(self, job: str, round: int, update: Update) -> None:
        """Prints that the update is trained."""
        self._line(f"{job}: update ready, waiting for the others")

    def declined(self, job: str, reason: Reason) -> None:
        """Does nothing: the state machine already logs it, with its detail."""

    def privacy(self, figures: Figures) -> None:
        """Prints what the ledger says now."""
        if figures.epsilon:
            left = max(0.0, 1 - figures.epsilon / figures.limit)
            month = f", {percent_left(figures.share_left)} this month" if figures.share_left < left - 0.005 else ""
            spent = f"{rounded_up(figures.epsilon):g} of {figures.limit:g}"
            self._line(f"privacy: spent epsilon {spent}; {percent_left(left)} left{month}")

    def encoded(self, attempt: AttemptId, vector: NDArray[np.uint32]) -> None:
        """The vector is about to be masked."""

    def uploading(self, attempt: AttemptId, sent: int, total: int) -> None:
        """Moves the progress line of sending: bytes handed to the network so far."""
        note = f"{sent / 2**20:.1f} of {total / 2**20:.1f} MiB"
        self._bar(attempt.job, attempt.round, "sending", sent, total, note)

    def attempt_ended(self, attempt: AttemptId, ended: AttemptEnded) -> None:
        """Prints how an attempt ended."""
        if ended.published:
            self._line(f"{attempt.job}: round {attempt.round} is in version {ended.new_version.hex()[:12]}")
        else:
            self._line(f"{attempt.job}: attempt {attempt.attempt} ended: {ended.detail or sentence(ended.reason)}")

    def job_over(self, ended: JobEnded) -> None:
        """Prints that a job is finished, paused or aborted."""
        if ended.reason in FINISHED:
            early = f" {sentence(ended.reason)}" if ended.reason != Reason.REASON_JOB_FINISHED else ""
            self._line(f"{ended.job} is finished; its model is version {ended.final_version.hex()[:12]}.{early}")
        else:
            self._line(f"{ended.job}: {sentence(ended.reason)}")


class MeteredWatcher:
    """Wraps another watcher and keeps the member's metrics beside it."""

    def __init__(self, watcher: Observer, metrics: "MemberMetrics") -> None:
        self._watcher = watcher
        self._metrics = metrics
        self._sent: dict[AttemptId, int] = {}
        # No metric counts these, so they go straight to the other watcher.
        self.training = watcher.training
        self.reading = watcher.reading
        self.training_failing = watcher.training_failing
        self.encoded = watcher.encoded

    def connected(self, federation: str) -> None:
        """Records and passes on that a session is open."""
        self._metrics.connected(True)
        self._watcher.connected(federation)

    def certificate_expires(self, at: float) -> None:
        """Sets when the member's new certificate expires, in seconds since 1970."""
        self._metrics.certificate_expires(at)

    def disconnected(self, sentence: str, seconds: float) -> None:
        """Records and passes on that a session broke or could not be opened."""
        self._metrics.connected(False)
        self._watcher.disconnected(sentence, seconds)

    def assigned(self, assignment: Assignment) -> None:
        """Counts and passes on that a round begins."""
        self._metrics.assigned()
        self._watcher.assigned(assignment)

    def ready(self, job: str, round: int, update: Update) -> None:
        """Counts and passes on that the update is trained."""
        self._metrics.ready(job)
        self._watcher.ready(job, round, update)

    def declined(self, job: str, reason: Reason) -> None:
        """Records and passes on that this member declined."""
        self._metrics.declined(job, word(reason))
        self._watcher.declined(job, reason)

    def privacy(self, figures: Figures) -> None:
        """Sets and passes on what the ledger says now."""
        self._metrics.privacy(figures)
        self._watcher.privacy(figures)

    def uploading(self, attempt: AttemptId, sent: int, total: int) -> None:
        """Counts bytes handed to the network. An upload resumed after a break also counts what it sends again."""
        self._metrics.uploaded(max(0, sent - self._sent.get(attempt, 0)))
        self._sent[attempt] = sent
        self._watcher.uploading(attempt, sent, total)

    def attempt_ended(self, attempt: AttemptId, ended: AttemptEnded) -> None:
        """Counts and passes on how an attempt ended."""
        self._sent.pop(attempt, None)
        self._metrics.attempt_ended("published" if ended.published else word(ended.reason))
        self._watcher.attempt_ended(attempt, ended)

    def job_over(self, ended: JobEnded) -> None:
        """Records and passes on that a job is finished, paused or aborted. A paused one may go on."""
        if ended.reason in OVER:
            self._metrics.job_ended(ended.job)
        self._watcher.job_over(ended)
