"""A member with several addresses behind a slow line: no transfer holds up the pings that notice a hanging coordinator.

Such a member sends a ping every two seconds and waits four for the answer. The vector and the version take far longer
than that, and all bytes of the member share one line.
"""

import json

import pytest

from tests.support.bad_network import BadNetwork, Way
from tests.support.besieged import Besieged, attempts, dropouts
from tests.support.processes import behind, free_ports

pytestmark = pytest.mark.timeout(600)

STRAIGHT = ("north", "east", "south")
FAR = "west"
# 300 kbit/s in bytes a second, and seconds from one end to the other.
RATE, DELAY = 37_500.0, 0.15
# Bytes that a vector has at least: more than 20 seconds.
VECTOR = 850_000


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    running, network = Besieged(tmp_path_factory.mktemp("federation")), BadNetwork(0)
    try:
        running.enrol(*STRAIGHT, FAR)
        network.lead_to(running.port)
        network.line(RATE, DELAY)
        behind(network, running.home(FAR))
        path = running.home(FAR) / "identity" / "identity.json"
        # The other coordinator is away.
        others = [f"localhost:{port}" for port in free_ports(1)]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"other_addresses": others}))
        running.network = network  # type: ignore[attr-defined]
        for name in (*STRAIGHT, FAR):
            running.light(name)
        yield running
    finally:
        running.close()
        network.close()


def test_a_vector_that_takes_longer_than_a_pings_patience_arrives_over_one_connection(federation):
    network = federation.network
    # On a busy machine the first dial may come before the coordinator listens.
    federation.processes[-1].wait_for("connected")
    before = network.connections
    federation.light_job("far", count=1, min_members=4, deadlines={"mask": 60.0, "mask_limit": 240.0})
    detail = federation.finished("far")
    assert dropouts(detail) == []
    (attempt,) = attempts(detail)
    assert sorted(attempt.survivors) == sorted((*STRAIGHT, FAR))
    # Each break would have made another connection.
    assert network.connections == before
    # The version came over the line, and the vector went once.
    assert network.carried[Way.DOWN] > VECTOR
    assert VECTOR < network.carried[Way.UP] < 1.3 * VECTOR
