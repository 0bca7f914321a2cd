"""Operates a coordinator from Python: `tacit.Coordinator` and `tacit.AsyncCoordinator`.

They call what the operator's commands call, over mutual TLS with the same folder. Answers are the objects that the
commands print with `--json`. Failures are `CommandFailed`, whose text says what happened and what to do.
"""

import asyncio
import tempfile
import threading
from collections.abc import AsyncGenerator, Awaitable, Collection, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from tacit.job import JobSpec
from tacit_api.jobs import read_job
from toolkit.console import CommandFailed, ExitCode
from toolkit.several import check_several

__all__ = ["AsyncCoordinator", "Coordinator"]

T = TypeVar("T")
Told = dict[str, Any]
Change = Literal["pause", "resume", "abort"]
Job = str | Path | JobSpec | Mapping[str, Any]


class AsyncCoordinator:
    """A coordinator, for code that runs in an event loop. A connection lasts for one call."""

    def __init__(self, operator: str | Path) -> None:
        """Opens the operator's folder.

        Args:
            operator: the folder that `coordinator init` or `coordinator operator issue` made; it names the address.

        Raises:
            CommandFailed: it is not an operator's folder.
        """
        from coordinator.cli.common import operator_folder

        self.folder = operator_folder(Path(operator), None)

    async def status(self) -> Told:
        """Members and jobs, as `coordinator status --json`."""
        from coordinator.cli.shown import status_json
        from tacit.v1 import operator_pb2

        return status_json(await self._call("Status", operator_pb2.StatusRequest()))

    async def watch(self) -> AsyncGenerator[Told, None]:
        """The status now, and again after each change, until the connection ends."""
        from coordinator.cli.common import operator_stub
        from coordinator.cli.shown import status_json
        from tacit.v1 import operator_pb2

        async with operator_stub(self.folder) as stub:
            async for answer in stub.Watch(operator_pb2.StatusRequest()):
                yield status_json(answer)

    async def jobs(self) -> list[Told]:
        """All jobs."""
        return list((await self.status())["jobs"])

    async def job(self, name: str) -> Told:
        """One job with its rounds and versions, as `coordinator job show --json`."""
        from coordinator.cli.shown import detail_json
        from tacit.v1 import operator_pb2

        return detail_json(await self._call("GetJob", operator_pb2.GetJobRequest(name=name)))

    async def finished(self, name: str, *, members: Collection[str] | None = None) -> Told:
        """Waits until a job is over, and returns it.

        A job whose members decline waits for others, and pauses after a training window.

        Args:
            name: the job's.
            members: who may take part. Too few of them that have not declined are then a failure at once. None: more
                members may come.

        Raises:
            CommandFailed: it was paused or aborted, there is no such job, or too few of `members` are left.
            ValueError: one of `members` is not enrolled, or `members` is one string.
        """
        check_several(members, "members")
        await self.job(name)
        if members is not None:
            known = {each["name"] for each in await self.members()}
            if unknown := sorted(set(members) - known):
                raise ValueError(f"there is no member {unknown[0]!r}; there are {', '.join(sorted(known))}")
        async for status in self.watch():
            found: Told | None = next((each for each in status["jobs"] if each["name"] == name), None)
            if found is None:
                break
            if found["status"] == "finished":
                return found
            if found["status"] != "running":
                why = ": ".join(filter(None, (found["status"], found["reason"], found["waiting"])))
                raise CommandFailed(f"job {name} is {why}", ExitCode.FAILED)
            if members is not None and found["phase"] == "training":
                _check_left(found, members, status["members"])
        raise CommandFailed(f"the coordinator ended the connection before job {name} was over", ExitCode.UNREACHABLE)

    async def create(self, job: Job, *, backbones: str | Path | None = None) -> Told:
        """Makes a job's bundle, uploads it and starts the job.

        Args:
            job: a job file, its content as a mapping, a `JobSpec`, or a bundle's folder.
            backbones: a folder of backbones, which `model.base` may name; None: the operator's.
        """
        from coordinator.cli.creating import upload_job
        from coordinator.cli.job import read_bundle_parts
        from coordinator.cli.shown import job_json

        with tempfile.TemporaryDirectory(prefix="tacit-bundle-") as scratch:
            bundle = await asyncio.to_thread(self._bundle, job, Path(scratch) / "bundle", backbones)
            document, parts = read_bundle_parts(bundle)
            return job_json(await upload_job(self.folder, document, parts, quiet=True))

    async def change(self, name: str, change: Change) -> Told:
        """Pauses, resumes or aborts a job.

        Raises:
            ValueError: it is another change.
        """
        if change not in get_args(Change):
            raise ValueError(f"{change!r} is no change of a job; give {', '.join(get_args(Change))}")
        from coordinator.cli.shown import job_json
        from tacit.v1 import operator_pb2

        request = operator_pb2.ChangeJobRequest(name=name, change=f"JOB_CHANGE_{change.upper()}")
        return job_json(await self._call("ChangeJob", request))

    async def members(self) -> list[Told]:
        """All members, as in the status."""
        return list((await self.status())["members"])

    async def invite(self, name: str, *, valid_seconds: int | None = None) -> str:
        """Invites a member, and returns its join token, which is a secret and works once.

        Args:
            name: the member's.
            valid_seconds: how long the token is valid, 1 minute to 30 days; None: as the coordinator's `token_hours`.
        """
        from tacit.v1 import operator_pb2

        request = operator_pb2.InviteMemberRequest(name=name, valid_seconds=valid_seconds or 0)
        return str((await self._call("InviteMember", request)).token)

    async def revoke(self, name: str) -> None:
        """Revokes a member's certificate."""
        from tacit.v1 import operator_pb2

        await self._call("RevokeMember", operator_pb2.RevokeMemberRequest(name=name))

    async def export(self, job: str, out: str | Path, *, version: int | str | None = None) -> Path:
        """Writes a version as ONNX with its tokenizer, as `coordinator export` does, without a passport.

        Args:
            job: its name.
            out: the folder to create.
            version: a number, `best`, `average`, or None for the newest.

        Returns:
            The folder, for `tacit.load`.

        Raises:
            CommandFailed: there is no such version, its model has no such form, or the folder holds something else.
        """
        from coordinator.cli.common import operator_stub
        from coordinator.cli.model import check_audits, check_exportable, export_version, fetch_material, load_tools
        from tacit.bundle import BundleInvalid, check_place

        try:
            # Before gigabytes are fetched; writing checks again.
            check_place(Path(out), "model")
        except BundleInvalid as error:
            raise CommandFailed(str(error), ExitCode.USAGE) from error
        with tempfile.TemporaryDirectory(prefix="tacit-export-") as scratch:
            named = None if version is None else str(version)
            async with operator_stub(self.folder) as stub:
                material = await fetch_material(
                    stub, job, named, Path(scratch), quiet=True, check=check_exportable, exported=True
                )
            await check_audits(self.folder, material, (), despite=False)
            await asyncio.to_thread(export_version, load_tools(), material, Path(out), [])
        return Path(out)

    def _bundle(self, job: Job, out: Path, backbones: str | Path | None) -> Path:
        """The job's bundle: the folder itself if it is one, else made in `out`."""
        from coordinator.cli.backbone import FOLDER
        from export.bundle import make_job_bundle
        from learning.backbones.collection import Collection

        if isinstance(job, str | Path) and Path(job).is_dir():
            return Path(job)
        spec, base = read_job(job)
        folder = self.folder / FOLDER if backbones is None else Path(backbones)
        if isinstance(spec.start, str):
            raise CommandFailed(
                f"start: version {spec.start} is at the coordinator; make the bundle with `coordinator job bundle`, "
                "and give its folder",
                ExitCode.USAGE,
            )
        try:
            make_job_bundle(spec, base, out, collection=Collection(folder))
        except (ValueError, OSError) as error:
            raise CommandFailed(f"no bundle was made of job {spec.name}: {error}", ExitCode.USAGE) from error
        return out

    async def _call(self, method: str, request: Any) -> Any:
        from coordinator.cli.common import CALL_SECONDS, operator_stub

        async with operator_stub(self.folder) as stub:
            return await getattr(stub, method)(request, timeout=CALL_SECONDS)


def _check_left(job: Told, members: Collection[str], status: list[Told]) -> None:
    """Checks that the next round can have enough of these members."""
    declined = {each["name"]: each["declined"].get(job["name"]) for each in status if each["name"] in members}
    said = [f"{name} declined: {why}" for name, why in declined.items() if why]
    left = len(set(members)) - len(said)
    if left < job["members_needed"]:
        raise CommandFailed(
            "; ".join([f"job {job['name']} needs {job['members_needed']} members and has {left}", *said]),
            ExitCode.FAILED,
        )


class Coordinator:
    """A coordinator, for scripts and notebooks: `AsyncCoordinator` whose calls return when they are done.

    It has a thread with an event loop of its own, so it works where one runs already.
    """

    def __init__(self, operator: str | Path) -> None:
        """Opens the operator's folder, as `AsyncCoordinator`."""
        self._own = AsyncCoordinator(operator)
        self.folder = self._own.folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="tacit-coordinator")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread. Calls that still wait end with `CancelledError`."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._done(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def status(self) -> Told:
        """See `AsyncCoordinator.status`."""
        return self._done(self._own.status())

    def watch(self) -> Iterator[Told]:
        """See `AsyncCoordinator.watch`."""
        changes = self._own.watch()
        try:
            while (status := self._done(anext(changes, None))) is not None:
                yield status
        finally:
            if not self._loop.is_closed():
                self._done(changes.aclose())

    def jobs(self) -> list[Told]:
        """See `AsyncCoordinator.jobs`."""
        return self._done(self._own.jobs())

    def job(self, name: str) -> Told:
        """See `AsyncCoordinator.job`."""
        return self._done(self._own.job(name))

    def finished(self, name: str, *, members: Collection[str] | None = None) -> Told:
        """See `AsyncCoordinator.finished`."""
        return self._done(self._own.finished(name, members=members))

    def create(self, job: Job, *, backbones: str | Path | None = None) -> Told:
        """See `AsyncCoordinator.create`."""
        return self._done(self._own.create(job, backbones=backbones))

    def change(self, name: str, change: Change) -> Told:
        """See `AsyncCoordinator.change`."""
        return self._done(self._own.change(name, change))

    def members(self) -> list[Told]:
        """See `AsyncCoordinator.members`."""
        return self._done(self._own.members())

    def invite(self, name: str, *, valid_seconds: int | None = None) -> str:
        """See `AsyncCoordinator.invite`."""
        return self._done(self._own.invite(name, valid_seconds=valid_seconds))

    def revoke(self, name: str) -> None:
        """See `AsyncCoordinator.revoke`."""
        self._done(self._own.revoke(name))

    def export(self, job: str, out: str | Path, *, version: int | str | None = None) -> Path:
        """See `AsyncCoordinator.export`."""
        return self._done(self._own.export(job, out, version=version))

    def _done(self, work: Awaitable[T]) -> T:
        if self._loop.is_closed():
            if isinstance(work, Coroutine):
                work.close()
            raise RuntimeError("this Coordinator is closed; make another one")

        async def whole() -> T:
            return await work

        running = asyncio.run_coroutine_threadsafe(whole(), self._loop)
        try:
            return running.result()
        except BaseException:
            # After Ctrl-C, nobody waits for the answer.
            running.cancel()
            raise
