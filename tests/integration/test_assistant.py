"""A model that writes, with real processes: three members, dp-sgd, adapters with one frozen matrix, a kill, two rounds.

The base is a small random Llama that the test makes. The job is `examples/assistant.toml` with that base and smaller
numbers.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import ExitStack

import numpy as np
import onnxruntime
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from edge_client.cli import app as edge_app
from export.bundle import read_job_bundle
from export.generating import Generator
from learning.accounting.events import SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.text.dialogue import Dialogue, DialogueEncoder
from tacit.bundle import read_bundle
from tacit.v1 import operator_pb2 as pb
from tests.support.places import ROOT
from tests.support.processes import BIN, PATIENCE, Federation, command, succeed, within_patience
from tests.support.tiny_writers import saved_writer
from toolkit.console import CommandFailed, ExitCode, printable

pytestmark = pytest.mark.timeout(600)

MEMBERS = ("north", "east", "south")
JOB = "assistant"
SECRET = "Mrs Almeida"
POLICY = """schema = 1
shared_parameters = ["lora.*.up.weight"]
backbones = ["coordinator"]
epsilon = 100.0
mechanisms = ["dp-sgd"]
"""
SUBJECTS = ("food", "river", "restaurant", "capital", "people")


def rows(number):
    """A member's questions and answers. One has no answer, one is a dialogue."""
    asked = [
        {"prompt": f"Where is the {subject} of {SECRET}?", "response": f"The {subject} is near {each}."}
        for each in range(number, number + 8)
        for subject in SUBJECTS
    ]
    turns = [{"role": "user", "content": "is it good"}, {"role": "assistant", "content": "yes"}]
    return [*asked, {"prompt": "no answer"}, {"messages": turns}]


def assistant(folder):
    """The example's job file with a small base and small numbers."""
    text = (ROOT / "examples" / "assistant.toml").read_text(encoding="utf-8")
    whole = tomllib.loads(text)
    changes = {
        'base = "smollm2"': 'base = "base"',
        "max_tokens = 256": "max_tokens = 64",
        "rank = 8": "rank = 2",
        "max_new_tokens = 64": "max_new_tokens = 16",
        "lot = 240": "lot = 8",
        # Noise is thirty times as large with such lots.
        "learning_rate = 4.0": "learning_rate = 0.1",
        "count = 4": "count = 2",
        'decay = "cosine"': 'warmup_rounds = 1\ndecay = "cosine"',
        "training = 3600": "training = 300\nreconnect = 5",
    }
    for old, new in changes.items():
        assert text.count(f"\n{old}") == 1, old
        text = text.replace(f"\n{old}", f"\n{new}")
    path = folder / f"{whole['name']}.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assistant")
    with ExitStack() as stack:
        federation = Federation(folder)
        stack.callback(federation.close)
        federation.enrol(*MEMBERS, policy=POLICY)
        for number, name in enumerate(MEMBERS):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(number)))
        saved_writer(folder / "base")
        federation.create(assistant(folder))
        dry = succeed(
            "edge_client", "run", "--dry-run", "--data", folder / "north.jsonl", "--home", federation.home("north")
        )
        # South is killed between its training and the attempt, for which it waits for the others, and comes back.
        victim = federation.start("south", "--until-finished")
        victim.wait_for("ready", job=JOB)
        victim.kill()
        members = [federation.start(name, "--until-finished") for name in MEMBERS]
        detail = federation.finished(JOB)
        ended = [each.process.wait(timeout=PATIENCE) for each in members]
        yield federation, read_job_bundle(folder / f"bundle-{JOB}"), detail, dry, ended


def test_every_round_is_published_and_the_version_moves(town):
    federation, bundle, detail, _, ended = town
    assert ended == [0, 0, 0]
    assert (detail.job.version_number, detail.job.status) == (2, pb.JOB_STATUS_FINISHED)
    store = federation.dir / "store"
    newest = next(store.rglob(detail.versions[-1].digest.hex())).read_bytes()
    moved = np.frombuffer(newest, "<f4") - np.frombuffer(bundle.weights, "<f4")
    assert len(moved) == bundle.document.values
    assert np.isfinite(moved).all()
    assert np.abs(moved).max() > 0


def test_only_one_matrix_of_each_adapter_travels(town):
    _, bundle, _, _, _ = town
    document = bundle.document
    assert (document.labels, document.model.injection.train) == ((), "up")
    assert all(tensor.name.endswith(".up.weight") for tensor in bundle.manifest.tensors)
    assert document.frozen.values == 2 * 2 * 2 * 64
    assert b"frozen" in document.canonical()


def test_the_dry_run_says_what_is_read_and_shows_a_row_here(town):
    _, _, _, dry, _ = town
    assert "41 of 42 rows are dialogues with a response; with template chatml" in dry
    assert "until then such rows are skipped" in dry
    assert f"| Where is the food of {SECRET}?<|im_end|>" in dry
    assert "> The food is near 0.<|im_end|>" in dry


def test_the_ledger_charges_every_step_and_no_text_is_in_what_stays(town):
    federation, _, detail, _, _ = town
    for name in MEMBERS:
        home = federation.home(name)
        receipts = [json.loads(path.read_bytes()) for path in (home / "receipts" / JOB).glob("*.json")]
        published = [each for each in receipts if each["outcome"] == "published"]
        assert [(each["event"]["multiplier"], each["event"]["steps"]) for each in published] == [(1.2, 3)] * 2
        # 42 rows, the one without a response among them.
        assert [each["event"]["rate"] for each in published] == pytest.approx([8 / 42] * 2)
        succeed("edge_client", "ledger", "verify", "--home", home)
        # The ledger says the same, with the epsilon of two such events. What the killed process had reserved is free.
        told = json.loads(succeed("edge_client", "ledger", "show", "--home", home, "--json"))
        event = SampledGaussian(multiplier=1.2, rate=8 / 42, steps=3)
        limit = Limit(100.0, told["limit"]["delta"])
        assert (told["charged"], told["reserved"], told["limit"]["unit"]) == (2, 0, "example")
        assert told["spent"]["epsilon"] == pytest.approx(epsilon_counted([event] * 2, limit))
        assert [(each["job"], each["releases"]) for each in told["jobs"]] == [(JOB, 2)]
        log = (federation.folder / f"{name}.log").read_text()
        assert "examples_left_out" in log
        assert SECRET not in log
    assert SECRET not in (federation.folder / "coordinator.log").read_text()
    assert SECRET not in str(detail)


def test_a_row_has_the_turns_of_its_template(town):
    _, bundle, _, _, _ = town
    task = bundle.document.model.task
    encoder = DialogueEncoder(bundle.public_tokenizer, task.template, bundle.document.model.max_tokens)
    ids, _ = encoder.encode([Dialogue.of("good food", "yes")])
    assert encoder.decode(ids[0].tolist()) == "user\ngood food\nassistant\nyes"


def test_what_only_classifiers_have_is_refused_in_a_sentence(town, tmp_path):
    federation, _, _, _, _ = town
    data, home = federation.data("north"), federation.home("north")
    for words in (
        ("edge_client", "audit", JOB, "--data", data, "--home", home),
        ("coordinator", "redteam", JOB, "--data", data, "--rows", "public", "--dir", federation.dir),
    ):
        ended = command(*words)
        assert ended.returncode != 0
        said = " ".join((ended.stdout + ended.stderr).split())
        assert f"the model of {JOB} writes" in said, said


def test_the_operator_sees_the_job_in_words(town):
    federation, _, _, _, _ = town
    shown = federation.operator("job", "show", JOB)
    assert JOB in shown
    assert JOB in federation.operator("status")


def test_a_version_leaves_in_every_form_and_answers_without_torch(town, tmp_path):
    federation, _, _, _, _ = town
    asked = f"Where is the food of {SECRET}?"
    for form in ("onnx", "peft", "hf"):
        told = json.loads(federation.operator("export", JOB, "--out", tmp_path / form, "--format", form, "--json"))
        assert (told["version_number"], told["format"]) == (2, form)
        assert told["max_difference"] < 1e-4
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": asked}) + "\n")
    answers = [
        json.loads(succeed("edge_client", "generate", "--bundle", tmp_path / "onnx", *given, "--json"))
        for given in ((asked,), ("--file", tmp_path / "rows.jsonl"))
    ]
    assert answers[0] == answers[1]
    assert 1 <= answers[0]["tokens"] <= 16
    assert (
        succeed("edge_client", "generate", "--bundle", tmp_path / "onnx", asked).strip()
        == printable(answers[0]["response"]).strip()
    )


def test_int8_weights_answer_on_a_machine_without_torch(town, tmp_path):
    """A process whose torch cannot be imported makes the answer that the format's own test compares."""
    federation, _, _, _, _ = town
    asked = f"Where is the food of {SECRET}?"
    sizes = {}
    for precision in ("float32", "int8"):
        out = tmp_path / precision
        told = json.loads(federation.operator("export", JOB, "--out", out, "--precision", precision, "--json"))
        sizes[precision] = (out / "model.safetensors").stat().st_size
        assert told["version_number"] == 2
        assert json.loads((out / "bundle.json").read_bytes())["generator"]["precision"] == precision
    assert sizes["int8"] < 0.5 * sizes["float32"]
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "torch.py").write_text('raise ImportError("there is no torch on this machine")\n')
    asking = ("edge_client", "generate", "--bundle", tmp_path / "int8", asked, "--json")
    answer = json.loads(succeed(*asking, env={**os.environ, "PYTHONPATH": str(tmp_path / "without")}))
    assert 1 <= answer["tokens"] <= 16
    assert answer == json.loads(succeed(*asking))
    words = ("--out", tmp_path / "peft", "--format", "peft", "--precision", "int8", "--dir", federation.dir)
    refused = command("coordinator", "export", JOB, *words)
    assert (refused.returncode, "--precision is for --format onnx" in refused.stderr) == (ExitCode.USAGE, True)


@pytest.mark.parametrize("who", ["coordinator", "edge_client"])
def test_an_export_that_sigterm_ends_leaves_nothing(town, tmp_path, who):
    """It comes while the model is compared, when all weights are on the disk, as that of `docker stop` would."""
    federation, _, _, _, _ = town
    work, fetched, rows = tmp_path / "work", tmp_path / "fetched", tmp_path / "rows.jsonl"
    work.mkdir()
    fetched.mkdir()
    # Far more than are compared before the signal comes.
    row = {"prompt": "Where is the food? " * 8, "response": "near"}
    rows.write_text("".join(json.dumps({**row, "prompt": f"{n} {row['prompt']}"}) + "\n" for n in range(5000)))
    words = ["export", JOB, "--out", work / "model"]
    words += (
        ["--samples", rows, "--dir", federation.dir]
        if who == "coordinator"
        else ["--data", rows, "--home", federation.home("north")]
    )
    env = {**os.environ, "TMPDIR": str(fetched), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([BIN / who, *map(str, words)], env=env, stderr=subprocess.PIPE, text=True) as export:
        try:
            within_patience(lambda: export.poll() is not None or [*work.glob(".model.bundle-*/model.onnx")])
            assert export.poll() is None, export.stderr.read()
            assert [*work.glob(".model.bundle-*/model.safetensors")]
            assert [*fetched.glob("tacit-export-*/*")] or who == "edge_client"
            export.send_signal(signal.SIGTERM)
            said = export.communicate(timeout=PATIENCE)[1]
        finally:
            export.kill()
    assert (export.returncode, said.strip().splitlines()[-1]) == (ExitCode.INTERRUPTED, "interrupted")
    assert [*work.iterdir(), *fetched.iterdir()] == []


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_member_exports_the_same_model(town, tmp_path, precision):
    """With the same card; that of the operator's also has the version's date and the number of members."""
    federation, _, _, _, _ = town
    home, data = federation.home("north"), federation.folder / "north.jsonl"
    words = ("--data", data, "--home", home, "--out", tmp_path / "own", "--precision", precision)
    said = " ".join(succeed("edge_client", "export", JOB, *words).split())
    assert f"edge_client generate --bundle {tmp_path / 'own'}" in said
    federation.operator("export", JOB, "--out", tmp_path / "theirs", "--precision", precision)
    for name in ("model.onnx", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    own, theirs = (read_bundle(tmp_path / each, "generator").index.generator for each in ("own", "theirs"))
    # The member's is compared with the trained model on the member's rows, of which one has no response.
    assert (own.precision, own.texts) == (precision, 41)
    assert f"largest difference from the trained model {own.parity:.2g}" in said
    assert own.model_copy(update={"parity": theirs.parity, "texts": theirs.texts}) == theirs
    cards = [(tmp_path / each / "README.md").read_text(encoding="utf-8").splitlines() for each in ("own", "theirs")]
    assert any(f"the weights, {precision}" in line for line in cards[0])
    rounds, members, parity = (line for line in cards[0] if line not in cards[1])
    assert (rounds.split(" | ")[0], members.split(" | ")[0]) == ("| rounds", "| members")
    assert parity.startswith("On 41 dialogues, its logits differ from the trained model's by at most ")


def plainly(folder, ids):
    """The logits (S, vocabulary) of a folder's model over a fresh cache, with onnxruntime and nothing of ours."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    past = [each for each in session.get_inputs() if each.name.startswith("past.")]
    feeds = {each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32) for each in past}
    numbers = {"ids": [ids], "lengths": [len(ids)], "wanted": [range(len(ids))]}
    feeds |= {name: np.array(each, dtype=np.int64) for name, each in numbers.items()}
    return session.run(["logits"], feeds)[0][0]


def test_a_members_int8_model_answers_as_its_float32_one_within_the_limit(town, tmp_path):
    federation, _, _, _, _ = town
    home, data = federation.home("north"), federation.folder / "north.jsonl"
    told, size = {}, {}
    for precision in ("float32", "int8"):
        words = ("--data", data, "--home", home, "--out", tmp_path / precision, "--precision", precision, "--json")
        told[precision] = json.loads(succeed("edge_client", "export", JOB, *words))
        size[precision] = (tmp_path / precision / "model.safetensors").stat().st_size
    assert size["int8"] < 0.5 * size["float32"]
    assert told["float32"]["max_difference"] < 1e-4 < told["int8"]["max_difference"]
    pieces = Tokenizer.from_file(str(tmp_path / "int8" / "tokenizer.json"))
    for asked in (f"Where is the food of {SECRET}?", "the river is near the restaurant", "people"):
        ids = pieces.encode(asked, add_special_tokens=False).ids
        whole, small = (plainly(tmp_path / each, ids) for each in ("float32", "int8"))
        # docs/exports.md: a fifth of the largest logit.
        assert 0 < np.abs(whole - small).max() <= 0.2 * np.abs(whole).max()
    # The README's own program runs it.
    (program,) = re.findall(r"```python\n(.*?)```", (tmp_path / "int8" / "README.md").read_text(encoding="utf-8"), re.S)
    (tmp_path / "int8" / "answer.py").write_text(program)
    asked = f"Where is the food of {SECRET}?"
    ran = subprocess.run(
        [sys.executable, "answer.py", asked], cwd=tmp_path / "int8", capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(succeed("edge_client", "generate", "--bundle", tmp_path / "int8", asked, "--json"))
    assert ran.stdout.strip() == answer["response"].strip()


def test_a_member_measures_the_same_as_the_operator_and_nothing_stays(town, tmp_path):
    """Its own rows, the same figures, no trace: neither in the ledger, nor at the coordinator, nor on its disk."""
    federation, _, _, _, _ = town
    home, data, test = federation.home("north"), federation.folder / "north.jsonl", tmp_path / "own.jsonl"
    seen = rows(0)[0]
    asked = [{"prompt": f"Where is the {each}?", "response": f"The {each} is near 3."} for each in SUBJECTS]
    test.write_text("".join(json.dumps(each) + "\n" for each in [*asked, seen, {"prompt": "no answer"}]))
    own = ("edge_client", "evaluate", JOB, "--data", data, "--test", test, "--home", home)

    def held():
        """What the member keeps: everything but downloads and locks."""
        files = [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]
        return {path: path.read_bytes() for path in files if "cache" not in path.parts}

    before = held()
    stored = json.loads(federation.operator("job", "show", JOB, "--json")).get("evaluation")
    words = ("--generate", "--answers", "2", "--temperature", "0.5", "--seed", "3", "--json")
    told = json.loads(succeed(*own, *words))
    assert held() == before
    assert any("ledgers" in path.parts for path in before)
    # The export that was measured is gone; files there are what everybody may fetch.
    assert [path for path in (home / "cache").iterdir() if path.is_dir()] == []
    assert json.loads(federation.operator("job", "show", JOB, "--json")).get("evaluation") == stored
    theirs = json.loads(federation.operator("evaluate", JOB, "--data", test, *words))
    assert (told["job"], told["version"], told["private_values"]) == (JOB, 2, 0)
    for key in ("loss", "perplexity", "token_accuracy", "examples", "tokens", "unusable_rows", "greedy", "sampled"):
        assert told[key] == theirs[key], key
    assert (told["examples"], told["unusable_rows"], told["also_in_data"]) == (6, 1, 2)
    assert (told["reading"]["rows"], told["reading"]["unusable_rows"]) == (7, 1)
    said = " ".join(succeed(*own).split())
    assert f"version 2 of {JOB}: loss {told['loss']:.4f} a token, perplexity" in said
    assert "6 of 7 rows are dialogues with a response; with template chatml" in said
    assert f"2 of 7 rows of {test} are also in {data}, so the figures are too good" in said
    refused = command(*own, "--answers", "2")
    assert (refused.returncode, "add --generate" in refused.stderr) == (ExitCode.USAGE, True)
    (tmp_path / "labels.jsonl").write_text('{"text": "a", "label": "b"}\n')
    refused = command(*own[:6], tmp_path / "labels.jsonl", *own[7:])
    assert (refused.returncode, "no row is a dialogue" in refused.stderr) == (ExitCode.USAGE, True)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_members_measurement_that_is_cut_off_shows_what_it_has(town, tmp_path, monkeypatch, by):
    """The signal comes as the fourth row is read, for real. What is then written of the answers is none."""
    federation, _, _, _, _ = town
    test = tmp_path / "own.jsonl"
    asked = [{"prompt": f"Where is the {each}?", "response": f"The {each} is near 3."} for each in SUBJECTS]
    test.write_text("".join(json.dumps(each) + "\n" for each in asked))
    words = ["--data", federation.folder / "north.jsonl", "--home", federation.home("north"), "--json"]
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    real, read = Generator.logits, []
    # This process has imported gRPC long ago.
    monkeypatch.setattr("toolkit.tls.tls_13_only", lambda: None)

    def logits(generator, ids):
        read.append(len(ids))
        if len(read) == at:
            os.kill(os.getpid(), by)
        return real(generator, ids)

    def measured(path, *more):
        read.clear()
        command = ["evaluate", JOB, "--test", path, *more, *words]
        return CliRunner().invoke(edge_app, [str(each) for each in command])

    with monkeypatch.context() as patch:
        patch.setattr(Generator, "logits", logits)
        at = 4
        cut = measured(test, "--generate")
        # At the last row it cuts nothing off: the figures are complete.
        at = 5
        late = measured(test)
    assert (late.exit_code, "stopping" in late.stderr) == (0, True), late.exception
    assert "rows_left" not in json.loads(late.stdout)
    assert isinstance(cut.exception, CommandFailed)
    assert (cut.exception.code, cut.exception.sentence) == (ExitCode.INTERRUPTED, "interrupted")
    assert "stopping; what has been measured follows" in cut.stderr
    told = json.loads(cut.stdout)
    assert (told["examples"], told["rows_left"], told["answers_left"]) == (4, 1, 10)
    # They are the figures of the first rows, and nothing stays of the export.
    test.write_text("".join(json.dumps(each) + "\n" for each in asked[:4]))
    whole = json.loads(measured(test, "--generate").stdout)
    assert (whole["loss"], whole["examples"]) == (told["loss"], 4)
    assert "rows_left" not in whole or whole["rows_left"] == 0
    assert [path for path in (federation.home("north") / "cache").iterdir() if path.is_dir()] == []
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def test_the_operator_measures_what_the_versions_predict_and_answer(town, tmp_path):
    """Loss and token accuracy of every version, and answers of the newest, on the exported models."""
    federation, _, _, _, _ = town
    data = tmp_path / "test.jsonl"
    asked = [{"prompt": f"Where is the {each}?", "response": f"The {each} is near 3."} for each in SUBJECTS]
    second = {"prompt": "Where is the food?", "response": "Near 3."}
    data.write_text("".join(json.dumps(each) + "\n" for each in [*asked, second, {"prompt": "no answer"}]))
    said = federation.operator("evaluate", JOB, "--data", data, "--versions", "all", "--json")
    versions = [json.loads(line) for line in said.splitlines()]
    assert [each["version_number"] for each in versions] == [0, 1, 2]
    (best,) = [each for each in versions if each["best"]]
    assert best["loss"] == min(each["loss"] for each in versions)
    assert {(each["examples"], each["unusable_rows"]) for each in versions} == {(6, 1)}
    assert len({each["loss"] for each in versions}) == 3
    words = ("--generate", "--answers", "2", "--temperature", "0.5", "--json")
    found = json.loads(federation.operator("evaluate", JOB, "--data", data, *words))
    assert found["loss"] == pytest.approx(versions[-1]["loss"])
    assert [(found[how]["answers"], found[how]["references"]) for how in ("greedy", "sampled")] == [(2, 3)] * 2
    stored = json.loads(federation.operator("job", "show", JOB, "--json"))["evaluation"]
    assert stored["accuracy"] == pytest.approx(found["token_accuracy"])
    shown = federation.operator("evaluate", JOB, "--data", data)
    assert "perplexity" in shown
    key = federation.dir / "operator"
    refused = command("coordinator", "evaluate", JOB, "--data", data, "--answers", "2", "--operator", key)
    assert (refused.returncode, "add --generate" in refused.stderr) == (ExitCode.USAGE, True)
