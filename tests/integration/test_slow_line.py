"""A round over a long and slow line, with real processes: the line is kept full, nobody is dropped, nothing times out.

The far member's vector takes longer than the job's deadline for it. Nothing here measures seconds: a sender that waits
for answers leaves the line empty, and the line notes at which byte (`tests.support.line`).
"""

import pytest

from tests.support.bad_network import BadNetwork, Way
from tests.support.besieged import Besieged, attempts, dropouts
from tests.support.processes import behind, within_patience

pytestmark = pytest.mark.timeout(600)

STRAIGHT = ("north", "east", "south")
FAR = "west"
# Bytes a second, and seconds from one end to the other: the line carries 64 KB in a round trip.
RATE, DELAY = 40_000.0, 0.8
WINDOW_KIB = 256
# Bytes that a vector has at least. It takes more than 20 seconds, and its first message 10.
VECTOR = 850_000
# Seconds.
MASK = 20.0


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    running, network = Besieged(tmp_path_factory.mktemp("federation")), BadNetwork(0)
    try:
        running.enrol(*STRAIGHT, FAR)
        running.coordinator.stop()
        config = running.dir / "coordinator.toml"
        text = config.read_text()
        assert "upload_window_kib = 128\n" in text
        config.write_text(text.replace("upload_window_kib = 128\n", f"upload_window_kib = {WINDOW_KIB}\n"))
        running.serve()
        network.lead_to(running.port)
        network.line(RATE, DELAY)
        behind(network, running.home(FAR))
        running.network = network  # type: ignore[attr-defined]
        for name in (*STRAIGHT, FAR):
            running.light(name)
        yield running
    finally:
        running.close()
        network.close()


def finished(federation, job):
    """The job's attempts, which lost nobody."""
    detail = federation.finished(job)
    assert dropouts(detail) == []
    assert all(sorted(attempt.survivors) == sorted((*STRAIGHT, FAR)) for attempt in attempts(detail))
    assert not any(line.get("event") == "disconnected" for line in federation.processes[-1].lines)
    return attempts(detail)


def test_a_vector_that_takes_longer_than_its_deadline_is_waited_for(federation):
    federation.light_job("far", count=1, min_members=4, deadlines={"mask": MASK, "mask_limit": 240.0})
    up = federation.network.lines[Way.UP]
    (attempt,) = finished(federation, "far")
    assert attempt.outcome == "published"
    # The vector is by far the largest message: the line was not found empty in its middle.
    total = up.entered
    assert total > VECTOR
    empty = [at for at in up.empty_at if total - VECTOR + 128 * 1024 < at < total - 128 * 1024]
    assert empty == []
    federation.coordinator.wait_for("uploads_awaited", members=1)


def test_a_vector_that_stops_is_dropped_a_deadline_later(federation):
    """The line holds still in the middle of the vector, and is open all the time."""
    network = federation.network
    limits = {"mask": MASK, "mask_limit": 600.0, "reconnect": 500.0}
    federation.light_job("still", count=1, min_members=3, target_members=4, deadlines=limits)
    federation.coordinator.wait_for("uploads_awaited", job="still")
    network.stall()
    federation.status(lambda jobs: jobs["still"].version_number == 1)
    network.release()
    detail = federation.show("still")
    assert [(lost[0], lost[1]) for lost in dropouts(detail)] == [(FAR, "mask")]
    within_patience(lambda: network.carried[Way.UP] > VECTOR)
