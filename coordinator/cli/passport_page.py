"""A passport for people: one HTML page without scripts or foreign addresses, and a summary as JSON.

Every text of the passport is escaped: a job's name or a file's name stays text.
"""

import hashlib
from html import escape
from typing import Any

from coordinator.cli.estimated import NOT_MEASURED, SELECTED, with_error
from coordinator.cli.shown import moment
from tacit.passport import (
    AuditFacts,
    EstimateFacts,
    ExportFacts,
    JobFacts,
    MeasurementFacts,
    Passport,
    RecordFacts,
    Seal,
    SuccessorFacts,
    VersionFacts,
    WithdrawalFacts,
)
from tacit.rounding import rounded_down
from toolkit.text import clean

__all__ = [
    "accuracy_of",
    "audit_text",
    "estimate_of",
    "measurement_lines",
    "page_of",
    "spend_of",
    "successor_text",
    "summary",
    "tuning_of",
    "withdrawal_text",
]

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}"
    "table{border-collapse:collapse;margin:1rem 0;width:100%}"
    "th,td{border-bottom:1px solid #ccc;padding:.3rem .6rem;text-align:left;vertical-align:top}"
    "code{font-size:.85em;overflow-wrap:anywhere}"
)


def spend_of(version: VersionFacts) -> str:
    """What members of a version's sum report, in words."""
    spend = version.spend
    if spend is None:
        return "-"
    if spend.reported == 0:
        return "kept back"
    told = f"at most {spend.largest_epsilon:g} at delta {spend.delta:g} ({spend.reported} reported"
    return told + (f", {spend.withheld} kept back)" if spend.withheld else ")")


def accuracy_of(version: VersionFacts) -> str:
    """The newest evaluation with its standard error, in words."""
    if not version.evaluations:
        return "-"
    newest = version.evaluations[-1]
    return f"{100 * newest.accuracy:.1f} % ± {100 * newest.standard_error:.1f} ({newest.examples} examples)"


def estimate_of(version: VersionFacts) -> str:
    """What members measured of a version, with its standard error, in words."""
    estimate = version.estimate
    if estimate is None:
        return NOT_MEASURED
    if estimate.accuracy is None or estimate.accuracy_error is None:
        return "too few units"
    return with_error(estimate.accuracy, estimate.accuracy_error) + (" (best, selected)" if estimate.selected else "")


def tuning_of(job: JobFacts) -> str | None:
    """What private rows the job's numbers were chosen on, as a sentence; None if the job names none."""
    if job.tuned_on is None:
        return None
    return "The job's numbers were tuned on the operator's own private rows. That tuning is in no epsilon."


def withdrawal_text(withdrawal: WithdrawalFacts) -> str:
    """A withdrawal as a sentence."""
    who = "A member" if withdrawal.members == 1 else f"{withdrawal.members} members"
    held = f"in {withdrawal.sums} sums, so " if withdrawal.sums else ""
    return (
        f"{who} withdrew at {moment(withdrawal.at_ms)} UTC: {held}every version from {withdrawal.first} on holds their "
        "updates."
    )


def audit_text(audit: AuditFacts) -> str:
    """An audit as a sentence."""
    verdict = {"sound": "sound", "above-claim": "ABOVE THE CLAIM", "cannot-tell": "cannot tell"}[audit.verdict]
    return (
        f"A member audited version {audit.number}: {verdict}. {audit.canaries} canaries prove an epsilon of at least "
        f"{rounded_down(audit.lower_bound):g} at {audit.confidence:.0%} confidence and delta {audit.delta:g}, and "
        f"could have proved {rounded_down(audit.possible):g}; it was charged at most {audit.claim:g}."
    )


def measurement_lines(measured: MeasurementFacts) -> list[str]:
    """A measurement as a sentence, and one for each label of a breakdown."""
    rows = "all their rows" if measured.rows == "all" else "rows that they keep back from training"
    who = "how many of them have updates in it is not known"
    if measured.trained is not None:
        who = f"{measured.trained} of them have updates in it"
    first = f"{measured.whole.members} members measured version {measured.number} on {rows} ({who})"
    lines = [f"{first}: {_numbers('accuracy', measured.whole)}."]
    for each in measured.by_label:
        lines.append(f"Label {clean(each.label, 200)}: {_numbers('recall', each.estimate)}.")
    return lines


def _numbers(what: str, estimate: EstimateFacts) -> str:
    if estimate.accuracy is None or estimate.accuracy_error is None or estimate.loss is None or estimate.units is None:
        return "too few rows beside the noise"
    said = f"{what} {with_error(estimate.accuracy, estimate.accuracy_error)}"
    return f"{said}, loss {estimate.loss:.3f} ± {estimate.loss_error:.2g}, over about {estimate.units:,.0f} rows"


def successor_text(successor: SuccessorFacts) -> str:
    """A job that started from this one, as a sentence."""
    held = "no member that had withdrawn by then"
    if successor.withdrawn:
        held = f"{successor.withdrawn} members that had withdrawn by then"
    return (
        f"Job {clean(successor.job, 200)} started from version {successor.version} at {moment(successor.at_ms)} UTC; "
        f"that version holds updates of {held}."
    )


def summary(passport: Passport) -> dict[str, Any]:
    """The passport's main facts as JSON. Raises: DocumentInvalid: a section cannot be read."""
    seal = Seal.from_json(passport.seal.encode(), what="the seal")
    return {
        "federation": seal.federation.hex(),
        "operator": seal.operator,
        "job": seal.job,
        "job_document": hashlib.sha256(passport.section("document")).hexdigest(),
        "made_ms": seal.made_ms,
        "tuned_on": JobFacts.from_json(passport.section("job"), what="the section job").tuned_on,
        "versions": [each.model_dump(mode="json", exclude={"schema_version"}) for each in passport.versions],
        "withdrawals": [each.model_dump(mode="json", exclude={"schema_version"}) for each in passport.withdrawals],
        "audits": [each.model_dump(mode="json", exclude={"schema_version"}) for each in passport.audits],
        "measurements": [each.model_dump(mode="json", exclude={"schema_version"}) for each in passport.measurements],
        "successors": [each.model_dump(mode="json", exclude={"schema_version"}) for each in passport.successors],
        "exports": [each.model_dump(mode="json", exclude={"schema_version"}) for each in passport.exports],
    }


def made_from(export: ExportFacts) -> str:
    """The version that an export was made from, or the versions of its average."""
    return f"average of {export.averaged[0]} to {export.averaged[-1]}" if export.averaged else str(export.number)


def page_of(passport: Passport, seal: Seal) -> str:
    """The page. The passport was verified before.

    Raises:
        DocumentInvalid: a section cannot be read.
    """
    job = JobFacts.from_json(passport.section("job"), what="the section job")
    record = RecordFacts.from_json(passport.section("record"), what="the section record")
    name = escape(clean(seal.job, 200))
    about = [
        ("federation", f"<code>{seal.federation.hex()}</code>"),
        ("signed by", f"operator {escape(seal.operator)}, {moment(seal.made_ms)} UTC"),
        ("job document", f"<code>{job.document.hex()}</code>"),
        ("created", f"{moment(job.created_ms)} UTC"),
        ("status", escape(job.status)),
        ("mechanism", escape(job.mechanism)),
        *([] if (tuned := tuning_of(job)) is None else [("tuned on", escape(tuned))]),
        ("journal", f"entry {record.journal_entry}, <code>{record.journal_head.hex()}</code>"),
        ("roster log", f"{record.roster_entries} entries, <code>{record.roster_root.hex()}</code>"),
    ]
    versions = [
        (
            str(each.number),
            f"<code>{each.version.hex()}</code>",
            f"{moment(each.at_ms)} UTC",
            "-" if each.cohort is None else str(each.cohort),
            "-" if each.summed is None else str(each.summed),
            "-" if each.sum is None else f"<code>{each.sum.hex()}</code>",
            escape(spend_of(each)),
            escape(accuracy_of(each)),
            escape(estimate_of(each)),
        )
        for each in passport.versions
    ]
    files = [
        (made_from(export), escape(export.format), escape(file), f"<code>{listed.sha256.hex()}</code>")
        for export in passport.exports
        for file, listed in sorted(export.files.items())
    ]
    headings = (
        "version",
        "SHA-256",
        "made",
        "cohort",
        "in the sum",
        "sum",
        "epsilon, as reported",
        "accuracy",
        "estimate",
    )
    left_out = f"<p>{job.versions_left_out} older versions are left out.</p>" if job.versions_left_out else ""
    withdrawn = "".join(f"<p>{escape(withdrawal_text(each))}</p>\n" for each in passport.withdrawals)
    audited = "".join(f"<p>{escape(audit_text(each))}</p>\n" for each in passport.audits)
    measured = "".join(
        f"<p>{'<br>'.join(map(escape, measurement_lines(each)))}</p>\n" for each in passport.measurements
    )
    followed = "".join(f"<p>{escape(successor_text(each))}</p>\n" for each in passport.successors)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Passport of {name}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>Passport of {name}</h1>\n"
        "<p>The operator signs what the coordinator recorded. This page is a copy for people: only the passport itself "
        "can be verified, with <code>coordinator passport verify</code>.</p>\n"
        f"{_table((), about)}\n<h2>Versions</h2>\n{left_out}{_table(headings, versions)}\n"
        "<p>Epsilon is what members' ledgers report, rounded up to one digit: what the job had cost the member that "
        "spent most, up to this version. ± is the standard error. Accuracy was measured on the operator's data. An "
        "estimate is what members measured under noise on rows that they keep back; its error is that of the noise. "
        f"The best version was {SELECTED}.</p>\n"
        + (f"<h2>Withdrawals</h2>\n{withdrawn}" if withdrawn else "")
        + (f"<h2>Audits</h2>\n{audited}" if audited else "")
        + (f"<h2>Measurements</h2>\n{measured}" if measured else "")
        + (f"<h2>Jobs that started from it</h2>\n{followed}" if followed else "")
        + (f"<h2>Exported files</h2>\n{_table(('version', 'format', 'file', 'SHA-256'), files)}\n" if files else "")
        + "<h2>Job document</h2>\n"
        f"<pre style='white-space:pre-wrap;overflow-wrap:anywhere'>{escape(passport.sections['document'])}</pre>\n"
        "</body></html>\n"
    )


def _table(headings: tuple[str, ...], rows: Any) -> str:
    head = f"<tr>{''.join(f'<th>{each}</th>' for each in headings)}</tr>" if headings else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table>{head}\n{body}</table>"
