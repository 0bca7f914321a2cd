"""Runs the server of a cohort in its own process, with the coordinator's own spools, and measures its memory.

It receives one vector at a time, as a file, and passes it in pieces to the coordinator's `UploadDesk`, which spools,
hashes and adds it. The figure is the highest resident size of the process above idle. Idle means all modules imported,
every certificate verified, and no attempt open. The mean is written block by block.
"""

import asyncio
import contextlib
import multiprocessing
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from numpy.typing import NDArray

import secure_agg
from benchmarks.secure_aggregation.cohort import ChecksMissing, CohortFailed, Server
from benchmarks.secure_aggregation.crowd import Crowd, due_of_server
from benchmarks.secure_aggregation.memory import Peak
from coordinator import heap
from coordinator.rounds.uploads import UploadDesk
from secure_agg import Layout, Phase, RoundContext
from tacit.attempt import AttemptId
from tacit.verification import verifiers

__all__ = ["SeparateServer"]

# Size of the pieces that a member sends.
_CHUNK = 384 * 1024
_ANSWER_SECONDS = 600.0


class SeparateServer:
    """A `cohort.Desk` in another process, which runs inside the `with` block."""

    def __init__(self, crowd: Crowd, context: RoundContext, layout: Layout, lost: int) -> None:
        self._peak: Peak | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="tacit-bench-")
        self._here, self._there = multiprocessing.Pipe()
        root = crowd.root.public_bytes(Encoding.DER)
        certificates = {party.member: party.certificate for party in crowd.parties}
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(self._there, self._folder.name, root, certificates, context, layout, lost), daemon=True
        )

    def __enter__(self) -> Self:
        self._process.start()
        # Now only the other process has its end, so this one notices its death.
        self._there.close()
        # It is idle once it has answered.
        self._answer()
        self._peak = Peak(self.process_id)
        self._ask("begin")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, of: TracebackType | None) -> None:
        # If it ended early, the caller knows already.
        with contextlib.suppress(OSError):
            self._here.send(None)
        self._process.join(_ANSWER_SECONDS)
        self._here.close()
        self._folder.cleanup()

    @property
    def process_id(self) -> int:
        """Id of the process, once it has started."""
        if self._process.pid is None:
            raise RuntimeError("the server's process has not been started")
        return self._process.pid

    @property
    def peak(self) -> Peak:
        """Peak of the process from idle on."""
        if self._peak is None:
            raise RuntimeError("the server's process has not been started")
        return self._peak

    def take(self, member: str, message: Any) -> None:
        """As `Desk`."""
        self._ask("take", member, message)

    def take_vector(self, member: str, message: secure_agg.MaskedInput, packed: memoryview) -> None:
        """As `Desk`."""
        path = Path(self._folder.name) / "upload"
        path.write_bytes(packed)
        self._ask("take_file", member, message, path)
        path.unlink()

    def close(self) -> Mapping[str, Any]:
        """As `Desk`."""
        inbox: Mapping[str, Any] = self._ask("close")
        return inbox

    def open(self) -> NDArray[np.float64]:
        """As `Desk`."""
        return np.fromfile(self._ask("open_into", Path(self._folder.name) / "mean"), dtype=np.float64)

    def _ask(self, method: str, *arguments: Any) -> Any:
        with _told_when_it_ended():
            self._here.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        with _told_when_it_ended():
            if not self._here.poll(_ANSWER_SECONDS):
                raise CohortFailed(f"the server's process has not answered for {_ANSWER_SECONDS:g} s")
            answer = self._here.recv()
        if isinstance(answer, CohortFailed | ChecksMissing):
            raise answer
        return answer


@contextlib.contextmanager
def _told_when_it_ended() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise CohortFailed("the server's process ended early; what it printed says why") from None


class _SpoolingServer(Server):
    """A server that spools through an `UploadDesk`."""

    def __init__(self, runner: asyncio.Runner, folder: Path, *arguments: Any) -> None:
        self._runner = runner
        self._desk = UploadDesk(folder)
        super().__init__(*arguments)

    def take_file(self, member: str, message: secure_agg.MaskedInput, path: Path) -> None:
        """Take a vector in pieces. Raises: CohortFailed."""
        with self.watch.running():
            self._runner.run(self._take(member, message, path))

    def close(self) -> Mapping[str, Any]:
        """End the phase. After masking, the desk takes no more."""
        masked = self._state.phase is Phase.MASK
        inbox = super().close()
        if masked:
            with self.watch.running():
                self._desk.close(self._attempt, keep_sum=True)
        return inbox

    def open_into(self, path: Path) -> Path:
        """Write the mean as float64."""
        with self.watch.running(), path.open("wb") as file:
            for block in self._opened():
                file.write(block.data)
        return path

    def uploaded(self, member: str, attempt: AttemptId, message: secure_agg.MaskedInput, digest: bytes) -> None:
        """Accept a vector that the desk has received completely. Raises: CohortFailed."""
        self._keep(self._state.receive(member, message, digest))
        self._accepting = asyncio.ensure_future(self._desk.accept(attempt, member))

    def _empty(self, context: RoundContext, members: Collection[str]) -> NDArray[np.uint32]:
        self._attempt = AttemptId(context.job, context.round, context.attempt)
        self._desk.open(self._attempt, frozenset(members), context.values, context.bits)
        return self._desk.total(self._attempt)

    async def _take(self, member: str, message: secure_agg.MaskedInput, path: Path) -> None:
        receipt = await self._desk.take(self._attempt, member, 0, message, _pieces(path), self)
        if not receipt.complete:
            raise CohortFailed(f"the vector of {member} was not accepted: {receipt}")


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_CHUNK):
            yield piece


def _serve(
    connection: Connection,
    folder: str,
    root: bytes,
    certificates: Mapping[str, bytes],
    context: RoundContext,
    layout: Layout,
    lost: int,
) -> None:
    """Run the process: verify certificates, report it, and answer requests until one is None."""
    heap.frugal()
    verify, key_of = verifiers(x509.load_der_x509_certificate(root))
    for certificate in certificates.values():
        key_of(certificate)
    connection.send(None)
    with asyncio.Runner() as runner:
        connection.recv()
        due = due_of_server(context, lost)
        server = _SpoolingServer(runner, Path(folder), context, layout, list(certificates), verify, key_of, due)
        connection.send(None)
        while (asked := connection.recv()) is not None:
            method, arguments = asked
            try:
                connection.send(getattr(server, method)(*arguments))
            except (CohortFailed, ChecksMissing) as error:
                connection.send(error)
