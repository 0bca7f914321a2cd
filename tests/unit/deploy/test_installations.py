"""The wheel installs from a package index: each extra in a new environment, and the two programs as tools.

Every environment is new, and torch alone takes a minute and a gigabyte, so these are sweeps. Where pip or uv reach no
index, they are skipped.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.distributions import build, clean_copy
from tests.support.places import ROOT
from tests.support.postgres import running_postgres
from tests.support.processes import free_ports
from tests.support.tried_jobs import TOML, written_job
from toolkit.console import ExitCode
from toolkit.install import DISTRIBUTION

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
CONSTRAINTS = ROOT / "constraints.txt"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without variables that lead Python to the working copy.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TACIT_"))}
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, env=kept | environment, cwd="/", check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    tree = clean_copy(tmp_path_factory.mktemp("tree"))
    return build(tree, tmp_path_factory.mktemp("made")).wheel


@dataclass(frozen=True)
class Tools:
    """uv and pipx, in an environment of their own."""

    uv: Path
    pipx: Path


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Tools:
    """Also says whether pip reaches an index at all: if it does, a later installation that fails is an error."""
    folder = tmp_path_factory.mktemp("tools")
    venv.create(folder, with_pip=True)
    done = run(folder / "bin" / "python", *PIP, "install", "--retries", "1", "uv", "pipx")
    if done.returncode != 0:
        pytest.skip(f"pip reaches no package index from here: {done.stderr.strip().splitlines()[-1]}")
    return Tools(folder / "bin" / "uv", folder / "bin" / "pipx")


@dataclass
class Installed:
    """A new environment with the wheel and some extras."""

    programs: Path
    folder: Path

    def __call__(self, *words: object, code: int = 0) -> str:
        """Runs a program of the environment; returns what it printed."""
        done = run(self.programs / str(words[0]), *words[1:], HOME=str(self.folder), OMP_NUM_THREADS="1")
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def has(self, module: str) -> bool:
        return run(self.programs / "python", "-c", f"import {module}").returncode == 0


@pytest.fixture
def installed(wheel, tools, tmp_path, request):
    """An environment with the test's extras, in which pip finds no conflict."""
    extras = request.node.callspec.params["extras"]
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    wanted = f"{wheel}[{extras}]" if extras else str(wheel)
    done = run(home / "bin" / "python", *PIP, "install", "-c", CONSTRAINTS, wanted)
    assert done.returncode == 0, done.stderr
    there = Installed(home / "bin", tmp_path)
    there("python", *PIP, "check")
    yield there
    shutil.rmtree(home)


def serves(there: Installed, *more: str) -> None:
    """`coordinator init` and `serve`, on SQLite unless `more` says otherwise, and the operator's commands beside it."""
    federation = there.folder / "federation"
    named = zip(("enrolment", "federation", "metrics"), free_ports(3), strict=True)
    ports = [f"--{name}-port={at}" for name, at in named]
    there("coordinator", "init", federation, "--listen-host=127.0.0.1", *ports, *more)
    words = [there.programs / "coordinator", "serve", "--dir", federation, "--log-format", "json"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=there.folder) as process:
        try:
            assert process.stderr is not None
            assert any('"serving"' in line for line in process.stderr)
            for line in (
                "status",
                "member invite north",
                "member list",
                "job list",
                "audit show",
                "audit verify",
                "health",
            ):
                there("coordinator", *line.split(), "--dir", federation)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    there("coordinator", "backup", there.folder / "copy", "--dir", federation)


def simulates(there: Installed, *more: object) -> None:
    job, rows = written_job(there.folder / "job", TOML)
    words = ("--data", rows, "--members", 3, "--out", there.folder / "played", *more)
    there("coordinator", "simulate", job, *words)
    assert len((there.folder / "played" / "rounds.jsonl").read_text().splitlines()) == 2


def without(there: Installed) -> None:
    assert not there.has("torch")
    assert not there.has("sqlalchemy")
    assert "Commands" in there("coordinator", "--help")
    assert "'.[coordinator]'" in there("coordinator", "init", there.folder / "f", code=ExitCode.USAGE)
    there("edge_client", "policy", "init", "--home", there.folder / "home")


def coordinator(there: Installed) -> None:
    assert not there.has("torch")
    serves(there)


def postgres(there: Installed) -> None:
    assert not there.has("torch")
    with running_postgres() as server:
        serves(there, "--database-url", server.database())
    assert not (there.folder / "federation" / "tacit.db").exists()


def member(there: Installed) -> None:
    words = ("desk", "--out", "m", "--data", ROOT / "examples" / "desk" / "test.jsonl", "--home", there.folder)
    assert "'.[edge,export]'" in there("edge_client", "export", *words, code=ExitCode.USAGE)
    job = ROOT / "examples" / "mechanisms" / "dp-sgd.toml"
    assert "epsilon" in there("edge_client", "privacy", "plan", job, "--examples", 1000)
    assert '"torch"' in there("edge_client", "doctor", "--home", there.folder, "--json", code=ExitCode.NOT_FOUND)
    assert there.has("learning.training.local")


def device(there: Installed) -> None:
    assert not there.has("torch")
    assert "trains only heads" in there("edge_client", "doctor", "--home", there.folder, code=ExitCode.NOT_FOUND)


def operator(there: Installed) -> None:
    there(
        "coordinator", "job", "bundle", ROOT / "examples" / "desk" / "job.toml", "--out", there.folder / "desk.bundle"
    )
    simulates(there)
    refused = there("coordinator", "simulate", "job.toml", "--data", "x", "--engine", "ray", code=ExitCode.NOT_FOUND)
    assert refused


def ray(there: Installed) -> None:
    simulates(there, "--engine", "ray", "--workers", 1)


def notebook(there: Installed) -> None:
    job, rows = written_job(there.folder / "job", TOML)
    script = f"""
import json, pandas, tacit
rows = pandas.DataFrame([json.loads(line) for line in open({str(rows)!r})])
found = tacit.simulate({str(job)!r}, rows, members=3)
assert len(found.history) == 2
found.plot({str(there.folder / "plot.png")!r})
found.export({str(there.folder / "model")!r})
print(tacit.load({str(there.folder / "model")!r}).predict(["sun"]))
"""
    there("python", "-c", script)


def arrow(there: Installed) -> None:
    code = "import pyarrow, learning.text.columnar"
    there("python", "-c", code)
    assert not there.has("torch")


def plots(there: Installed) -> None:
    imports = "from coordinator.cli.drawing import drawn; from coordinator.cli.panels import Panel"
    there("python", "-c", f"{imports}; drawn('x', [Panel('loss', '', ())], 'svg')")


def tensorboard(there: Installed) -> None:
    there("python", "-c", "import coordinator.cli.tensorboard_tracker, tensorboard.summary.writer.event_file_writer")


@pytest.mark.parametrize(
    ("extras", "works"),
    [
        ("", without),
        ("coordinator", coordinator),
        ("coordinator-postgres", postgres),
        ("device", device),
        ("edge", member),
        ("coordinator,export", operator),
        ("coordinator,ray", ray),
        ("notebook", notebook),
        ("arrow", arrow),
        ("coordinator,plots", plots),
        ("coordinator,tensorboard", tensorboard),
    ],
)
def test_an_extra_installs_and_its_commands_work(installed, extras, works):
    works(installed)


@pytest.fixture(params=["uv", "pipx"])
def tool(request, tools, wheel, tmp_path):
    """The wheel as a tool in a home of its own; the folder of its programs, and how to type in it."""
    places = {
        "HOME": tmp_path / "home",
        "UV_TOOL_DIR": tmp_path / "uv",
        "UV_TOOL_BIN_DIR": tmp_path / "bin",
        "UV_CACHE_DIR": tmp_path / "cache",
        "PIPX_HOME": tmp_path / "pipx",
        "PIPX_BIN_DIR": tmp_path / "bin",
        "PIPX_MAN_DIR": tmp_path / "man",
    }
    environment = {name: str(path) for name, path in places.items()}
    (tmp_path / "home").mkdir()
    wanted = f"{wheel}[coordinator]"
    if request.param == "uv":
        words = [tools.uv, "tool", "install", "--python", sys.executable, "-c", CONSTRAINTS, wanted]
    else:
        words = [tools.pipx, "install", "--python", sys.executable, "--pip-args", f"-c {CONSTRAINTS}", wanted]
    done = run(*words, **environment)
    if "Failed to fetch" in done.stderr or "error sending request" in done.stderr:
        pytest.skip(f"{request.param} reaches no package index from here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return Installed(tmp_path / "bin", tmp_path), environment


def test_a_tool_has_the_two_programs(tool, tools, wheel, tmp_path):
    there, environment = tool
    assert {"coordinator", "edge_client"} <= {each.name for each in there.programs.iterdir()}
    assert there("edge_client", "--version").startswith("edge_client 0.")
    serves(there)
    # What an error tells to type adds an extra to the tool, and keeps what it has.
    sentence = json.loads(
        there("coordinator", "job", "bundle", ROOT / "examples" / "desk" / "job.toml", "--json", code=2)
    )
    command = sentence["error"].partition("`")[2].partition("`")[0]
    assert DISTRIBUTION in command or "--python" in command
    command = command.replace("'.[coordinator,export]'", f"'{wheel}[plots]'")
    path = f"{tools.uv.parent}:{os.environ['PATH']}"
    done = run("sh", "-c", command, **environment, PATH=path)
    assert done.returncode == 0, done.stderr
    shebang = (there.programs / "coordinator").resolve().read_text(encoding="utf-8").splitlines()[0]
    # pipx adds an option.
    python = shebang.removeprefix("#!").split()[0]
    for module in ("matplotlib", "sqlalchemy"):
        assert run(python, "-c", f"import {module}").returncode == 0, module
