"""Sleeps between rounds while the member's own command says so: battery, network, load, or whatever it looks at.

Guarantees:

- A session is opened only after the command ended with exit code 0. Any other code, a signal, a command that cannot be
  started and one that takes too long all mean: not now.
- A session is closed only between rounds: while this member trains, holds an update or is in an attempt, it stays. So
  sleeping costs no reservation of the ledger.
- The command gets nothing of this program: no data, no standard input, and of its environment PATH, HOME and LANG alone
  (it may hold passwords). Its output is not read.
- A command that takes too long is ended together with the processes that it started, unless they left its group.

A member that sleeps is offline for the coordinator, which forms cohorts of those that are there.
"""

import asyncio
import contextlib
import os
import shlex
import signal

import structlog

__all__ = ["Idle", "IdleInvalid"]

# Seconds between two looks, and the longest that a look may take.
LOOK_SECONDS = 60.0
_COMMAND_SECONDS = 30.0
_ENVIRONMENT = ("PATH", "HOME", "LANG")

log = structlog.get_logger("edge_client")


class IdleInvalid(ValueError):
    """The command is not one. The text says what to do."""


class Idle:
    """When to be connected.

    Args:
        command: A program with its arguments, split as a shell would; no shell runs it.
        seconds: Between two looks.

    Raises:
        IdleInvalid: The text is no command.
    """

    def __init__(self, command: str, seconds: float = LOOK_SECONDS) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise IdleInvalid(f"--idle: {command!r} cannot be split into words ({error}); check its quotes") from error
        if not self._words:
            raise IdleInvalid("--idle: the command is empty; name a program whose exit code 0 means go")
        if "\0" in command:
            raise IdleInvalid("--idle: the command has a zero byte; leave it out")
        self.seconds = seconds
        self._sleeping = False

    async def goes(self) -> bool:
        """Runs the command once: whether its exit code is 0."""
        code = await self._run()
        if (code != 0) != self._sleeping:
            self._sleeping = code != 0
            if self._sleeping:
                log.info("sleeping", code=code)
            else:
                log.info("awake")
        return code == 0

    async def _run(self) -> int | None:
        """The command's exit code; None if it cannot be started or takes too long."""
        nothing = asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,
            )
        except OSError as error:
            log.warning("idle_command_failing", why=f"{self._words[0]} cannot be started: {error.strerror}")
            return None
        code: int | None = None
        try:
            async with asyncio.timeout(_COMMAND_SECONDS):
                code = await process.wait()
        except TimeoutError:
            log.warning("idle_command_failing", why=f"{self._words[0]} took more than {_COMMAND_SECONDS:g} seconds")
        finally:
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return code

    async def until_it_goes(self) -> None:
        """Returns once the command says go."""
        # Nobody tells this process when the battery is full: it has to look.
        while not await self.goes():  # noqa: ASYNC110
            await asyncio.sleep(self.seconds)
