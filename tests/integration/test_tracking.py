"""Plots and trackers with real processes: one job with noised metrics, whose tracker and coordinator are killed."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from learning.text.data import data_digest
from tests.support.places import ROOT
from tests.support.processes import BIN, PATIENCE, command, free_ports, running_federation, within_patience
from tests.support.small_disk import SmallDisk, needs_small_disks

MEMBERS = ("north", "east", "south")
ROUNDS = 4
POLICY = "schema = 1\nmetrics_epsilon = 4.0\nvalidation_share = 0.25\n"
EVERY = ("attempts", "cohort", "dropouts", "dropouts_mask", "seconds", "summed", "reported_epsilon")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("tracking")) as running:
        running.enrol(*MEMBERS, policy=POLICY)
        spec = (ROOT / "examples" / "mechanisms" / "dp-sgd.toml").read_text()
        spec = spec.replace('name = "dp-sgd"\nlabels', 'name = "tracked"\nlabels')
        spec = spec.replace("../desk/words.txt", str(ROOT / "examples" / "desk" / "words.txt"))
        spec = spec.replace("count = 5", f"count = {ROUNDS}")
        path = running.folder / "tracked.toml"
        path.write_text(spec + "\n[metrics]\nnoise_multiplier = 10.0\nevery = 2\n")
        running.create(path)
        yield running


def tracking(federation, folder: Path, *more: str) -> subprocess.Popen[str]:
    words = [BIN / "coordinator", "track", "tracked", "--to", "tensorboard", "--at", folder, "--json"]
    return subprocess.Popen(
        [*map(str, words), "--dir", str(federation.dir), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kept(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of the folder."""
    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    return {key: [(each.step, each.value) for each in shown.Scalars(key)] for key in shown.Tags()["scalars"]}


def start_members(federation) -> None:
    for name in MEMBERS:
        federation.data(name, 360)
        federation.start(name, "--job", "tracked", "--until-finished")


def trained(federation) -> None:
    """Waits for the job's end; its members start now if no test before has started them."""
    if len(federation.processes) == 1:
        start_members(federation)
    federation.finished("tracked")


def plot(federation, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return command("coordinator", "job", "plot", *words, "--dir", federation.dir)


def test_before_the_first_round_there_is_nothing_to_draw(federation, tmp_path):
    done = plot(federation, "tracked", "--out", tmp_path / "it.png")
    assert done.returncode == 5
    assert "nothing to draw: no round has ended" in done.stderr
    assert not list(tmp_path.iterdir())
    assert json.loads(plot(federation, "tracked", "--json").stdout) == {"file": None, "job": "tracked", "series": {}}


def test_a_job_that_is_not_there_is_not_found(federation, tmp_path):
    done = plot(federation, "other", "--text")
    assert (done.returncode, done.stdout) == (5, "")
    done = command("coordinator", "track", "other", "--to=tensorboard", "--at", tmp_path / "t", "--dir", federation.dir)
    assert done.returncode == 5
    assert "there is no job other; `coordinator job list` shows them" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_tracker_outlives_the_coordinator_and_goes_on_where_it_was_killed(federation, tmp_path):
    folder = tmp_path / "board"
    first = tracking(federation, folder)
    assert json.loads(first.stdout.readline())["status"] == "running"
    federation.coordinator.kill()
    assert first.stderr.readline().endswith("; trying again\n")
    federation.serve()
    start_members(federation)
    assert json.loads(first.stdout.readline())["added"] > 0
    first.kill()
    first.communicate(timeout=PATIENCE)
    # As if it had died in the middle of a record.
    (file,) = folder.glob("events.out.tfevents.*")
    os.truncate(file, file.stat().st_size - 3)

    second = tracking(federation, folder)
    out, err = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, err
    last = json.loads(out.splitlines()[-1])
    assert (last["status"], last["round"]) == ("finished", ROUNDS)
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2

    detail = federation.show("tracked")
    found = kept(folder)
    for key in EVERY:
        assert [step for step, _ in found[key]] == list(range(1, ROUNDS + 1)), key
    assert [value for _, value in found["summed"]] == [len(each.attempts[-1].survivors) for each in detail.rounds]
    measured = {each.round: each.estimate.shown for each in detail.versions if each.HasField("estimate")}
    assert measured
    assert dict(found["estimate_accuracy"]) == pytest.approx({at: each.accuracy for at, each in measured.items()})
    assert dict(found["estimate_loss_error"]) == pytest.approx({at: each.loss_error for at, each in measured.items()})
    epsilons = [value for _, value in found["reported_epsilon"]]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] > 0
    assert sum(map(len, found.values())) == last["points"]
    assert json.loads((folder / "job.json").read_text())["name"] == "tracked"

    # Once more, and nothing is kept twice.
    words = ("track", "tracked", "--to", "tensorboard", "--at", folder, "--json")
    assert json.loads(federation.operator(*words))["added"] == 0
    assert kept(folder) == found
    (folder / "job.json").write_text("{}")
    done = command("coordinator", *words, "--dir", federation.dir)
    assert done.returncode == 2
    assert "holds another job; name another folder with --at" in done.stdout


def test_a_plot_is_an_image_or_text_or_series(federation, tmp_path):
    trained(federation)
    shown = federation.operator("job", "plot", "tracked", "--text")
    assert shown.startswith("Job tracked\n\nAccuracy (share)\n")
    for line in ("o members' estimate ± standard error", "Cohort and dropouts (members)", "Privacy (epsilon)"):
        assert line in shown
    assert "Wrote" in federation.operator("job", "plot", "tracked", "-o", tmp_path / "it.svg")
    image = (tmp_path / "it.svg").read_bytes()
    assert ElementTree.fromstring(image).tag.endswith("svg")  # noqa: S314 - our own
    assert b"largest epsilon that members reported" in image
    series = json.loads(federation.operator("job", "plot", "tracked", "--json"))["series"]
    assert {each["round"] for each in series["cohort"]} == set(range(1, ROUNDS + 1))
    assert all(each["error"] > 0 for each in series["estimate_accuracy"])


def test_what_cannot_be_written_is_a_sentence(federation, tmp_path):
    for words, code, sentence in (
        (("-o", tmp_path / "it.pdf"), 2, "is neither .png nor .svg"),
        ((), 2, "name the file with --out (.png or .svg), or draw in the terminal with --text"),
        (("-o", tmp_path / "none" / "it.png"), 1, "cannot be written: No such file or directory"),
    ):
        done = plot(federation, "tracked", *words)
        assert (done.returncode, done.stdout) == (code, "")
        assert sentence in done.stderr


def test_an_evaluation_on_a_datasets_folder_is_drawn_with_its_error(federation, tmp_path):
    trained(federation)
    rows = [json.loads(line) for line in (ROOT / "examples" / "desk" / "test.jsonl").open()]
    table = pa.Table.from_pylist(rows)
    folder = tmp_path / "set"
    folder.mkdir()
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as file:
        file.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    for data in (folder, ROOT / "examples" / "desk" / "test.jsonl"):
        federation.operator("evaluate", "tracked", "--data", data)
    one, other = federation.show("tracked").versions[-1].evaluations
    assert (one.accuracy, one.loss, one.examples) == (other.accuracy, other.loss, len(rows))
    assert one.data == data_digest(folder)
    drawn = json.loads(federation.operator("job", "plot", "tracked", "--json"))["series"]["evaluation_accuracy"]
    error = (one.accuracy * (1 - one.accuracy) / one.examples) ** 0.5
    assert [(each["round"], each["error"]) for each in drawn] == [(ROUNDS, pytest.approx(error))] * 2


@needs_small_disks
def test_a_full_disk_leaves_the_earlier_plot(federation, tmp_path):
    disk = SmallDisk(tmp_path / "disk", 1 << 20)
    try:
        (disk.folder / "it.svg").write_bytes(b"earlier")
        disk.fill()
        done = plot(federation, "tracked", "-o", disk.folder / "it.svg")
        assert done.returncode == 1
        assert "cannot be written: No space left on device; choose another file with --out" in done.stderr
        assert (disk.folder / "it.svg").read_bytes() == b"earlier"
        done = command(
            "coordinator", "track", "tracked", "--to=tensorboard", "--at", disk.folder / "b", "--dir", federation.dir
        )
        assert done.returncode == 1
        assert "make room or name another folder with --at" in done.stderr
    finally:
        disk.close()


@pytest.mark.long
def test_an_mlflow_server_has_each_point_once(federation, tmp_path):
    """A real server, in an environment of its own: MLflow's pins are not ours."""
    trained(federation)
    program = os.environ.get("TACIT_TESTS_MLFLOW")
    if program is None:
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "mlflow"], check=True)
        pip = [tmp_path / "mlflow" / "bin" / "python", "-m", "pip", "install", "--quiet", "mlflow==3.18.0"]
        subprocess.run(pip, check=True, timeout=500)
        program = str(tmp_path / "mlflow" / "bin" / "mlflow")
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    words = [program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination",
        str(tmp_path / "kept"),
    ]
    track = ("track", "tracked", "--to", "mlflow", "--at", address, "--json")
    assert command("coordinator", *track, "--dir", federation.dir).returncode == 3
    with (tmp_path / "server.log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as server:
        try:
            within_patience(lambda: server.poll() is not None or _answers(address))
            told = [json.loads(federation.operator(*track)) for _ in range(2)]
            assert (told[0]["added"], told[1]["added"]) == (told[0]["points"], 0)
            run = _runs(address)
            metrics = {each["key"]: each["value"] for each in run["data"]["metrics"]}
            assert metrics["summed"] == len(MEMBERS)
            history = _ask(address, f"metrics/get-history?run_id={run['info']['run_id']}&metric_key=cohort")["metrics"]
            assert [each["step"] for each in history] == list(range(1, ROUNDS + 1))
            parameters = {each["key"]: each["value"] for each in run["data"]["params"]}
            assert (parameters["name"], parameters["rounds.count"]) == ("tracked", str(ROUNDS))
            assert run["info"]["status"] == "FINISHED"
            (document,) = (tmp_path / "kept").rglob("job.json")
            assert json.loads(document.read_text())["name"] == "tracked"
        finally:
            server.terminate()


def _answers(address: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{address}/health", timeout=5).read())  # noqa: S310 - ours
    except OSError:
        return False


def _ask(address: str, call: str, content: object = None):
    data = None if content is None else json.dumps(content).encode()
    url, kind = f"{address}/api/2.0/mlflow/{call}", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, kind)  # noqa: S310 - ours
    return json.loads(urllib.request.urlopen(request, timeout=30).read())  # noqa: S310


def _runs(address: str):
    experiment = _ask(address, "experiments/get-by-name?experiment_name=tacit")["experiment"]["experiment_id"]
    (run,) = _ask(address, "runs/search", {"experiment_ids": [experiment]})["runs"]
    return run
