"""A federation under attack, for tests: real processes whose members do not train, and checks of what must hold.

Members run `tests.support.rogue_member`, which is honest until a test gives it an order. Their updates follow from
their names, so a published version shows whose updates it holds, and how often.
"""

import asyncio
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.library.members import synthetic_update
from coordinator.cli.common import operator_stub
from tacit.blobs import fetch_blob, put_blob
from tacit.v1 import operator_pb2 as pb
from tests.support.processes import EXAMPLES, PATIENCE, Federation, Process

__all__ = ["Besieged", "Footprint", "attempts", "dropouts"]

# Largest accepted error of a coordinate. Rounding in the ring moves the mean of a few synthetic updates by up to 6e-5;
# an update that is missing, added or counted twice moves coordinates by 1e-2.
_ROUNDING = 2e-4


def attempts(detail: pb.JobDetail) -> list[pb.Attempt]:
    """All attempts of a job, in order."""
    return [attempt for each in detail.rounds for attempt in each.attempts]


def dropouts(detail: pb.JobDetail) -> list[tuple[str, str, int]]:
    """(member, phase, reason) of all attempts of a job."""
    return [(lost.member, lost.phase, lost.reason) for attempt in attempts(detail) for lost in attempt.dropouts]


class Footprint:
    """Growth of a process's memory and open files since this object was made."""

    def __init__(self, process: int) -> None:
        self._process = psutil.Process(process)
        self.memory, self.files = self._memory(), self._files()

    def _memory(self) -> int:
        return int(self._process.memory_info().rss)

    def _files(self) -> int:
        return int(self._process.num_fds())

    @property
    def grown(self) -> int:
        """Additional bytes of memory."""
        return self._memory() - self.memory

    @property
    def opened(self) -> int:
        """Additional open files and sockets."""
        return self._files() - self.files


class Besieged(Federation):
    """A federation of light members: real processes that do not train."""

    # ---- members --------------------------------------------------------------------------------------------------

    def enrol(self, *names: str, policy: str | None = None) -> None:
        """Enrols members in this process, because a command for each would cost seconds."""
        from edge_client.identity.enrolment import enrol

        async def join() -> None:
            async with operator_stub(self.dir / "operator") as stub:
                for name in names:
                    answer = await stub.InviteMember(pb.InviteMemberRequest(name=name, valid_seconds=3600))
                    await enrol(self.home(name), answer.token)
                    (self.home(name) / "policy.toml").write_text(policy or (EXAMPLES / "policy.toml").read_text())

        asyncio.run(join())

    def order(self, name: str, *words: str) -> None:
        """Orders a member to behave like this from now on. Without words, it is honest again."""
        path = self._orders(name)
        if words:
            fresh = path.with_suffix(".new")
            fresh.write_text(" ".join(words))
            fresh.replace(path)
        else:
            path.unlink(missing_ok=True)

    def _orders(self, name: str) -> Path:
        return self.folder / f"orders-{name}"

    def light(self, name: str, *jobs: str) -> Process:
        """Starts a member that takes part in jobs whose names match these patterns, or in all jobs."""
        words = [sys.executable, "-m", "tests.support.rogue_member", str(self.home(name)), str(self._orders(name))]
        member = Process(name, [*words, *jobs], self.folder / f"{name}.log")
        self.processes.append(member)
        return member

    # ---- jobs -----------------------------------------------------------------------------------------------------

    def light_job(
        self,
        name: str,
        *,
        embedding: int = 64,
        deadlines: dict[str, float] | None = None,
        mechanism: str = "",
        server: str = "",
        **rounds: int,
    ) -> None:
        """Creates a job that nobody trains. With the default embedding it has 256,000 values, a megabyte each way.

        Args:
            mechanism: the content of the job file's `[mechanism]` table.
            server: the content of its `[server]` table.
        """
        from export.bundle import make_job_bundle
        from tacit.bundle import read_bundle
        from tacit.job import JobSpec

        labels = sorted({json.loads(line)["label"] for line in (EXAMPLES / "train.jsonl").open()})
        limits = {"training": 60, "reconnect": 20, **(deadlines or {})}
        numbers = {"count": 1, "min_members": 3, **rounds}
        spec, bundle = self.folder / f"{name}.toml", self.folder / f"bundle-{name}"
        spec.write_text(
            f"schema = 1\nname = {json.dumps(name)}\nlabels = {json.dumps(labels)}\n"
            # Different seeds, so that no job starts from a version that members already have in their caches.
            f"seed = {zlib.crc32(name.encode())}\n"
            f'[vocabulary]\nkind = "words"\nfile = {json.dumps(str(EXAMPLES / "words.txt"))}\n'
            f"[model]\nembedding = {embedding}\nwidths = [2]\nmaps = 4\n"
            + (f"[mechanism]\n{mechanism}\n" if mechanism else "")
            + (f"[server]\n{server}\n" if server else "")
            + "[rounds]\n"
            + "".join(f"{key} = {value}\n" for key, value in numbers.items())
            + "[rounds.deadlines]\n"
            + "".join(f"{key} = {value}\n" for key, value in limits.items())
        )
        document = make_job_bundle(JobSpec.from_toml(spec), self.folder, bundle)
        files = read_bundle(bundle, "job").files

        async def create() -> None:
            async with operator_stub(self.dir / "operator") as stub:
                for file in document.files:
                    await put_blob(stub, files[file])
                digest = await put_blob(stub, document.canonical())
                await stub.CreateJob(pb.CreateJobRequest(document=digest))

        asyncio.run(create())

    def abort(self, job: str) -> None:
        """Aborts a job, so that it disturbs no later test."""
        self.operator("job", "abort", job, "--yes")

    # ---- the coordinator's state ---------------------------------------------------------------------------------

    def status(self, holds: Callable[[dict[str, pb.Job]], Any]) -> dict[str, pb.Job]:
        """Waits until `holds` is true of the jobs, and returns them by name."""

        async def wait() -> dict[str, pb.Job]:
            jobs: dict[str, pb.Job] = {}
            try:
                async with asyncio.timeout(PATIENCE), operator_stub(self.dir / "operator") as stub:
                    async for status in stub.Watch(pb.StatusRequest()):
                        jobs = {each.name: each for each in status.jobs}
                        if holds(jobs):
                            return jobs
            except TimeoutError:
                pass
            raise AssertionError(f"the expected state was never reached: {jobs}")

        return asyncio.run(wait())

    def goes_on(self, job: str, rounds: int = 2) -> None:
        """Returns once a job has `rounds` more versions than now."""
        before = self.status(lambda jobs: job in jobs)[job].version_number
        self.status(lambda jobs: jobs[job].version_number >= before + rounds)

    def sound(self, job: str, members: Iterable[str], *, rounding: float = _ROUNDING) -> pb.JobDetail:
        """Checks that no version of the job is lost and no update counts twice.

        Every version must exist under the digest by which it was announced, and must equal the version before it plus
        the mean update of its survivors.

        Args:
            members: the members that may be survivors.
            rounding: largest accepted error of a coordinate.
        """
        detail = self.show(job)
        allowed = set(members)
        numbers = [version.number for version in detail.versions]
        assert numbers == list(range(detail.job.version_number + 1)), numbers
        published = [attempt for attempt in attempts(detail) if attempt.outcome == "published"]
        digests = {version.number: version.digest for version in detail.versions}
        assert [attempt.new_version for attempt in published] == [digests[number] for number in numbers[1:]]
        for each in detail.rounds:
            assert sum(attempt.outcome == "published" for attempt in each.attempts) == (each.outcome == "published")
        values = self._values(digests)
        for number, attempt in enumerate(published, 1):
            assert set(attempt.survivors) <= allowed, attempt.survivors
            updates = [synthetic_update(name, values[0].size).change for name in attempt.survivors]
            expected = np.mean(np.asarray(updates, dtype=np.float64), axis=0)
            step = values[number].astype(np.float64) - values[number - 1]
            off = np.abs(step - expected)
            assert off.max() < rounding, f"{job}: version {number} is another sum, off by {off.max():.2g}"
        return detail

    def _values(self, digests: dict[int, bytes]) -> dict[int, np.ndarray[Any, np.dtype[np.float32]]]:
        async def fetch() -> dict[int, np.ndarray[Any, np.dtype[np.float32]]]:
            found = {}
            async with operator_stub(self.dir / "operator") as stub:
                for number, digest in digests.items():
                    data = bytearray()
                    await fetch_blob(stub.FetchBlob, digest, data)
                    assert hashlib.sha256(data).digest() == digest
                    found[number] = np.frombuffer(bytes(data), dtype="<f4")
            return found

        return asyncio.run(fetch())

    def never_logged(self, names: Sequence[str], *events: str) -> None:
        """Checks that neither these members nor the coordinator logged one of these events."""
        for name in (*names, "coordinator"):
            for line in (self.folder / f"{name}.log").read_text().splitlines():
                try:
                    event = json.loads(line).get("event")
                except ValueError:
                    continue
                assert event not in events, f"{name}: {line}"
