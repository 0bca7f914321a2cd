"""Runs the calls of a simulation in worker processes, on this machine or on the actors of a Ray cluster.

An engine makes one object in each worker and calls its methods. Guarantees: results come in the order of the calls.
A call whose worker died is made again in a new worker, so a method must give the same result however often it runs.
After `_MAX_DEATHS` deaths in a row without a result, the engine gives up and says so.
"""

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, Protocol

from toolkit.install import install_with

__all__ = ["Engine", "NoRoom", "RayMissing", "WorkersDied", "local_engine", "ray_engine", "room_of"]

# A call that kills its worker each time would never end.
_MAX_DEATHS = 3
# Ray sends smaller arguments with the call and puts larger ones into its store, once for each call.
_INLINE_BYTES = 100 * 1024
# What takes workers long to import. Torch imports its compiler when the first optimiser is made.
_IMPORTED = ("simulation.virtual_members", "export.bundle", "torch", "torch._dynamo")

Make = Callable[[Any], Any]


class WorkersDied(RuntimeError):
    """Workers died again and again; the text says what to do."""


class RayMissing(ValueError):
    """Ray is not installed."""


class NoRoom(ValueError):
    """A Ray cluster has no room for the workers, even if nobody else uses it. Ray itself would wait for ever."""


class Engine(Protocol):
    """Workers, each with an object of its own.

    Attributes:
        workers: how many.
        shares: calls into which a worker's part of a round is cut, where calls may have any size. More calls let no
            worker wait long for the last one, and lose less if a worker dies; fewer cost less.
    """

    @property
    def workers(self) -> int: ...

    @property
    def shares(self) -> int: ...

    def each(self, what: str, calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Call the method `what` with each of these arguments, and yield the results in their order.

        Raises:
            WorkersDied: workers die again and again.
        """


class _Processes:
    """Processes of this machine.

    They are not forked from this one, because a forked copy of torch's threads hangs. On Linux they are forked from a
    process that has imported what they need and has no threads, so that many workers cost one import. That process ends
    with this one. Elsewhere libraries of the system do not survive a fork, and each worker is spawned.
    """

    shares = 8

    def __init__(self, make: Make, told: Any, workers: int) -> None:
        self._make, self._told, self.workers = make, told, workers
        self._pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        context = get_context("forkserver" if sys.platform == "linux" else "spawn")
        context.set_forkserver_preload(list(_IMPORTED))
        # Variables may have changed since the other process began.
        given = (self._make, self._told, dict(os.environ))
        return ProcessPoolExecutor(self.workers, context, initializer=_begin, initargs=given)

    def each(self, what: str, calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """See `Engine`."""
        waiting: list[Future[Any]] = []
        for at in range(len(calls)):
            deaths = 0
            while True:
                try:
                    # All calls are submitted at once, so an idle worker takes the next one.
                    if at == len(waiting):
                        waiting += self._submitted(what, calls[at:])
                    result = waiting[at].result()
                    break
                except BrokenProcessPool:
                    # One dead process ends the whole pool, also if it died before these calls.
                    deaths += 1
                    if deaths == _MAX_DEATHS:
                        raise _died(what) from None
                    self.close()
                    self._pool = self._new()
                    del waiting[at:]
            yield result
            # Its result is not held for longer than it is needed.
            waiting[at] = Future()

    def _submitted(self, what: str, calls: Sequence[tuple[Any, ...]]) -> list[Future[Any]]:
        return [self._pool.submit(_call, what, arguments) for arguments in calls]

    def close(self) -> None:
        """Ends the processes."""
        self._pool.shutdown(cancel_futures=True)

    def kill(self) -> None:
        """Ends the processes at once, whatever they do."""
        # The pool has no call for it before Python 3.14.
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self.close()


@contextmanager
def local_engine(make: Make, told: Any, workers: int) -> Iterator[Engine]:
    """Start processes, each with `make(told)`, and end them afterwards.

    Args:
        make: a class or function that can be pickled.
        told: what it is given; pickled once for each worker.
        workers: processes, at least 1.
    """
    engine = _Processes(make, told, workers)
    try:
        yield engine
    except BaseException:
        # Somebody pressed Ctrl-C, or a round failed: no member's training is waited for.
        engine.kill()
        raise
    engine.close()


_worker: Any = None


def _begin(make: Make, told: Any, environment: Mapping[str, str]) -> None:
    global _worker  # noqa: PLW0603  one for each process
    os.environ.clear()
    os.environ.update(environment)
    # A terminal's Ctrl-C reaches every process. The one that started this worker ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = make(told)


def _call(what: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_worker, what)(*arguments)


class _Actors:
    """Actors of a Ray cluster. An actor that died is replaced, wherever Ray finds room."""

    # A call costs Ray's own processes about as much as a member's training of a head costs the actor.
    shares = 2

    def __init__(self, make: Make, told: Any, workers: int, gpus: float, report: Callable[[str], None]) -> None:
        import ray as found

        # Ray's own types do not know what its decorators make.
        ray: Any = found
        self._ray, self.workers, self._gpus, self._report = ray, workers, gpus, report
        self._check_room()
        self._tell_of_others()
        held = ray.put(told)

        class Actor:
            def __init__(self, told: Any) -> None:
                self.own = make(told)

            # Ray reads what is in its store only if it is an argument of its own.
            def call(self, what: str, *arguments: Any) -> Any:
                return getattr(self.own, what)(*arguments)

        # Restarts and repetitions are this engine's, which counts them.
        kind: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(Actor)
        self._start = lambda: kind.remote(held)
        self._actors = [self._start() for _ in range(workers)]

    @property
    def _needs(self) -> str:
        return f"one CPU and {self._gpus:g} GPU" if self._gpus else "one CPU"

    def _check_room(self) -> None:
        """Raises NoRoom if the nodes that are there do not suffice."""
        nodes = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        room = room_of(nodes, self._gpus)
        if room < self.workers:
            has = ", ".join(f"{each.get('CPU', 0):g} CPUs and {each.get('GPU', 0):g} GPUs" for each in nodes[:8])
            advice = f"use --workers {room}, or add nodes" if room else "lower --gpus, or add nodes"
            raise NoRoom(
                f"Ray has room for {room} of {self.workers} workers: each needs {self._needs}, and the cluster's "
                f"{len(nodes)} nodes have {has or 'nothing'}; {advice}"
            )

    def _tell_of_others(self) -> None:
        """Reports if others hold what the workers need."""
        free = room_of([self._ray.available_resources()], self._gpus)
        if free < self.workers:
            self._report(
                f"Ray has room for {free} of {self.workers} workers now, each with {self._needs}, because others use "
                "the cluster; the rest of the work waits for them"
            )

    def each(self, what: str, calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """See `Engine`."""
        # Each actor has a call that waits, so that it never waits for one. The others wait here and take no memory.
        free = deque(list(range(len(self._actors))) * 2)
        next_call, next_result, deaths = 0, 0, 0
        running: dict[Any, tuple[int, int, Any]] = {}
        again: list[int] = []
        done: dict[int, Any] = {}
        stored: dict[int, Any] = {}
        while next_result < len(calls):
            while free and (again or next_call < len(calls)):
                at = again.pop() if again else next_call
                next_call += at == next_call
                place = free.popleft()
                actor = self._actors[place]
                arguments = [self._once(each, stored) for each in calls[at]]
                running[actor.call.remote(what, *arguments)] = (at, place, actor)
            (ready,), _ = self._ray.wait(list(running), num_returns=1)
            at, place, actor = running.pop(ready)
            try:
                done[at] = self._ray.get(ready)
                deaths = 0
            except self._ray.exceptions.RayActorError as error:
                again.append(at)
                # All calls of a dead actor end like this, and the first one replaces it.
                if self._actors[place] is actor:
                    deaths += 1
                    if deaths == _MAX_DEATHS * len(self._actors):
                        # Ray says here what an actor could not import or load.
                        raise _died(what) from error
                    # Its node may be gone.
                    self._check_room()
                    self._actors[place] = self._start()
            except self._ray.exceptions.RayTaskError as error:
                # The worker's own exception, as other engines raise it.
                raise error.cause from None
            free.append(place)
            while next_result in done:
                yield done.pop(next_result)
                next_result += 1

    def _once(self, argument: Any, stored: dict[int, Any]) -> Any:
        """Put bytes that many calls share, such as a version, into Ray's store once. stored: by their id."""
        if not isinstance(argument, bytes) or len(argument) < _INLINE_BYTES:
            return argument
        if id(argument) not in stored:
            stored[id(argument)] = self._ray.put(argument)
        return stored[id(argument)]

    def close(self) -> None:
        """Ends the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


@contextmanager
def ray_engine(
    make: Make,
    told: Any,
    workers: int,
    *,
    address: str | None = None,
    gpus: float = 0.0,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Engine]:
    """Start actors, each with `make(told)`, on a Ray cluster, and end them afterwards.

    Args:
        make, told: as in `local_engine`.
        workers: actors, each with one processor.
        address: of the cluster (`auto` finds a running one); None starts Ray on this machine, and ends it afterwards.
        gpus: share of a GPU that each actor has.
        report: called with a sentence if actors must wait for others who use the cluster.

    Raises:
        RayMissing: Ray is not installed.
        NoRoom: the cluster's nodes cannot hold the actors, now or after one of them died.
    """
    try:
        import ray
    except ImportError:
        raise RayMissing(f"Ray is not installed; {install_with('ray')}, or use --engine local") from None
    ours = not ray.is_initialized()
    if ours:
        settings: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            settings |= {"num_cpus": workers}
        ray.init(address=address, **settings)
    try:
        engine = _Actors(make, told, workers, gpus, report)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        if ours:
            ray.shutdown()


def room_of(nodes: Sequence[Mapping[str, float]], gpus: float) -> int:
    """Return how many actors nodes can hold, each actor on one node with one CPU and this share of a GPU.

    Args:
        nodes: each node's resources, as Ray names them.
        gpus: below 1, actors share a GPU; above, each has whole ones.
    """

    def of(node: Mapping[str, float]) -> int:
        cpus, held = int(node.get("CPU", 0)), node.get("GPU", 0.0)
        if not gpus:
            return cpus
        # Ray takes a share from one GPU, never from two. The addend is for shares such as 0.1, which are not exact.
        return min(cpus, int(held) * int(1 / gpus + 1e-9) if gpus < 1 else int(held / gpus + 1e-9))

    return sum(map(of, nodes))


def _died(what: str) -> WorkersDied:
    return WorkersDied(
        f"{_MAX_DEATHS} workers died one after another while they should {what}; look for memory that ran out, and use "
        'fewer workers; a script must make this call below `if __name__ == "__main__":`'
    )
