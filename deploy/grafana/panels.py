"""The dashboards as data: which panels there are, what each asks Prometheus, in which unit.

`build.py` makes Grafana's JSON of it, `benchmarks.operations.dashboard` draws the same panels from the same queries,
and tests run every query against a real Prometheus. Variables: `$instance`, `$job` (regular expressions),
`$__rate_interval`, `$__range`.

An increase is never asked of a counter whose labels begin with their first event (see the rules); where it must be
split by reason, the count since the coordinator's start is shown.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["BOARDS", "COORDINATOR", "MEMBER", "Board", "Panel", "Query", "Row", "Variable", "substituted"]

Kind = Literal["lines", "bars", "stat"]


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel and the name of each of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is Grafana's word; `width` in the 24 columns of a dashboard; `least` and `most` fix the axis. A
    stat shows `negative` in place of a value below zero.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    width: int = 8
    least: float | None = 0
    most: float | None = None
    negative: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard: the values of a label."""

    name: str
    label: str
    metric: str


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All of them, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)


def substituted(expr: str, *, interval: str, span: str) -> str:
    """The query as Grafana would send it with everything chosen; `interval` and `span` like `30s`."""
    for name, value in (("$__rate_interval", interval), ("$__range", span), ("$instance", ".*"), ("$job", ".*")):
        expr = expr.replace(name, value)
    return expr


_C = "tacit_coordinator_"
_HERE = 'instance=~"$instance"'
_PUBLISHED = ', outcome="published"'
_JOB = 'instance=~"$instance", job=~"$job"'


def _c(name: str, more: str = "", *, job: bool = True) -> str:
    """A metric of the coordinator, of the chosen coordinator (and job)."""
    return f"{_C}{name}{{{_JOB if job else _HERE}{more}}}"


def _increase(series: str) -> str:
    return f"increase({series}[$__rate_interval])"


def _rate(series: str) -> str:
    return f"rate({series}[$__rate_interval])"


_OVERVIEW = Row(
    "Now",
    (
        Panel(
            "Running jobs",
            "Jobs that make rounds.",
            "none",
            (Query(f"sum({_c('job_running')})", "running"),),
            "stat",
            4,
        ),
        Panel(
            "Connected",
            "Members with an open session.",
            "none",
            (Query(f"sum({_c('members_connected', job=False)})", "connected"),),
            "stat",
            4,
        ),
        Panel(
            "Published rounds",
            "Within the time shown.",
            "none",
            (Query(f"sum(increase({_c('rounds_total', _PUBLISHED)}[$__range]))", "published"),),
            "stat",
            4,
        ),
        Panel(
            "Since the last version",
            "Of the job that waits longest, among those that run.",
            "s",
            (
                Query(
                    f"max(time() - {_c('version_published_timestamp_seconds')} "
                    f"and on (instance, job) {_c('job_running')} == 1) or vector(0)",
                    "since",
                ),
            ),
            "stat",
            4,
        ),
        Panel(
            "Lost in the last hour",
            "Share of the members of all cohorts that dropped out.",
            "percentunit",
            (Query("max(job:tacit_dropouts:ratio1h{" + _JOB + "}) or vector(0)", "dropped out"),),
            "stat",
            4,
        ),
        Panel(
            "Alerts firing",
            "What Prometheus' rules say now.",
            "none",
            (Query('count(ALERTS{alertname=~"Tacit.*", alertstate="firing"}) or vector(0)', "firing"),),
            "stat",
            4,
        ),
    ),
)

_ROUNDS = Row(
    "Rounds",
    (
        Panel(
            "Version",
            "Number of the newest version of each job.",
            "none",
            (Query(f"max by (job) ({_c('model_version')})", "{{job}}"),),
        ),
        Panel(
            "Rounds that ended",
            "Published or abandoned, within each step of the graph.",
            "none",
            (
                Query(f"sum({_increase(_c('rounds_total', _PUBLISHED))})", "published"),
                Query("sum(" + _increase("job:tacit_rounds_abandoned:sum{" + _JOB + "}") + ")", "abandoned"),
            ),
            "bars",
        ),
        Panel(
            "Attempts by outcome and reason",
            "Since the coordinator's start. Reasons: docs/reasons.md.",
            "none",
            (Query(f"sum by (outcome, reason) ({_c('attempts_total')})", "{{outcome}} {{reason}}"),),
        ),
        Panel(
            "Age of the open round",
            "And the longest that its deadlines allow.",
            "s",
            (
                Query("max by (job) (job:tacit_round_age:seconds{" + _JOB + "})", "{{job}}"),
                Query(f"max by (job) ({_c('round_deadline_seconds')})", "{{job}}, by its deadlines"),
            ),
        ),
        Panel(
            "Cohorts",
            "Members of an attempt at its start, and those that are ready or that a round needs.",
            "none",
            (
                Query(
                    f"sum by (job) ({_rate(_c('cohort_size_sum'))}) / sum by (job) ({_rate(_c('cohort_size_count'))})",
                    "{{job}}, cohort",
                ),
                Query(f"max by (job) ({_c('members_ready')})", "{{job}}, ready"),
                Query(f"max by (job) ({_c('members_needed')})", "{{job}}, needed"),
            ),
        ),
        Panel(
            "Quality",
            "Accuracy over the last sum (absent under noise), and of the newest measured version.",
            "percentunit",
            (
                Query(f"max by (job) ({_c('training_accuracy')})", "{{job}}, training"),
                Query(f"max by (job) ({_c('evaluation_accuracy')})", "{{job}}, evaluation"),
            ),
            most=1,
        ),
    ),
)

_DROPOUT = Row(
    "Dropout by phase and reason, and groups",
    (
        Panel(
            "Dropouts by phase and reason",
            "Members that did not finish an attempt, since the coordinator's start.",
            "none",
            (Query(f"sum by (phase, reason) ({_c('dropouts_total')}) > 0", "{{phase}}, {{reason}}"),),
            width=12,
        ),
        Panel(
            "Dropout rate",
            "Share of the members of all cohorts, over an hour; the line is the alert's.",
            "percentunit",
            (
                Query("max by (job) (job:tacit_dropouts:ratio1h{" + _JOB + "})", "{{job}}"),
                Query("vector(0.2)", "alert"),
            ),
            width=12,
        ),
        Panel(
            "Declines, refusals, extended windows",
            "Who would not train, who went no further, and windows that closed with too few ready; since the start.",
            "none",
            (
                Query(f"sum by (reason) ({_c('declines_total')})", "declined: {{reason}}"),
                Query(f"sum({_c('refusals_total')}) or vector(0)", "refused"),
                Query(f"sum({_c('training_windows_extended_total')})", "windows extended"),
                Query(f"sum({_c('members_left_out_total')})", "left out for missed deadlines"),
            ),
            width=12,
        ),
        Panel(
            "Groups by outcome",
            "Of jobs that split their cohorts, since the coordinator's start: combined into a version, left out as "
            "outliers, lost to dropout, or with a sum that cannot be. None of these jobs: all zero.",
            "none",
            tuple(
                Query("sum(" + _c("groups_total", f', outcome="{outcome}"') + ") or vector(0)", outcome)
                for outcome in ("combined", "outliers", "lost", "invalid")
            ),
            width=12,
        ),
    ),
)

_PRIVACY = Row(
    "Privacy spend by job",
    (
        Panel(
            "Epsilon by job",
            "Largest and median of what members reported; what gates lies on their machines.",
            "none",
            (
                Query(f"max by (job) ({_c('privacy_epsilon_largest')})", "{{job}}, largest"),
                Query(f"max by (job) ({_c('privacy_epsilon_median')})", "{{job}}, median"),
            ),
        ),
        Panel(
            "Epsilon a round",
            "How much the largest grows with each version.",
            "none",
            (
                Query(
                    f"max by (job) ({_c('privacy_epsilon_largest')}) / (max by (job) ({_c('model_version')}) > 0)",
                    "{{job}}",
                ),
            ),
        ),
        Panel(
            "Members at their limit",
            "Beside those that have reported. Below what a round needs, the job stands still.",
            "none",
            (
                Query(f"max by (job) ({_c('members_budget_spent')})", "{{job}}, at the limit"),
                Query(f"max by (job) ({_c('members_reporting')})", "{{job}}, have reported"),
            ),
        ),
    ),
)

_CORPORA = Row(
    "Made-up text",
    (
        Panel(
            "Members' files of synthetic text",
            "Of jobs that order them, since the coordinator's start; without such jobs all zero. Who gave one: "
            "coordinator job corpora JOB.",
            "none",
            tuple(
                # A federation that makes no text up has none, and a line that lies on zero says so.
                Query("sum(" + _c("corpora_total", f', outcome="{outcome}"') + ") or vector(0)", outcome)
                for outcome in ("received", "declined", "refused")
            ),
            width=24,
        ),
    ),
)

_MEMBERS = Row(
    "Members and certificates",
    (
        Panel(
            "Members",
            "By status, and with an open session.",
            "none",
            (
                Query(f"sum({_c('members_connected', job=False)})", "connected"),
                Query(f"sum by (status) ({_c('members', job=False)})", "{{status}}"),
            ),
        ),
        Panel(
            "Sessions that ended, by reason",
            "Since the coordinator's start.",
            "none",
            (Query(f"sum by (reason) ({_c('sessions_total', job=False)})", "{{reason}}"),),
        ),
        Panel(
            "Enrolments and renewals",
            "By outcome, since the coordinator's start.",
            "none",
            (
                Query(f"sum by (outcome) ({_c('enrolments_total', job=False)})", "enrolment: {{outcome}}"),
                Query(f"sum by (outcome) ({_c('certificate_renewals_total', job=False)})", "renewal: {{outcome}}"),
            ),
        ),
        Panel(
            "Connections to the enrolment port",
            "How many stand, and those a second that were passed on or refused, by outcome.",
            "none",
            (
                Query(f"sum({_c('enrolment_connections_open', job=False)})", "open"),
                Query(
                    f"sum by (outcome) ({_rate(_c('enrolment_connections_total', job=False))})",
                    "{{outcome}} a second",
                ),
            ),
            width=12,
        ),
        Panel(
            "Members that send too much",
            "Calls refused and sessions ended, since the coordinator's start; the log's member_limited says whose.",
            "none",
            (Query(f"sum by (kind) ({_c('members_limited_total', job=False)})", "{{kind}}"),),
            width=12,
        ),
        Panel(
            "Days left of certificates",
            "Of the coordinator's own, and of the member whose certificate ends first.",
            "d",
            (
                Query("min by (kind) (tacit:certificate_left:days{" + _HERE + "})", "{{kind}}"),
                Query("min(tacit:member_certificate_left:days{" + _HERE + "})", "first member"),
            ),
            width=12,
        ),
        Panel(
            "Members with an ended certificate",
            "Enrolled, and cut off.",
            "none",
            (Query(f"sum({_c('members_certificates_expired', job=False)})", "ended"),),
            width=12,
        ),
    ),
)

_COST = Row(
    "Cost of aggregation",
    (
        Panel(
            "Seconds by phase",
            "Mean from a phase's first message out to its end.",
            "s",
            (
                Query(
                    f"sum by (phase) ({_rate(_c('phase_duration_seconds_sum'))})"
                    f" / (sum by (phase) ({_rate(_c('phase_duration_seconds_count'))}) > 0)",
                    "{{phase}}",
                ),
            ),
        ),
        Panel(
            "CPU by phase",
            "Share of one core that judging messages, adding vectors and opening sums takes.",
            "percentunit",
            (Query(f"sum by (phase) ({_rate(_c('aggregation_cpu_seconds_total'))})", "{{phase}}"),),
            "bars",
        ),
        Panel(
            "Session bytes by phase",
            "Both ways: keys, rosters, shares, confirmations; all but the masked vectors.",
            "Bps",
            (Query(f"sum by (phase) ({_rate(_c('session_bytes_total', job=False))})", "{{phase}}"),),
            "bars",
        ),
        Panel(
            "Bytes a published round",
            "Masked vectors in, and all else, for each version.",
            "bytes",
            (
                Query(
                    f"sum by (channel) ({_c('bytes_total', job=False)})"
                    f" / on () group_left () (sum({_c('rounds_total', _PUBLISHED)}) > 0)",
                    "{{channel}}",
                ),
            ),
        ),
        Panel(
            "Memory",
            "Resident now and at its peak, and masked vectors on the disk.",
            "bytes",
            (
                Query('sum(process_resident_memory_bytes{job="tacit-coordinator", ' + _HERE + "})", "resident"),
                Query(f"sum({_c('memory_peak_bytes', job=False)})", "peak"),
                Query(f"sum({_c('spool_bytes', job=False)})", "spooled"),
            ),
        ),
        Panel(
            "CPU of the coordinator",
            "Cores in use, all of the process.",
            "none",
            (
                Query(
                    "sum(" + _rate('process_cpu_seconds_total{job="tacit-coordinator", ' + _HERE + "}") + ")", "cores"
                ),
            ),
        ),
    ),
)

_TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Bytes by channel",
            "Masked vectors, blobs (versions, bundles), sessions.",
            "Bps",
            (
                Query(
                    f"sum by (direction, channel) ({_rate(_c('bytes_total', job=False))})", "{{channel}} {{direction}}"
                ),
            ),
            width=12,
        ),
        Panel(
            "Messages of sessions",
            "Each way.",
            "cps",
            (Query(f"sum by (direction) ({_rate(_c('session_messages_total', job=False))})", "{{direction}}"),),
            width=12,
        ),
    ),
)

_HEALTH = Row(
    "Health",
    (
        Panel(
            "Database",
            "Median and 99th percentile of a transaction.",
            "s",
            (
                Query(
                    f"histogram_quantile(0.5, sum by (le) ({_rate(_c('database_seconds_bucket', job=False))}))",
                    "median",
                ),
                Query("max(tacit:database_seconds:p99_5m{" + _HERE + "})", "99 %"),
            ),
        ),
        Panel(
            "Event loop",
            "How late it comes back: what every answer waits.",
            "s",
            (
                Query(
                    f"histogram_quantile(0.5, sum by (le) ({_rate(_c('event_loop_lag_seconds_bucket', job=False))}))",
                    "median",
                ),
                Query("max(tacit:event_loop_lag_seconds:p99_5m{" + _HERE + "})", "99 %"),
            ),
        ),
        Panel(
            "Failures",
            "Of the database, of the store, and of jobs, since the coordinator's start.",
            "none",
            (
                Query(f"sum({_c('database_failures_total', job=False)})", "database"),
                Query(f"sum({_c('store_failures_total', job=False)})", "store"),
                Query(f"sum({_c('job_failures_total')})", "jobs"),
            ),
        ),
        Panel(
            "Disk",
            "Room left where the coordinator's folder is.",
            "bytes",
            (Query(f"min({_c('disk_free_bytes', job=False)})", "free"),),
        ),
        Panel(
            "Open files",
            "Of the limit.",
            "percentunit",
            (
                Query(
                    'max(process_open_fds{job="tacit-coordinator", '
                    + _HERE
                    + '} / process_max_fds{job="tacit-coordinator", '
                    + _HERE
                    + "})",
                    "open",
                ),
            ),
            most=1,
        ),
        Panel(
            "Since the newest backup",
            "`none` where the journal has no backup.",
            "s",
            # The metric is 0 without a backup; the query then gives -1, and no data where the coordinator is down.
            (
                Query(
                    f"(time() - max({_c('backup_timestamp_seconds', job=False)} > 0)) "
                    f"or (max({_c('backup_timestamp_seconds', job=False)}) - 1)",
                    "since",
                ),
            ),
            "stat",
            negative="none",
        ),
    ),
)

COORDINATOR = Board(
    uid="tacit-coordinator",
    title="Tacit: coordinator",
    description="Rounds, dropouts, privacy spend, members and certificates, cost, traffic and health of a coordinator.",
    variables=(
        Variable("instance", "Coordinator", _C + "build_info"),
        Variable("job", "Job", _C + "model_version"),
    ),
    rows=(_OVERVIEW, _ROUNDS, _DROPOUT, _PRIVACY, _CORPORA, _MEMBERS, _COST, _TRAFFIC, _HEALTH),
)


def _e(name: str) -> str:
    return f"tacit_edge_{name}{{{_HERE}}}"


MEMBER = Board(
    uid="tacit-member",
    title="Tacit: member",
    description="What one institution sees of its own member: its budget, its session, its certificate, its attempts.",
    variables=(Variable("instance", "Member", "tacit_edge_connected"),),
    rows=(
        Row(
            "Privacy",
            (
                Panel(
                    "Budget left",
                    "Share of the privacy budget, by the gate.",
                    "percentunit",
                    (Query(_e("privacy_share_left"), "{{instance}}"),),
                    "stat",
                    most=1,
                ),
                Panel(
                    "Epsilon",
                    "Charged and reserved, and what the ledger may reach.",
                    "none",
                    (
                        Query(_e("privacy_epsilon_spent"), "{{instance}}, spent"),
                        Query(_e("privacy_epsilon_limit"), "{{instance}}, limit"),
                    ),
                    width=16,
                ),
            ),
        ),
        Row(
            "Taking part",
            (
                Panel(
                    "Attempts by outcome",
                    "Since the member's start.",
                    "none",
                    (Query(f"sum by (instance, outcome) ({_e('attempts_total')})", "{{outcome}}"),),
                ),
                Panel(
                    "Asked and answered",
                    "Rounds that the coordinator asked for, and updates that were offered.",
                    "none",
                    (Query(_e("assignments_total"), "asked"), Query(_e("updates_total"), "offered")),
                ),
                Panel(
                    "Since the last published attempt",
                    "With this member in it.",
                    "s",
                    (Query(f"time() - ({_e('published_timestamp_seconds')} > 0)", "{{instance}}"),),
                ),
            ),
        ),
        Row(
            "Connection",
            (
                Panel(
                    "Connected",
                    "1 while a session is open.",
                    "none",
                    (Query(_e("connected"), "{{instance}}"),),
                    most=1,
                ),
                Panel(
                    "Sent",
                    "Masked vectors handed to the network.",
                    "Bps",
                    (Query(_rate(_e("masked_bytes_total")), "{{instance}}"),),
                ),
                Panel(
                    "Sessions that broke",
                    "And tries that failed, since the start.",
                    "none",
                    (Query(_e("disconnections_total"), "{{instance}}"),),
                ),
                Panel(
                    "Days left of the certificate",
                    "A running member renews it by itself.",
                    "d",
                    (Query(f"({_e('certificate_expires_timestamp_seconds')} - time()) / 86400", "{{instance}}"),),
                    width=12,
                ),
                Panel(
                    "Age of these figures",
                    "Of a member that died, a file of --metrics-file stays behind and grows old.",
                    "s",
                    (Query(f"time() - {_e('written_timestamp_seconds')}", "{{instance}}"),),
                    width=12,
                ),
            ),
        ),
    ),
)

BOARDS = (COORDINATOR, MEMBER)
