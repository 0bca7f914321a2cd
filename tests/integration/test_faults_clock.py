"""Clocks that jump, on either side: nothing is wedged, nobody ends, and what is wrong is said in a sentence.

Only the clock that tells the time of day is set, as an administrator or a time server sets it: deadlines run on the
other one. What OpenSSL thinks of a certificate's dates in a handshake is not shifted here.
"""

import sys

import pytest

from tests.support.besieged import Besieged, attempts
from tests.support.processes import Process

STEADY = ("north", "east", "south")
MEMBERS = (*STEADY, "west")
HOUR, DAY = 3600, 86_400


class Shifted(Besieged):
    """A federation in which the coordinator's clock and that of `west` are what files say."""

    def set_clock(self, whose, seconds):
        """From now on so many seconds ahead of the machine's."""
        path = self.folder / f"clock-{whose}"
        fresh = path.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(path)

    def _shifted(self, whose, module, *words):
        return [
            sys.executable,
            "-m",
            "tests.support.shifted_clock",
            str(self.folder / f"clock-{whose}"),
            module,
            *map(str, words),
        ]

    def serve(self):
        """The coordinator, by its shifted clock."""
        words = self._shifted("coordinator", "coordinator.cli", "serve", "--dir", self.dir, "--log-format", "json")
        self.coordinator = Process("coordinator", words, self.folder / "coordinator.log")
        self.processes.append(self.coordinator)
        self.coordinator.wait_for("serving")
        return self.coordinator

    def start_west(self):
        """The member whose clock is shifted."""
        module = "tests.support.rogue_member"
        words = self._shifted("west", module, self.home("west"), self.folder / "orders-west")
        member = Process("west", words, self.folder / "west.log")
        self.processes.append(member)
        return member

    def with_west(self, job):
        """Returns once west is in a version that is published from now on."""
        after = len(self.show(job).rounds)
        self.wait_for(job, lambda detail: any("west" in each.survivors for each in attempts_after(detail, after)))


def attempts_after(detail, rounds):
    return [attempt for each in detail.rounds[rounds:] for attempt in each.attempts]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    running = Shifted(tmp_path_factory.mktemp("federation"))
    try:
        running.enrol(*MEMBERS)
        for name in STEADY:
            running.light(name)
        running.west = running.start_west()
        yield running
    finally:
        running.close()


def test_rounds_continue_when_the_coordinators_clock_jumps(federation):
    federation.light_job("coordinators", count=100_000, embedding=8)
    federation.goes_on("coordinators")
    federation.set_clock("coordinator", HOUR)
    federation.goes_on("coordinators", 3)
    # Whoever connects is told the coordinator's time, and says in its own log that the clocks differ.
    federation.west.stop()
    federation.processes.remove(federation.west)
    federation.west = federation.start_west()
    assert abs(int(federation.west.wait_for("clock_differs")["seconds"]) - HOUR) < 60
    federation.with_west("coordinators")
    federation.set_clock("coordinator", 0)
    federation.goes_on("coordinators", 3)
    # A phase that began an hour later than it ended took no time, and not less.
    sums = [
        federation.metric("tacit_coordinator_phase_duration_seconds_sum", job="coordinators", phase=phase)
        for phase in ("advertise", "share", "mask", "confirm", "unmask", "publish")
    ]
    assert min(sums) >= 0
    federation.abort("coordinators")
    detail = federation.sound("coordinators", MEMBERS)
    assert all(attempt.outcome == "published" for attempt in attempts(detail)[:-1])
    federation.never_logged(MEMBERS, "job_failed", "message_failed", "attempt_refused")


def test_a_member_outlasts_a_coordinator_clock_past_its_certificate(federation):
    federation.west.stop()
    federation.processes.remove(federation.west)
    federation.set_clock("coordinator", 30 * DAY)
    federation.west = federation.start_west()
    # The handshake took the certificate: one of the clocks is wrong, and tomorrow it may be right.
    while "clock" not in federation.west.wait_for("disconnected")["why"]:
        pass
    federation.set_clock("coordinator", 0)
    federation.light_job("later", count=100_000, embedding=8)
    federation.with_west("later")
    federation.abort("later")
    federation.sound("later", MEMBERS)


def test_a_member_rejoins_after_its_clock_jumps_ahead_and_back(federation):
    federation.light_job("members", count=100_000, embedding=8)
    federation.with_west("members")
    federation.set_clock("west", HOUR)
    federation.with_west("members")
    federation.set_clock("west", 0)
    federation.with_west("members")
    # So far ahead that by it everybody's certificate is over, it takes part in nothing and says why; the others go on.
    federation.set_clock("west", 30 * DAY)
    # An attempt that was under way then ends with whatever was checked next; the one after it begins with certificates.
    while not any(said in federation.west.wait_for("attempt_refused")["detail"] for said in ("valid", "expired")):
        pass
    federation.goes_on("members")
    federation.set_clock("west", 0)
    federation.with_west("members")
    assert federation.west.process.poll() is None
    federation.abort("members")
    federation.sound("members", MEMBERS)
