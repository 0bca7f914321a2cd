"""Formats the operator's service's answers as JSON and as words for people. Digests are hexadecimal."""

import math
from datetime import UTC, datetime
from typing import Any

from coordinator.cli.estimated import estimate_json
from tacit.reason import from_word, sentence, word
from tacit.server_optimiser import FedAvgMServer, FedAvgServer, ServerOptimiser
from tacit.v1 import operator_pb2
from tacit.v1.reason_pb2 import Reason

__all__ = [
    "approvals_words",
    "detail_json",
    "evaluation_json",
    "job_json",
    "job_status",
    "member_json",
    "moment",
    "optimiser_json",
    "percent",
    "status_json",
    "version_json",
    "why",
]


def job_status(job: operator_pb2.Job) -> str:
    """Returns running, paused, finished or aborted."""
    return operator_pb2.JobStatus.Name(job.status).removeprefix("JOB_STATUS_").lower()


def why(reason: Reason) -> str:
    """Returns a reason's sentence, or an empty text without a reason."""
    return "" if not reason else sentence(from_word(word(reason)))


def moment(ms: int) -> str:
    """Formats a time in UTC, to the minute; 0 is a dash.

    Args:
        ms: Milliseconds since the epoch.
    """
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M}" if ms else "-"


def percent(value: float) -> str:
    """Formats an accuracy between 0 and 1."""
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def _number(value: float) -> float | None:
    # JSON has neither nan nor infinity.
    return value if math.isfinite(value) else None


def _reason(value: Reason) -> str | None:
    return word(value) if value else None


def evaluation_json(item: operator_pb2.Evaluation) -> dict[str, Any]:
    """Returns an evaluation as JSON."""
    return {
        "version_number": item.version_number,
        "version": item.version.hex(),
        "accuracy": _number(item.accuracy),
        "loss": _number(item.loss),
        "examples": item.examples,
        "data": item.data.hex() or None,
        "at_ms": item.at_ms,
    }


def _training_json(item: operator_pb2.TrainingMetrics) -> dict[str, Any]:
    return {"examples": item.examples, "loss": _number(item.loss), "accuracy": _number(item.accuracy)}


def job_json(job: operator_pb2.Job) -> dict[str, Any]:
    """Returns a job's current state as JSON."""
    return {
        "name": job.name,
        "status": job_status(job),
        "reason": _reason(job.reason),
        "waiting": job.waiting or None,
        "warning": job.warning or None,
        "document": job.document.hex(),
        "round": job.round,
        "rounds_total": job.rounds_total,
        "attempt": job.attempt,
        "phase": job.phase,
        "version": job.version.hex(),
        "version_number": job.version_number,
        "members_connected": job.members_connected,
        "members_ready": job.members_ready,
        "members_needed": job.members_needed,
        "cohort": job.cohort,
        "answered": job.answered,
        "created_ms": job.created_ms,
        "evaluation": evaluation_json(job.evaluation) if job.HasField("evaluation") else None,
        "training": _training_json(job.training) if job.HasField("training") else None,
        "approvals": _approvals_json(job.approvals) if job.HasField("approvals") else None,
        "estimate": estimate_json(job.estimate) if job.HasField("estimate") else None,
        "best": {**estimate_json(job.best), "selected": True} if job.HasField("best") else None,
    }


def _approvals_json(said: operator_pb2.Approvals) -> dict[str, Any]:
    return {
        "approved": said.approved,
        "awaited": said.awaited,
        "awaited_members": list(said.awaited_members),
        "declined": said.declined,
    }


def approvals_words(said: operator_pb2.Approvals) -> str:
    """Says how many members' stewards approved a job, have not looked, and declined."""
    named = ", ".join(said.awaited_members)
    more = said.awaited - len(said.awaited_members)
    names = f" ({named}{f' and {more} more' if more > 0 else ''})" if named else ""
    return (
        f"{said.approved} approved by their stewards, {said.awaited} not looked at yet{names}, {said.declined} declined"
    )


def optimiser_json(server: ServerOptimiser) -> dict[str, Any]:
    """Returns a job's server optimiser with its numbers, including the derived ones."""
    numbers = {key: getattr(server, key) for key in type(server).model_fields if key != "optimiser"}
    if not isinstance(server, FedAvgServer | FedAvgMServer):
        numbers["initial_accumulator"] = server.first_accumulator
    return {"optimiser": server.optimiser, **numbers}


def member_json(member: operator_pb2.Member) -> dict[str, Any]:
    """Returns a member as JSON."""
    return {
        "name": member.name,
        "status": member.status,
        "connected": member.connected,
        "software_version": member.software_version or None,
        "certificate_expires_ms": member.certificate_expires_ms or None,
        "declined": dict(member.declined),
        "awaiting": dict(member.awaiting),
    }


def status_json(status: operator_pb2.StatusResponse) -> dict[str, Any]:
    """Returns the whole federation as JSON."""
    return {
        "federation": status.federation,
        "software_version": status.software_version,
        "started_ms": status.started_ms,
        "lease": {
            "fence": status.lease.fence,
            "address": status.lease.address,
            "since_ms": status.lease.since_ms,
        }
        if status.HasField("lease")
        else None,
        "jobs": [job_json(job) for job in status.jobs],
        "members": [member_json(member) for member in status.members],
    }


def _attempt_json(item: operator_pb2.Attempt) -> dict[str, Any]:
    return {
        "number": item.number,
        "outcome": item.outcome,
        "reason": _reason(item.reason),
        "detail": item.detail or None,
        "cohort": list(item.cohort),
        "survivors": list(item.survivors),
        "dropouts": [
            {
                "member": dropout.member,
                "phase": dropout.phase,
                "reason": _reason(dropout.reason),
                "detail": dropout.detail or None,
                "evidence": dropout.evidence.hex() or None,
            }
            for dropout in item.dropouts
        ],
        "result": item.result.hex() or None,
        "new_version": item.new_version.hex() or None,
        "opened_ms": item.opened_ms,
        "ended_ms": item.ended_ms or None,
        "training": _training_json(item.training) if item.HasField("training") else None,
    }


def detail_json(detail: operator_pb2.JobDetail) -> dict[str, Any]:
    """Returns a job with its rounds and versions as JSON."""
    return {
        **job_json(detail.job),
        "rounds": [
            {
                "number": item.number,
                "outcome": item.outcome,
                "reason": _reason(item.reason),
                "attempts": [_attempt_json(attempt) for attempt in item.attempts],
                "opened_ms": item.opened_ms,
                "ended_ms": item.ended_ms or None,
            }
            for item in detail.rounds
        ],
        "versions": [version_json(item, detail.job) for item in detail.versions],
        "successors": [
            {
                "job": item.job,
                "version": item.version_number,
                "withdrawn": item.withdrawn,
                "status": operator_pb2.JobStatus.Name(item.status).removeprefix("JOB_STATUS_").lower(),
            }
            for item in detail.successors
        ],
        "acts": [{"at_ms": item.at_ms, "by": item.by, "act": item.act} for item in detail.acts],
    }


def version_json(item: operator_pb2.Version, job: operator_pb2.Job) -> dict[str, Any]:
    """Returns a version of a job as JSON; `estimate` is null if nobody measured it."""
    return {
        "number": item.number,
        "digest": item.digest.hex(),
        "round": item.round,
        "created_ms": item.created_ms,
        "norm": item.norm or None,
        "change": item.change or None,
        "withdrawn": item.withdrawn,
        "pruned": item.pruned,
        "evaluations": [evaluation_json(evaluation) for evaluation in item.evaluations],
        "estimate": estimate_json(item.estimate) if item.HasField("estimate") else None,
        "best": job.HasField("best") and job.best.version_number == item.number,
    }
