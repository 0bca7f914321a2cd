"""The example of a plugin, as its README has it: a wheel, installed, federated under dp-sgd, exported, predicted with.

The wheel is installed into a folder of its own, which is on the path of every process here, so `importlib.metadata`
finds its entry point as it would in any environment.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import tacit
from tacit.v1 import operator_pb2 as pb
from tests.support import warm
from tests.support.places import ROOT
from tests.support.processes import EXAMPLES, PATIENCE, Federation, command, succeed

pytestmark = pytest.mark.timeout(900)

MEMBERS, OUTSIDER = ("north", "east", "south"), "west"
JOB = "gated"
POLICY = "schema = 1\nepsilon = 50.0\n"
SPEC = """schema = 1
name = "gated"
labels = {labels}
[model]
architecture = "plugin"
distribution = "tacit-gated"
version = "1.0.0"
files = "{files}"
name = "gated"
embedding = 16
dropout = 0.1
[model.settings]
hidden = 8
[vocabulary]
kind = "words"
file = {words}
[mechanism]
name = "dp-sgd"
noise_multiplier = 1.0
clip = 1.0
lot = 20
steps = 5
[rounds]
count = 2
min_members = 3
target_members = 3
"""


def pip(*words):
    options = ["--no-index", "--no-deps", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, *options], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The example's wheel, built by its own backend from a copy, which leaves nothing behind in the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "examples" / "plugin", folder / "source")
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, folder / "source")
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--target", folder, wheel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


@pytest.fixture(scope="module")
def files(site, tmp_path_factory):
    """The digest that the operator copies into the job."""
    home = tmp_path_factory.mktemp("nobody")
    (found,) = json.loads(succeed("edge_client", "models", "--home", home, "--json"))["plugins"]
    assert (found["distribution"], found["version"], found["names"]) == ("tacit-gated", "1.0.0", ["gated"])
    assert (found["allowed"], found["unusable"]) == (False, None)
    return found["files"]


@pytest.fixture(scope="module")
def town(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("town")
    with ExitStack() as stack:
        # The coordinator starts cold: its memory is looked at.
        federation = Federation(folder)
        stack.enter_context(warm.in_this_environment())
        stack.callback(federation.close)
        federation.enrol(*MEMBERS, policy=f'{POLICY}[plugins]\ntacit-gated = "{files}"\n')
        federation.enrol(OUTSIDER, policy=POLICY)
        labels = json.dumps(sorted({json.loads(line)["label"] for line in (EXAMPLES / "train.jsonl").open()}))
        words = json.dumps(str(EXAMPLES / "words.txt"))
        (folder / f"{JOB}.toml").write_text(SPEC.format(labels=labels, files=files, words=words))
        federation.create(folder / f"{JOB}.toml")
        planned = {
            name: json.loads(succeed("edge_client", "run", "--dry-run", "--json", *_at(federation, name)))
            for name in (MEMBERS[0], OUTSIDER)
        }
        outsider = federation.start(OUTSIDER)
        declined = outsider.wait_for("declined", job=JOB)
        members = [federation.start(name, "--until-finished") for name in MEMBERS]
        detail = federation.finished(JOB)
        assert [member.process.wait(timeout=PATIENCE) for member in members] == [0] * 3
        yield federation, detail, declined, planned


def _at(federation, name):
    return "--home", federation.home(name), "--data", federation.data(name)


def test_three_members_that_allow_it_finish_the_job(town):
    federation, detail, *_ = town
    assert (detail.job.version_number, detail.job.status) == (2, pb.JOB_STATUS_FINISHED)
    for name in MEMBERS:
        receipts = (federation.home(name) / "receipts" / JOB).glob("*.json")
        told = [json.loads(path.read_bytes()) for path in receipts]
        assert [each["event"]["steps"] for each in told if each["outcome"] == "published"] == [5, 5]
        succeed("edge_client", "ledger", "verify", "--home", federation.home(name))


def test_a_member_whose_policy_does_not_list_it_declines_and_spends_nothing(town):
    federation, _, declined, _ = town
    assert declined["detail"].startswith("plugins: the job's model is code of the installed plugin tacit-gated")
    assert not (federation.home(OUTSIDER) / "receipts" / JOB).exists()


def test_the_server_never_imports_the_plugin(town):
    """It has the plugin on its path here; a real one has neither it nor torch."""
    federation, *_ = town
    maps = Path(f"/proc/{federation.coordinator.process.pid}/maps").read_text()
    assert "torch" not in maps


def test_a_dry_run_and_the_policy_say_what_would_run(town, files):
    federation, _, _, planned = town
    named = {"distribution": "tacit-gated", "version": "1.0.0", "files": files, "name": "gated"}
    assert [each["plugin"] for each in planned.values()] == [named, named]
    assert (planned[MEMBERS[0]]["takes_part"], planned[OUTSIDER]["takes_part"]) == (True, False)
    assert [each.split(":")[0] for each in planned[OUTSIDER]["refusals"]] == ["plugins"]
    spec = federation.folder / f"{JOB}.toml"
    checked = command("edge_client", "policy", "check", spec, "--home", federation.home(OUTSIDER))
    assert checked.returncode != 0
    assert f"the job's model is code of the installed plugin tacit-gated {files}" in checked.stdout
    shown = succeed("edge_client", "models", "--home", federation.home(MEMBERS[0]))
    assert "this member's policy allows it" in shown


def test_it_is_exported_compared_and_predicted_with(town, tmp_path):
    federation, *_ = town
    out = tmp_path / "model"
    federation.operator("export", JOB, "--out", out)
    text = json.loads((EXAMPLES / "test.jsonl").read_text().splitlines()[0])["text"]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Prediction needs the folder alone: neither the plugin nor torch.
    predicted = json.loads(succeed("edge_client", "predict", "--bundle", out, text, "--json", env=bare))
    (found,) = tacit.load(out).predict([text])
    assert (predicted["label"], found.label) == (found.label, predicted["label"])
    assert predicted["probability"] == pytest.approx(found.probability, abs=1e-6)
    facts = json.loads((out / "bundle.json").read_bytes())["model"]
    assert facts["parity"] < 1e-4
    assert "gated of the plugin tacit-gated 1.0.0" in (out / "README.md").read_text()
    # A member's own export is the same model.
    home, data = federation.home(MEMBERS[0]), federation.data(MEMBERS[0])
    succeed("edge_client", "export", JOB, "--home", home, "--data", data, "--out", tmp_path / "own")
    assert (tmp_path / "own" / "model.onnx").read_bytes() == (out / "model.onnx").read_bytes()


def test_a_member_that_does_not_allow_it_exports_nothing(town, tmp_path):
    federation, *_ = town
    home, data = federation.home(OUTSIDER), federation.data(OUTSIDER)
    done = command("edge_client", "export", JOB, "--home", home, "--data", data, "--out", tmp_path / "own")
    assert done.returncode == 4
    assert "this member's policy does not allow the plugin tacit-gated" in done.stderr
    assert not (tmp_path / "own").exists()


def test_the_operator_measures_it_and_simulates_the_job(town, tmp_path):
    federation, *_ = town
    measured = federation.operator("evaluate", JOB, "--data", EXAMPLES / "test.jsonl", "--json")
    assert 0 <= json.loads(measured)["accuracy"] <= 1
    spec, rows = federation.folder / f"{JOB}.toml", EXAMPLES / "train.jsonl"
    words = ["simulate", spec, "--data", rows, "--members", "4", "--workers", "2", "--out", tmp_path / "played"]
    succeed("coordinator", *words)
    lines = (tmp_path / "played" / "rounds.jsonl").read_text().splitlines()
    assert len(lines) >= 2


def test_the_readme_prints_the_digest_of_no_build_in_particular(files):
    """A digest in it would be wrong for the next build."""
    readme = (ROOT / "examples" / "plugin" / "README.md").read_text()
    assert not re.search(r"[0-9a-f]{64}", readme)
    assert "edge_client models" in readme
