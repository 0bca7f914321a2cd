"""What `coordinator member withdraw` says: which versions hold a member's updates, and what can be done."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.storage.blobs import BlobStore
    from coordinator.storage.database import Database
    from coordinator.storage.withdrawal import Withdrawn

__all__ = ["earlier_versions", "withdrawn_json", "withdrawn_lines"]


def earlier_versions(database: "Database", store: "BlobStore") -> dict[str, tuple[str, int]]:
    """The version that each job started from, as (job, number), for jobs that started from another job's.

    Raises:
        StorageError: a document is not there or damaged.
        DocumentInvalid: a document is of newer software.
    """
    from coordinator.storage import records
    from tacit.job import JobDocument

    found = {}
    for job in database.run_now(records.load_jobs):
        document = JobDocument.from_json(store.get(job.document), what=f"the document of {job.name}")
        if document.earlier is not None:
            found[job.name] = (document.earlier.job, document.earlier.number)
    return found


def withdrawn_json(found: "Sequence[Withdrawn]") -> list[dict[str, Any]]:
    """The jobs as JSON."""
    return [
        {
            "job": each.job,
            "first": each.first,
            "newest": each.newest,
            "sums": list(each.sums),
            "exported": list(each.exported),
            "text": each.text,
            "marked_before": each.marked,
        }
        for each in found
    ]


def withdrawn_lines(member: str, found: "Sequence[Withdrawn]", dry_run: bool) -> Iterator[str]:
    """The lines for people."""
    if not found:
        yield f"No version holds updates of {member}."
    for each in found:
        in_sums = (
            f", in {len(each.sums)} sums of this job" if each.sums else ", because the job started from such a one"
        )
        said = "were marked before" if each.marked else "would be marked" if dry_run else "are marked"
        yield f"{each.job}: versions {each.first} to {each.newest} hold its updates{in_sums}; they {said}."
        if each.exported:
            numbers = ", ".join(map(str, each.exported))
            yield f"  exported: {numbers}. Tell whoever has them; a new export says so in its card and passport."
        if each.text:
            yield f"  its synthetic text counts; the member takes it back with `edge_client corpus veto {each.job}`"
        if each.first > 0:
            yield (
                f'  without it: `coordinator job abort {each.job}`, and a new job with start = "{each.job}:'
                f'{each.first - 1}" in its file'
            )
    yield f"The epsilon in its own ledger bounds what its updates can reveal: `edge_client ledger show` at {member}."
    yield f"It is still a member: `coordinator member revoke {member}` ends that."
