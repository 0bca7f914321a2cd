"""Counts the bytes that a member of a FedVocab federation sends and receives.

Three members (`edge_client run`) train on TREC with a coordinator process, and every member connects through a counter.
Each case has two jobs, of one round and of three. Half their difference is one round, without the bytes sent once a job
(handshake, job document, version 0, the private start, goodbyes). An uncounted job comes first and downloads the word
list that all cases share. Sizes are the paper's: a BiLSTM with 300 hidden units each way over an embedding 300 wide,
here of the 7,846 words in the list.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.library.federation import BIN, Federation, federation
from benchmarks.library.record import SHARED, Figure, NoData, Results, open_results, parser
from benchmarks.library.untrained import POLICY, member_names

__all__ = ["Counter", "dial", "main", "per_round"]

BENCH = "fedvocab_wire"

GLOVE = SHARED / "glove" / "glove.6B.50d.subset.txt.gz"
TREC = SHARED / "trec" / "train.jsonl.gz"
MEMBERS, ROWS, ROUNDS = 3, 20, (1, 3)
JOB_SECONDS = 300.0
_CHUNK = 64 * 1024

# (method, vocabulary).
CASES: Sequence[tuple[str, str]] = (
    ("fedavg", "same"),
    ("fedprox", "same"),
    ("lg-fedavg", "same"),
    ("fedrecon", "same"),
    ("fedvocab", "same"),
    ("fedvocab", "own"),
)


@dataclass
class Counter:
    """A TCP relay on loopback to a port of this machine that counts the bytes. It does not open TLS."""

    target: int
    sent: int = 0
    received: int = 0
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Listen, and yield the port."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for each in self._open:
                each.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._relay(reader, writer))
        self._open.add(connection)
        connection.add_done_callback(self._open.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(self._pump(reader, back, "sent"), self._pump(there, writer, "received"))
        finally:
            back.close()
            writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, counted: str) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                setattr(self, counted, getattr(self, counted) + len(data))
                sink.write(data)
                await sink.drain()
            sink.write_eof()


def per_round(short: int, long: int) -> float:
    """Return the bytes of one round, from those of the two jobs with ROUNDS."""
    return (long - short) / (ROUNDS[1] - ROUNDS[0])


def specification(method: str, vocabulary: str, rounds: int, *, width: int, hidden: int, seed: int) -> tuple[str, str]:
    """Return a job's name and file. seed: differs between jobs, so that no version 0 is in a member's cache."""
    name = f"{method}-{vocabulary}-{seed}"
    file = f"file = {json.dumps(str(GLOVE))}\n" if vocabulary == "same" else ""
    return name, (
        f'schema = 1\nname = "{name}"\nseed = {seed}\nlabels = {json.dumps(_labels())}\n'
        f'[method]\nname = "{method}"\n[vocabulary]\nkind = "words"\n{file}'
        f'[model]\narchitecture = "bilstm"\nembedding = {width}\nhidden = {hidden}\nmax_tokens = 32\n'
        f"[training]\nepochs = 1\nbatch = 8\n[rounds]\ncount = {rounds}\nmin_members = {MEMBERS}\n"
        f"target_members = {MEMBERS}\n"
    )


def _rows() -> list[str]:
    from learning.text.textual import read_text

    return read_text(TREC).splitlines()


def _labels() -> list[str]:
    return sorted({json.loads(row)["label"] for row in _rows()})


async def _job(running: Federation, counters: Sequence[Counter], name: str, text: str) -> tuple[int, int, int]:
    """Run a job, and return its values and the bytes that a member sent and received, as means over the members."""
    from export.bundle import read_job_bundle

    names = member_names(MEMBERS)
    before = [(each.sent, each.received) for each in counters]
    await asyncio.to_thread(running.create_job, name, text)
    for member in names:
        words: list[str | Path] = [BIN / "edge_client", "run", "--until-finished", "--log-format", "json"]
        home = running.home(member)
        running.spawn(member, [*words, "--device", "cpu", "--home", home, "--data", running.folder / f"{member}.jsonl"])
    detail = await running.finished(name, JOB_SECONDS)
    running.end(*names)
    if any(len(each.attempts) != 1 or len(each.attempts[0].survivors) != MEMBERS for each in detail.rounds):
        raise RuntimeError(f"job {name}: a round was not one attempt of all members")
    sent = sum(each.sent - old for each, (old, _) in zip(counters, before, strict=True))
    received = sum(each.received - old for each, (_, old) in zip(counters, before, strict=True))
    values = read_job_bundle(running.folder / f"bundle-{name}").document.values
    return values, sent // MEMBERS, received // MEMBERS


async def _measure(results: Results, cases: Sequence[tuple[str, str]], width: int, hidden: int) -> None:
    rows = _rows()
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        async with contextlib.AsyncExitStack() as stack:
            running = await stack.enter_async_context(federation(Path(scratch), POLICY, member_names(MEMBERS)))
            counters = [Counter(running.port) for _ in range(MEMBERS)]
            for place, (member, counter) in enumerate(zip(member_names(MEMBERS), counters, strict=True)):
                port = await stack.enter_async_context(counter.listening())
                dial(running.home(member), port)
                data = rows[place * ROWS : (place + 1) * ROWS]
                (running.folder / f"{member}.jsonl").write_text("\n".join(data) + "\n", encoding="utf-8")
            seeds = count(1)

            async def job(method: str, vocabulary: str, rounds: int) -> tuple[int, int, int]:
                named = specification(method, vocabulary, rounds, width=width, hidden=hidden, seed=next(seeds))
                return await _job(running, counters, *named)

            await job("lg-fedavg", "same", 1)
            for method, vocabulary in cases:
                case = {"method": method, "vocabulary": vocabulary, "model": "bilstm", "embedding": width}
                if results.done(case):
                    continue
                results.open([0])
                values, *short = await job(method, vocabulary, ROUNDS[0])
                _, *long = await job(method, vocabulary, ROUNDS[1])
                results.add(case, _figures(values, short, long))


def _figures(values: int, short: Sequence[int], long: Sequence[int]) -> list[Figure]:
    more: dict[str, Any] = {"jobs": {str(ROUNDS[0]): list(short), str(ROUNDS[1]): list(long)}}
    return [
        Figure("values_per_round", values),
        Figure("sent_bytes_per_round", per_round(short[0], long[0]), "B", more=more),
        Figure("received_bytes_per_round", per_round(short[1], long[1]), "B"),
    ]


def dial(home: Path, port: int) -> None:
    """Make the member of `home` connect to a loopback port instead of its coordinator's."""
    path = home / "identity" / "identity.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "address": f"localhost:{port}"}))


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    chosen = parser("private_vocabularies.wire").parse_args(words)
    for path in (GLOVE, TREC):
        if not path.exists():
            raise NoData(f"{path} is missing: this benchmark needs public data under {SHARED} (docs/benchmarks.md)")
    cases = [CASES[0], CASES[-1]] if chosen.quick else CASES
    asyncio.run(_measure(open_results(BENCH, quick=chosen.quick), cases, *((8, 8) if chosen.quick else (300, 300))))


if __name__ == "__main__":
    main()
