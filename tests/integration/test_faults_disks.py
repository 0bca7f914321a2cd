"""Full and read-only disks on either side: the log says what is wrong, no uncharged vector leaves, no version is lost,
and everything continues when there is room again.
"""

import json

import pytest

from tacit.reason import Reason
from tacit.v1 import operator_pb2 as pb
from tests.support.besieged import Besieged, attempts
from tests.support.processes import command
from tests.support.small_disk import SmallDisk, needs_small_disks
from toolkit.console import ExitCode

pytestmark = needs_small_disks

STEADY = ("north", "east", "south")
MEMBERS = (*STEADY, "west")
MEBIBYTE = 2**20
# What matters here is that noise is charged, not how much. Light members have a hundred examples.
NOISY = 'name = "gaussian-update"\nnoise_multiplier = 40.0\nclip = 1.0\nlot = 64\nsampling = "poisson"'
POLICY = 'schema = 1\nmechanisms = ["none", "gaussian-update"]\n'


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    running = Besieged(tmp_path_factory.mktemp("federation"))
    disks = []
    try:
        running.enrol(*MEMBERS, policy=POLICY)
        home = running.home("west")
        # Each kind of file that west writes has its own disk, so that each disk can be full by itself.
        disks.append(SmallDisk(home, 8 * MEBIBYTE))
        running.disks = {"journal": disks[0]}  # type: ignore[attr-defined]
        for name, size in (("ledgers", 4 * MEBIBYTE), ("receipts", 8 * MEBIBYTE), ("cache", 32 * MEBIBYTE)):
            disks.append(SmallDisk(home / name, size))
            running.disks[name] = disks[-1]  # type: ignore[attr-defined]
        for name in MEMBERS:
            running.light(name).wait_for("connected")
        yield running
    finally:
        running.close()
        for disk in reversed(disks):
            disk.close()


@pytest.fixture
def west(federation):
    """The member whose disks are small."""
    (member,) = [each for each in federation.processes if each.name == "west"]
    yield member
    federation.order("west")
    assert member.process.poll() is None


def sent(federation, job):
    """The attempts of a job in which west sent its whole vector, according to its own log."""
    lines = map(json.loads, (federation.folder / "west.log").read_text().splitlines())
    return [
        line["attempt"]
        for line in lines
        if line["event"] == "masked_vector_sent" and line["attempt"].startswith(f"{job}/")
    ]


def lost(detail, member):
    """The phases and reasons of a member's dropouts in a job's first attempt."""
    return [(each.phase, each.reason) for each in attempts(detail)[0].dropouts if each.member == member]


@pytest.mark.parametrize(
    ("disk", "halted", "event", "phase"),
    [
        # In order: before preparation, before west joins the first attempt, before its vector is charged.
        pytest.param("cache", "", "preparation_refused", "", id="cache"),
        pytest.param("ledgers", "", "ledger_failing", "", id="ledger-reserve"),
        pytest.param("journal", "", "journal_failing", "advertise", id="journal"),
        pytest.param("ledgers", "advertise", "ledger_failing", "mask", id="ledger-charge"),
        pytest.param("receipts", "advertise", "ledger_failing", "mask", id="receipt"),
    ],
)
def test_a_member_with_a_full_disk_sits_out_and_returns(federation, west, request, disk, halted, event, phase):
    job = f"full-{request.node.callspec.id}"
    full = federation.disks[disk]
    if disk == "cache":
        for path in full.folder.iterdir():
            # Leave nothing that could be deleted to make room.
            path.unlink()
    if halted:
        # West has prepared and reserved, and has not answered yet.
        federation.order("west", "halt", halted)
        federation.light_job(job, count=10_000, embedding=8, mechanism=NOISY)
        west.wait_for("halted", phase=halted)
        full.fill()
        federation.order("west")
    else:
        full.fill()
        federation.light_job(job, count=10_000, embedding=8, mechanism=NOISY)
    line = json.dumps(west.wait_for(event))
    assert any(words in line for words in ("cannot be written", "is full")), line
    detail = federation.wait_for(job, lambda detail: detail.job.version_number >= 2)
    # West is in none of the versions published meanwhile, and has sent nothing.
    assert all("west" not in attempt.survivors for attempt in attempts(detail))
    assert sent(federation, job) == []
    assert lost(detail, "west") == ([(phase, Reason.REASON_LEDGER_FAILING)] if phase else [])
    full.empty()
    federation.wait_for(job, lambda detail: any("west" in attempt.survivors for attempt in attempts(detail)))
    federation.abort(job)
    federation.sound(job, MEMBERS, rounding=1.0)
    # Every vector sent since then was charged and has its receipt.
    home = federation.home("west")
    for name in sent(federation, job):
        assert (home / "receipts" / job / f"{name.split('/')[1]}.sent.json").exists()
    verified = command("edge_client", "ledger", "verify", "--home", home)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_a_full_disk_clears_the_cache_and_costs_no_round(federation, west):
    cache = federation.disks["cache"]
    # The disk is full: files of earlier jobs, and no free byte.
    (cache.folder / ("0" * 64)).write_bytes(bytes(MEBIBYTE))
    cache.fill()
    federation.light_job("room-is-made", count=100_000, embedding=8)
    west.wait_for("cache_cleared")
    federation.wait_for("room-is-made", lambda detail: any("west" in each.survivors for each in attempts(detail)))
    assert not (cache.folder / ("0" * 64)).exists()
    cache.empty()
    federation.abort("room-is-made")
    federation.sound("room-is-made", MEMBERS)


def test_a_member_with_a_read_only_cache_sits_out_and_returns(federation, west):
    disk = federation.disks["cache"]
    disk.read_only()
    federation.light_job("read-only", count=100_000, embedding=8)
    assert "Read-only" in west.wait_for("preparation_refused")["why"]
    federation.goes_on("read-only")
    disk.read_only(False)
    federation.wait_for("read-only", lambda detail: any("west" in each.survivors for each in attempts(detail)))
    federation.abort("read-only")
    federation.sound("read-only", MEMBERS)


@pytest.mark.parametrize("state", ["full", "read-only"])
def test_a_member_started_on_an_unwritable_disk_says_so(federation, tmp_path, state):
    name = f"started-{state}"
    federation.enrol(name, policy=POLICY)
    home = federation.home(name)
    disk = SmallDisk(home, MEBIBYTE)
    try:
        disk.fill() if state == "full" else disk.read_only()
        done = command("edge_client", "run", "--home", home, "--data", federation.data(name))
        assert done.returncode in (ExitCode.USAGE, ExitCode.REFUSED), done.stderr
        assert "Traceback" not in done.stderr
        assert str(home) in done.stderr
        assert "space" in done.stderr or "rights" in done.stderr
    finally:
        disk.close()


# ---- the coordinator's ----------------------------------------------------------------------------------------------


@pytest.fixture
def cramped(tmp_path):
    """A coordinator whose folder lies on a small disk, and three members."""
    disk = SmallDisk(tmp_path / "federation", 24 * MEBIBYTE)
    running = Besieged(tmp_path)
    running.disk = disk  # type: ignore[attr-defined]
    try:
        running.enrol(*STEADY, policy=POLICY)
        for name in STEADY:
            running.light(name)
        yield running
    finally:
        running.close()
        disk.close()


# The first event depends on what the coordinator was about to write.
FAILING = ("job_failed", "compute_failed", "spool_failing", "storage_failed")


def recovers(federation, job):
    """Checks that the job continues, if necessary after the operator resumes it, as docs/operations.md says."""
    before = federation.status(lambda jobs: job in jobs)[job].version_number
    seen = federation.status(
        lambda jobs: jobs[job].version_number >= before + 2 or jobs[job].status == pb.JOB_STATUS_PAUSED
    )[job]
    if seen.status == pb.JOB_STATUS_PAUSED:
        assert seen.reason == Reason.REASON_INTERNAL
        federation.operator("job", "resume", job)
        federation.goes_on(job)


def test_a_coordinator_with_a_full_disk_recovers(cramped):
    cramped.light_job("cramped", count=100_000, embedding=16, deadlines={"mask": 5})
    cramped.status(lambda jobs: jobs["cramped"].version_number >= 2)
    cramped.disk.fill()
    cramped.coordinator.wait_for(*FAILING)
    # The coordinator still answers and shows what it had announced.
    before = cramped.show("cramped").job.version_number
    assert before >= 2
    cramped.disk.empty()
    recovers(cramped, "cramped")
    # Killed while the disk is full, it comes back with every announced version once there is room.
    cramped.disk.fill()
    cramped.coordinator.wait_for(*FAILING)
    announced = cramped.show("cramped")
    cramped.coordinator.kill()
    cramped.disk.empty()
    cramped.serve()
    recovers(cramped, "cramped")
    cramped.abort("cramped")
    detail = cramped.sound("cramped", STEADY)
    digests = [each.digest for each in detail.versions]
    assert [each.digest for each in announced.versions] == digests[: len(announced.versions)]
