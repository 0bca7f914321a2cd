"""Whether the canaries that a job demands can test what it claims, before anybody takes part."""

from learning.accounting.calibration import repeated
from learning.accounting.renyi import EventUnaccountable
from learning.auditing.planted import largest_bound
from learning.auditing.subject import claim_of
from learning.mechanisms.protection import protection_of
from tacit.job import JobDocument
from tacit.mechanism import DpSgd, GaussianUpdate
from tacit.rounding import rounded_up

__all__ = ["warning_of"]

# Doublings of the lot that are tried as a member's rows.
_DOUBLINGS = 10


def warning_of(job: JobDocument, delta: float) -> str | None:
    """Warn of an audit that cannot tell; None if it can for every member, or none is demanded.

    A member's claim falls with its rows, so members with many rows may audit where others cannot.

    Args:
        job: The job.
        delta: That of a usual policy.
    """
    if job.audit is None:
        return None
    canaries = job.audit.canaries
    largest = largest_bound(canaries, delta)
    drawn = isinstance(job.mechanism, DpSgd | GaussianUpdate)
    lot = job.mechanism.lot if isinstance(job.mechanism, DpSgd | GaussianUpdate) else 1
    claimed = [_claim(job, lot << at, delta) for at in range(_DOUBLINGS + 1 if drawn else 1)]
    enough = next((at for at, claim in enumerate(claimed) if claim is not None and claim < largest), None)
    if enough == 0 or claimed[0] is None:
        return None
    said = f"{canaries} canaries prove an epsilon of at most {rounded_up(largest):g}"
    if enough is None:
        return f"Audits cannot tell: {said}, and all rounds cost members more; set a larger audit.canaries."
    return (
        f"Audits can tell only of members with about {lot << enough:,} rows or more: {said}, and all rounds cost a "
        f"member with {lot:,} rows {rounded_up(claimed[0]):g}; set a larger audit.canaries for smaller members."
    )


def _claim(job: JobDocument, examples: int, delta: float) -> float | None:
    """The epsilon of all rounds for a member with this many rows, canaries among them; None without a formula."""
    event = protection_of(job, examples).event
    try:
        return None if event is None else claim_of(job, [repeated(event, job.rounds.count)], delta)
    except EventUnaccountable:
        return None
