"""A network that cuts, delays, stalls, truncates, corrupts and reorders connections, in each phase that matters.

Each time, the round continues and includes the member behind that network, no member ends or needs help, nothing is
lost or counted twice, and another job of other members continues meanwhile.
"""

import itertools

import pytest

from tests.support.bad_network import BadNetwork, Fault, Way
from tests.support.besieged import Besieged, Footprint, attempts, dropouts
from tests.support.processes import PATIENCE, behind
from tests.support.sweep import sweep

STRAIGHT = ("north", "east", "south")
MEMBERS = (*STRAIGHT, "west")
# Bytes after which a fault strikes: well inside the job's model (down) and its masked vector (up), a megabyte each.
INSIDE = 400_000


@pytest.fixture(scope="module")
def network():
    made = BadNetwork(0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def federation(tmp_path_factory, network):
    running = Besieged(tmp_path_factory.mktemp("federation"))
    try:
        running.enrol(*MEMBERS, "late")
        network.lead_to(running.port)
        for name in ("west", "late"):
            behind(network, running.home(name))
        running.light_job("beside", embedding=8, count=1_000_000)
        for name in STRAIGHT:
            running.light(name)
        running.west = running.light("west", "net-*")  # type: ignore[attr-defined]
        running.goes_on("beside")
        yield running
    finally:
        running.close()


@pytest.fixture
def job(request):
    """A job name that only this test uses."""
    return "net-" + "".join(letter if letter.isalnum() else "-" for letter in request.node.name.split("[")[-1].lower())


@pytest.fixture(autouse=True)
def _sound_at_the_end(federation, network, job):
    """Checks after each test that every version holds all four members once, without a dropout or a refusal."""
    footprint = Footprint(federation.coordinator.process.pid)
    yield
    detail = federation.sound(job, MEMBERS)
    assert all(sorted(attempt.survivors) == sorted(MEMBERS) for attempt in attempts(detail))
    assert dropouts(detail) == []
    assert federation.west.process.poll() is None
    federation.never_logged(MEMBERS, "attempt_refused", "message_failed", "declined", "job_failed")
    # A vector has a megabyte. Broken connections are released.
    assert footprint.grown < 64 * 2**20
    assert footprint.opened < 16


@pytest.mark.parametrize(
    ("fault", "way"),
    sweep(
        itertools.product([Fault.CUT, Fault.TRUNCATE, Fault.CORRUPT], Way),
        (Fault.CUT, Way.DOWN),
        (Fault.CORRUPT, Way.UP),
    ),
)
def test_a_round_survives_a_broken_transfer(federation, network, job, fault, way):
    if way is Way.DOWN:
        network.plan(fault, way, INSIDE)
        federation.light_job(job, count=2, min_members=4)
    else:
        # Only bytes from the member count here, and it sends almost nothing before its vector.
        federation.light_job(job, count=2, min_members=4)
        network.plan(fault, way, INSIDE)
    assert network.struck.wait(PATIENCE)
    federation.west.wait_for("disconnected")
    federation.west.wait_for("connected")
    federation.finished(job)


@pytest.mark.parametrize("way", [Way.DOWN, Way.UP])
def test_a_stalled_transfer_holds_up_nobody_else(federation, network, job, way):
    network.plan(Fault.STALL, way, INSIDE)
    federation.light_job(job, count=2, min_members=4)
    assert network.struck.wait(PATIENCE)
    federation.goes_on("beside")
    assert federation.show(job).job.version_number <= 1
    network.release()
    federation.finished(job)


@pytest.mark.parametrize("phase", ["share", "confirm"])
def test_a_round_survives_a_cut_between_two_phases(federation, network, job, phase):
    federation.order("south", "halt", phase)
    federation.light_job(job, count=1, min_members=4)
    # The coordinator has West's answer and has not sent the next phase's message.
    federation.status(lambda jobs: jobs[job].phase == phase and jobs[job].answered == 3)
    network.cut()
    federation.west.wait_for("disconnected")
    federation.west.wait_for("connected")
    federation.order("south")
    federation.finished(job)


def test_a_member_cut_off_during_publication_continues(federation, network, job):
    # Shares of three members would open the sum, so two of them halt.
    for name in ("south", "east"):
        federation.order(name, "halt", "unmask")
    federation.light_job(job, count=2, min_members=4)
    federation.status(lambda jobs: jobs[job].phase == "unmask" and jobs[job].answered == 2)
    network.stall()
    for name in ("south", "east"):
        federation.order(name)
    federation.status(lambda jobs: jobs[job].version_number == 1)
    # West never heard how the attempt ended.
    network.cut()
    network.release()
    federation.west.wait_for("connected")
    federation.finished(job)


def test_a_member_waits_while_nobody_listens(federation, network, job):
    network.refuse()
    network.cut()
    federation.light_job(job, count=1, min_members=4)
    federation.west.wait_for("disconnected")
    assert "nobody listens" in federation.west.wait_for("disconnected")["why"]
    federation.goes_on("beside")
    network.accept()
    federation.west.wait_for("connected")
    federation.finished(job)


def test_a_round_survives_a_slow_network(federation, network, job):
    network.delay(0.02)
    federation.light_job(job, count=2, min_members=4)
    federation.finished(job)
    network.delay(0)


def test_connections_may_arrive_out_of_order(federation, network, job):
    network.order.clear()
    network.reorder()
    network.cut()
    federation.west.wait_for("disconnected")
    other = federation.light("late", "nothing")
    other.wait_for("connected")
    federation.west.wait_for("connected")
    assert network.order == ["the later", "the earlier"]
    assert other.stop() == 0
    federation.light_job(job, count=1, min_members=4)
    federation.finished(job)
