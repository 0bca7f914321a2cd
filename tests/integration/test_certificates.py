"""Certificates of real processes: renewed during an open session, and followed to another authority during a job."""

import json
import sys
import time

import pytest

from tests.support.processes import Federation, Process, command, succeed, within_patience

# Seventy seconds: renewal is due after about forty-five.
SHORT = "0.00081"


@pytest.fixture
def federation(tmp_path, monkeypatch):
    running = Federation(tmp_path)
    try:
        # With the default lifetime: west is offline until the end, and north has time before it must renew.
        running.enrol("west", "north")
        running.coordinator.stop()
        monkeypatch.setenv("TACIT_MEMBER_DAYS", SHORT)
        running.serve()
        running.enrol("east", "south")
        yield running
    finally:
        running.close()


def _authority(federation, *words, code=0):
    done = command("coordinator", "authority", *words, "--dir", federation.dir, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stdout + done.stderr


def _start(federation, name) -> Process:
    """The job goes on for as long as certificates take to expire, so its members take their time."""
    words = [sys.executable, "-m", "tests.support.unhurried_member", "run", "--data", str(federation.data(name))]
    words += ["--home", str(federation.home(name)), "--log-format", "json"]
    member = Process(name, words, federation.folder / f"{name}.log")
    federation.processes.append(member)
    return member


def _connections(process) -> int:
    return sum(line.get("event") == "connected" for line in process.lines)


def test_certificates_renew_and_the_authority_rotates_during_a_job(federation):
    first = _expiry(federation, "east")
    east = _start(federation, "east")
    north, south = _start(federation, "north"), _start(federation, "south")
    for process in (east, north, south):
        process.wait_for("connected")
    federation.job("long", count=100_000, deadlines={"training": 30})
    federation.wait_for("long", lambda detail: detail.job.version_number >= 1)

    # The session stays open while its certificate is replaced, and through later replacements.
    east.wait_for("certificate_renewed", same_key=True)
    assert _expiry(federation, "east") > first

    # The next authority: one cohort holds members of both.
    before = _authority(federation, "status")
    rotated = _authority(federation, "rotate", "--yes")
    assert rotated["federation"] == before["federation"]
    for process in (east, north, south):
        process.wait_for("authorities_followed", number=1)

    def of_earlier():
        return set(_authority(federation, "status")["members_of_earlier"])

    # East and south renew often, so they move. North renews at a random moment within ten minutes.
    within_patience(lambda: of_earlier() <= {"north", "west"})
    assert "west" in of_earlier()
    at = federation.show("long").job.version_number
    mixed = federation.wait_for("long", lambda detail: detail.job.version_number >= at + 2)
    published = [attempt for each in mixed.rounds for attempt in each.attempts if attempt.outcome == "published"]
    assert sorted(published[-1].survivors) == ["east", "north", "south"]

    # The earlier authority cannot be retired while west still depends on it, unless forced.
    said = _authority(federation, "retire", "--yes", code=4)
    assert "west" in said
    # A second process of the same home renews; the running one picks up the new certificate.
    renewed = json.loads(succeed("edge_client", "renew", "--home", federation.home("north"), "--json"))
    assert renewed["renewed"]
    north.wait_for("certificate_renewed", same_key=True)
    done = _authority(federation, "retire", "--yes", "--force")
    assert done["trusted"] == 1
    for process in (east, north, south):
        process.wait_for("authorities_followed", number=2)
    at = federation.show("long").job.version_number
    federation.wait_for("long", lambda detail: detail.job.version_number >= at + 2)

    # West, offline until now, follows the chain of authorities, gets a certificate and takes part.
    west = _start(federation, "west")
    west.wait_for("authorities_followed", number=2)
    west.wait_for("certificate_renewed", same_key=True)
    west.wait_for("connected")
    west.wait_for("attempt_ended", outcome="published")

    # Nobody was disconnected: rounds go on after the first certificates of east and south have expired.
    federation.wait_for("long", lambda _: time.time() > first)
    at = federation.show("long").job.version_number
    federation.wait_for("long", lambda detail: detail.job.version_number >= at + 2)
    assert [_connections(process) for process in (east, north, south)] == [1, 1, 1]
    for process in (east, north, south, west):
        process.stop()
        assert "disconnected" not in {line.get("event") for line in process.lines if process is not west}
    # Receipts under every certificate and both authorities verify offline.
    for name in ("east", "west"):
        verdict = json.loads(succeed("edge_client", "ledger", "verify", "--home", federation.home(name), "--json"))
        assert verdict["problems"] == []


def _expiry(federation, member) -> float:
    """When a member's certificate expires according to the coordinator, in seconds since 1970."""
    listed = json.loads(federation.operator("member", "list", "--json"))["members"]
    (found,) = (each for each in listed if each["name"] == member)
    return found["certificate_expires_ms"] / 1000
