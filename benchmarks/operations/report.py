"""The page of operations."""

from benchmarks.library.report import Page, Section

__all__ = ["PAGE"]

PAGE = Page(
    "operations",
    (
        Section(
            "ledger",
            "ledger_faults",
            "operations.ledger_faults",
            ("killed", "points", "charges", "refusals", "seconds", "target"),
        ),
        Section(
            "load",
            "load",
            "operations.load",
            (
                *("target", "main_cpu_seconds", "members_cpu_seconds", "members_cpu_seconds_each"),
                *("connected_bytes", "alone_bytes"),
            ),
        ),
        Section("prune", "prune", "operations.prune", ("blobs", "target")),
        Section(
            "transfer",
            "transfer",
            "operations.transfer",
            ("target", "slowest", "load", "member", "coordinator", "two_cores", "before_bytes"),
        ),
        Section(
            "strangers",
            "strangers",
            "operations.strangers",
            (
                *("target", "quiet_seconds", "slowest_seconds", "strangers_cpu_seconds", "forwarded", "network_full"),
                *("all_full", "displaced", "not_tls", "hello_late"),
            ),
        ),
        Section(
            "soak",
            "soak",
            "operations.soak",
            ("attempts", "coordinator_kills", "handovers", "member_kills", "receipts", "median", "seconds", "target"),
        ),
        Section(
            "failover",
            "failover",
            "operations.failover",
            (
                *("attempts", "failovers", "standby_kills", "restarts", "receipts", "median", "seconds", "load"),
                "target",
            ),
        ),
    ),
)
