"""`coordinator finetune` as the operator runs it, from a folder and from the coordinator."""

import hashlib
import json
import math
import sys

import numpy as np
import pytest

import export.finetune.run
from coordinator.config import OperatorConfig, operator_toml
from coordinator.domain.jobs import JobStatus
from export.predictor import Predictor
from learning.text.encoder import word_tokenizer
from tests.support import party
from tests.support.ordered_corpora import corpus_file, lay_down, ordering_job
from tests.unit.coordinator.services.test_corpora import House, housed
from toolkit.durable import durable_file

SMALL = ("--embedding", "8", "--hidden", "8", "--epochs", "6", "--learning-rate", "0.02", "--device", "cpu")
COMMON = ["the", "film", "was", "and", "it", "play", "day", "actor"]


def rows_of(count: int, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    made = [(" ".join(random.choice(COMMON, size=5)), str(label)) for label in random.choice(["a", "b"], size=count)]
    return corpus_file([(f"{text} {'good' if label == 'a' else 'bad'}", label) for text, label in made])


def run(*arguments: object) -> int:
    """Runs the command in this process and returns its exit code."""
    from coordinator.cli import main

    before = sys.argv
    sys.argv = ["coordinator", "finetune", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    return int(ended.value.code or 0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Corpora of two members for the job `questions`, one of them without a promise, and a test file."""
    job = ordering_job()
    (tmp_path / "corpora").mkdir()
    for place, promise in enumerate(("differentially-private", "none")):
        data = rows_of(60, place)
        lay_down(tmp_path / "corpora", data, job, member=f"m{place}", promise=promise)
    (tmp_path / "test.jsonl").write_bytes(rows_of(40, 9))
    # Tests run without an operator's folder unless they create one.
    monkeypatch.chdir(tmp_path)
    for name in ("TACIT_OPERATOR", "TACIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def operators_folder(path, federation):
    path.mkdir(mode=0o700)
    (path / "operator.toml").write_text(operator_toml(OperatorConfig(address="localhost:1", federation=federation)))
    for name in ("cert.pem", "key.pem", "root.pem"):
        durable_file(path / name, b"of no use here")


def test_from_a_folder_it_prints_the_scores_and_the_missing_promise(folder, capsys):
    given = ("questions", "--test", folder / "test.jsonl", "--corpora", folder / "corpora")
    assert run(*given, "--out", folder / "out", *SMALL) == 0
    said = capsys.readouterr()
    assert "120 synthetic texts in 2 corpora: no differential privacy guarantee (m1)." in said.out
    assert "always answering 'a': " in said.out or "always answering 'b': " in said.out
    assert said.out.count("no differential privacy guarantee") == 2
    assert "epoch 1: loss" in said.err
    assert Predictor.load(folder / "out").predict(["the film was good"])[0].label == "a"
    assert run(*given, "--out", folder / "again", *SMALL, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["promise"], found["out"]) == ("none", str(folder / "again"))
    assert found["test"]["scores"]["accuracy"] > 0.9
    assert (folder / "again" / "model.onnx").read_bytes() == (folder / "out" / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--test", "HERE/none.jsonl", "--corpora", "HERE/corpora"], 5, "none.jsonl does not exist"),
        (["--test", "HERE/test.jsonl", "--corpora", "HERE/none"], 5, "none is not a folder"),
        (["--test", "HERE/test.jsonl", "--unverified"], 2, "--unverified applies to files in a folder"),
        (["--test", "HERE/test.jsonl", "--corpora", "HERE/corpora", "--base", "x"], 2, "a BiLSTM has none"),
        (["--test", "HERE/test.jsonl", "--corpora", "HERE/corpora", "--learning-rate", "0"], 2, "learning_rate: "),
        (["--test", "HERE/test.jsonl", "--corpora", "HERE/corpora", "--label", "x"], 2, "no column 'x'"),
        (["--test", "HERE/test.jsonl", "--corpora", "HERE/corpora", "--words", "HERE/none"], 2, "none does not exist"),
        (["--test", "HERE/test.jsonl", "--operator", "HERE/none"], 5, "is not an operator's folder"),
    ],
)
def test_a_refusal_is_a_sentence(folder, capsys, arguments, code, says):
    made = [each.replace("HERE", str(folder)) for each in arguments]
    assert run("questions", *made, "--out", folder / "out") == code
    assert says in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_training_that_diverges_is_a_sentence(folder, capsys, monkeypatch):
    starting = export.finetune.run._starting

    def spoilt(*given):
        module, *rest = starting(*given)
        module.output.bias.data.fill_(math.nan)
        return module, *rest

    monkeypatch.setattr(export.finetune.run, "_starting", spoilt)
    given = ("questions", "--test", folder / "test.jsonl", "--corpora", folder / "corpora")
    assert run(*given, "--out", folder / "out", *SMALL) == 1
    assert "lower --learning-rate (it is 0.02)" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_without_torch_it_says_what_to_install(folder, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "export.finetune.run")
    # The package gets the module that the command imports, and this one again afterwards.
    monkeypatch.setattr(export.finetune, "run", export.finetune.run)
    monkeypatch.setitem(sys.modules, "torch", None)
    given = ("questions", "--test", folder / "test.jsonl", "--corpora", folder / "corpora")
    assert run(*given, "--out", folder / "out") == 2
    assert "pip install '.[coordinator,export]'" in capsys.readouterr().err


def test_it_names_the_federation_or_compares_it_itself(folder, capsys):
    federation = party.authority().federation
    given = ("questions", "--test", folder / "test.jsonl", "--corpora", folder / "corpora")
    short = (*SMALL, "--epochs", "1")
    assert run(*given, "--out", folder / "alone", *short) == 0
    asked = f"only for federation {federation.hex()}, which the folder's author may have invented"
    assert asked in (said := capsys.readouterr().out)
    assert "Compare it with what `coordinator authority status` prints" in said
    # With --json, standard output holds only the object.
    assert run(*given, "--out", folder / "json", *short, "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["federation"] == federation.hex()
    assert asked in said.err
    # With an operator's folder, named or found here, the command compares the federation itself.
    operators_folder(folder / "operator", federation)
    assert run(*given, "--out", folder / "here", *short) == 0
    assert federation.hex() not in capsys.readouterr().out
    operators_folder(folder / "elsewhere", bytes(32))
    assert run(*given, "--out", folder / "refused", *short, "--operator", folder / "elsewhere") == 2
    assert "and the operator's folder belong to different federations" in capsys.readouterr().err
    assert run(*given, "--out", folder / "refused", *short, "--operator", folder / "nowhere") == 5
    assert "is not an operator's folder" in capsys.readouterr().err
    assert not (folder / "refused").exists()


def test_a_folder_without_signatures_is_refused_or_promises_nothing(folder, capsys):
    for path in [*(folder / "corpora").glob("*.sig"), folder / "corpora" / "authorities.json"]:
        path.unlink()
    given = ("questions", "--test", folder / "test.jsonl", "--corpora", folder / "corpora", *SMALL, "--epochs", "1")
    assert run(*given, "--out", folder / "out") == 2
    said = capsys.readouterr().err
    assert "authorities.json is missing" in said
    assert "download the corpora again" in said
    assert run(*given, "--out", folder / "out", "--unverified") == 0
    said = capsys.readouterr().out
    assert "120 synthetic texts in 2 corpora: no differential privacy guarantee." in said
    # Without signatures there is no federation to compare.
    assert "federation" not in said


@housed
async def test_from_the_coordinator_it_trains_on_released_corpora(house: House):
    tokenizer = word_tokenizer([*COMMON, "lovely"])
    house.store.put(tokenizer)
    job = await house.job(ordering_job(tokenizer=hashlib.sha256(tokenizer).digest()))
    (house.tmp / "test.jsonl").write_bytes(rows_of(40, 9))
    given = ("finetune", "questions", "--test", str(house.tmp / "test.jsonl"), "--out", str(house.tmp / "out"))
    await house.member("south").status(declined=True)
    _, err = await house.cli(*given, *SMALL, code=4)
    assert "1 of its members declined, and 2 have yet to answer" in err
    await house.member("north").give(job, rows_of(90, 1), chunk=4096)
    vectors = house.tmp / "vectors.txt"
    vectors.write_text("".join(f"{word} {at} 1 0 0 0 0 0 0\n" for at, word in enumerate(["lovely", "film", "sour"])))
    out, _ = await house.cli(*given, *SMALL, "--vectors", str(vectors), "--json")
    said = json.loads(out)
    assert [(each["member"], each["rows"]) for each in said["corpora"]] == [("north", 90)]
    assert (said["promise"], said["job_document"]) == ("differentially-private", job.digest().hex())
    assert said["labels"] == list(job.labels)
    assert Predictor.load(house.tmp / "out").predict(["it was bad"])[0].label == "b"
    # "lovely" is in no member's text but in the job's word list; "sour" is in neither.
    known = json.loads((house.tmp / "out" / "tokenizer.json").read_bytes())["model"]["vocab"]
    assert "lovely" in known
    assert "sour" not in known


@housed
async def test_it_refuses_while_the_job_runs(house: House):

    await house.job(status=JobStatus.RUNNING)
    (house.tmp / "test.jsonl").write_bytes(rows_of(4, 9))
    given = ("finetune", "questions", "--test", str(house.tmp / "test.jsonl"), "--out", str(house.tmp / "out"))
    _, err = await house.cli(*given, code=4)
    assert "job questions is running; members release texts only once it is finished" in err
