"""The page of privacy."""

from benchmarks.library.report import Page, Section

__all__ = ["PAGE"]

PAGE = Page(
    "privacy",
    (
        Section("clipping", "dp_cost", "privacy.step_cost", ("target", "step_seconds", "plain_seconds")),
        Section("precision", "precision", "privacy.precision", ("float32_seconds", "bfloat16_seconds")),
        Section("job_audits", "job_audits", "audit.jobs", ("possible", "runs")),
        Section("audit", "privacy_audit", "privacy.audit", ("method", "rates", "runs", "paper")),
    ),
)
