"""Two members with torch and two that cannot import it, in one cohort: dp-sgd by person, one member killed, exported.

The encoder is the small random BERT of the test of heads, once as a backbone and once as an ONNX file.
"""

import json
import subprocess
import sys
from contextlib import ExitStack

import pytest

from export.bundle import read_job_bundle
from export.predictor import Predictor
from learning.text.data import read_examples
from tacit.v1 import operator_pb2 as pb
from tests.integration.test_heads import POLICY, SPEC, made_encoder
from tests.support.places import ROOT
from tests.support.processes import EXAMPLES, PATIENCE, Federation, Process, succeed

pytestmark = pytest.mark.timeout(600)

TORCH, DEVICE = ("north", "east"), ("south", "west")
JOB = "devices"
# Each person has two rows, of which a draw uses both.
PERSONS = 45
BY_PERSON = f"""noise_multiplier = 1.0
clip = 1.0
lot = {PERSONS}
steps = 20
unit = "person"
person.max_examples = 2
"""
# What a small device does not install. scipy and the hub are there for other packages' sake.
ABSENT = ("torch", "transformers", "opacus", "scipy", "safetensors", "dp_accounting", "huggingface_hub", "peft", "onnx")
BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); from edge_client.cli import main; main()"


def start_device(federation, name, *more):
    """Starts `edge_client run` in a process that cannot import what a small device does not install."""
    words = [sys.executable, "-c", BLOCKED, "run", "--data", str(federation.data(name))]
    words += ["--home", str(federation.home(name)), "--person", "author", "--log-format", "json", *more]
    member = Process(name, words, federation.folder / f"{name}.log")
    federation.processes.append(member)
    return member


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    with ExitStack() as stack:
        federation = Federation(folder)
        stack.callback(federation.close)
        federation.enrol(*TORCH, *DEVICE, policy=POLICY + 'unit = "person"\n')
        lines = (EXAMPLES / "train.jsonl").read_text().splitlines(keepends=True)
        for number, name in enumerate((*TORCH, *DEVICE)):
            rows = [json.loads(line) for line in lines[2 * PERSONS * number : 2 * PERSONS * (number + 1)]]
            named = [json.dumps(row | {"author": f"person {at % PERSONS}"}) + "\n" for at, row in enumerate(rows)]
            (folder / f"{name}.jsonl").write_text("".join(named))
        made_encoder(folder / "encoder")
        labels = json.dumps(sorted({json.loads(line)["label"] for line in lines}))
        text = SPEC.format(name=JOB, labels=labels).replace(
            'injection = "none"', 'injection = "none"\nonnx = "float32"'
        )
        text = text.replace("min_members = 3", "min_members = 4")
        before, after = text.index("noise_multiplier"), text.index("[training]")
        text = text[:before] + BY_PERSON + text[after:]
        (folder / f"{JOB}.toml").write_text(text)
        federation.create(folder / f"{JOB}.toml")
        others = [federation.start(name, "--until-finished", "--person", "author") for name in TORCH]
        devices = [start_device(federation, name, "--until-finished") for name in DEVICE]
        # Killed once its update is trained; the ledger has the reservation, and the round goes on with a new process.
        assert devices[0].wait_for("runtime")["runtime"] == "device"
        devices[0].wait_for("ready")
        devices[0].kill()
        devices[0] = start_device(federation, DEVICE[0], "--until-finished")
        detail = federation.finished(JOB)
        # A member that has ended has heard of its last sum.
        assert [member.process.wait(timeout=PATIENCE) for member in (*others, *devices)] == [0] * 4
        yield federation, read_job_bundle(folder / f"bundle-{JOB}"), detail, lines


def test_all_four_are_in_every_published_round(town):
    federation, _, detail, _ = town
    assert (detail.job.version_number, detail.job.status) == (2, pb.JOB_STATUS_FINISHED)
    for name in (*TORCH, *DEVICE):
        receipts = [json.loads(path.read_bytes()) for path in (federation.home(name) / "receipts" / JOB).glob("*.json")]
        published = [each["event"] for each in receipts if each["outcome"] == "published"]
        told = [(each["unit"], each["multiplier"], each["steps"], each["rate"]) for each in published]
        assert set(told) == {("person", 1.0, 20, 1.0)}
        # One that was killed after its vector had left may never hear that it was published.
        assert len(told) == 2 or (name == DEVICE[0] and len(receipts) == 2)
        succeed("edge_client", "ledger", "verify", "--home", federation.home(name))


def test_each_fetches_the_backbone_that_it_runs(town):
    federation, bundle, _, _ = town
    whole, onnx = bundle.document.model.backbone.hex(), bundle.document.model.onnx.digest.hex()
    for name, has in [*((name, whole) for name in TORCH), *((name, onnx) for name in DEVICE)]:
        cache = federation.home(name) / "cache"
        assert [digest for digest in (whole, onnx) if (cache / digest).exists()] == [has]


def test_the_exported_model_has_learnt(town, tmp_path):
    federation, _, _, lines = town
    federation.operator("export", JOB, "--out", tmp_path / "out")
    rest = tmp_path / "rest.jsonl"
    rest.write_text("".join(lines[360:480]))
    examples = read_examples(rest)
    told = Predictor.load(tmp_path / "out").predict([each.text for each in examples])
    right = sum(each.label == example.label for each, example in zip(told, examples, strict=True))
    # A constant answer has about a sixth.
    assert right > 0.25 * len(examples)


def test_a_dry_run_says_what_a_device_cannot_train(town):
    federation, *_ = town
    federation.job("other", min_members=3)
    try:
        words = [sys.executable, "-c", BLOCKED, "run", "--data", str(federation.data("west")), "--person", "author"]
        words += ["--dry-run", "--json"]
        done = subprocess.run(
            [*words, "--home", str(federation.home("west"))], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert "runs without torch, and trains only jobs of a head" in done.stdout, done.stderr
    finally:
        federation.operator("job", "abort", "other", "--yes")


def test_a_member_sleeps_until_its_command_says_go(town):
    federation, *_ = town
    go = federation.folder / "go"
    member = start_device(federation, "west", "--idle", f"test -e {go}")
    assert member.wait_for("sleeping", "connected")["event"] == "sleeping"
    member.stop()
    go.touch()
    member = start_device(federation, "west", "--idle", f"test -e {go}")
    member.wait_for("connected")
    member.stop()


def test_torch_is_asked_for_by_name_where_it_is_not_installed(town):
    federation, *_ = town
    member = start_device(federation, "west", "--runtime", "torch")
    assert member.process.wait(timeout=60) == 2
