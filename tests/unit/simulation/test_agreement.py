"""A simulated federation publishes the versions of a real one, to the bit, where their coins are the same.

The real members are those of the product: policy, ledger, the noise on the disk, preparation, each in a home of its own
and started anew for each round. Only their coins are replaced by the simulation's.
"""

import asyncio
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tacit
from coordinator.rounds.in_memory import InMemory
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateStore
from edge_client.session.keeping import Keeper
from edge_client.session.preparation import Preparer
from export.bundle import read_job_bundle
from export.evaluate_writing import evaluate_generator
from learning.mechanisms.banded import best_coefficients
from learning.text.examples import DataInvalid
from learning.text.persons import unit_of_job, units_of
from learning.text.turns import Dialogue
from simulation.preparing import Engines, Shares, dealt, opened, parts_of, prepared
from simulation.simulate import NotSimulated, Plan
from simulation.trying import read_rows
from simulation.virtual_members import SeededRandom, cohort_of, seed_of
from tacit.attempt import AttemptId
from tacit.job import JobSpec
from tacit.messages import Assignment
from tacit.vector import layout_of
from tests.support import party
from tests.support.tiny_models import saved
from tests.support.tiny_writers import saved_writer
from tests.support.tried_jobs import TOML, WRITER, written_job, written_rows

SEED, MEMBERS = 5, 4
ROUNDS = TOML.replace("count = 2", "count = 3").replace("noise_multiplier = 0.3", "noise_multiplier = 2.0")
ROUNDS = ROUNDS.replace('name = "tried"', f'name = "tried"\nseed = {SEED}')
# A person's rows have one gradient, which is known for a head on a frozen encoder.
HEAD = """
[model]
architecture = "prompted"
base = "encoder"
max_tokens = 16
injection = "none"
[model.task]
name = "head"
layers = [0, 1, 2]

# Found"""
PERSONS = ROUNDS.replace("steps = 6", 'steps = 6\nunit = "person"\nperson.max_examples = 2').replace(
    "lot = 20", "lot = 5"
)
PERSONS = PERSONS.partition("[vocabulary]")[0] + HEAD + PERSONS.partition("# Found")[2]
# Four bands: an example is drawn at most every fourth step, and rounds of three steps end within a band.
CORRELATED = ROUNDS.replace("steps = 6", f"steps = 3\ncoefficients = {list(best_coefficients(4, 9))}")
CORRELATED = CORRELATED.replace("lot = 20", "lot = 4")
JOBS = {"rows": ROUNDS, "persons": PERSONS, "correlated": CORRELATED, "writer": WRITER}


class Watcher:
    def training(self, *_):
        pass

    def reading(self, *_):
        pass

    def training_failing(self, *_):
        pass


@dataclass
class Real:
    """One member's machine."""

    place: int
    home: Path
    examples: tuple
    policy: Policy

    def __post_init__(self):
        self.identity = party.member(self.home, "localhost:7441")

    def vector(self, job, served, version, number, cohort, monkeypatch):
        """What a new process of the member would mask in this round."""
        coins = SeededRandom(f"{job.seed}/{job.name}/{number}/{self.place}")
        # Drawn once, when the job begins, and then read from the disk.
        key = SeededRandom(f"{job.seed}/{job.name}/classes/{self.place}")
        monkeypatch.setattr("edge_client.ledger.noise.secrets", SimpleNamespace(token_bytes=key.bytes))
        persons = units_of(self.examples) if self.policy.unit == "person" else None
        texts = [each.texts for each in self.examples]
        column = None if persons is None else "person"

        async def fetch(digest, into, limit):
            assert len(served[digest]) <= limit
            into.parent.mkdir(exist_ok=True, parents=True)
            into.write_bytes(served[digest])

        with open_budget(self.home, self.identity, self.policy, texts, persons=persons, column=column) as budget:
            preparer = Preparer(
                self.examples,
                self.identity.federation,
                self.identity.member,
                self.policy,
                budget,
                coins,
                BlobCache(self.home / "cache"),
                "cpu",
                Watcher(),
                Keeper(PrivateStore(self.home, self.identity.federation, "data"), self.examples),
            )
            # A real member's seed names it, and this one's only orders batches.
            preparer._seed = lambda *_: seed_of(job.seed, job.name, number, self.place)
            assignment = Assignment(job.name, number, job.digest(), hashlib.sha256(version).digest(), number - 1, 1000)
            made = asyncio.run(preparer.prepare(assignment, fetch))
            attempt = AttemptId(job.name, number, 1)
            budget.charge(attempt, made.reserved)
            vector = made.protection.encode(job, made.update, cohort, coins)
            budget.ended(attempt, "published", b"", None)
        return vector


def prepare(folder, toml):
    file, data = written_job(folder, toml)
    saved(folder / "encoder", "bert", bare=True)
    if toml is WRITER:
        saved_writer(folder / "writer")
        asked = [{"prompt": each["text"], "response": f"the {each['label']}"} for each in written_rows(60)]
        data.write_text("".join(json.dumps(each) + "\n" for each in asked))
    job, person = JobSpec.from_toml(file), None if toml is WRITER else "person"
    rows, test = parts_of(read_rows(data, job, text="text", label="label", person=person), test=0.2, seed=0)
    return prepared(job, folder, rows, test, Shares(members=MEMBERS), folder / "first", seed=0)


def play(made, folder, rounds=None, **engines):
    with opened(made, Plan(SEED, cohort=3), Engines(**engines), InMemory(), folder) as simulation:
        list(simulation.run(rounds=rounds))
        return [each.version for each in simulation.played]


def really(made, folder, monkeypatch):
    bundle = read_job_bundle(made.bundle)
    job, manifest, server = bundle.document, bundle.manifest, InMemory()
    files = [each.read_bytes() for each in made.bundle.iterdir()]
    served = {hashlib.sha256(data).digest(): data for data in files}
    policy = Policy(epsilon=1000.0, unit=unit_of_job(job), backbones=("disk", "coordinator"))
    members = [Real(place, folder / str(place), rows, policy) for place, rows in enumerate(made.members)]
    values, found = manifest.decode(bundle.weights).copy(), []
    for number in range(1, job.rounds.count + 1):
        version = manifest.encode(values)
        served[hashlib.sha256(version).digest()] = version
        cohort = cohort_of(MEMBERS, 3, SEED, number * 1000 + 1)
        total = np.zeros(layout_of(job, len(cohort)).values, np.uint32)
        for place in cohort:
            total += members[place].vector(job, served, version, number, len(cohort), monkeypatch)
        values = server.publish(job, [(len(cohort), total)], values.copy(), None, server.state(job)).values
        found.append(hashlib.sha256(manifest.encode(values)).hexdigest())
    return found


@pytest.mark.parametrize("name", JOBS)
def test_a_simulation_publishes_the_versions_of_real_members(name, tmp_path, monkeypatch):
    made = prepare(tmp_path / "job", JOBS[name])
    simulated = play(made, tmp_path / "simulated")
    assert len(set(simulated)) == 3
    assert really(made, tmp_path / "real", monkeypatch) == simulated


@pytest.mark.parametrize(
    "name",
    [pytest.param("persons", marks=pytest.mark.long), "correlated", pytest.param("writer", marks=pytest.mark.long)],
)
def test_neither_workers_nor_a_stop_change_a_version(name, tmp_path):
    made = prepare(tmp_path / "job", JOBS[name])
    whole = play(made, tmp_path / "whole")
    play(made, tmp_path / "parts", rounds=1)
    # A member of the second round had trained when everything stopped.
    for place in (tmp_path / "parts" / "states").glob("*"):
        (place / "000002.npz").write_bytes(b"of a round that nobody finished")
    assert play(made, tmp_path / "parts", workers=2) == whole


def test_a_persons_rows_are_in_one_place(tmp_path):
    file, data = written_job(tmp_path, ROUNDS)
    read = read_rows(data, JobSpec.from_toml(file), text="text", label="label", person="person", column="site")
    # Each person has three rows: nobody is in the test and with a member.
    rows, test = parts_of(read, test=0.2, seed=0)
    tested = {row.person for row in test}
    assert len(test) == 3 * len(tested) == 24
    assert not tested & {row.person for row in rows.examples}
    for text in ("even", "label", "quantity", "ratios:1,2,3"):
        members = dealt(rows, Shares.read(text, 3, 1.0), 0)
        held = [{row.person for row in part} for part in members]
        assert all(len(part) == 3 * len(persons) for part, persons in zip(members, held, strict=True)), text
        assert sum(map(len, held)) == 32
    # A column decides alone: two members may know the same person, and each protects it with what it has.
    by_site = dealt(rows, Shares.read("column", 3, 1.0), 0)
    assert sum(len({row.person for row in part}) for part in by_site) > 32


def test_a_model_that_writes_is_scored_as_its_export_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved_writer(tmp_path / "writer")
    (tmp_path / "job.toml").write_text(WRITER.replace("count = 3", "count = 1"))
    rows = [{"prompt": each["text"], "response": f"the {each['label']}"} for each in written_rows(60)]
    found = tacit.simulate("job.toml", rows, members=3, test=rows[:8])
    (played,) = found.rounds
    assert (played.balanced_accuracy, played.macro_f1) == (None, None)
    dialogues = [Dialogue.of(each["prompt"], each["response"]) for each in rows[:8]]
    tokens = evaluate_generator(found.export("model"), dialogues).tokens
    assert played.loss == pytest.approx(tokens.loss.value, abs=1e-4)
    assert played.accuracy == pytest.approx(tokens.accuracy.value, abs=1e-9)
    assert tacit.load("model").answer("the sun") is not None
    with pytest.raises(NotSimulated, match="rows of a job that writes have no labels"):
        tacit.simulate("job.toml", rows, members=3, partition="label")
    with pytest.raises(DataInvalid, match="1 of 68 rows have no response"):
        tacit.simulate("job.toml", [*rows[:-1], {"prompt": "the moon"}], members=3, test=rows[:8])
