"""Two coordinators over one PostgreSQL: one is active, and the other takes over whatever happens to it.

The tests run in order on one federation: each ends the active coordinator in another way, in the middle of a round, and
starts it again as the standby.
"""

import json
import urllib.error
import urllib.request

import pytest
from sqlalchemy.engine import make_url

from tests.support.bad_network import BadNetwork
from tests.support.postgres import running_postgres
from tests.support.processes import PATIENCE, command
from tests.support.replicas import Town

pytestmark = pytest.mark.timeout(4 * PATIENCE)


@pytest.fixture(scope="module")
def postgres():
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def way(postgres):
    """The second coordinator's connections to the database."""
    network = BadNetwork(postgres.port)
    yield network
    network.close()


@pytest.fixture(scope="module")
def town(postgres, way, tmp_path_factory):
    url = postgres.database()
    beside = make_url(url).set(port=way.port).render_as_string(hide_password=False)
    federation = Town(tmp_path_factory.mktemp("town"), url, second_database_url=beside)
    yield federation
    federation.close()


def health(replica, *more):
    done = command("coordinator", "health", "--dir", replica.dir, "--timeout", str(PATIENCE), *more)
    return done.returncode, done.stdout + done.stderr


def ready(replica):
    """The status of what Kubernetes asks before it sends members to a coordinator."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{replica.config.metrics_port}/ready") as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_standby_says_so_and_refuses(town):
    assert (ready(town.active), ready(town.standby)) == (200, 503)
    assert health(town.active)[0] == 0
    code, said = health(town.standby)
    assert (code, "stands by for another one" in said) == (1, True), said
    assert health(town.standby, "--standby")[0] == 0
    # An operator's folder that names the standby alone.
    only = town.folder / "only"
    (town.standby.dir / "operator").rename(only)
    told = (only / "operator.toml").read_text().replace(":7441", ":" + town.standby.address.rsplit(":", 1)[1])
    (only / "operator.toml").write_text(told)
    done = command("coordinator", "status", "--operator", only)
    assert done.returncode == 3, done.stderr
    assert f"the active one is at {town.active.address}" in done.stderr
    # One that names both finds the active one.
    status = json.loads(town.operator("status", "--json"))
    assert (status["lease"]["address"], status["lease"]["fence"]) == (town.active.address, 1)
    assert town.metric("tacit_coordinator_lease_active") == 1
    town.metrics_port = town.standby.config.metrics_port
    assert (town.metric("tacit_coordinator_lease_active"), town.metric("tacit_coordinator_lease_fence")) == (0, 1)


def test_a_killed_coordinator_loses_its_job(town):
    town.in_the_middle("killed")
    town.active.running.kill()
    town.taken_over("expired")
    assert ready(town.active) == 200
    town.goes_on_from_there("killed")
    town.run(town.standby, "standing_by")


def test_a_coordinator_that_is_cut_off_from_the_database_ends(town, way):
    """It cannot know whether another one has the lease, so it must not go on, and its members go to that one."""
    assert town.active is town.second
    town.in_the_middle("cut")
    way.stall()
    cut = town.active
    town.taken_over("expired")
    assert "could not be renewed" in cut.running.wait_for("lease_lost")["detail"]
    assert cut.running.process.wait(timeout=PATIENCE) == 1
    way.release()
    town.goes_on_from_there("cut")
    town.run(town.standby, "standing_by")


def test_a_halted_coordinator_does_no_harm_when_it_wakes(town):
    town.in_the_middle("halted")
    halted = town.active
    halted.halt()
    town.taken_over("expired")
    town.order("west")
    town.goes_on("halted", 1)
    # Its own members' connections are still open on its side, and it has their answers of an attempt long over.
    halted.wake()
    halted.running.wait_for("lease_lost")
    assert halted.running.process.wait(timeout=PATIENCE) == 1
    town.goes_on_from_there("halted")
    town.run(town.standby, "standing_by")


def test_a_coordinator_that_is_told_to_stop_hands_over_at_once(town):
    town.in_the_middle("stopped")
    assert town.active.running.stop() == 0
    town.taken_over("released")
    town.goes_on_from_there("stopped")
    # A standby that is told to stop just ends.
    town.run(town.standby, "standing_by")
    assert town.standby.running.stop() == 0


def test_a_lone_coordinator_that_is_started_again_has_its_lease_again(town):
    town.active.running.kill()
    town.run(town.active, "serving")
    assert town.takeovers()[-1]["how"] == "expired"
