"""Acts: what somebody asked for and that has begun to change something. An act runs to its end, whoever waits for it.

gRPC cancels a servicer when its client goes away or the call's deadline passes, and the database commits what it has
begun all the same. So from its first write on, an act runs as a task of its own. What it changes in memory after that
write (a driver, a session, a metric) then happens, too.

A stopping coordinator waits for its acts, for a bounded time. Of what is given up then, the next start does what the
database holds; a job that was to be created, paused, resumed or aborted may have to be asked for again.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from coordinator.storage.errors import StorageError

__all__ = ["Acts"]

log = structlog.get_logger("coordinator")

_Result = TypeVar("_Result")

# Seconds for which a stopping coordinator waits. Its supervisor kills it after thirty.
END_SECONDS = 10.0


class Acts:
    """All acts under way. Used from one event loop."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[Any]] = set()

    async def run(
        self,
        act: Coroutine[Any, Any, _Result],
        name: str,
        *,
        refusals: type[Exception] | tuple[type[Exception], ...] = (),
        **about: str,
    ) -> _Result:
        """Returns what an act returns. It goes on if the caller is cancelled; then the log hears of its failure.

        Args:
            act: The act.
            name: Its name, for the log.
            refusals: What it raises to refuse, which is no failure.
            about: Further fields for the log.

        Raises:
            Exception: what the act raises.
        """
        task = self._begun(act, name)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda ended: _say(ended, about, refusals))
            raise

    def begin(self, act: Coroutine[Any, Any, object], name: str, **about: str) -> None:
        """Begins an act that nobody waits for; the log hears of its failure."""
        self._begun(act, name).add_done_callback(lambda ended: _say(ended, about))

    async def end(self, seconds: float = END_SECONDS) -> None:
        """Waits for all acts. Those that take longer than `seconds` are given up, as a crash would end them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._under_way:
                    await asyncio.wait(self._under_way)
        if late := list(self._under_way):
            log.warning("acts_given_up", acts=sorted(task.get_name() for task in late), seconds=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _begun(self, act: Coroutine[Any, Any, _Result], name: str) -> "asyncio.Task[_Result]":
        task = asyncio.create_task(act, name=name)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task


def _say(
    task: "asyncio.Task[Any]", about: dict[str, str], refusals: type[Exception] | tuple[type[Exception], ...] = ()
) -> None:
    if task.cancelled() or (error := task.exception()) is None or isinstance(error, refusals):
        return
    # A failure of the database says all in its sentence.
    cause = None if isinstance(error, StorageError) else error
    log.error("act_failed", act=task.get_name(), error=str(error), exc_info=cause, **about)
