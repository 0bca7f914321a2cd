"""Correlated noise with real processes: a job to its end, and a member that is killed while its vector leaves.

Then a home whose noise was put back, and a copy of a home.
"""

import json
import shutil

import pytest

from edge_client.ledger.chain import Stepped
from edge_client.ledger.ledger import ledger_path
from edge_client.ledger.store import reading
from learning.accounting.events import SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.mechanisms.banded import best_coefficients
from tests.support.processes import (
    PATIENCE,
    Proxy,
    behind,
    running_federation,
    succeed,
)

pytestmark = pytest.mark.timeout(600)

MEMBERS = ("north", "east", "south")
# Nine steps use an example three times, and so do twelve: there is room for one round that is repeated.
ROUNDS, STEPS, BAND, EXAMPLES, LOT = 3, 3, 4, 360, 40
EVENT = SampledGaussian(multiplier=3.0, rate=BAND * LOT / EXAMPLES, steps=3)
MECHANISM = (
    f'[mechanism]\nname = "dp-sgd"\nnoise_multiplier = 3.0\nlot = {LOT}\nsteps = {STEPS}\n'
    f"coefficients = {list(best_coefficients(BAND, ROUNDS * STEPS))}\n"
)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("correlated")) as running:
        running.enrol(*MEMBERS, policy="schema = 1\n")
        yield running


def start(federation, name, job):
    federation.data(name, EXAMPLES)
    return federation.start(name, "--job", job, "--data-name", job, "--until-finished")


def steps_of(federation, name, job):
    """The step counts in a member's ledger, and the events that it was charged."""
    from edge_client.ledger.history import records_of, replayed

    with reading(ledger_path(federation.home(name), job)) as store:
        bodies = [each.body for each in records_of(store)]
        state = replayed(store)
    return [each.through for each in bodies if isinstance(each, Stepped)], [*state.charged]


def test_a_job_to_its_end_with_a_member_killed_while_it_sends(federation):
    job, home = "correlated", federation.home("south")
    federation.job(job, mechanism=MECHANISM, count=ROUNDS, min_members=3, target_members=3)
    address = home / "identity" / "identity.json"
    before = address.read_bytes()
    proxy = Proxy(federation.port)
    try:
        behind(proxy, home)
        # In the middle of the first masked vector.
        proxy.stall_after = 130_000
        victim = start(federation, "south", job)
        others = [start(federation, name, job) for name in ("north", "east")]
        assert proxy.stalled.wait(PATIENCE)
        victim.kill()
        # The steps of the first round may have left. The rows after them are on the disk.
        assert steps_of(federation, "south", job) == ([STEPS], [EVENT])
        noise = home / "noise" / job / f"{job}.noise"
        header = json.loads(noise.read_bytes().partition(b"\n")[0])
        assert (header["step"], header["rows"]) == (STEPS, BAND - 1)
        again = start(federation, "south", job)
        again.wait_for("ledger_recovered", job=job, round=1, kept="charged")
        proxy.cut()
        detail = federation.finished(job)
        assert [each.process.wait(timeout=PATIENCE) for each in (again, *others)] == [0, 0, 0]
    finally:
        proxy.close()
        address.write_bytes(before)
    assert detail.job.version_number == ROUNDS
    expected = epsilon_counted([EVENT], Limit(8.0, 1e-6))
    for name in MEMBERS:
        words = ("--home", federation.home(name), "--data-name", job)
        shown = json.loads(succeed("edge_client", "ledger", "show", *words, "--json").splitlines()[0])
        assert shown["spent"]["epsilon"] == pytest.approx(expected, rel=1e-3)
        succeed("edge_client", "ledger", "verify", *words)
        through, events = steps_of(federation, name, job)
        # One event for the whole job, however many rounds and attempts. No step twice, and none left out.
        assert events == [EVENT]
        assert through == [STEPS * (number + 1) for number in range(len(through))]
        assert ROUNDS - 1 <= len(through) <= ROUNDS + 1
    # The job is over, and so is its noise.
    assert not noise.exists()


def test_a_home_whose_noise_was_put_back_takes_no_more_steps(federation):
    job, home = "put-back", federation.home("east")
    federation.job(job, mechanism=MECHANISM, count=30, min_members=3, target_members=3)
    noise = home / "noise" / job / f"{job}.noise"
    first = start(federation, "east", job)
    others = [start(federation, name, job) for name in ("north", "south")]
    federation.wait_for(job, lambda detail: detail.job.version_number >= 1)
    first.stop()
    through, _ = steps_of(federation, "east", job)
    assert through
    # As if the folder came from a snapshot before the first round.
    shutil.rmtree(noise.parent)
    again = start(federation, "east", job)
    lost = again.wait_for("noise_lost", job=job)
    assert "put back the newest copy" in lost["detail"]
    again.wait_for("declined", job=job)
    assert steps_of(federation, "east", job)[0] == through
    for each in (again, *others):
        each.stop()
