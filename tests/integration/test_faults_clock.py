"""Clocks that jump, on either side: nothing hangs, no process ends, and a sentence says what is wrong.

Only the wall clock is set, as an administrator or a time server sets it. Deadlines run on the monotonic clock. The
clock by which OpenSSL checks a certificate's dates in a handshake is not shifted here.
"""

import sys

import pytest

from tests.support.besieged import Besieged, attempts
from tests.support.processes import Process

STEADY = ("north", "east", "south")
MEMBERS = (*STEADY, "west")
HOUR, DAY = 3600, 86_400


class Shifted(Besieged):
    """A federation in which files set the clocks of the coordinator and of `west`."""

    def set_clock(self, whose, seconds):
        """Sets a clock `seconds` ahead of the machine's from now on."""
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
        """Starts the coordinator with its shifted clock."""
        words = self._shifted("coordinator", "coordinator.cli", "serve", "--dir", self.dir, "--log-format", "json")
        self.coordinator = Process("coordinator", words, self.folder / "coordinator.log")
        self.processes.append(self.coordinator)
        self.coordinator.wait_for("serving")
        return self.coordinator

    def start_west(self):
        """Starts the member whose clock is shifted."""
        module = "tests.support.rogue_member"
        words = self._shifted("west", module, self.home("west"), self.folder / "orders-west")
        member = Process("west", words, self.folder / "west.log")
        self.processes.append(member)
        return member

    def with_west(self, job):
        """Returns once west is in a version published from now on."""
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
        running.west = running.start_west()  # type: ignore[attr-defined]
        yield running
    finally:
        running.close()


def test_rounds_continue_when_the_coordinators_clock_jumps(federation):
    federation.light_job("beside-coordinators", count=100_000, embedding=8)
    federation.goes_on("beside-coordinators")
    federation.set_clock("coordinator", HOUR)
    federation.goes_on("beside-coordinators", 3)
    # A connecting member hears the coordinator's time, and logs that the clocks differ.
    federation.west.stop()
    federation.processes.remove(federation.west)
    federation.west = federation.start_west()
    assert abs(int(federation.west.wait_for("clock_differs")["seconds"]) - HOUR) < 60
    federation.with_west("beside-coordinators")
    federation.set_clock("coordinator", 0)
    federation.goes_on("beside-coordinators", 3)
    # By the wall clock, a phase ended an hour before it began. Its duration counts as zero, never as negative.
    sums = [
        federation.metric("tacit_coordinator_phase_duration_seconds_sum", job="beside-coordinators", phase=phase)
        for phase in ("advertise", "share", "mask", "confirm", "unmask", "publish")
    ]
    assert min(sums) >= 0
    federation.abort("beside-coordinators")
    detail = federation.sound("beside-coordinators", MEMBERS)
    assert all(attempt.outcome == "published" for attempt in attempts(detail)[:-1])
    federation.never_logged(MEMBERS, "job_failed", "message_failed", "attempt_refused")


def test_a_member_outlasts_a_coordinator_clock_past_its_certificate(federation):
    federation.west.stop()
    federation.processes.remove(federation.west)
    federation.set_clock("coordinator", 30 * DAY)
    federation.west = federation.start_west()
    # The handshake accepted the certificate, so one of the clocks is wrong. It may be corrected, so the member waits.
    while "clock" not in federation.west.wait_for("disconnected")["why"]:
        pass
    federation.set_clock("coordinator", 0)
    federation.light_job("beside-later", count=100_000, embedding=8)
    federation.with_west("beside-later")
    federation.abort("beside-later")
    federation.sound("beside-later", MEMBERS)


def test_a_member_rejoins_after_its_clock_jumps_ahead_and_back(federation):
    federation.light_job("beside-members", count=100_000, embedding=8)
    federation.with_west("beside-members")
    federation.set_clock("west", HOUR)
    federation.with_west("beside-members")
    federation.set_clock("west", 0)
    federation.with_west("beside-members")
    # By a clock this far ahead, every certificate has expired. West takes part in nothing and says why; the others
    # continue.
    federation.set_clock("west", 30 * DAY)
    # An open attempt ends at the next check of any kind. The attempt after it begins with certificates.
    while not any(said in federation.west.wait_for("attempt_refused")["detail"] for said in ("valid", "expired")):
        pass
    federation.goes_on("beside-members")
    federation.set_clock("west", 0)
    federation.with_west("beside-members")
    assert federation.west.process.poll() is None
    federation.abort("beside-members")
    federation.sound("beside-members", MEMBERS)
