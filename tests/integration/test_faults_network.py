"""A network that cuts, delays, stalls, truncates, corrupts and reorders connections, in each phase that matters.

What holds each time: the round goes on with the member behind that network in it, no member ends or has to be told
anything, nothing is lost or counted twice, and another job of other members goes on meanwhile.
"""

import pytest

from tests.support.bad_network import BadNetwork, Fault, Way
from tests.support.besieged import Besieged, Footprint, attempts, dropouts
from tests.support.processes import PATIENCE, behind

STRAIGHT = ("north", "east", "south")
MEMBERS = (*STRAIGHT, "west")
# Of the job's model, down, and of its masked vector, up: about a megabyte each. So much is well inside either.
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
        running.west = running.light("west", "net-*")
        running.goes_on("beside")
        yield running
    finally:
        running.close()


@pytest.fixture
def job(request):
    """A name of its own for each test."""
    return "net-" + "".join(letter if letter.isalnum() else "-" for letter in request.node.name.split("[")[-1].lower())


@pytest.fixture(autouse=True)
def _sound_at_the_end(federation, network, job):
    """Whatever the test did: all four are in every version, once, and nobody was dropped or refused anything."""
    footprint = Footprint(federation.coordinator.process.pid)
    yield
    detail = federation.sound(job, MEMBERS)
    assert all(sorted(attempt.survivors) == sorted(MEMBERS) for attempt in attempts(detail))
    assert dropouts(detail) == []
    assert federation.west.process.poll() is None
    federation.never_logged(MEMBERS, "attempt_refused", "message_failed", "declined", "job_failed")
    # A vector has a megabyte; connections that broke are let go of.
    assert footprint.grown < 64 * 2**20
    assert footprint.opened < 16


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.TRUNCATE, Fault.CORRUPT])
@pytest.mark.parametrize("way", [Way.DOWN, Way.UP])
def test_a_round_survives_a_broken_transfer(federation, network, job, fault, way):
    if way is Way.DOWN:
        network.plan(fault, way, INSIDE)
        federation.light_job(job, count=2, min_members=4)
    else:
        # Only what a member sends is counted, and before its vector that is next to nothing.
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
    # Its answer is with the coordinator, and the next phase's message is not out.
    federation.status(lambda jobs: jobs[job].phase == phase and jobs[job].answered == 3)
    network.cut()
    federation.west.wait_for("disconnected")
    federation.west.wait_for("connected")
    federation.order("south")
    federation.finished(job)


def test_a_member_cut_off_during_publication_continues(federation, network, job):
    # The shares of three would open the sum.
    for name in ("south", "east"):
        federation.order(name, "halt", "unmask")
    federation.light_job(job, count=2, min_members=4)
    federation.status(lambda jobs: jobs[job].phase == "unmask" and jobs[job].answered == 2)
    network.stall()
    for name in ("south", "east"):
        federation.order(name)
    federation.status(lambda jobs: jobs[job].version_number == 1)
    # It never heard how the attempt ended.
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
