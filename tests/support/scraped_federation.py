"""A federation of real processes under a real Prometheus, through rounds with noise, dropouts and a spent budget.

Two jobs run, one with noise and one without. One of five members reaches its privacy limit, and one is killed in the
middle of attempts and comes back. The job with noise has no fixed end, because the time that the member needs to come
back depends on the machine. Prometheus scrapes the coordinator and one member every second, with the rules of
deploy/prometheus.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.cli.common import operator_stub
from tacit.v1 import operator_pb2 as pb
from tests.support.places import ROOT
from tests.support.processes import Federation, Process, free_ports, running_federation, within_patience
from tests.support.prometheus import Prometheus, running_prometheus

__all__ = ["NOISY", "PLAIN", "Watched", "scraped_federation"]

NOISY, PLAIN = "noisy", "plain"
STEADY = ("north", "east", "center")
FRUGAL, UNLUCKY = "west", "south"
EXAMPLES = 360

_POLICY = 'schema = 1\nmechanisms = ["none", "gaussian-update"]\n'
# The others measure versions, on a third of their rows.
_MEASURES = "metrics_epsilon = 4.0\nvalidation_share = 0.33\n"
_RULES = ROOT / "deploy" / "prometheus"


@dataclass
class Watched:
    """The running processes, and when their healthy part began and ended (seconds since 1970)."""

    federation: Federation
    prometheus: Prometheus
    # The port of north's metrics.
    member_port: int
    began: float = 0.0
    ended: float = 0.0

    def metric(self, name: str, **labels: str) -> float:
        """A value of the coordinator's metric with this name, without its prefix."""
        return self.federation.metric(f"tacit_coordinator_{name}", **labels)

    def run(self, *, rounds: int, kills: int, note: Callable[[str], None] = lambda text: None) -> None:
        """Starts the members. Returns when `rounds` rounds with noise are published and the job without is finished.

        Args:
            kills: how often a member is killed in an attempt.
            note: called with a sentence about each step, for a person who waits.
        """
        federation = self.federation
        for name in (*STEADY, FRUGAL):
            more = ("--metrics-port", str(self.member_port)) if name == STEADY[0] else ()
            self._start(name, *more)
        unlucky = self._start(UNLUCKY)
        within_patience(lambda: self.metric("members_connected") == len(STEADY) + 2)
        # Until members connect, the rules rightly raise an alert.
        within_patience(lambda: not self.prometheus.query("ALERTS"))
        self.began = time.time()
        note("five members are connected")
        for number in range(1, kills + 1):
            unlucky = self._killed_in_an_attempt(unlucky, number)
            self._until_dropped(number)
            note(f"a member was killed in an attempt and dropped, {number} of {kills}")
            unlucky.wait_for("attempt_ended", outcome="published")
        asyncio.run(self._evaluate())
        federation.finished(PLAIN)
        federation.wait_for(NOISY, lambda detail: detail.job.version_number >= rounds)
        # Wait for the last value that a job changes, and then for a scrape of it.
        within_patience(lambda: self.metric("jobs", status="finished") == 1)
        # Twice, because the last step of a range query with one-second steps may be before the first such scrape.
        for _ in range(2):
            self.prometheus.scraped_after(time.time(), "tacit-coordinator")
        self.ended = time.time()
        note("the rounds are done")

    def _killed_in_an_attempt(self, unlucky: Process, number: int) -> Process:
        """Kills a member in an attempt, so that the job has `number` dropouts, and returns the member started again.

        It is dropped after `reconnect` seconds. An attempt may be over before the signal arrives; then it tries again.
        """

        def dropouts(detail: pb.JobDetail) -> int:
            return sum(len(attempt.dropouts) for each in detail.rounds for attempt in each.attempts)

        def until(version: int) -> Callable[[pb.JobDetail], bool]:
            return lambda detail: dropouts(detail) >= number or detail.job.version_number >= version

        while True:
            while not unlucky.wait_for("attempt_joined")["attempt"].startswith(f"{NOISY}/"):
                pass
            unlucky.kill()
            self.federation.processes.remove(unlucky)
            detail = self.federation.wait_for(NOISY, until(self.federation.show(NOISY).job.version_number + 3))
            unlucky = self._start(UNLUCKY)
            if dropouts(detail) >= number:
                return unlucky

    def _until_dropped(self, number: int) -> None:
        """Waits until `number` dropouts of any phase and reason have been scraped."""

        def dropouts() -> float:
            found = self.prometheus.query("sum(tacit_coordinator_dropouts_total)")
            return float(found[0]["value"][1]) if found else 0.0

        within_patience(lambda: dropouts() >= number)

    def _start(self, name: str, *more: str) -> Process:
        self.federation.data(name, EXAMPLES)
        return self.federation.start(name, *more)

    async def _evaluate(self) -> None:
        """Records an evaluation, as `coordinator evaluate` does."""
        async with operator_stub(self.federation.dir / "operator") as stub:
            request = pb.RecordEvaluationRequest(
                job=PLAIN, evaluation=pb.Evaluation(version_number=0, accuracy=0.41, loss=1.7, examples=190)
            )
            await stub.RecordEvaluation(request)


def _job(federation: Federation, name: str, rounds: int, mechanism: str) -> None:
    labels = sorted({json.loads(line)["label"] for line in (ROOT / "examples/desk/train.jsonl").open()})
    spec = federation.folder / f"{name}.toml"
    spec.write_text(
        f"schema = 1\nname = {json.dumps(name)}\nlabels = {json.dumps(labels)}\n{mechanism}"
        f'[vocabulary]\nkind = "words"\nfile = {json.dumps(str(ROOT / "examples/desk/words.txt"))}\n'
        "[model]\nembedding = 32\nwidths = [1, 2]\nmaps = 16\n"
        f"[rounds]\ncount = {rounds}\nmin_members = 3\ntarget_members = 4\n"
        "[rounds.deadlines]\ntraining = 5\nreconnect = 2\n"
    )
    federation.create(spec)


_NOISE = '[mechanism]\nname = "gaussian-update"\nnoise_multiplier = 4.0\nclip = 1.0\nlot = 64\nsampling = "poisson"\n'
_METRICS = "[metrics]\nnoise_multiplier = 8.0\n"


def _config(federation: Federation, member_port: int) -> str:
    return (
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{_RULES}/tacit.rules.yml, {_RULES}/tacit.alerts.yml, {_RULES}/member.alerts.yml]\n"
        "scrape_configs:\n"
        "  - job_name: tacit-coordinator\n    honor_labels: true\n"
        f'    static_configs: [{{targets: ["127.0.0.1:{federation.metrics_port}"]}}]\n'
        "  - job_name: tacit-member\n"
        f'    static_configs: [{{targets: ["127.0.0.1:{member_port}"]}}]\n'
    )


@contextmanager
def scraped_federation(folder: Path, *, plain: int) -> Iterator[Watched]:
    """Creates both jobs, the one without noise with `plain` rounds. Nobody is connected yet. Ends everything after the
    block.
    """
    with running_federation(folder) as federation:
        # Workers have panels, too.
        federation.coordinator.stop()
        settings = federation.dir / "coordinator.toml"
        settings.write_text(re.sub("(?m)^(# ?)?workers = 1$", "workers = 2", settings.read_text()))
        federation.serve()
        federation.enrol(*STEADY, UNLUCKY, policy=_POLICY + _MEASURES)
        federation.enrol(FRUGAL, policy=_POLICY + "epsilon = 1.6\n")
        (member_port,) = free_ports(1)
        with running_prometheus(folder, _config(federation, member_port)) as prometheus:
            _job(federation, NOISY, 1000, _NOISE + _METRICS)
            _job(federation, PLAIN, plain, "")
            yield Watched(federation, prometheus, member_port)
