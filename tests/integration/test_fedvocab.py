"""FedVocab with real processes: examples/fedvocab.toml, kill -9, messages, export, noise, and the simulation.

Mutual TLS, secure aggregation, policies that allow what these jobs need beyond the strict default, and a ledger for
each member. North's messages are recorded; east seals its private state with a passphrase, and moves; west is killed
twice.
"""

import asyncio
import hashlib
import json
import os
import random
import shutil
import sys
import tomllib
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations

import grpc
import numpy as np
import pytest

from coordinator.cli.common import operator_stub
from coordinator.config import CoordinatorFolder
from coordinator.rounds.in_memory import InMemory
from coordinator.services.credentials import federation_credentials
from edge_client.identity.enrolment import enrol
from edge_client.identity.home import MemberIdentity
from edge_client.private_store import StoreKey
from edge_client.private_store.upkeep import held, look
from export.bundle import make_job_bundle, read_job_bundle
from learning.accounting.events import SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.text.data import read_examples
from learning.text.tables import entries_of
from learning.text.vocabulary import own_tokenizer
from secure_agg import packed_size
from simulation import virtual_members
from tacit.blobs import fetch_blob, put_blob
from tacit.job import JobSpec
from tacit.method import SPECIAL_ENTRIES
from tacit.v1 import operator_pb2 as pb
from tacit.vector import layout_of
from tests.support.processes import BIN, EXAMPLES, PATIENCE, ROOT, Federation, Process, behind, command, succeed  # type: ignore[attr-defined]
from tests.support.recorder import Canaries, Relay
from toolkit.console import ExitCode

# The first test sets up everything, with a dozen processes.
pytestmark = pytest.mark.timeout(600)

FOUR = ("north", "east", "south", "west")
EIGHT = (*FOUR, "aster", "birch", "cedar", "dill")
JOB, ROWS = "fedvocab", 60
LABELS = ["account_access", "appointment", "billing", "complaint", "directions", "document_request"]
PASSPHRASE = "a heron stands in the reeds"
# Words that only north's data contains.
PLANTED = ("quorvexalim", "mibblethornak", "ostrennyvule", "wexcomblyfurt")
POLICY = """schema = 1
mechanisms = ["none", "dp-sgd", "gaussian-update"]
shared_parameters = ["encoder.*", "output.*"]
"""
SMALL = '[model]\narchitecture = "bilstm"\nembedding = 8\nhidden = 8\nmax_tokens = 32\n'
PUBLIC = f'[vocabulary]\nkind = "words"\nfile = {json.dumps(str(EXAMPLES / "words.txt"))}\n'
OWN = '[vocabulary]\nkind = "words"\nsize = 300\n'


def rounds_of(count, members):
    return f"[rounds]\ncount = {count}\nmin_members = {members}\n[rounds.deadlines]\ntraining = 300\nreconnect = 5\n"


@dataclass(frozen=True)
class Seen:
    """The private state on a member's disk at one moment."""

    round: int
    staged: int

    @classmethod
    def at(cls, home, job):
        found = held(home, job)
        assert found.header is not None
        return cls(found.header.round, found.staged)


class Town:
    """The federation with its eight members, four of which run from the start."""

    def __init__(self, folder, stack):
        self.folder = folder
        self.running = {}
        # Homes of members that moved.
        self.homes = {}
        self.federation = Federation(folder)
        stack.callback(self.federation.close)
        asyncio.run(self._enrol())
        rows = [json.loads(line) for line in (EXAMPLES / "train.jsonl").open()]
        source = random.Random(5)
        for number, name in enumerate(EIGHT):
            own = [dict(row) for row in rows[ROWS * number : ROWS * (number + 1)]]
            for row in own if name == "north" else ():
                row["text"] = f"{source.choice(PLANTED)} {row['text']}"
            self.data(name).write_text("".join(json.dumps(row) + "\n" for row in own))
        identity = MemberIdentity.load(self.home("north"))
        towards = grpc.ssl_channel_credentials(identity.root_pem, identity.key_pem, identity.certificate_pem)
        credentials = federation_credentials(CoordinatorFolder(self.federation.dir))
        self.relay = Relay(credentials, f"localhost:{self.federation.port}", towards)
        stack.callback(self.relay.close)
        behind(self.relay, self.home("north"))

    async def _enrol(self):
        async with operator_stub(self.federation.dir / "operator") as stub:
            for name in EIGHT:
                asked = pb.InviteMemberRequest(name=name, valid_seconds=3600)
                await enrol(self.home(name), (await stub.InviteMember(asked)).token)
                (self.home(name) / "policy.toml").write_text(POLICY)

    def home(self, name):
        return self.homes.get(name, self.federation.home(name))

    def data(self, name):
        return self.folder / f"{name}.jsonl"

    def start(self, name, *more, support=()):
        """Starts `edge_client run`, or the module of tests.support that `support` names, with its arguments."""
        words = [sys.executable, "-m", f"tests.support.{support[0]}", *support[1:], "--"] if support else []
        words = words or [str(BIN / "edge_client")]
        words += ["run", "--data", str(self.data(name)), "--home", str(self.home(name)), "--log-format", "json", *more]
        with pytest.MonkeyPatch.context() as patch:
            if name == "east":
                patch.setenv("TACIT_PASSPHRASE", PASSPHRASE)
            member = Process(name, words, self.folder / f"{name}.log")
        self.federation.processes.append(member)
        self.running[name] = member
        return member

    def create(self, name, text):
        """Creates a job from this text, in this process."""
        spec = self.folder / f"{name}.toml"
        spec.write_text(f'schema = 1\nname = "{name}"\nlabels = {json.dumps(LABELS)}\n{text}')
        document = make_job_bundle(JobSpec.from_toml(spec), self.folder, self.folder / f"bundle-{name}")

        async def work():
            async with operator_stub(self.federation.dir / "operator") as stub:
                for file in document.files:
                    await put_blob(stub, self.folder / f"bundle-{name}" / file)
                digest = await put_blob(stub, document.canonical())
                await stub.CreateJob(pb.CreateJobRequest(document=digest))

        asyncio.run(work())
        return document

    def change(self, name, change):
        asyncio.run(self._ask(lambda stub: stub.ChangeJob(pb.ChangeJobRequest(name=name, change=change))))

    def declined(self, name):
        """The refusals of a member that the operator sees, by job."""
        members = asyncio.run(self._ask(lambda stub: stub.ListMembers(pb.ListMembersRequest()))).members
        return {each.name: dict(each.declined) for each in members}[name]

    def version(self, digest):
        async def fetch(stub):
            data = bytearray()
            await fetch_blob(stub.FetchBlob, digest, data)
            return bytes(data)

        return asyncio.run(self._ask(fetch))

    async def _ask(self, call):
        async with operator_stub(self.federation.dir / "operator") as stub:
            return await call(stub)

    def state(self, name, job, home=None):
        """The header and the private state that a member keeps."""
        key = StoreKey.from_passphrase(PASSPHRASE) if name == "east" else None
        return look(home or self.home(name), job, key)

    def receipts(self, name, job):
        """The member's receipts of the vectors that it sent, in order."""
        paths = sorted((self.home(name) / "receipts" / job).glob("*.json"))
        return [json.loads(path.read_bytes()) for path in paths]


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    with ExitStack() as stack:
        yield Town(tmp_path_factory.mktemp("fedvocab"), stack)


def attempts(detail):
    return [attempt for each in detail.rounds for attempt in each.attempts]


def vocabulary(state):
    return set(json.loads(state.tokenizer)["model"]["vocab"])


# ---- the example, with a member that is killed -----------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    """What happened while the example's job ran."""

    detail: pb.JobDetail
    before_first: Seen
    after_first: Seen
    shown: dict
    made_at_first: bytes
    discarded: dict
    status: int
    before_second: Seen
    recovered: dict
    after_second: Seen
    sent: object


@pytest.fixture(scope="module")
def story(town):
    federation, home = town.federation, town.home("west")
    halt = town.folder / "halt"
    for name in FOUR[:3]:
        town.start(name)
    west = town.start("west", support=("halting_member", "share", str(halt)))
    federation.create(ROOT / "examples" / "fedvocab.toml")
    federation.wait_for(JOB, lambda detail: detail.job.version_number >= 1)
    # First kill: west has trained and sent nothing more, so no sum holds its update.
    halt.touch()
    west.wait_for("halted", phase="share")
    before_first = Seen.at(home, JOB)
    west.kill()
    halt.unlink()
    after_first = Seen.at(home, JOB)
    shown = json.loads(succeed("edge_client", "private", "show", JOB, "--home", home, "--json"))
    made_at_first = town.state("west", JOB)[1].tokenizer
    # Second kill: west has signed U3 and not yet renamed the file.
    west = town.start("west", support=("killed_keeping", "commit.renaming", "1"))
    discarded = west.wait_for("private_state_recovered", job=JOB)
    status = west.process.wait(timeout=PATIENCE)
    before_second = Seen.at(home, JOB)
    west = town.start("west")
    recovered = west.wait_for("private_state_recovered", job=JOB)
    after_second = Seen.at(home, JOB)
    detail = federation.finished(JOB)
    for name in FOUR:
        town.running[name].wait_for("job_over", job=JOB)
    return Story(
        detail,
        before_first,
        after_first,
        shown,
        made_at_first,
        discarded,
        status,
        before_second,
        recovered,
        after_second,
        town.relay.take(),
    )


def test_a_killed_member_resumes_from_its_last_counted_update(town, story):
    published = [each for each in attempts(story.detail) if each.outcome == "published"]
    assert len(published) == 6
    lost = next(number for number, each in enumerate(published, 1) if "west" not in each.survivors)
    # The state trained in the lost round was staged beside the state of the round before, and was discarded.
    assert story.before_first == story.after_first == Seen(round=lost - 1, staged=1)
    assert (story.shown["round"], story.shown["staged"]) == (lost - 1, 1)
    assert (story.discarded["committed"], story.discarded["token"].partition("-")[0]) == (False, str(lost))
    # The next update was in a sum whose U3 west had signed. It counts, although the process was killed.
    assert story.status == -9
    assert story.before_second == Seen(round=lost - 1, staged=1)
    assert story.recovered["committed"]
    assert story.after_second == Seen(round=lost + 1, staged=0)
    assert [number for number, each in enumerate(published, 1) if "west" not in each.survivors] == [lost]
    # At the end, every member keeps the last round's state, and west still has its first vocabulary.
    for name in FOUR:
        assert Seen.at(town.home(name), JOB) == Seen(round=6, staged=0)
    assert town.state("west", JOB)[1].tokenizer == story.made_at_first


def test_each_member_has_its_own_vocabulary(town, story):
    states = {name: town.state(name, JOB)[1] for name in FOUR}
    for one, other in combinations(FOUR, 2):
        assert len(vocabulary(states[one]) ^ vocabulary(states[other])) > 100
    assert set(PLANTED) <= vocabulary(states["north"])
    shapes = {name: state.arrays["embedding.weight"].shape for name, state in states.items()}
    assert shapes == {name: (len(vocabulary(state)), 64) for name, state in states.items()}
    assert all(state.arrays.keys() == {"embedding.weight"} for state in states.values())


def test_no_part_of_vocabulary_or_embedding_is_sent(town, story):
    bundle = read_job_bundle(town.folder / f"bundle-{JOB}")
    assert bundle.tokenizer is None
    names = [tensor.name for tensor in bundle.manifest.tensors]
    assert names
    assert all(name.startswith(("encoder.", "output.")) for name in names)
    # A sent vector has room for the values of these tensors and four sums, whatever the vocabulary's size.
    layout = layout_of(bundle.document, len(FOUR))
    assert layout.values == bundle.document.values + 4 == 66_826
    uploads = [
        each for each in story.sent.parsed("FederationService/UploadMasked") if each.WhichOneof("part") == "data"
    ]
    assert sum(len(each.data) for each in uploads) == 6 * packed_size(layout.values, layout.bits)
    _, state = town.state("north", JOB)
    canaries, source = Canaries(), random.Random(3)
    for word in PLANTED:
        canaries.text(word, word)
    canaries.windows("the vocabulary", state.tokenizer, source)
    for kind, size in (("<f4", 4), (">f4", 4), ("<f8", 8)):
        data = state.arrays["embedding.weight"].astype(kind).tobytes()
        canaries.windows(f"the embedding, {kind}", data, source, count=200, length=16, align=size)
    for example in read_examples(town.data("north")):
        canaries.text("a text", example.text)
    assert len(canaries) > 5000
    assert canaries.found(story.sent, ()) == []
    # The search would find a leak.
    call, first = story.sent.calls[0], story.sent.messages[0]
    leaked = type(first)(call.number, first.method, first.data + state.arrays["embedding.weight"].tobytes())
    assert canaries.found(type(story.sent)((call,), (leaked,)), ())


def test_a_member_exports_and_predicts_on_its_own_machine(town, story, tmp_path):
    out = tmp_path / "own"
    words = ("--home", town.home("north"), "--data", town.data("north"), "--out", out, "--json")
    # The member's own `edge_client run` is still running.
    assert town.running["north"].process.poll() is None
    done = json.loads(succeed("edge_client", "export", JOB, *words))
    _, state = town.state("north", JOB)
    assert (done["version"], done["private_values"]) == (6, state.arrays["embedding.weight"].size)
    assert done["max_difference"] <= 1e-4
    # Export adapts a copy. The kept state is unchanged.
    assert Seen.at(town.home("north"), JOB) == Seen(round=6, staged=0)
    predicted = succeed("edge_client", "predict", "--bundle", out, "--file", town.data("north"), "--json")
    labels = [json.loads(line)["label"] for line in predicted.splitlines()]
    truth = [example.label for example in read_examples(town.data("north"))]
    right = sum(map(str.__eq__, labels, truth))
    # Always predicting the most frequent label would be right for a third.
    assert right >= 0.8 * len(truth)
    assert (out / "tokenizer.json").read_bytes() == state.tokenizer


def test_a_member_measures_its_sealed_model_that_the_operator_cannot(town, story, monkeypatch):
    home = town.home("east")
    words = ("evaluate", JOB, "--home", home, "--data", town.data("east"), "--test", town.data("dill"))
    sealed = command("edge_client", *words)
    assert sealed.returncode == ExitCode.USAGE
    assert "TACIT_PASSPHRASE" in sealed.stderr
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    monkeypatch.setenv("TACIT_PASSPHRASE", PASSPHRASE)
    told = json.loads(succeed("edge_client", *words, "--json"))
    assert (told["version"], told["examples"], told["also_in_data"]) == (6, ROWS, 0)
    # The vocabulary is the member's own, so another member's words are unknown to it.
    assert told["reading"]["unknown_share"] > 0.1
    assert told["private_values"] == town.state("east", JOB)[1].arrays["embedding.weight"].size
    # Neither the ledger nor the private state nor anything else changed.
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before
    done = command("coordinator", "evaluate", JOB, "--data", town.data("dill"), "--dir", town.federation.dir)
    assert done.returncode == ExitCode.REFUSED
    assert "measures it with `edge_client evaluate`" in done.stderr


def test_the_operator_cannot_export_a_whole_model(town, story, tmp_path):
    done = command("coordinator", "export", JOB, "--out", tmp_path / "model", "--dir", town.federation.dir)
    assert done.returncode == ExitCode.REFUSED
    assert "shares only a part of its model (fedvocab)" in done.stderr
    assert "a member exports its own model with `edge_client export`" in done.stderr
    assert not (tmp_path / "model").exists()


# ---- sealed, and moved ----------------------------------------------------------------------------------------------


def test_a_sealed_state_moves_to_another_machine(town, story):
    home, new, job = town.home("east"), town.folder / "home-east-new", "moved"
    path = home / "private" / JOB / "state"
    words = [word.encode() for word in vocabulary(town.state("east", JOB)[1]) if len(word) >= 8]
    assert words
    assert not [word for word in words if word in path.read_bytes()]
    closed = json.loads(succeed("edge_client", "private", "show", JOB, "--home", home, "--json"))
    assert (closed["round"], closed["sealed"]) == (6, "passphrase")
    assert not {"arrays", "tokenizer"} & closed.keys()
    environment = {**os.environ, "TACIT_PASSPHRASE": PASSPHRASE}
    open_ = json.loads(succeed("edge_client", "private", "show", JOB, "--home", home, "--json", env=environment))
    assert open_["arrays"]["embedding.weight"] == [open_["tokenizer"]["entries"], 64]
    # East stops in the middle of a job, and continues on another machine.
    town.create(job, OWN + SMALL + '[method]\nname = "fedvocab"\n' + rounds_of(30, 4))
    town.federation.wait_for(job, lambda detail: detail.job.version_number >= 1)
    town.change(job, pb.JOB_CHANGE_PAUSE)
    assert town.running["east"].stop() == 0
    before, kept = town.state("east", job)
    assert 1 <= before.round < 30
    succeed("edge_client", "private", "backup", town.folder / "backup", "--home", home)
    shutil.copytree(home, new, ignore=shutil.ignore_patterns("private"))
    done = json.loads(succeed("edge_client", "private", "restore", town.folder / "backup", "--home", new, "--json"))
    assert sorted(done["restored"]) == [JOB, job]
    assert town.state("east", job, new)[0] == before
    # The pause may have cut off a round for which east had sent its vector, and it trains anew for that version.
    (new / "policy.toml").write_text(POLICY + "allow_second_sum = true\n")
    town.homes["east"] = new
    town.start("east").wait_for("connected")
    town.change(job, pb.JOB_CHANGE_RESUME)
    town.federation.wait_for(job, lambda detail: detail.job.version_number >= before.round + 2)
    town.change(job, pb.JOB_CHANGE_ABORT)
    town.running["east"].wait_for("job_over", job=job)
    header, state = town.state("east", job)
    assert header.round >= before.round + 1
    assert state.tokenizer == kept.tokenizer
    # The old folder still holds the state that was backed up.
    assert town.state("east", job, home)[0] == before


# ---- noise, and policies --------------------------------------------------------------------------------------------


def test_unaccountable_noise_and_forbidden_parameters_are_declined(town, story):
    lotted = '[mechanism]\nname = "gaussian-update"\nnoise_multiplier = 16.0\nlot = 16\n'
    town.create("lotted", OWN + SMALL + '[method]\nname = "fedvocab"\n' + lotted + rounds_of(1, 3))
    town.create("everything", PUBLIC + SMALL + '[method]\nname = "fedavg"\n' + rounds_of(1, 3))
    for job in ("lotted", "everything"):
        town.running["south"].wait_for("declined", job=job)
    seen = town.declined("south")
    assert "needs all examples in every round; its lot is 16, and this member has more" in seen["lotted"]
    # By the same policy, the member accepted the example's job.
    assert "shared_parameters" in seen["everything"]
    assert "embedding.weight" in seen["everything"]
    assert not town.receipts("south", "lotted")
    assert not town.receipts("south", "everything")
    for job in ("lotted", "everything"):
        town.change(job, pb.JOB_CHANGE_ABORT)
        town.running["south"].wait_for("job_over", job=job)


def test_the_charge_follows_the_method_and_the_mechanism(town, story):
    method = '[method]\nname = "fedvocab"\n'
    private = '[mechanism]\nname = "dp-sgd"\nnoise_multiplier = 4.0\nlot = 16\nsteps = 2\n'
    output = '[mechanism]\nname = "gaussian-update"\nnoise_multiplier = 16.0\nlot = 1000\n'
    texts = {
        "output": OWN + SMALL + method + output,
        "frozen": PUBLIC + SMALL + method + private,
        "joint": PUBLIC + SMALL + method + 'embedding = "trained"\n' + private,
    }
    documents = {job: town.create(job, text + rounds_of(2, 4)) for job, text in texts.items()}
    for job in texts:
        town.federation.finished(job)
    over = set()
    while not over >= texts.keys():
        over.add(town.running["south"].wait_for("job_over")["job"])
    events = {
        # A sensitivity of two clips halves the job's multiplier, and no lot is drawn.
        "output": {"kind": "sampled-gaussian", "multiplier": 8.0, "rate": 1.0, "steps": 1},
        "frozen": {"kind": "sampled-gaussian", "multiplier": 4.0, "rate": 16 / ROWS, "steps": 2},
        # The epoch of adaptive updating uses the same data, and doubles the steps.
        "joint": {"kind": "sampled-gaussian", "multiplier": 4.0, "rate": 16 / ROWS, "steps": 4},
    }
    for job, event in events.items():
        assert documents[job].protected == job
        published = [each for each in town.receipts("south", job) if each["outcome"] == "published"]
        assert len(published) == 2
        for each in published:
            assert {key: each["event"][key] for key in event} == event
    home = town.home("south")
    ledger = json.loads(succeed("edge_client", "ledger", "show", "--home", home, "--json").splitlines()[0])
    parts = [SampledGaussian.model_validate(event | {"steps": 2 * event["steps"]}) for event in events.values()]
    expected = epsilon_counted(parts, Limit(8.0, 1e-6))
    assert ledger["spent"]["epsilon"] == pytest.approx(expected, rel=1e-3)
    assert 0.5 < expected < 8
    succeed("edge_client", "ledger", "verify", "--home", home)
    # After two rounds, the frozen embedding equals the bundle's bit for bit, and the shared parameters have moved.
    for job, round_ in (("frozen", 0), ("joint", 2), ("output", 2)):
        bundle = read_job_bundle(town.folder / f"bundle-{job}")
        assert Seen.at(home, job) == Seen(round=round_, staged=0)
        _, state = town.state("south", job)
        if bundle.private is not None:
            manifest, data = bundle.private
            start = manifest.unflatten(manifest.decode(data))["embedding.weight"]
            assert np.array_equal(state.arrays["embedding.weight"], start) == (job == "frozen")
            assert state.tokenizer is None
        last = town.federation.show(job).versions[-1]
        moved = bundle.manifest.decode(town.version(last.digest)) - bundle.manifest.decode(bundle.weights)
        assert np.count_nonzero(moved) > 0.9 * moved.size


# ---- the simulation -------------------------------------------------------------------------------------------------


def test_eight_members_match_the_simulation(town, story, tmp_path, monkeypatch):
    """The example's job with eight members gives the same versions, up to the ring's grid, and the same vocabularies
    and private parameters. A table holds all their words, so no embedding row starts from a member's secret.
    """
    job, rounds = "eight", 2
    example = tomllib.loads((ROOT / "examples" / "fedvocab.toml").read_text())
    text = as_toml({key: example[key] for key in ("method", "vocabulary", "model", "training", "aggregation")})
    texts = [each.text for name in EIGHT for each in read_examples(town.data(name))]
    entries = entries_of(own_tokenizer(texts, "words", 30_000))
    words = [word for word in entries if word not in SPECIAL_ENTRIES["words"]]
    numbers = np.random.default_rng(0).normal(size=(len(words), example["model"]["embedding"]))
    table = tmp_path / "table.txt"
    lines = (f"{word} {' '.join(f'{x:.3f}' for x in row)}\n" for word, row in zip(words, numbers, strict=True))
    table.write_text("".join(lines))
    # The running members have no table and would make their states without one.
    for name in FOUR:
        town.running[name].stop()
    document = town.create(job, text + rounds_of(rounds, len(EIGHT)))
    for name in EIGHT:
        town.start(name, "--job", job, "--embedding", str(table))
    detail = town.federation.finished(job)
    assert [sorted(each.survivors) for each in attempts(detail)] == [sorted(EIGHT)] * rounds
    for name in EIGHT:
        town.running[name].wait_for("job_over", job=job)
    bundle = read_job_bundle(town.folder / f"bundle-{job}")
    versions = [bundle.manifest.decode(town.version(each.digest)) for each in detail.versions]
    world = virtual_members.World(
        bundle=bundle,
        members=[virtual_members.Held(read_examples(town.data(name)), (), ()) for name in EIGHT],
        common=(),
        states=tmp_path / "states",
        table=table,
    )

    def seed_of(seed, name, number, place):
        """The seed as `Preparer` derives it. The simulation numbers its members; here they have names."""
        # A round's seed depends on the version. A member's own start has a word in place of the round's number.
        of = number if isinstance(number, str) else detail.versions[number - 1].digest.hex()
        public = f"tacit/training/v1/{seed}/{name}/{of}/{EIGHT[place]}".encode()
        return int.from_bytes(hashlib.sha256(public).digest()[:7], "big")

    monkeypatch.setattr(virtual_members, "seed_of", seed_of)
    layout = layout_of(document, len(EIGHT))
    # Each side rounds each member's values at random to a neighbour on the ring's grid, so the sums differ by at most
    # one step per member. A mean over eight members, each with ROWS of max_weight examples, differs by at most:
    bound = len(EIGHT) / layout.segments[0].scale * document.aggregation.max_weight / (len(EIGHT) * ROWS)
    # Versions are float32, which adds one rounding.
    bound += float(np.spacing(np.float32(max(np.abs(version).max() for version in versions))))
    with virtual_members.crew_of(world, 1) as crew:
        for number in range(1, rounds + 1):
            base = versions[number - 1].copy()
            found = virtual_members.play_round(crew, base, number, range(len(EIGHT)), server=InMemory())
            assert np.abs(found - versions[number]).max() <= bound
            # The bound is below a ten-thousandth of the round's change.
            assert np.abs(versions[number] - versions[number - 1]).max() > 1e4 * bound
    # Private parameters were never in the ring, so they and the vocabularies are equal bit for bit.
    states, own = virtual_members.States(world.states), set()
    for place, name in enumerate(EIGHT):
        header, state = town.state(name, job)
        tokenizer, arrays = states.load(place)
        assert header.round == rounds
        assert tokenizer == state.tokenizer
        own.add(state.tokenizer)
        assert arrays.keys() == state.arrays.keys() == {"embedding.weight"}
        assert np.array_equal(arrays["embedding.weight"], state.arrays["embedding.weight"])
    assert len(own) == len(EIGHT), "each has words of its own"


def as_toml(tables):
    """TOML text of tables that hold strings, numbers and booleans."""
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )
