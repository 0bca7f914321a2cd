"""Fetches the version of an earlier job that a new job starts from."""

from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.cli.common import CALL_SECONDS, operator_stub, progress_bar, run
from toolkit.console import ExitCode, fail

if TYPE_CHECKING:
    from export.continuing import Earlier

__all__ = ["fetch_earlier"]


def fetch_earlier(where: Path, job: str, number: int, *, quiet: bool) -> "Earlier":
    """Fetches a version with the documents that say what its values are, each by its digest.

    Args:
        where: The operator's folder.
        job: The earlier job's name.
        number: The version's number.
        quiet: Whether to hide progress bars.

    Raises:
        CommandFailed: the coordinator does not answer, or has no such job or version.
    """

    async def work() -> "Earlier":
        from export.continuing import Earlier
        from tacit.blobs import fetch_blob
        from tacit.documents import DocumentInvalid
        from tacit.job import JobDocument
        from tacit.manifest import Manifest
        from tacit.v1 import operator_pb2

        async with operator_stub(where) as stub:

            async def blob(digest: bytes, what: str) -> bytes:
                data = bytearray()
                with progress_bar(f"fetching {what}", quiet=quiet) as progress:
                    await fetch_blob(stub.FetchBlob, digest, data, progress=progress)
                return bytes(data)

            request = operator_pb2.GetJobRequest(name=job)
            detail: operator_pb2.JobDetail = await stub.GetJob(request, timeout=CALL_SECONDS)
            found = next((each for each in detail.versions if each.number == number), None)
            if found is None:
                fail(
                    f"job {job} has no version {number}; the newest is {detail.job.version_number}", ExitCode.NOT_FOUND
                )
            try:
                what = f"the document of {job}"
                document = JobDocument.from_json(await blob(detail.job.document, what), what=what)
                manifest = Manifest.from_json(await blob(document.manifest, "its manifest"), what="its manifest")
            except DocumentInvalid as error:
                fail(f"{error}; the coordinator may be newer than this software", ExitCode.FAILED)
            frozen = None if document.frozen is None else await blob(document.frozen.weights, "its frozen values")
            return Earlier(document, manifest, number, await blob(found.digest, f"version {number}"), frozen)

    return run(work())
