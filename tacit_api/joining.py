"""Runs a member inside the user's own process, with rows from memory: `tacit.Member`."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tacit_api.rows import Data, rows_of
from tacit_api.torch_threads import threads_kept
from toolkit.console import CommandFailed
from toolkit.install import naming_extra
from toolkit.several import check_several

if TYPE_CHECKING:
    from edge_client.agent.runner import RunOptions

__all__ = ["Member"]

# Seconds of one wait for the end of a member.
_LOOKS = 0.2


class Member:
    """A member of a federation, by its home. What it does is `edge_client run`: policy, ledger, receipts, masks.

    Its coins are the operating system's. Nothing here takes a seed: only a simulation can be seeded.
    """

    def __init__(self, home: str | Path) -> None:
        """Names the home.

        Args:
            home: the folder that `edge_client enrol` or `Member.enrol` made.
        """
        self.home = Path(home)
        self._stop: Callable[[], None] | None = None
        self._stopping = threading.Lock()
        self._wants_stop = False
        self._ended: Future[None] | None = None

    @classmethod
    def enrol(cls, home: str | Path, token: str) -> Self:
        """Joins a federation with a token. The private key is made here and never leaves this machine.

        Args:
            home: the folder to create.
            token: from the operator (`Coordinator.invite`).

        Raises:
            CommandFailed: the token is not valid, or the coordinator cannot be reached.
        """
        import asyncio

        from tacit_api.tls import only_tls_13

        # Before the imports below, which import gRPC.
        only_tls_13()
        with naming_extra("tacit.Member", "edge"):
            from edge_client.identity.enrolment import EnrolmentFailed
            from edge_client.identity.enrolment import enrol as spend

        try:
            _in_a_loop(lambda: asyncio.run(spend(Path(home), token, force=False)))
        except EnrolmentFailed as error:
            raise CommandFailed(error.sentence, error.code) from error
        return cls(home)

    def run(
        self,
        data: Data,
        *,
        ledger: str,
        jobs: Sequence[str] = (),
        text: str = "text",
        label: str = "label",
        text_b: str | None = None,
        prompt: str | None = None,
        response: str | None = None,
        messages: str | None = None,
        person: str | None = None,
        device: str = "auto",
        backbones: Sequence[str | Path] = (),
        until_finished: bool = True,
    ) -> None:
        """Takes part in the federation's jobs.

        Args:
            data: labelled rows: a file, a pandas DataFrame, a `datasets` Dataset, or a list of mappings or pairs. For
                a job that writes, rows with `prompt` and `response`, or `messages`.
            ledger: the member's own name for these rows. Each name has its own privacy ledger, so the same rows must
                always come under the same name.
            jobs: names of jobs, with * and ?; none: all.
            text: the column of the text.
            label: the column of the label.
            text_b: the column of a pair's second text.
            prompt: the column of a prompt, if it has another name.
            response: the column of its response, if it has another name.
            messages: the column of a dialogue's turns, if it has another name.
            person: the column that says whose each row is; a policy with `unit = "person"` needs it.
            device: auto, cpu, cuda or mps.
            backbones: folders with frozen models.
            until_finished: return once every job that this member took part in is over; otherwise at `stop`.

        Raises:
            CommandFailed: the input cannot be used, the coordinator refuses this member for good, or jobs did not
                finish.
            ValueError: `jobs` or `backbones` is one string.
            KeyboardInterrupt: somebody pressed Ctrl-C; the member has said goodbye.
        """
        # An earlier `stop` is over. One that comes from now on counts, even before the member has begun.
        self._wants_stop = False
        options = self._options(
            data,
            ledger=ledger,
            jobs=jobs,
            text=text,
            label=label,
            text_b=text_b,
            prompt=prompt,
            response=response,
            messages=messages,
            person=person,
            device=device,
            backbones=backbones,
            until_finished=until_finished,
        )
        self._run(options)

    def _options(
        self,
        data: Data,
        *,
        ledger: str,
        jobs: Sequence[str] = (),
        text: str = "text",
        label: str = "label",
        text_b: str | None = None,
        prompt: str | None = None,
        response: str | None = None,
        messages: str | None = None,
        person: str | None = None,
        device: str = "auto",
        backbones: Sequence[str | Path] = (),
        until_finished: bool = True,
    ) -> "RunOptions":
        """Reads rows from memory, and checks what can be checked before a run."""
        from tacit_api.tls import only_tls_13

        check_several(jobs, "jobs")
        check_several(backbones, "backbones")
        # Before the import below, which imports gRPC.
        only_tls_13()
        with naming_extra("tacit.Member", "edge"):
            from edge_client.agent.runner import RunOptions

        rows, named = None, "rows in memory"
        if isinstance(data, str | Path):
            named = str(data)
        else:
            turns: dict[str, Any] = {"prompt": prompt, "response": response, "messages": messages}
            # The jobs to come are not known yet.
            turns["rows_for"] = "texts or dialogues"
            rows = rows_of(data, text=text, label=label, text_b=text_b, person=person, **turns).examples
        return RunOptions(
            data=Path(named),
            rows=rows,
            text=text,
            label=label,
            text_b=text_b,
            prompt=prompt,
            response=response,
            messages=messages,
            person=person,
            home=self.home,
            data_name=ledger,
            jobs=tuple(jobs),
            device=device,
            backbones=tuple(map(Path, backbones)),
            until_finished=until_finished,
            embedded=True,
        )

    def _run(self, options: "RunOptions") -> None:
        from edge_client.agent.dry_run import describing
        from edge_client.agent.runner import run_member

        def runs() -> None:
            with threads_kept():
                run_member(options, describe=describing(options), started=self._begun)

        _in_a_loop(runs, self._ask_to_stop)

    def start(self, data: Data, **options: Any) -> Self:
        """Runs in a thread of its own, as `run`; end it with `stop` or `wait`, or use the member as a context.

        Raises:
            RuntimeError: it runs already. One that ended by itself may start again, and why it ended is then forgotten.
            ValueError: rows in memory cannot be read, or `jobs` or `backbones` is one string.
        """
        return self._begin(self._options(data, **options))

    def _begin(self, options: "RunOptions") -> Self:
        if self.running:
            raise RuntimeError("this member runs already; stop it first")
        self._wants_stop = False
        self._ended = _in_a_thread(lambda: self._run(options), f"tacit-{self.home.name}")
        return self

    @property
    def running(self) -> bool:
        """Whether `start` began a run that has not ended."""
        return self._ended is not None and not self._ended.done()

    def wait(self) -> None:
        """Waits until the member ends by itself.

        Raises:
            CommandFailed: why it ended, if not because its jobs were over.
        """
        if self._ended is not None:
            _until_over(self._ended)
            ended, self._ended = self._ended, None
            ended.result()

    def stop(self) -> None:
        """Ends the member as Ctrl-C would: it says goodbye, and what it has sent stays sent."""
        self._ask_to_stop()
        self.wait()

    def _ask_to_stop(self) -> None:
        with self._stopping:
            # It may not have begun yet; then it ends as soon as it does.
            self._wants_stop = True
            if self._stop is not None:
                self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.stop()
        except CommandFailed:
            # What went wrong first says more.
            if kind is None:
                raise

    def _begun(self, stop: Callable[[], None] | None) -> None:
        with self._stopping:
            self._stop = stop
            if stop is not None and self._wants_stop:
                stop()


def _in_a_loop(work: Callable[[], object], stop: Callable[[], object] = lambda: None) -> None:
    """Runs what starts an event loop, also where one runs already: in a notebook.

    Args:
        work: runs in a thread if there is a loop.
        stop: ends `work`, if Ctrl-C comes while it runs in a thread.
    """
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        work()
        return
    ended = _in_a_thread(work, "tacit-member")
    try:
        _until_over(ended)
    except KeyboardInterrupt:
        # It reaches this thread alone.
        stop()
        _until_over(ended)
        raise
    ended.result()


def _in_a_thread(work: Callable[[], object], name: str) -> "Future[None]":
    """Runs work in a thread of its own, and returns its end.

    A future, because `Thread.join` of Python 3.11 takes a thread for ended once Ctrl-C has interrupted it.
    """
    ended: Future[None] = Future()

    def whole() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised again by whoever waits
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=whole, name=name, daemon=True).start()
    return ended


def _until_over(ended: "Future[None]") -> None:
    # Python notices Ctrl-C between two waits, whichever thread the system gave it to.
    while wait_for([ended], _LOOKS).not_done:
        pass
