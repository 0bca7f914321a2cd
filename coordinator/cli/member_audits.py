"""Members' audits as the operator gets them: files, each signed by its member (`tacit.audit`)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.rounding import apart, rounded_up
from toolkit.console import ExitCode, fail
from toolkit.install import install_with

if TYPE_CHECKING:
    from tacit.audit import AuditStatement
    from tacit.authorities import Authorities
    from tacit.passport import AuditFacts

__all__ = ["Audited", "Audits", "check_version", "facts_of", "miscomputed", "read_audits"]

# Two machines' numerics differ by less.
_ROUNDING = 1e-6

Audits = Annotated[
    list[Path] | None,
    typer.Option(
        help="A member's audit, as `edge_client audit --release` wrote it; it goes into the passport. Repeatable.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Audited:
    """A member's audit. digest: SHA-256 of its file."""

    digest: bytes
    statement: "AuditStatement"


def read_audits(paths: Sequence[Path], authorities: "Authorities", document: bytes) -> list[Audited]:
    """Reads and verifies members' audits.

    Args:
        paths: the files.
        authorities: of the federation.
        document: SHA-256 of the job document.

    Raises:
        CommandFailed: a file is missing, is no audit of this job, contradicts itself, or a member of this federation
            did not sign it.
    """
    from tacit.audit import SignedAudit, verify_audit
    from tacit.documents import DocumentInvalid
    from tacit.identity import CertificateInvalid
    from tacit.passport import MAX_AUDITS

    if len(paths) > MAX_AUDITS:
        fail(f"at most {MAX_AUDITS} audits fit into a passport; leave some out", ExitCode.USAGE)
    found: dict[bytes, Audited] = {}
    for path in paths:
        try:
            signed = SignedAudit.from_file(path)
            statement = verify_audit(signed, authorities)
            digest = hashlib.sha256(path.read_bytes()).digest()
        except FileNotFoundError:
            fail(f"{path} does not exist; check the path", ExitCode.NOT_FOUND)
        except OSError as error:
            fail(f"{path} cannot be read: {error.strerror}; check the path", ExitCode.USAGE)
        except (DocumentInvalid, CertificateInvalid) as error:
            fail(f"{path} is not a member's audit: {error}; ask the member for it again", ExitCode.USAGE)
        if statement.document != document:
            fail(f"{path} is an audit of another job, {statement.job}; leave it out", ExitCode.USAGE)
        if (wrong := miscomputed(statement)) is not None:
            fail(f"{path} contradicts itself: {wrong}; ask the member for it again", ExitCode.USAGE)
        # The same file twice is one audit.
        found.setdefault(digest, Audited(digest, statement))
    return list(found.values())


def miscomputed(statement: "AuditStatement") -> str | None:
    """What does not follow from the counts that a member signed; None if all does. The member's own bounds are not
    believed: they are computed again, at the confidence that every audit has.
    """
    try:
        from learning.auditing.planted import CONFIDENCE, TESTS, bound_of, largest_bound, planted_guesses
        from learning.auditing.statistics import Guesses
    except ImportError as error:
        fail(f"reading audits needs {error.name}; {install_with('coordinator', 'export')}", ExitCode.USAGE)
    if (statement.confidence, statement.tests) != (CONFIDENCE, TESTS):
        return f"audits are made at {CONFIDENCE:.0%} confidence for {TESTS} tests"
    if statement.guesses != planted_guesses(statement.canaries):
        return f"of {statement.canaries} canaries {planted_guesses(statement.canaries)} are guessed"
    computed = bound_of(Guesses(statement.canaries, statement.guesses, statement.correct), statement.delta)
    possible = largest_bound(statement.canaries, statement.delta)
    for name, told, follows in (("lower", statement.lower_bound, computed), ("possible", statement.possible, possible)):
        if abs(told - follows) > _ROUNDING:
            return f"its {name} bound is {told:.4g}, and {follows:.4g} follows from its counts"
    return None


def check_version(job: str, number: int, version: bytes, audits: Sequence[Audited]) -> None:
    """Refuses a version that no audit could have refuted, or that one finds above its claim.

    Raises:
        CommandFailed: it is refused.
    """
    if (other := next((each for each in audits if _confused(each.statement, number, version)), None)) is not None:
        fail(
            f"an audit is of version {other.statement.number} by its number and of another one by its digest; leave it "
            "out, and ask the member for it again",
            ExitCode.USAGE,
        )
    of_it = [each.statement for each in audits if each.statement.version == version and each.statement.canaries]
    above = [each for each in of_it if each.verdict == "above-claim"]
    if above:
        worst = max(above, key=lambda each: each.lower_bound)
        bound, claim = apart(worst.lower_bound, worst.claim)
        fail(
            f"version {number} of {job} is above its claim: a member's audit proves an epsilon of at least "
            f"{bound} where {claim} is claimed, or its own updates betray it; find "
            "out why, or export it with --despite-audit",
            ExitCode.ABOVE_CLAIM,
        )
    if of_it and not any(each.verdict == "sound" for each in of_it):
        best = max(of_it, key=lambda each: each.possible - each.claim)
        fail(
            f"no audit of version {number} of {job} can tell: {best.canaries} canaries prove an epsilon of at most "
            f"{rounded_up(best.possible):g}, and {best.claim:g} is claimed; ask a member with more canaries or more "
            "rows, or export it with --despite-audit",
            ExitCode.REFUSED,
        )
    if not of_it:
        fail(
            f"job {job} demands an audit, and none of version {number} is given; ask members for `edge_client audit "
            f"{job} --release FILE` and name the files with --audit, or export it with --despite-audit",
            ExitCode.REFUSED,
        )


def _confused(statement: "AuditStatement", number: int, version: bytes) -> bool:
    return (statement.number == number) != (statement.version == version)


def facts_of(audits: Sequence[Audited]) -> "list[AuditFacts]":
    """What a passport says of them."""
    from tacit.passport import AuditFacts

    return [
        AuditFacts(
            audit=each.digest,
            number=each.statement.number,
            version=each.statement.version,
            verdict=each.statement.verdict,
            lower_bound=each.statement.lower_bound,
            possible=each.statement.possible,
            claim=each.statement.claim,
            delta=each.statement.delta,
            confidence=each.statement.confidence,
            canaries=each.statement.canaries,
        )
        for each in audits
    ]
