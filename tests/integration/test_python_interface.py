"""`tacit.local_federation`: a real coordinator and members from Python, to an exported model, and nothing is left."""

import asyncio
import contextlib
import hashlib
import json
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime

import numpy as np
import psutil
import pytest
import torch
from typer.testing import CliRunner

import tacit
from coordinator.cli import app
from coordinator.cli.common import operator_stub
from coordinator.config import load_config
from coordinator.rounds.in_memory import InMemory
from edge_client.approval.desk import Desk
from edge_client.approval.folder import ApprovalFolder
from export.bundle import make_job_bundle, read_job_bundle
from learning.text.examples import DataInvalid, Example
from simulation import virtual_members
from tacit.blobs import fetch_blob
from tacit.job import JobSpec
from tacit.token import JoinToken
from tacit.vector import layout_of
from tacit_api import local
from tests.support.processes import PATIENCE
from tests.support.stewards import MARY
from tests.support.toy_jobs import spec_of
from tests.support.toy_texts import LIST
from tests.support.tried_jobs import TOML, written_job, written_rows
from toolkit.console import CommandFailed, ExitCode

NONE = (
    TOML.split("# Found by the operator.")[0]
    + "[training]\nlearning_rate = 0.05\n[rounds]\ncount = 2\nmin_members = 3\n"
)


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    with tacit.local_federation(("north", "east", "south"), folder=tmp_path_factory.mktemp("town") / "here") as found:
        yield found


def test_a_job_from_rows_to_a_model(town, tmp_path):
    job, _ = written_job(tmp_path, NONE + '[average]\nkind = "tail"\nlast = 2\n')
    rows = written_rows(120)
    parts = {name: [(row["text"], row["label"]) for row in rows[at::3]] for at, name in enumerate(town.members)}
    with torch_threads(2):
        done = town.train(job, parts)
        # Each member trained with one. What a thread that comes later gets is what the program had.
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
    assert (done["status"], done["version_number"]) == ("finished", 2)
    # A ledger of that name is in each home: a member in a thread is a member.
    assert all(any((member.home / "receipts").rglob("*.json")) for member in town.members.values())
    model = tacit.load(town.coordinator.export("tried", tmp_path / "model"))
    assert model.predict(["the sun"])[0].label in ("day", "night")
    # It says where it comes from, as what the command writes does.
    _exported(town, "tried", tmp_path / "theirs")
    for file in ("README.md", "model.onnx"):
        assert (tmp_path / "model" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| version | 2, `" in card
    assert "| rounds | 2 of 2 |" in card
    assert "3 in the last |" in card
    mean = town.coordinator.export("tried", tmp_path / "mean", version="average")
    assert "the average of versions 1 to 2 (equal weights)" in (mean / "README.md").read_text()
    assert json.loads((mean / "bundle.json").read_text())["model"]["averaged"] == [1, 2]
    assert [each["name"] for each in town.coordinator.jobs()] == ["tried"]
    assert {each["name"] for each in town.coordinator.members()} == set(town.members)


@contextlib.contextmanager
def torch_threads(count):
    """A program that has set torch's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _exported(town, job, out):
    words = ["export", job, "--out", out, "--no-passport", "--operator", town.coordinator.folder]
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0


def test_a_model_that_writes_text_and_labels_none_is_refused(town, tmp_path):
    """By export and by evaluate, with the command that has a use for it."""
    (tmp_path / "words.txt").write_text("\n".join(LIST) + "\n")
    make_job_bundle(spec_of(name="rhymes"), tmp_path, tmp_path / "bundle")
    town.coordinator.create(tmp_path / "bundle")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"text": "a sun", "label": "day"}) + "\n")
    says = "job rhymes trains an rvae, .* sample its texts with `coordinator sample rhymes --out FOLDER`"
    with pytest.raises(CommandFailed, match=says) as failed:
        town.coordinator.export("rhymes", tmp_path / "model")
    assert failed.value.code is ExitCode.USAGE
    words = ["evaluate", "rhymes", "--data", data, "--operator", town.coordinator.folder]
    with pytest.raises(CommandFailed, match=says) as failed:
        CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert failed.value.code is ExitCode.USAGE


def test_a_place_that_holds_something_else_is_refused_before_anything_is_fetched(town, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CommandFailed, match=r"thesis\.txt") as failed:
        town.coordinator.export("nothing", tmp_path)
    assert failed.value.code is ExitCode.USAGE


def test_an_invitation_lasts_as_long_as_the_coordinator_says(town):
    hours = load_config(town.folder / "coordinator").token_hours
    for lasts, more in ((hours, {}), (2.0, {"valid_seconds": 7200})):
        left = JoinToken.parse(town.coordinator.invite("guest", **more)).expires - datetime.now(UTC)
        assert lasts - 0.5 < left.total_seconds() / 3600 <= lasts


METHODS = {
    "fedavg": {"name": "fedavg"},
    "fedprox": {"name": "fedprox", "mu": 0.5},
    "lg-fedavg": {"name": "lg-fedavg", "private": ["embedding"]},
    "fedrecon": {"name": "fedrecon", "tokens": ["sun", "moon"]},
}


def blob(town, digest):
    """What the coordinator holds under this digest."""

    async def fetch():
        data = bytearray()
        async with operator_stub(town.coordinator.folder) as stub:
            await fetch_blob(stub.FetchBlob, digest, data)
        return bytes(data)

    return asyncio.run(fetch())


def test_a_federation_and_a_simulation_agree_up_to_the_rings_grid(town, tmp_path, monkeypatch):
    """For each method; tests/integration/test_fedvocab.py has the fifth. Members train in turn on the same rows."""
    rows = written_rows(60)
    parts = [[(row["text"], row["label"]) for row in rows[at::3]] for at in range(3)]
    base = JobSpec.from_toml(written_job(tmp_path, NONE)[0]).model_dump(mode="json", exclude_none=True)
    # No member has more rows, so the grid is as fine as it can be.
    base["aggregation"] |= {"max_weight": 20}
    bundles = {}
    for name, method in METHODS.items():
        spec = JobSpec.model_validate(base | {"name": f"equal-{name}", "method": method})
        make_job_bundle(spec, tmp_path, tmp_path / name)
        bundles[name] = read_job_bundle(tmp_path / name)
        town.coordinator.create(tmp_path / name)
    with ExitStack() as running:
        for member, own in zip(town.members.values(), parts, strict=True):
            running.enter_context(member.start(own, ledger="equal", jobs=("equal-*",), until_finished=False))
        for name in METHODS:
            assert town.coordinator.finished(f"equal-{name}")["version_number"] == 2
    held = [virtual_members.Held([Example(*row) for row in own], (), ()) for own in parts]
    for name, bundle in bundles.items():
        job = bundle.document
        digests = [each["digest"] for each in town.coordinator.job(job.name)["versions"]]
        versions = [bundle.manifest.decode(blob(town, bytes.fromhex(digest))) for digest in digests]
        world = virtual_members.World(bundle, held, (), tmp_path / f"states-{name}")

        def seed_of(seed, name, number, place, digests=digests):
            """The seed as `Preparer` derives it, from the version and the member's name."""
            public = f"tacit/training/v1/{seed}/{name}/{digests[number - 1]}/{list(town.members)[place]}".encode()
            return int.from_bytes(hashlib.sha256(public).digest()[:7], "big")

        monkeypatch.setattr(virtual_members, "seed_of", seed_of)
        # Each member's values are rounded at random to a neighbour on the grid, so a mean moves by at most one step.
        bound = job.aggregation.max_weight / layout_of(job, 3).segments[0].scale / len(parts[0])
        bound += float(np.spacing(np.float32(np.abs(versions).max())))
        with virtual_members.crew_of(world, 1) as crew:
            for number in (1, 2):
                found = virtual_members.play_round(
                    crew, versions[number - 1].copy(), number, range(3), server=InMemory()
                )
                assert np.abs(found - versions[number]).max() <= bound
                assert np.abs(versions[number] - versions[number - 1]).max() > 20 * bound


def test_the_same_calls_in_an_event_loop(town):
    async def work():
        coordinator = tacit.AsyncCoordinator(town.coordinator.folder)
        async for status in coordinator.watch():
            return status, await coordinator.status()

    first, second = asyncio.run(work())
    assert first["federation"] == second["federation"] == town.coordinator.status()["federation"]
    assert next(iter(town.coordinator.watch()))["federation"] == first["federation"]


def test_failures_are_sentences(town, tmp_path):
    with pytest.raises(CommandFailed, match="nothing") as failed:
        town.coordinator.finished("nothing")
    assert failed.value.code is ExitCode.NOT_FOUND
    with pytest.raises(CommandFailed, match="is not an operator's folder"):
        tacit.Coordinator(tmp_path)
    with pytest.raises(CommandFailed, match=r"edge_client enrol"):
        tacit.Member(tmp_path / "nobody").run([("a", "day")], ledger="own")
    with pytest.raises(ValueError, match="there is no member 'west'"):
        town.train(JobSpec.from_toml(written_job(tmp_path, NONE)[0]), {"west": []})
    with pytest.raises(CommandFailed, match="token"):
        tacit.Member.enrol(tmp_path / "thief", "no token")


def test_rows_that_cannot_be_read_create_no_job(town, tmp_path):
    """Names are never used twice, so the job could not be created again with better rows."""
    job, _ = written_job(tmp_path, NONE.replace('"tried"', '"unread"'))
    rows = [(row["text"], row["label"]) for row in written_rows(60)]
    parts = {name: rows[at::3] for at, name in enumerate(town.members)}
    with pytest.raises(DataInvalid, match=r"^east: the data, row 1: no label in column 'label'"):
        town.train(job, {**parts, "east": [("the sun", None)]})
    with pytest.raises(TypeError, match="labels"):
        town.train(job, parts, labels="when")
    assert "unread" not in {each["name"] for each in town.coordinator.jobs()}


def test_a_job_that_too_few_take_part_in_fails_at_once_and_goes_on_later(town, tmp_path):
    """Without the members' names, the coordinator would wait a training window for others: ten minutes."""
    job, _ = written_job(tmp_path, NONE.replace('"tried"', '"refused"'))
    rows = [(row["text"], row["label"]) for row in written_rows(60)]
    parts = {name: rows[at::3] for at, name in enumerate(town.members)}
    willing, policy = (tmp_path / "willing.toml"), town.members["east"].home / "policy.toml"
    willing.write_text(policy.read_text())
    policy.write_text('schema = 1\nmechanisms = ["dp-sgd"]\n')
    with pytest.raises(CommandFailed, match="needs 3 members and has 2; east declined: mechanisms: ") as failed:
        town.train(job, parts)
    assert failed.value.code is ExitCode.FAILED
    with pytest.raises(CommandFailed, match="refused needs 3 members and has 2"):
        town.coordinator.finished("refused", members=("north", "south"))
    # A name that nobody has would be waited for.
    there = sorted(each["name"] for each in town.coordinator.members())
    assert {"east", "north", "south"} <= set(there)
    with pytest.raises(ValueError, match=f"there is no member 'nroth'; there are {', '.join(there)}"):
        town.coordinator.finished("refused", members=("nroth", "east", "south"))
    policy.write_text(willing.read_text())
    with ExitStack() as running:
        for name, own in parts.items():
            member = town.members[name].start(own, ledger="local", jobs=("refused",), until_finished=False)
            running.enter_context(member)
        assert town.coordinator.finished("refused")["version_number"] == 2


def test_stewards_read_a_dry_run_of_the_programs_rows(town, tmp_path, monkeypatch):
    job, _ = written_job(tmp_path, NONE.replace('"tried"', '"asked"'))
    member, ask, asked = town.members["south"], Desk.ask, threading.Event()

    async def waited_for(self, *given):
        await ask(self, *given)
        asked.set()

    monkeypatch.setattr(Desk, "ask", waited_for)
    policy = member.home / "policy.toml"
    before = policy.read_text()
    policy.write_text(before + f'jobs = "ask"\nstewards = {{ mary = "{MARY.public.hex()}" }}\n')
    rows = [{"story": row["text"], "when": row["label"]} for row in written_rows(30)]
    town.coordinator.create(job)
    try:
        with member.start(rows, ledger="asked", jobs=("asked",), until_finished=False, text="story", label="when"):
            assert asked.wait(PATIENCE)
    finally:
        policy.write_text(before)
        town.coordinator.change("asked", "abort")
    request = ApprovalFolder(member.home, "asked", "asked").request()
    assert request.lines[0] == "reads rows in memory: the columns story, when"
    assert any("epsilon" in line for line in request.lines)
    told = request.dry_run()
    assert (told["columns"], told["rows"]) == (["story", "when"], 30)


def test_ctrl_c_ends_a_member_and_then_the_program(town, monkeypatch):
    """Also after an earlier stop, and in a notebook, whose loop runs while the member has a thread."""
    member, begun = town.members["north"], tacit.Member._begun
    member.stop()

    def presses(self, stop):
        begun(self, stop)
        if stop is not None:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    async def in_a_notebook():
        member.run([("the sun", "day")], ledger="pressed", until_finished=False)

    monkeypatch.setattr(tacit.Member, "_begun", presses)
    theirs = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, theirs)
    # A shell lets what it starts in the background ignore SIGINT.
    pressed = signal.signal(signal.SIGINT, signal.default_int_handler)
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            member.run([("the sun", "day")], ledger="pressed", until_finished=False)
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(in_a_notebook())
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, pressed)
        loop.close()
    # It has let go of its home.
    monkeypatch.undo()
    member.start([("the sun", "day")], ledger="pressed").stop()


def test_a_coordinator_does_not_outlive_a_killed_program(tmp_path):
    script = f"""
import sys, tacit
with tacit.local_federation(0, folder={str(tmp_path / "town")!r}):
    print("ready", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"ready\n"
        (coordinator,) = psutil.Process(program.pid).children()
        program.kill()
    assert psutil.wait_procs([coordinator], timeout=30)[0]


@pytest.fixture
def ended(tmp_path):
    """The folder of a federation that ended, and its coordinator's port."""
    with tacit.local_federation(0, folder=tmp_path / "town"):
        pass
    return tmp_path / "town", load_config(tmp_path / "town" / "coordinator").federation_port


def test_a_coordinator_that_still_ends_is_waited_for(ended):
    """As after a kernel was started anew. Until then, its port answers."""
    folder, port = ended
    with socket.create_server(("127.0.0.1", port)) as earlier:

        def ends():
            earlier.accept()[0].close()
            earlier.close()

        thread = threading.Thread(target=ends, daemon=True)
        thread.start()
        with tacit.local_federation(0, folder=folder) as town:
            assert town.coordinator.jobs() == []
        thread.join()


def test_another_program_on_the_port_is_not_taken_for_the_coordinator(ended, monkeypatch):
    folder, port = ended
    monkeypatch.setattr(local, "_ENDS", 0.1)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(CommandFailed, match=f"ended at once: .*port {port} on .* cannot be used") as failed,
        tacit.local_federation(0, folder=folder),
    ):
        pytest.fail("it was taken for the coordinator")
    assert failed.value.code is ExitCode.FAILED


def below(process=None):
    """The processes below this one, with their words.

    Two of the tests' own are none of them: a PostgreSQL, whose workers come and go, and the server of warm commands,
    which also starts those of the tests beside this one.
    """
    found = {}
    for each in (process or psutil.Process()).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(each.cmdline())
            if each.name() != "postgres" and "tests.support.warm" not in words:
                found |= {each.pid: words, **below(each)}
    return found


def test_nothing_is_left_behind(tmp_path):
    before = below()
    with tacit.local_federation(1) as town:
        folder = town.folder
        assert below().keys() - before.keys()
    assert not folder.exists()
    left = below()
    assert not {pid: left[pid] for pid in left.keys() - before.keys()}
