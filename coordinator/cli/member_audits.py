"""Members' audits as the operator gets them: files, each signed by its member (`tacit.audit`)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.console import ExitCode, fail

if TYPE_CHECKING:
    from tacit.audit import AuditStatement
    from tacit.authorities import Authorities
    from tacit.passport import AuditFacts

__all__ = ["Audited", "Audits", "check_version", "facts_of", "read_audits"]

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
        CommandFailed: a file is missing, is no audit of this job, or a member of this federation did not sign it.
    """
    from tacit.audit import SignedAudit, verify_audit
    from tacit.documents import DocumentInvalid
    from tacit.identity import CertificateInvalid
    from tacit.passport import MAX_AUDITS

    if len(paths) > MAX_AUDITS:
        fail(f"at most {MAX_AUDITS} audits fit into a passport; leave some out", ExitCode.USAGE)
    found = []
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
        found.append(Audited(digest, statement))
    return found


def check_version(job: str, number: int, version: bytes, audits: Sequence[Audited]) -> None:
    """Refuses a version that no audit could have refuted, or that one finds above its claim.

    Raises:
        CommandFailed: it is refused.
    """
    of_it = [each.statement for each in audits if each.statement.version == version and each.statement.canaries]
    above = [each for each in of_it if each.verdict == "above-claim"]
    if above:
        worst = max(above, key=lambda each: each.lower_bound)
        fail(
            f"version {number} of {job} is above its claim: a member's audit proves an epsilon of at least "
            f"{worst.lower_bound:.3g} where {worst.claim:.3g} is claimed, or its own updates betray it; find out "
            "why, or export it with --despite-audit",
            ExitCode.ABOVE_CLAIM,
        )
    if of_it and not any(each.verdict == "sound" for each in of_it):
        best = max(of_it, key=lambda each: each.possible - each.claim)
        fail(
            f"no audit of version {number} of {job} can tell: {best.canaries} canaries prove an epsilon of at most "
            f"{best.possible:.3g}, and {best.claim:.3g} is claimed; ask a member with more canaries or more rows, or "
            "export it with --despite-audit",
            ExitCode.REFUSED,
        )
    if not of_it:
        fail(
            f"job {job} demands an audit, and none of version {number} is given; ask members for `edge_client audit "
            f"{job} --release FILE` and name the files with --audit, or export it with --despite-audit",
            ExitCode.REFUSED,
        )


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
