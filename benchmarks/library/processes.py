"""Runs a benchmark's tasks in several processes, which may share a GPU.

A task may lead to others: a cell is measured as soon as its last recipe is trained. Those come before the tasks that
wait, so that a run that is stopped has whole cells. A task that fails ends no other.

On Linux, the processes are forked from one that has imported torch and has started no threads of its own. They end with
the process that began them, however that ends.
"""

import argparse
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

__all__ = ["count", "run_in_processes"]

T = TypeVar("T", bound=Hashable)


def run_in_processes(
    tasks: Iterable[T],
    act: Callable[[T], Sequence[T]],
    processes: int,
    *,
    begin: Callable[..., None],
    given: tuple[Any, ...],
    until: float,
    imports: Sequence[str] = ("torch",),
) -> list[T]:
    """Run tasks, each once, and those that follow from them.

    Args:
        tasks: in the order in which they begin.
        act: runs a task in one of the processes, and returns the tasks that it leads to. A function of a module.
        processes: at most.
        begin: called with `given` in each process before its first task.
        until: when to begin no further task (monotonic seconds).
        imports: modules that processes share.

    Returns:
        The tasks that failed; standard error says why.

    Raises:
        BrokenProcessPool: a process died.
    """
    waiting, seen, failed = deque(tasks), set[T](), list[T]()
    running: dict[Future[Sequence[T]], T] = {}
    variables = dict(os.environ)
    context = get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(list(imports))
    pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(variables, begin, given))
    try:
        while True:
            while waiting and len(running) < processes and time.monotonic() < until:
                task = waiting.popleft()
                if task not in seen:
                    seen.add(task)
                    running[pool.submit(act, task)] = task
            if not running:
                return failed
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task = running.pop(future)
                try:
                    waiting.extendleft(reversed(future.result()))
                except BrokenProcessPool:
                    raise
                except (Exception, SystemExit):  # noqa: BLE001  whatever a task raised
                    failed.append(task)
                    print(f"{task} failed:", traceback.format_exc(), sep="\n", file=sys.stderr, flush=True)
    except BaseException:
        # What they train is lost to nobody: lines and versions are written by whole cells.
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(variables: Mapping[str, str], begin: Callable[..., None], given: tuple[Any, ...]) -> None:
    # The process that this one is forked from may have begun before a variable changed.
    os.environ.update(variables)
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
    begin(*given)


def _end_with(parent: BaseProcess | None) -> None:
    """End with the process that submits tasks, also if that is killed. Otherwise this one would wait for good."""
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def count(word: str) -> int:
    """Parse an option's number of processes."""
    if not (word.isascii() and word.isdecimal() and 1 <= int(word) <= 1000):
        raise argparse.ArgumentTypeError("must be a whole number from 1 to 1000")
    return int(word)
