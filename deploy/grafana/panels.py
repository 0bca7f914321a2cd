"""The dashboards as data: their panels, and the queries and unit of each.

`build.py` makes Grafana's JSON from them, `benchmarks.operations.dashboard` draws the same panels from the same
queries, and tests run every query on a real Prometheus. Queries use the variables `$instance` and `$job` (regular
expressions), `$__rate_interval` and `$__range`.

No query takes the increase of a counter that is split by reason: such a series begins with its first event (see
deploy/prometheus/tacit.rules.yml). A panel that splits by reason shows the count since the coordinator's start.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["BOARDS", "COORDINATOR", "MEMBER", "Board", "Panel", "Query", "Row", "Variable", "substituted"]

Kind = Literal["lines", "bars", "stat"]


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Args:
        unit: as Grafana names it.
        width: in columns; a dashboard has 24.
        least, most: ends of the axis.
        negative: text that a stat shows instead of a value below zero.
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
    """The panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard, of the values of one label."""

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
        """All panels, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)


def substituted(expr: str, *, interval: str, span: str) -> str:
    """Return the query that Grafana sends when every instance and job is chosen.

    Args:
        interval, span: durations as Prometheus writes them, such as `30s`.
    """
    for name, value in (("$__rate_interval", interval), ("$__range", span), ("$instance", ".*"), ("$job", ".*")):
        expr = expr.replace(name, value)
    return expr


_C = "tacit_coordinator_"
_HERE = 'instance=~"$instance"'
_PUBLISHED = ', outcome="published"'
_JOB = 'instance=~"$instance", job=~"$job"'


def _c(name: str, more: str = "", *, job: bool = True) -> str:
    """Return a selector for a coordinator metric, limited to the chosen coordinator (and job)."""
    return f"{_C}{name}{{{_JOB if job else _HERE}{more}}}"


def _rounded_up(epsilon: str) -> str:
    """Return a query for an epsilon in hundredths, since Grafana would round it to the nearest number."""
    return f"ceil({epsilon} * 100) / 100"


def _increase(series: str) -> str:
    return f"increase({series}[$__rate_interval])"


def _rate(series: str) -> str:
    return f"rate({series}[$__rate_interval])"


def _with_errors(name: str, legend: str) -> tuple[Query, ...]:
    """Return the queries of an estimate, and of the ends of its interval of one standard error."""
    value, error = _c(name), _c(f"{name}_error")
    return (
        Query(f"max by (job) ({value})", legend),
        Query(f"max by (job) ({value} + {error})", f"{legend}, above"),
        Query(f"max by (job) ({value} - {error})", f"{legend}, below"),
    )


_OVERVIEW = Row(
    "Now",
    (
        Panel(
            "Running jobs",
            "Jobs that are running.",
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
            "Rounds published in the time range shown.",
            "none",
            (Query(f"sum(increase({_c('rounds_total', _PUBLISHED)}[$__range]))", "published"),),
            "stat",
            4,
        ),
        Panel(
            "Since the last version",
            "Time since the newest version, of the running job that has waited longest.",
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
            "Share of the members in the last hour's cohorts that dropped out.",
            "percentunit",
            (Query("max(job:tacit_dropouts:ratio1h{" + _JOB + "}) or vector(0)", "dropped out"),),
            "stat",
            4,
        ),
        Panel(
            "Alerts firing",
            "Alerts that Prometheus reports as firing now.",
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
            "Norms",
            "Norm of each job's newest version, and of its change. A jump means that training may have diverged.",
            "none",
            (
                Query(f"max by (job) ({_c('version_norm')})", "{{job}} version"),
                Query(f"max by (job) ({_c('version_change')})", "{{job}} change"),
            ),
        ),
        Panel(
            "Rounds that ended",
            "Rounds published or abandoned in each step of the graph.",
            "none",
            (
                Query(f"sum({_increase(_c('rounds_total', _PUBLISHED))})", "published"),
                Query("sum(" + _increase("job:tacit_rounds_abandoned:sum{" + _JOB + "}") + ")", "abandoned"),
            ),
            "bars",
        ),
        Panel(
            "Attempts by outcome and reason",
            "Attempts since the coordinator's start. docs/reasons.md explains the reasons.",
            "none",
            (Query(f"sum by (outcome, reason) ({_c('attempts_total')})", "{{outcome}} {{reason}}"),),
        ),
        Panel(
            "Age of the open round",
            "Age of each job's open round, and the longest that its deadlines allow.",
            "s",
            (
                Query("max by (job) (job:tacit_round_age:seconds{" + _JOB + "})", "{{job}}"),
                Query(f"max by (job) ({_c('round_deadline_seconds')})", "{{job}}, by its deadlines"),
            ),
        ),
        Panel(
            "Cohorts",
            "Mean size of a cohort, members that are ready, and members that a round needs.",
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
            "Accuracy over the last sum's examples (absent under noise), and accuracy of the newest evaluated version.",
            "percentunit",
            (
                Query(f"max by (job) ({_c('training_accuracy')})", "{{job}}, training"),
                Query(f"max by (job) ({_c('evaluation_accuracy')})", "{{job}}, evaluation"),
            ),
            most=1,
        ),
    ),
)

_ESTIMATES = Row(
    "Measured by members, under noise",
    (
        Panel(
            "Estimated accuracy",
            "Of the newest version with an estimate, and one standard error of the noise above and below it.",
            "percentunit",
            _with_errors("estimate_accuracy", "{{job}}"),
            most=1,
        ),
        Panel(
            "Estimated loss",
            "Of the newest version with an estimate, and one standard error of the noise above and below it.",
            "none",
            _with_errors("estimate_loss", "{{job}}"),
        ),
        Panel(
            "Accuracy of the best version (selected)",
            "Of the best measured version, and one standard error above and below it. It is the highest of several "
            "noisy estimates, so it is too high on average.",
            "percentunit",
            _with_errors("best_accuracy", "{{job}}"),
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
            "Share of the members in the last hour's cohorts that dropped out. The line is the alert's threshold.",
            "percentunit",
            (
                Query("max by (job) (job:tacit_dropouts:ratio1h{" + _JOB + "})", "{{job}}"),
                Query("vector(0.2)", "alert"),
            ),
            width=12,
        ),
        Panel(
            "Declines, refusals, extended windows",
            "Assignments that members declined, attempts that they refused to continue, windows extended because too "
            "few were ready, and members left out after missed deadlines. Since the coordinator's start.",
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
            "Groups of split cohorts since the coordinator's start: combined into a version, left out as outliers, "
            "lost to dropout, or with an invalid sum. All zero if no job splits its cohorts.",
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
            "Largest and median epsilon that members reported, in hundredths, rounded up. The ledgers that limit it "
            "are on the members' machines.",
            "none",
            (
                Query(_rounded_up(f"max by (job) ({_c('privacy_epsilon_largest')})"), "{{job}}, largest"),
                Query(_rounded_up(f"max by (job) ({_c('privacy_epsilon_median')})"), "{{job}}, median"),
            ),
        ),
        Panel(
            "Epsilon per round",
            "Largest reported epsilon divided by the number of the newest version.",
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
            "Members at their own privacy limit, and members that have reported. If fewer members have budget left "
            "than a round needs, rounds are abandoned.",
            "none",
            (
                Query(f"max by (job) ({_c('members_budget_spent')})", "{{job}}, at the limit"),
                Query(f"max by (job) ({_c('members_reporting')})", "{{job}}, have reported"),
            ),
        ),
    ),
)

_CORPORA = Row(
    "Synthetic text",
    (
        Panel(
            "Members' files of synthetic text",
            "Corpora received, declined or refused since the coordinator's start. All zero if no job orders corpora. "
            "`coordinator job corpora JOB` lists the members.",
            "none",
            tuple(
                # Without corpora the metric has no series; a line at zero says so.
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
            "Members by status, and members with an open session.",
            "none",
            (
                Query(f"sum({_c('members_connected', job=False)})", "connected"),
                Query(f"sum by (status) ({_c('members', job=False)})", "{{status}}"),
            ),
        ),
        Panel(
            "Sessions that ended, by reason",
            "Sessions that ended since the coordinator's start.",
            "none",
            (Query(f"sum by (reason) ({_c('sessions_total', job=False)})", "{{reason}}"),),
        ),
        Panel(
            "Enrolments and renewals",
            "Requests to enrol and for a new certificate, by outcome, since the coordinator's start.",
            "none",
            (
                Query(f"sum by (outcome) ({_c('enrolments_total', job=False)})", "enrolment: {{outcome}}"),
                Query(f"sum by (outcome) ({_c('certificate_renewals_total', job=False)})", "renewal: {{outcome}}"),
            ),
        ),
        Panel(
            "Connections to the enrolment port",
            "Open connections, and connections per second that were forwarded or refused, by outcome.",
            "none",
            (
                Query(f"sum({_c('enrolment_connections_open', job=False)})", "open"),
                Query(
                    f"sum by (outcome) ({_rate(_c('enrolment_connections_total', job=False))})",
                    "{{outcome}} per second",
                ),
            ),
            width=12,
        ),
        Panel(
            "Members that send too much",
            "Calls refused and sessions ended since the coordinator's start. The log's member_limited names them.",
            "none",
            (Query(f"sum by (kind) ({_c('members_limited_total', job=False)})", "{{kind}}"),),
            width=12,
        ),
        Panel(
            "Certificate days left",
            "Days left of the coordinator's own certificates, and of the member's certificate that ends first.",
            "d",
            (
                Query("min by (kind) (tacit:certificate_left:days{" + _HERE + "})", "{{kind}}"),
                Query("min(tacit:member_certificate_left:days{" + _HERE + "})", "first member"),
            ),
            width=12,
        ),
        Panel(
            "Members with an expired certificate",
            "Enrolled members whose certificate has ended. They cannot connect.",
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
            "Mean time from the first message sent in a phase to its end.",
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
            "Share of one core spent on checking messages, adding vectors and opening sums.",
            "percentunit",
            (Query(f"sum by (phase) ({_rate(_c('aggregation_cpu_seconds_total'))})", "{{phase}}"),),
            "bars",
        ),
        Panel(
            "Session bytes by phase",
            "Both directions: keys, rosters, shares, confirmations. Masked vectors travel separately.",
            "Bps",
            (Query(f"sum by (phase) ({_rate(_c('session_bytes_total', job=False))})", "{{phase}}"),),
            "bars",
        ),
        Panel(
            "Bytes per published round",
            "Bytes of each channel divided by the number of published rounds.",
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
            "Resident memory now and at its peak, and masked vectors on the disk.",
            "bytes",
            (
                Query('sum(process_resident_memory_bytes{job="tacit-coordinator", ' + _HERE + "})", "resident"),
                Query(f"sum({_c('memory_peak_bytes', job=False)})", "peak"),
                Query(f"sum({_c('spool_bytes', job=False)})", "spooled"),
            ),
        ),
        Panel(
            "CPU of the coordinator",
            "Cores that the whole process uses.",
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
            "Masked vectors, blobs (versions, bundles) and sessions.",
            "Bps",
            (
                Query(
                    f"sum by (direction, channel) ({_rate(_c('bytes_total', job=False))})", "{{channel}} {{direction}}"
                ),
            ),
            width=12,
        ),
        Panel(
            "Session messages",
            "Messages per second, in each direction.",
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
            "Duration of a transaction: median and 99th percentile.",
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
            "How late the event loop wakes a task: median and 99th percentile. Every answer is delayed as long.",
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
            "Workers",
            "Workers that accept members' connections (0: the main process does), and their starts, "
            "tries that failed included.",
            "none",
            (
                Query(f"sum({_c('workers', job=False)})", "running"),
                Query(f"sum by (worker) ({_c('worker_starts_total', job=False)})", "starts of {{worker}}"),
            ),
        ),
        Panel(
            "Open calls and files of workers",
            "Sessions, uploads and downloads of each worker, and its open files.",
            "none",
            (
                Query(f"sum by (worker) ({_c('worker_calls', job=False)})", "calls of {{worker}}"),
                Query(f"sum by (worker) ({_c('worker_open_files', job=False)})", "files of {{worker}}"),
            ),
        ),
        Panel(
            "CPU of workers",
            "Cores that each worker uses.",
            "none",
            (Query(f"sum by (worker) ({_rate(_c('worker_cpu_seconds_total', job=False))})", "{{worker}}"),),
        ),
        Panel(
            "Memory of workers",
            "Resident memory of each worker.",
            "bytes",
            (Query(f"sum by (worker) ({_c('worker_resident_bytes', job=False)})", "{{worker}}"),),
        ),
        Panel(
            "Lease",
            "How many coordinators are active (one, or none for seconds), and the number of the lease, which grows "
            "with each takeover.",
            "none",
            (
                Query(f"sum({_c('lease_active', job=False)})", "active"),
                Query(f"max({_c('lease_fence', job=False)})", "lease"),
            ),
        ),
        Panel(
            "Failures",
            "Failures of the database, the store and jobs since the coordinator's start.",
            "none",
            (
                Query(f"sum({_c('database_failures_total', job=False)})", "database"),
                Query(f"sum({_c('store_failures_total', job=False)})", "store"),
                Query(f"sum({_c('job_failures_total')})", "jobs"),
            ),
        ),
        Panel(
            "Disk",
            "Free space on the disks of the coordinator's folder, database and store, and the size of the store.",
            "bytes",
            (
                Query(f"min by (kind) ({_c('disk_free_bytes', job=False)})", "free, {{kind}}"),
                Query(f"max({_c('store_bytes', job=False)})", "store"),
            ),
        ),
        Panel(
            "Blobs in the store",
            "Grows with every version until somebody prunes.",
            "short",
            (Query(f"max({_c('store_blobs', job=False)})", "blobs"),),
        ),
        Panel(
            "Open files",
            "Share of the limit on open files that is in use.",
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
            "Age of the newest backup. `none`: the journal has no backup.",
            "s",
            # Without a backup the metric is 0 and the query gives -1. If the coordinator is down, there is no data.
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
    rows=(_OVERVIEW, _ROUNDS, _ESTIMATES, _DROPOUT, _PRIVACY, _CORPORA, _MEMBERS, _COST, _TRAFFIC, _HEALTH),
)


def _e(name: str) -> str:
    return f"tacit_edge_{name}{{{_HERE}}}"


MEMBER = Board(
    uid="tacit-member",
    title="Tacit: member",
    description="One institution's view of its own member: budget, session, certificate and attempts.",
    variables=(Variable("instance", "Member", "tacit_edge_connected"),),
    rows=(
        Row(
            "Privacy",
            (
                Panel(
                    "Budget left",
                    "Share of the privacy budget that is left, by the gate, in tenths of a per cent, rounded down.",
                    "percentunit",
                    # Grafana rounds to the nearest, and shows no more digits than these of a share.
                    (Query(f"floor({_e('privacy_share_left')} * 1000) / 1000", "{{instance}}"),),
                    "stat",
                    most=1,
                ),
                Panel(
                    "Epsilon",
                    "Epsilon charged and reserved in the ledger, in hundredths, rounded up, and its limit.",
                    "none",
                    (
                        Query(_rounded_up(_e("privacy_epsilon_spent")), "{{instance}}, spent"),
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
                    "Attempts with this member since its start.",
                    "none",
                    (Query(f"sum by (instance, outcome) ({_e('attempts_total')})", "{{outcome}}"),),
                ),
                Panel(
                    "Assignments and updates",
                    "Rounds that the coordinator asked this member to train for, and updates that it offered.",
                    "none",
                    (Query(_e("assignments_total"), "asked"), Query(_e("updates_total"), "offered")),
                ),
                Panel(
                    "Since the last published attempt",
                    "Time since an attempt with this member was last published.",
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
                    "Bytes of masked vectors passed to the network.",
                    "Bps",
                    (Query(_rate(_e("masked_bytes_total")), "{{instance}}"),),
                ),
                Panel(
                    "Sessions that broke",
                    "Sessions that broke and failed tries to connect, since the member's start.",
                    "none",
                    (Query(_e("disconnections_total"), "{{instance}}"),),
                ),
                Panel(
                    "Certificate days left",
                    "A running member renews its certificate by itself.",
                    "d",
                    (Query(f"({_e('certificate_expires_timestamp_seconds')} - time()) / 86400", "{{instance}}"),),
                    width=12,
                ),
                Panel(
                    "Age of these figures",
                    "Time since the member wrote these figures. A killed member leaves its --metrics-file behind.",
                    "s",
                    (Query(f"time() - {_e('written_timestamp_seconds')}", "{{instance}}"),),
                    width=12,
                ),
            ),
        ),
    ),
)

BOARDS = (COORDINATOR, MEMBER)
