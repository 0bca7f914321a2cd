"""Uploads a job's files and creates the job."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.cli.common import operator_stub, progress_bar, run

if TYPE_CHECKING:
    from tacit.job import JobDocument
    from tacit.v1 import operator_pb2

__all__ = ["CREATE_SECONDS", "create_job"]

# The coordinator reads all files of a job before it accepts it, but no backbone.
CREATE_SECONDS = 600.0


def create_job(
    where: Path, document: "JobDocument", parts: "Sequence[tuple[str, bytes | Path]]", *, quiet: bool
) -> "operator_pb2.Job":
    """Uploads a job's files and starts its first round. An interrupted upload continues where it stopped.

    Args:
        where: The operator's folder.
        document: The job document, also of a question.
        parts: What each file is, and its bytes or its path.
        quiet: Whether to hide progress bars.
    """

    async def work() -> "operator_pb2.Job":
        from tacit.blobs import put_blob
        from tacit.v1 import operator_pb2

        async with operator_stub(where) as stub:
            for what, source in parts:
                with progress_bar(f"uploading {what}", quiet=quiet) as progress:
                    await put_blob(stub, source, progress=progress)
            digest = await put_blob(stub, document.canonical())
            answer: operator_pb2.Job = await stub.CreateJob(
                operator_pb2.CreateJobRequest(document=digest), timeout=CREATE_SECONDS
            )
            return answer

    return run(work())
