"""DP-SGD by person with real processes: two members, a head, one member killed between rounds and started again.

Each member has 120 rows of 24 persons, of whom one has 50. The encoder is that of `test_heads`.
"""

import json
from contextlib import ExitStack

import pytest

from export.predictor import Predictor
from learning.text.data import read_examples
from tacit.v1 import operator_pb2 as pb
from tests.integration.test_heads import made_encoder
from tests.support.processes import EXAMPLES, PATIENCE, Federation, command, succeed

pytestmark = pytest.mark.timeout(900)

MEMBERS = ("north", "south")
JOB, PERSONS = "persons", 24
POLICY = """schema = 1
shared_parameters = ["output.weight"]
backbones = ["disk", "coordinator"]
epsilon = 100.0
unit = "person"
min_cohort = 2
allow_two_party_sums = true
assumed_corrupt = 0
"""
SPEC = """schema = 1
name = "{name}"
labels = {labels}
[model]
architecture = "prompted"
base = "encoder"
max_tokens = 48
injection = "none"
[model.task]
name = "head"
layers = [0, 1, 2]
[mechanism]
name = "dp-sgd"
noise_multiplier = 2.0
clip = 1.0
lot = 12
steps = 20
unit = "person"
person.max_examples = 8
[training]
optimiser = "sgd"
learning_rate = 30.0
[rounds]
count = 2
min_members = 2
[rounds.deadlines]
training = 300
[aggregation]
coordinate_bound = 64.0
assumed_corrupt = 0
"""


def person_of(at: int) -> str:
    """One person has 50 of 120 rows, and 23 share the others."""
    return "large" if at < 50 else f"person {at % (PERSONS - 1)}"


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    folder = tmp_path_factory.mktemp("persons")
    with ExitStack() as stack:
        federation = Federation(folder)
        stack.callback(federation.close)
        federation.enrol(*MEMBERS, policy=POLICY)
        lines = (EXAMPLES / "train.jsonl").read_text().splitlines()
        for number, name in enumerate(MEMBERS):
            rows = [json.loads(line) for line in lines[120 * number : 120 * (number + 1)]]
            written = [json.dumps(row | {"author": person_of(at), "reader": at}) + "\n" for at, row in enumerate(rows)]
            (folder / f"{name}.jsonl").write_text("".join(written))
        made_encoder(folder / "encoder")
        labels = json.dumps(sorted({json.loads(line)["label"] for line in lines}))
        spec = folder / f"{JOB}.toml"
        spec.write_text(SPEC.format(name=JOB, labels=labels))
        federation.create(spec)
        shown = succeed(
            "edge_client", "run", "--data", folder / "north.jsonl", "--person", "author", "--dry-run", "--json",
            "--home", federation.home("north"),
        )  # fmt: skip
        victim, other = (federation.start(name, "--until-finished", "--person", "author") for name in MEMBERS)
        # By its own log, which tells sooner than the coordinator: there are two rounds.
        victim.wait_for("attempt_ended", outcome="published")
        victim.kill()
        resumed = federation.start("north", "--until-finished", "--person", "author")
        detail = federation.finished(JOB)
        # A member that has ended has heard of its last sum.
        assert [member.process.wait(timeout=PATIENCE) for member in (resumed, other)] == [0, 0]
        yield federation, detail, json.loads(shown.splitlines()[0]), lines


def test_a_killed_member_resumes_and_every_round_is_published(town):
    _, detail, _, _ = town
    assert (detail.job.version_number, detail.job.status) == (2, pb.JOB_STATUS_FINISHED)


def test_the_dry_run_shows_rows_per_person_and_charges_by_persons(town):
    _, _, shown, _ = town
    assert shown["persons"] == {
        "column": "author", "persons": PERSONS, "median": 3, "most": 50, "above": 1, "used": 8
    }  # fmt: skip
    assert (shown["rows"], shown["takes_part"]) == (120, True)


def test_the_ledgers_count_persons_across_the_kill(town):
    federation, _, _, _ = town
    for name in MEMBERS:
        home = federation.home(name)
        receipts = [json.loads(path.read_bytes()) for path in (home / "receipts" / JOB).glob("*.json")]
        events = {json.dumps(each["event"], sort_keys=True) for each in receipts}
        (event,) = (json.loads(each) for each in events)
        assert (event["unit"], event["multiplier"], event["steps"], event["rate"]) == ("person", 2.0, 20, 0.5)
        # The one that was killed may not have heard that its first vector was published.
        assert sum(each["outcome"] == "published" for each in receipts) >= (1 if name == MEMBERS[0] else 2)
        (said,) = [
            json.loads(line) for line in succeed("edge_client", "ledger", "show", "--home", home, "--json").splitlines()
        ]
        assert said["limit"]["unit"] == "person"
        assert said["persons"] == {"column": "author", "count": PERSONS, "rows_before": None}
        assert said["charged"] >= 2
        assert " 24 by column 'author'" in succeed("edge_client", "ledger", "show", "--home", home)
        succeed("edge_client", "ledger", "verify", "--home", home)


def test_the_exported_model_answers(town, tmp_path):
    federation, detail, _, lines = town
    said = json.loads(federation.operator("export", JOB, "--out", tmp_path / "out", "--json"))
    assert (said["version_number"], said["version"]) == (2, detail.versions[-1].digest.hex())
    assert said["max_difference"] < 1e-3
    rest = tmp_path / "rest.jsonl"
    rest.write_text("\n".join(lines[360:480]) + "\n")
    examples = read_examples(rest)
    told = Predictor.load(tmp_path / "out").predict([each.text for each in examples])
    # With so few persons and so much noise it need not be right.
    assert len(told) == len(examples)
    assert {each.label for each in told} <= {json.loads(line)["label"] for line in lines}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "the policy protects persons"),
        (("--person", "reader"), "opened with persons by column 'author', but 'reader' is asked for"),
        (("--person", "nobody"), "no column 'nobody'"),
    ],
)
def test_a_member_without_the_column_of_its_ledger_is_told_what_to_do(town, more, said):
    federation, _, _, _ = town
    home = federation.home("south")
    done = command("edge_client", "run", "--data", federation.folder / "south.jsonl", *more, "--home", home)
    assert done.returncode != 0
    assert said in done.stderr
