"""Versions of a job: exported, measured one by one, all at once, and as they come."""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.cli import model
from coordinator.cli.evaluate import evaluate
from coordinator.domain.jobs import JobStatus, Norms
from coordinator.domain.validation import Estimate, Measured, Validation
from coordinator.storage import records
from export.figures import EvaluationCut, Figures, figures_of
from export.generating import ModelFailed
from export.onnx import ParityFailed
from learning.text.examples import DataInvalid
from tacit.job import BundledWeights
from tacit.manifest import Manifest
from tacit.mechanism import DpSgd
from tacit.v1 import operator_pb2
from tacit.validation import NoisedMetrics
from tests.support.operator_house import TOKENIZER, House, Job, created, fragile, make_job
from tests.support.processes import PATIENCE
from toolkit.console import CommandFailed, ExitCode

# By its module's name: `coordinator.cli.evaluate` is the command.
MEASURING = sys.modules["coordinator.cli.evaluate"]


@dataclass(frozen=True)
class Made:
    """The result of an export, with the fields that commands read."""

    max_difference: float = 1e-7


class Tools:
    """`export` without a model: records its calls. A version is right on as many texts as its first byte says."""

    def __init__(self) -> None:
        self.exported: list[tuple[bytes, int]] = []
        # What the README says of each version; None in an evaluation.
        self.origins: list[Any] = []
        self.frozen: dict[str, Any] = {}
        self.began = threading.Event()
        # By a version's first byte, how its export or its model fails.
        self.unlike: dict[int, Exception] = {}
        self.failing: dict[int, Exception] = {}
        # Versions that are measured until they are cut off.
        self.endless: set[int] = set()
        self.measuring, self.looks = threading.Event(), threading.Event()

    def read_examples(self, path: Path, *, text: str, label: str | None, text_b: str | None) -> list[Any]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [argparse.Namespace(text=row[text], label=label and row[label]) for row in rows]

    def read_data(self, path: Path, *, text: str, label: str, text_b: str | None, **_columns: None) -> Any:
        return argparse.Namespace(examples=self.read_examples(path, text=text, label=label, text_b=text_b))

    def text_rows(self, examples: Any, *, pairs: bool) -> list[str]:
        assert not pairs
        return [example.text for example in examples]

    def export_model(
        self,
        document: Any,
        manifest: Any,
        weights: bytes,
        tokenizer: bytes,
        out: Path,
        samples: Any,
        *,
        frozen: Any,
        origin: Any = None,
    ) -> Made:
        self.frozen = frozen
        self.origins.append(origin)
        manifest.decode(weights)
        assert tokenizer == TOKENIZER
        self.exported.append((weights, len(samples)))
        self.began.set()
        if (error := self.unlike.get(weights[0])) is not None:
            raise error
        out.mkdir()
        return Made()

    def evaluate_bundle(self, folder: Path, examples: Any, *, cancelled: Callable[[], bool]) -> Figures:
        assert folder.is_dir()
        if self.exported[-1][0][0] in self.endless:
            self.measuring.set()
            while not cancelled():
                self.looks.wait(0.01)
            raise EvaluationCut("the evaluation was cut off")
        if (error := self.failing.get(self.exported[-1][0][0])) is not None:
            raise error
        right = np.arange(len(examples)) < self.exported[-1][0][0]
        expected = np.array([("no", "yes").index(example.label) for example in examples])
        answers = np.where(right, expected, 1 - expected)
        return figures_of(np.eye(2, dtype=np.float32)[answers], expected, ("no", "yes"))


@pytest.fixture
def tools(monkeypatch) -> Tools:
    made = Tools()
    for module in (MEASURING, model):
        monkeypatch.setattr(module, "load_tools", lambda: made)
    return made


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "test.jsonl"
    rows = (("a", "no"), ("b", "yes"), ("c", "no"), ("d", "no"))
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return path


def publish(
    house: House, number: int, right: int | None = None, *, measured: Validation | None = None
) -> Callable[[records.Session], None]:
    """Publishes another version, whose first byte is `right`, or its number. Its round `measured` the one before it."""
    weights = bytes([number if right is None else right]) + bytes(54) + bytes([number])
    digest = house.store.put(weights)

    def write(s: records.Session) -> None:
        records.open_round(s, "desk", number, 3000)
        norms = Norms(3.0, 4.0, 2.5)
        records.publish_version(s, "desk", number, digest, number, 3000, norms=norms, validation=measured)
        records.end_round(s, "desk", number, "published", None, 3000)

    return write


def of_members(accuracy: float | None) -> Validation:
    """What three members measured; None: too few units to show anything."""
    if accuracy is None:
        return Validation(3, None)
    numbers = Estimate(loss=Measured(0.6, 0.05), accuracy=Measured(accuracy, 0.012), units=Measured(812.0, 20.0))
    return Validation(3, numbers)


async def in_a_thread(work: Callable[[], Any]) -> Any:
    # A command starts its own event loop, which needs another thread.
    return await asyncio.to_thread(work)


def test_an_export_takes_frozen_values_from_the_bundle(house, tools, tmp_path):
    """They are in no version."""
    frozen = {"table": np.arange(6, dtype=np.float32).reshape(3, 2)}
    manifest = Manifest.of(frozen)
    values = manifest.encode(manifest.flatten(frozen))
    base = make_job()
    document = base.document.model_copy(
        update={
            "model": base.document.model.model_copy(update={"freeze_embedding": True}),
            "frozen": BundledWeights(
                manifest=manifest.digest(), weights=hashlib.sha256(values).digest(), values=manifest.values
            ),
        }
    )
    job = Job(
        document,
        base.blobs | {"job.json": document.canonical(), "frozen.json": manifest.canonical(), "frozen.bin": values},
    )

    async def scenario(house: House) -> None:
        digest = job.store_in(house.store)
        await house.stub().CreateJob(operator_pb2.CreateJobRequest(document=digest))
        folder = house.operator_folder()
        await in_a_thread(lambda: model.export("desk", tmp_path / "model", passport=False, operator=folder))
        assert tools.frozen.keys() == frozen.keys()
        assert np.array_equal(tools.frozen["table"], frozen["table"])
        assert tools.exported[0][0] == base.blobs["weights.bin"]

    house(scenario)


def test_evaluating_a_version_shows_all_figures_and_stores_three(house, tools, data, capsys):
    async def scenario(house: House) -> None:
        await created(house)
        for number in (1, 2):
            await house.database.run(publish(house, number))
        folder = house.operator_folder()
        await in_a_thread(lambda: evaluate("desk", data, operator=folder))
        text = capsys.readouterr().out.splitlines()
        assert text[0] == "version 2: accuracy 50.00 %, loss 0.8133, 4 examples"
        assert text[2] == "  majority class     75.0 %, always answering no"
        assert text[6] == "  no better than always answering no (75.0 %)"
        assert [line.split() for line in text[-2:]] == [["1", "no", "1", "2"], ["2", "yes", ".", "1"]]
        await in_a_thread(lambda: evaluate("desk", data, version="1", operator=folder, as_json=True))
        said = json.loads(capsys.readouterr().out)
        assert (said["job"], said["version_number"], said["accuracy"], said["examples"]) == ("desk", 1, 0.25, 4)
        assert said["confusion"] == [[1, 2], [1, 0]]
        assert (said["majority_label"], said["majority_accuracy"], said["beats_majority"]) == ("no", 0.75, "no")
        stored = await house.database.run(lambda s: records.versions(s, "desk"))
        assert [len(version.evaluations) for version in stored] == [0, 1, 1]
        measured = stored[2].evaluations[0]
        assert (measured.accuracy, measured.examples) == (0.5, 4)
        assert measured.loss == pytest.approx(0.8133, abs=1e-4)
        assert measured.data == hashlib.sha256(data.read_bytes()).digest()
        assert tools.exported[0][1] == 4

    house(scenario)


def test_all_versions_of_the_store_are_measured_and_the_best_is_marked(house, tools, data, capsys):
    async def scenario(house: House) -> None:
        await created(house)
        for number, right in ((1, 1), (2, 2), (3, 4), (4, 3)):
            await house.database.run(publish(house, number, right))
        # A version whose blob is gone is left out, and the others are measured.
        lost = (await house.database.run(lambda s: records.versions(s, "desk")))[2].digest.hex()
        (house.tmp / "store" / "blobs" / lost[:2] / lost).unlink()
        folder = house.operator_folder()
        await in_a_thread(lambda: evaluate("desk", data, versions="all", operator=folder))
        shown = capsys.readouterr()
        assert "version 2 is not in the coordinator's store; it is left out\n" in shown.err
        assert [line.split(":")[0] for line in shown.err.splitlines() if "of 4" in line] == [
            f"version {number} of 4" for number in (0, 1, 3, 4)
        ]
        (best,) = [line for line in shown.out.splitlines() if line.endswith("best")]
        assert best.split()[:3] == ["3", "100.0", "%"]
        assert "best: version 3, accuracy 100.00 %" in shown.out
        drawn = [line.removesuffix("majority 75.0 %") for line in shown.out.splitlines() if " % | " in line]
        assert sum(line.count("o") for line in drawn) == 4
        await in_a_thread(lambda: evaluate("desk", data, versions="all", operator=folder, as_json=True))
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(row["version_number"], row["accuracy"], row["best"]) for row in rows] == [
            (0, 0.0, False),
            (1, 0.25, False),
            (3, 1.0, True),
            (4, 0.75, False),
        ]
        stored = await house.database.run(lambda s: records.versions(s, "desk"))
        assert [len(version.evaluations) for version in stored] == [2, 2, 0, 2, 2]

    house(scenario)


@pytest.mark.parametrize("as_json", [False, True])
def test_versions_measured_before_sigterm_are_shown_and_the_others_named(house, tools, data, capsys, as_json):
    """A time limit (`timeout`, systemd) ends a command with SIGTERM; Ctrl-C cancels it the same way."""
    tools.endless = {9}

    async def scenario(house: House) -> None:
        await created(house)
        for number, right in ((1, 1), (2, 3), (3, 9), (4, 2)):
            await house.database.run(publish(house, number, right))
        folder = house.operator_folder()
        examples = tools.read_examples(data, text="text", label="label", text_b=None)
        scratch = house.tmp / "scratch"
        scratch.mkdir()
        work = MEASURING._Evaluation(tools, "desk", data, examples, scratch, as_json)
        task = asyncio.create_task(MEASURING._ended_by_sigterm(work.all(folder)))
        await asyncio.to_thread(tools.measuring.wait)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(CommandFailed, match="interrupted") as failed:
            await task
        assert failed.value.code is ExitCode.INTERRUPTED
        shown = capsys.readouterr()
        assert "cut off after 3 of 5 versions; not measured to the end: 3 to 4; " in shown.err
        if as_json:
            rows = [json.loads(line) for line in shown.out.splitlines()]
            assert [(row["version_number"], row["best"]) for row in rows] == [(0, False), (1, False), (2, True)]
        else:
            assert "best: version 2, accuracy 75.00 %" in shown.out
        stored = await house.database.run(lambda s: records.versions(s, "desk"))
        assert [len(version.evaluations) for version in stored] == [1, 1, 1, 0, 0]

    house(scenario)


def test_versions_measured_before_the_coordinator_went_away_are_shown(house, tools, data, capsys):
    tools.failing = {3: CommandFailed("the coordinator does not answer", ExitCode.UNREACHABLE)}

    async def scenario(house: House) -> None:
        await created(house)
        for number in range(1, 4):
            await house.database.run(publish(house, number))
        folder = house.operator_folder()
        with pytest.raises(CommandFailed, match="does not answer") as failed:
            await in_a_thread(lambda: evaluate("desk", data, versions="all", operator=folder))
        assert failed.value.code is ExitCode.UNREACHABLE
        shown = capsys.readouterr()
        assert "best: version 2, accuracy 50.00 %" in shown.out
        assert "cut off after 3 of 4 versions; not measured to the end: 3; " in shown.err

    house(scenario)


def test_versions_that_cannot_be_measured_are_named_and_the_others_are_measured(house, tools, data, capsys):
    """Of two versions that exploded, one has no export, and the model of the other fails. A third is damaged."""
    tools.unlike = {2: ParityFailed("the logits differ")}
    tools.failing = {3: ModelFailed("the logits are not numbers")}

    async def scenario(house: House) -> None:
        await created(house)
        for number in range(1, 6):
            await house.database.run(publish(house, number, min(number, 4)))
        damaged = (await house.database.run(lambda s: records.versions(s, "desk")))[4].digest.hex()
        (house.tmp / "store" / "blobs" / damaged[:2] / damaged).write_bytes(bytes(56))
        folder = house.operator_folder()
        left_out = [
            "version 2 cannot be exported: the logits differ",
            "version 3 cannot be measured: the logits are not numbers",
            f"version 4 did not arrive as it should (what arrived for {damaged} has another digest",
        ]
        await in_a_thread(lambda: evaluate("desk", data, versions="all", operator=folder, as_json=True))
        shown = capsys.readouterr()
        rows = [json.loads(line) for line in shown.out.splitlines()]
        assert [(row["version_number"], row["accuracy"], row["best"]) for row in rows] == [
            (0, 0.0, False),
            (1, 0.25, False),
            (5, 1.0, True),
        ]
        for sentence in left_out:
            (line,) = [line for line in shown.err.splitlines() if sentence in line]
            assert line.endswith("; it is left out")
        await in_a_thread(lambda: evaluate("desk", data, versions="all", operator=folder))
        assert "best: version 5, accuracy 100.00 %" in capsys.readouterr().out
        # One alone is an error, with the same sentence.
        for number, sentence in zip((2, 3), left_out, strict=False):
            with pytest.raises(CommandFailed, match=sentence) as failed:
                await in_a_thread(lambda number=number: evaluate("desk", data, version=str(number), operator=folder))
            assert failed.value.code is ExitCode.FAILED

    house(scenario)


def test_rows_that_no_version_can_be_measured_on_end_the_command_at_the_first_one(house, tools, data, capsys):
    tools.failing = {number: DataInvalid("the job does not know these labels: 'maybe'") for number in range(4)}

    async def scenario(house: House) -> None:
        await created(house)
        for number in range(1, 4):
            await house.database.run(publish(house, number))
        folder = house.operator_folder()
        for more in ({"versions": "all"}, {"follow": True}):
            tools.exported.clear()
            with pytest.raises(CommandFailed, match="does not know these labels") as failed:
                await in_a_thread(lambda more=more: evaluate("desk", data, operator=folder, **more))
            assert failed.value.code is ExitCode.USAGE
            assert len(tools.exported) == 1

    house(scenario)


def test_a_job_of_which_no_version_can_be_measured_is_an_error(house, tools, data):
    tools.unlike = {number: ParityFailed("the logits differ") for number in range(3)}

    async def scenario(house: House) -> None:
        await created(house)
        for number in range(1, 3):
            await house.database.run(publish(house, number))
        folder = house.operator_folder()
        await house.database.run(lambda s: records.set_job_status(s, "desk", JobStatus.FINISHED, "job_finished", 9))
        for more in ({"versions": "all"}, {"follow": True}):
            with pytest.raises(CommandFailed, match="no version of job desk could be measured") as failed:
                await in_a_thread(lambda more=more: evaluate("desk", data, operator=folder, **more))
            assert failed.value.code is ExitCode.FAILED

    house(scenario)


def test_following_names_versions_that_cannot_be_measured_and_goes_on(house, tools, data, capsys):
    tools.unlike = {2: ParityFailed("the logits differ")}

    async def scenario(house: House) -> None:
        await created(house)
        for number in range(1, 3):
            await house.database.run(publish(house, number))
        folder = house.operator_folder()
        following = asyncio.create_task(in_a_thread(lambda: evaluate("desk", data, follow=True, operator=folder)))
        assert await in_a_thread(lambda: tools.began.wait(PATIENCE))
        # Version 3 is pruned before it can be measured.
        published = publish(house, 3)
        pruned = hashlib.sha256(bytes([3, *bytes(54), 3])).hexdigest()
        (house.tmp / "store" / "blobs" / pruned[:2] / pruned).unlink()
        for each in (published, publish(house, 4)):
            await house.database.run(each)
        await house.database.run(lambda s: records.set_job_status(s, "desk", JobStatus.FINISHED, "job_finished", 9))
        house.rounds.change()
        await following
        shown = capsys.readouterr()
        assert [line.split(":")[0] for line in shown.out.splitlines() if line.startswith("version")] == ["version 4"]
        assert [line for line in shown.err.splitlines() if "left out" in line] == [
            "the version 2 cannot be exported: the logits differ; it is left out",
            "version 3 is not in the coordinator's store; it is left out",
        ]

    house(scenario)


def test_what_cannot_be_evaluated_is_a_sentence(house, tools, data, tmp_path):
    async def scenario(house: House) -> None:
        await created(house)
        folder = house.operator_folder()
        nowhere = house.operator_folder(port=1)
        for more, code, sentence in (
            ({"version": "7"}, ExitCode.NOT_FOUND, "has no version 7; the newest is 0"),
            ({"version": "1", "follow": True}, ExitCode.USAGE, "leave out --version"),
            ({"version": "1", "versions": "all"}, ExitCode.USAGE, "leave out --version and --follow"),
            ({"follow": True, "versions": "all"}, ExitCode.USAGE, "leave out --version and --follow"),
            ({"job": "nobody"}, ExitCode.NOT_FOUND, "there is no job named nobody"),
            ({"operator": nowhere}, ExitCode.UNREACHABLE, "coordinator serve"),
            ({"operator": nowhere, "versions": "all"}, ExitCode.UNREACHABLE, "coordinator serve"),
            ({"data": tmp_path / "missing.jsonl"}, ExitCode.NOT_FOUND, "missing.jsonl"),
        ):
            given = {"job": "desk", "data": data, "operator": folder, **more}
            with pytest.raises(CommandFailed, match=sentence) as failed:
                await in_a_thread(lambda given=given: evaluate(**given))
            assert failed.value.code is code
        assert tools.exported == []

    house(scenario)


def test_following_evaluates_every_version_until_the_job_ends(house, tools, data, monkeypatch):
    monkeypatch.setattr(MEASURING, "RECONNECT_SECONDS", 0.05)

    async def scenario(house: House) -> None:
        await created(house)
        await house.database.run(publish(house, 1))

        async def measured(number: int) -> None:
            while True:
                stored = await house.database.run(lambda s: records.load_job(s, "desk"))
                if stored.evaluation is not None and stored.evaluation.version_number >= number:
                    return
                await asyncio.sleep(0.02)

        async with fragile(house.port, lasts=20_000) as (port, connections):
            folder = house.operator_folder(port=port)
            following = asyncio.create_task(in_a_thread(lambda: evaluate("desk", data, follow=True, operator=folder)))
            await measured(1)
            for number in range(2, 9):
                await house.database.run(publish(house, number))
                house.rounds.change()
                if number in (4, 8):
                    await measured(number)
            await house.database.run(lambda s: records.set_job_status(s, "desk", JobStatus.FINISHED, "job_finished", 9))
            house.rounds.change()
            await following
            # Connections broke, and following continued.
            assert len(connections) > 1
        stored = await house.database.run(lambda s: records.versions(s, "desk"))
        counts = [len(version.evaluations) for version in stored]
        assert counts[0] == 0
        # A result whose answer was lost may be recorded twice. No version is left out.
        assert all(1 <= count <= 2 for count in counts[1:])

    house(scenario)


def test_following_an_unknown_job_fails_at_once(house, tools, data):
    async def scenario(house: House) -> None:
        folder = house.operator_folder()
        with pytest.raises(CommandFailed, match="there is no job named desk"):
            await in_a_thread(lambda: evaluate("desk", data, follow=True, operator=folder))

    house(scenario)


def test_a_version_is_exported(house, tools, data, tmp_path, capsys):
    async def scenario(house: House) -> None:
        await created(house)
        await house.database.run(publish(house, 1))
        folder = house.operator_folder()
        await in_a_thread(lambda: model.export("desk", tmp_path / "one", passport=False, operator=folder, as_json=True))
        assert json.loads(capsys.readouterr().out)["version_number"] == 1
        # These tools write no folder that a passport could name.
        more = {"samples": data, "passport": False, "operator": folder}
        await in_a_thread(lambda: model.export("desk", tmp_path / "two", version="0", **more))
        assert "version 0" in capsys.readouterr().out
        assert [weights[:1] for weights, _ in tools.exported] == [b"\x01", b"\x00"]
        assert [(each.number, each.round, each.created_ms) for each in tools.origins] == [(1, 1, 3000), (0, 0, 1000)]
        assert [each.members for each in tools.origins] == [None, None]
        # Without samples, export makes synthetic ones.
        assert tools.exported[0][1] > 10
        assert tools.exported[1][1] == 4

    house(scenario)


def test_a_model_that_transformers_does_not_know_is_refused_with_the_format_to_use(house, tools, tmp_path):
    async def scenario(house: House) -> None:
        await created(house)
        said = await house.cli(
            "export", "desk", "--out", tmp_path / "out", "--format", "hf", folder=house.operator_folder(), code=2
        )
        assert said.err == (
            "error: transformers knows no textcnn, which job desk trains; export it with --format onnx\n"
        )
        assert said.out == ""
        assert not (tmp_path / "out").exists()

    house(scenario)


def test_a_damaged_version_is_not_exported(house, tools, tmp_path):
    async def scenario(house: House) -> None:
        job = await created(house)
        name = job.document.weights.hex()
        path = house.tmp / "store" / "blobs" / name[:2] / name
        path.write_bytes(bytes(56))
        folder = house.operator_folder()
        with pytest.raises(CommandFailed, match="another digest"):
            await in_a_thread(lambda: model.export("desk", tmp_path / "out", operator=folder))
        assert tools.exported == []

    house(scenario)


def test_estimates_are_shown_with_their_errors_and_best_names_the_best_measured_version(house, tools, data, capsys):
    async def scenario(house: House) -> None:
        base = make_job()
        metrics = NoisedMetrics(noise_multiplier=20.0, patience=3, min_improvement=0.05)
        noise = DpSgd(noise_multiplier=1.0, clip=1.0, lot=8)
        document = base.document.model_copy(update={"mechanism": noise, "metrics": metrics})
        job = Job(document, base.blobs | {"job.json": document.canonical()})
        digest = job.store_in(house.store)
        await house.stub().CreateJob(operator_pb2.CreateJobRequest(document=digest))
        folder = house.operator_folder()
        said = await house.cli("job", "show", "desk", "--version", "best", code=5)
        assert "job desk has no best version: no version of it has an estimate to choose by; give a number" in said.err
        with pytest.raises(CommandFailed, match="no best version") as refused:
            await in_a_thread(
                lambda: model.export("desk", house.tmp / "none", version="best", passport=False, operator=folder)
            )
        assert refused.value.code is ExitCode.NOT_FOUND
        assert "ESTIMATE" not in (await house.cli("status")).out

        for number, accuracy in enumerate((0.5, None, 0.8, 0.79), start=1):
            await house.database.run(publish(house, number, measured=of_members(accuracy)))
        said = await house.cli("job", "show", "desk")
        table = said.out[said.out.index("VERSION  DIGEST") :]
        rows = {line.split()[0]: line for line in table.splitlines()[1:6]}
        assert "50.0 % ± 1.2" in rows["0"]
        assert "too few units" in rows["1"]
        assert "80.0 % ± 1.2 best" in rows["2"]
        assert "0.600 ± 0.05" in rows["3"]
        assert "not measured" in rows["4"]
        assert "Best of 4 measured versions: version 2, accuracy 80.0 % ± 1.2, selected as the highest" in said.out
        assert (
            "Measured versions that were not 5 points of accuracy better than version 2: 1; 3 stop the job." in said.out
        )
        detail = (await house.cli("job", "show", "desk", "--json")).json
        assert (detail["best"]["version_number"], detail["best"]["selected"]) == (2, True)
        assert detail["estimate"]["shown"]["accuracy_error"] == 0.012
        assert [each["best"] for each in detail["versions"]] == [False, False, True, False, False]
        assert [each["estimate"] and each["estimate"]["shown"] is not None for each in detail["versions"]] == [
            True,
            False,
            True,
            True,
            None,
        ]
        said = await house.cli("status")
        assert "79.0 % ± 1.2 (v3)" in said.out
        assert "80.0 % ± 1.2 (v2)" in said.out
        assert "BEST, SELECTED" in said.out

        said = await house.cli("job", "show", "desk", "--version", "best")
        assert said.out.startswith("Version 2 of desk, ")
        assert "accuracy 80.0 % ± 1.2, loss 0.600 ± 0.05, 812 ± 20 units, from 3 members" in said.out
        assert "It is the best measured version: selected as the highest" in said.out
        assert (await house.cli("job", "show", "desk", "--version", "best", "--json")).json["number"] == 2
        assert "estimate: not measured" in (await house.cli("job", "show", "desk", "--version", "4")).out
        assert "has no version 9" in (await house.cli("job", "show", "desk", "--version", "9", code=5)).err
        assert (
            "is not a version's number, best or average"
            in (await house.cli("job", "show", "desk", "--version", "-1", code=2)).err
        )

        more = {"passport": False, "operator": folder, "as_json": True}
        await in_a_thread(lambda: model.export("desk", house.tmp / "best", version="best", **more))
        assert json.loads(capsys.readouterr().out)["version_number"] == 2
        await in_a_thread(lambda: evaluate("desk", data, version="best", operator=folder, as_json=True))
        assert json.loads(capsys.readouterr().out)["version_number"] == 2

        await house.database.run(publish(house, 5, measured=of_members(0.8)))
        await house.database.run(publish(house, 6, measured=of_members(0.79)))
        await house.database.run(
            lambda s: records.set_job_status(s, "desk", JobStatus.FINISHED, "no_improvement", 4000)
        )
        said = await house.cli("job", "show", "desk")
        assert "The job stopped early, because by its members' estimates its versions no longer improve." in said.out
        assert "Stopped early: 3 measured versions were not 5 points of accuracy better than version 2." in said.out
        assert (await house.cli("status", "--json")).json["jobs"][0]["reason"] == "no_improvement"

    house(scenario)


def test_synthetic_texts_are_deterministic_and_of_many_lengths():
    tokenizer = json.dumps({"model": {"vocab": {"[PAD]": 0, "house": 1, "##ing": 2, "go": 3, ".": 4}}}).encode()
    texts = model.synthetic_texts(tokenizer)
    assert texts == model.synthetic_texts(tokenizer)
    assert {len(text.split()) for text in texts} == {1, 2, 4, 8, 16, 32}
    assert {word for text in texts for word in text.split()} == {"house", "go"}


def test_the_command_line_imports_no_heavy_package():
    import subprocess

    script = """
        import sys
        from coordinator.cli import app
        heavy = {"grpc", "sqlalchemy", "alembic", "cryptography", "pydantic", "numpy", "google.protobuf", "torch"}
        sys.stdout.write(repr(sorted(heavy & set(sys.modules))))
    """
    import textwrap

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]"
