"""Privacy with real processes: an example of every mechanism, a member at its limit, crashes, and old ledgers."""

import json
import shutil

import pytest

from learning.accounting.calibration import repeated
from learning.accounting.events import DiscreteGaussianSum, Laplace, SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from secure_agg import Grid
from tests.support.passports import by_openssl, party_of, refused_after_changes, verified
from tests.support.processes import (  # type: ignore[attr-defined]
    PATIENCE,
    ROOT,
    Proxy,
    behind,
    command,
    running_federation,
    succeed,
    within_patience,
)
from tests.support.sweep import sweep
from toolkit.console import ExitCode

MEMBERS = ("north", "east", "south")
JOBS = ROOT / "examples" / "mechanisms"
EXAMPLES = 360
DELTA = 1e-6
VALUES = 127_078

# By job: its rounds, and the event that the ledger of a member with 360 examples must charge for each round.
GRID = Grid(clip=1.0, noise_multiplier=8.0, honest=2, values=VALUES, members=4)
COSTS = {
    "dp-sgd": (5, SampledGaussian(multiplier=2.0, rate=64 / EXAMPLES, steps=8)),
    "gaussian-update": (5, SampledGaussian(multiplier=2.0, rate=64 / EXAMPLES)),
    "laplace-update": (5, Laplace(epsilon=1.0)),
    "distributed-gaussian": (
        4,
        DiscreteGaussianSum(honest=1, std=GRID.std, distance=GRID.distance(replaced=True), values=VALUES),
    ),
}


def epsilon(job, rounds):
    _, event = COSTS[job]
    return epsilon_counted([repeated(event, rounds)], Limit(8.0, DELTA))


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("privacy")) as running:
        # A policy with nothing but its schema: the defaults hold, which require noise and limit epsilon to 8.
        running.enrol(*MEMBERS, policy="schema = 1\n")
        yield running


@pytest.fixture(autouse=True)
def _members_end(federation):
    yield
    for process in federation.processes[:]:
        if process is not federation.coordinator:
            process.end()
            federation.processes.remove(process)


def start(federation, name, job, *more):
    federation.data(name, EXAMPLES)
    return federation.start(name, "--job", job, "--data-name", job, "--until-finished", *more)


def ledger(federation, name, job):
    """The output of `edge_client ledger show --json` for a member's data of that name."""
    shown = succeed("edge_client", "ledger", "show", "--home", federation.home(name), "--data-name", job, "--json")
    return json.loads(shown.splitlines()[0])


def attempts(detail):
    return [attempt for each in detail.rounds for attempt in each.attempts]


@pytest.mark.parametrize("job", sweep(COSTS, "dp-sgd", "distributed-gaussian"))
def test_the_example_job_of_each_mechanism_is_charged_correctly(federation, job):
    rounds, _ = COSTS[job]
    federation.create(JOBS / f"{job}.toml")
    members = [start(federation, name, job) for name in MEMBERS]
    detail = federation.finished(job)
    assert [member.process.wait(timeout=PATIENCE) for member in members] == [0, 0, 0]
    assert detail.job.version_number == rounds
    assert [attempt.outcome for attempt in attempts(detail)] == ["published"] * rounds
    # The sums held no training metrics.
    assert not detail.job.HasField("training")
    expected = epsilon(job, rounds)
    for name in MEMBERS:
        assert ledger(federation, name, job)["spent"]["epsilon"] == pytest.approx(expected, rel=1e-3)
        succeed("edge_client", "ledger", "verify", "--home", federation.home(name), "--data-name", job)
        receipts = [
            json.loads(path.read_bytes()) for path in sorted((federation.home(name) / "receipts" / job).glob("*.json"))
        ]
        assert {receipt["outcome"] for receipt in receipts} == {"sending", "published"}
        assert len([receipt for receipt in receipts if receipt["outcome"] == "published"]) == rounds
    told = federation.metric("tacit_coordinator_privacy_epsilon_largest", job=job)
    assert told == pytest.approx(expected, rel=1e-3)


def test_the_passport_of_a_job_verifies_offline_and_shows_every_changed_byte(federation, tmp_path):
    """Uses the job that the first of the tests above finished."""
    job, out, ours = "dp-sgd", tmp_path / "model", party_of(federation)
    federation.operator("export", job, "--out", out)
    passport = out / "passport.json"
    words = ("coordinator", "passport", "verify", passport, "--federation", ours)
    said = verified(passport, ours, out)
    assert (said["job"], len(said["versions"])) == (job, 6)
    newest, cost = said["versions"][5], epsilon(job, 5)
    assert (newest["cohort"], newest["summed"], newest["mechanism"]) == (3, 3, "dp-sgd")
    assert newest["spend"]["reported"] == 3
    assert cost <= newest["spend"]["largest_epsilon"] <= cost + 1
    # Each member's own receipt, which it signed, names the same sums.
    for name in MEMBERS:
        receipts = [json.loads(each.read_bytes()) for each in (federation.home(name) / "receipts" / job).glob("*.json")]
        sums = {each["attempt"]: each["result"] for each in receipts if each["outcome"] == "published"}
        assert sums == {each["attempt"]: each["sum"] for each in said["versions"][1:]}
    # openssl and jq alone come to the same verdict.
    done = by_openssl(passport, ours, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["the passport holds"]), done
    assert by_openssl(passport, "0" * 64, tmp_path).returncode != 0
    whole, edited = passport.read_bytes(), tmp_path / "edited.json"
    refused_after_changes(passport, ours, edited, seed=5)
    edited.write_bytes(whole.replace(b'\\"summed\\":3', b'\\"summed\\":9', 1))
    assert "version-1 was changed" in by_openssl(edited, ours, tmp_path).stdout
    page = tmp_path / "page.html"
    succeed("coordinator", "passport", "page", passport, "--federation", ours, "--out", page)
    assert newest["version"] in page.read_text()
    assert "<script" not in page.read_text()
    # A later passport names the folder as well, and a changed file in it.
    federation.operator("passport", job, "--export", out, "--out", tmp_path / "later.json")
    (out / "labels.json").write_text("[]")
    later = command(*words[:3], tmp_path / "later.json", *words[4:], "--export", out)
    assert (later.returncode, "labels.json" in later.stderr) == (ExitCode.FAILED, True)
    # Libraries read this file by its name.
    (out / "adapter_config.json").write_text("{}")
    more = command(*words[:3], tmp_path / "later.json", *words[4:], "--export", out)
    assert (more.returncode, "adapter_config.json: it is not among" in more.stderr) == (ExitCode.FAILED, True)
    over = command("coordinator", "passport", "page", passport, "--federation", ours, "--out", passport)
    assert (over.returncode, "exists already" in over.stderr) == (ExitCode.USAGE, True)
    absent = command("coordinator", "passport", "absent", "--dir", federation.dir)
    assert (absent.returncode, "no job named absent" in absent.stderr) == (ExitCode.NOT_FOUND, True)


def test_the_default_policy_declines_a_job_without_noise(federation):
    federation.job("silent")
    member = federation.start("north", "--job", "silent", "--data-name", "silent")
    declined = member.wait_for("declined", job="silent")
    assert "mechanisms" in declined["detail"]
    federation.operator("job", "abort", "silent", "--yes")


def test_a_member_at_its_limit_stops_and_the_others_continue(federation):
    federation.enrol("west", policy="schema = 1\nepsilon = 2.7\nreport_epsilon = false\n")
    federation.create(renamed(federation, "dp-sgd", "limited"))
    members = {name: start(federation, name, "limited") for name in (*MEMBERS, "west")}
    west = members["west"]
    west.wait_for("declined", job="limited")
    # West logs it before the coordinator has read its message.
    within_patience(lambda: federation.metric("tacit_coordinator_members_budget_spent", job="limited") == 1)
    detail = federation.finished("limited")
    assert all(member.process.wait(timeout=PATIENCE) == 0 for member in members.values())
    took_part = [set(attempt.survivors) for attempt in attempts(detail)]
    contributed = sum("west" in survivors for survivors in took_part)
    # By the gate's accounting, epsilon 2.7 admits three rounds and no fourth.
    assert contributed == 3
    # West stops contributing for good. The others continue.
    assert [("west" in survivors) for survivors in took_part] == [True] * contributed + [False] * (5 - contributed)
    spent = ledger(federation, "west", "limited")
    assert epsilon("dp-sgd", 3) <= 2.7 < epsilon("dp-sgd", 4)
    assert spent["spent"]["epsilon"] == pytest.approx(epsilon("dp-sgd", contributed), rel=1e-3)
    # West keeps back what it spent, and the others report it with each sum.
    said = federation.operator("audit", "show", "--subject", "limited", "--json").splitlines()
    ended = [each["fields"] for each in map(json.loads, said) if each["kind"] == "attempt_ended"]
    assert [(len(each["survivors"]), each["reported"]) for each in ended] == [(4, 3)] * 3 + [(3, 3)] * 2
    # West still receives models: its cache holds the version from which the last round started.
    newest = [attempt.new_version.hex() for attempt in attempts(detail)][-2]
    assert any(newest in path.name for path in (federation.home("west") / "cache").rglob("*"))


def renamed(federation, job, name):
    """A copy of the example's job file under another name."""
    path = federation.folder / f"{name}.toml"
    text = (JOBS / f"{job}.toml").read_text().replace(f'name = "{job}"', f'name = "{name}"', 1)
    path.write_text(text.replace("../desk", str(JOBS.parent / "desk")))
    return path


def test_a_member_killed_while_sending_is_charged_and_continues(federation):
    job = "killed"
    federation.create(renamed(federation, "gaussian-update", job))
    home = federation.home("south")
    address = home / "identity" / "identity.json"
    before = address.read_bytes()
    proxy = Proxy(federation.port)
    try:
        behind(proxy, home)
        # In the middle of the first masked vector, which has 222,387 bytes.
        proxy.stall_after = 130_000
        victim = start(federation, "south", job)
        others = [start(federation, name, job) for name in ("north", "east")]
        assert proxy.stalled.wait(PATIENCE)
        victim.kill()
        again = start(federation, "south", job)
        again.wait_for("ledger_recovered", job=job, round=1, kept="charged")
        proxy.cut()
        federation.finished(job)
        assert again.process.wait(timeout=PATIENCE) == 0
        assert [other.process.wait(timeout=PATIENCE) for other in others] == [0, 0]
    finally:
        proxy.close()
        address.write_bytes(before)
    # One event for the killed attempt, and one for each published round that this member is in.
    detail = federation.show(job)
    published = sum("south" in attempt.survivors for attempt in attempts(detail) if attempt.outcome == "published")
    assert ledger(federation, "south", job)["spent"]["epsilon"] == pytest.approx(
        epsilon("gaussian-update", published + 1), rel=1e-3
    )
    succeed("edge_client", "ledger", "verify", "--home", home, "--data-name", job)


def test_a_ledger_replaced_by_an_older_copy_is_detected(federation):
    job, home = "rolled-back", federation.home("east")
    federation.create(renamed(federation, "gaussian-update", job))
    first = start(federation, "east", job)
    first.wait_for("connected")
    first.stop()
    old = federation.folder / "old"
    for folder in ("ledgers", "pins"):
        shutil.copytree(home / folder, old / folder)
    members = [start(federation, name, job) for name in MEMBERS]
    federation.finished(job)
    assert [member.process.wait(timeout=PATIENCE) for member in members] == [0, 0, 0]

    def run():
        words = ("edge_client", "run", "--data", federation.data("east"), "--home", home, "--data-name", job)
        done = command(*words, "--log-format", "json")
        assert done.returncode == ExitCode.REFUSED
        return done.stderr

    def copy_back(folder):
        shutil.rmtree(home / folder)
        shutil.copytree(old / folder, home / folder)

    copy_back("ledgers")
    assert "an older copy replaced it" in run()
    # With an old pin too, the receipts show it. Without receipts, the coordinator still remembers.
    copy_back("pins")
    assert "is the receipt of record" in run()
    shutil.rmtree(home / "receipts" / job)
    assert "the coordinator heard of record" in run()
