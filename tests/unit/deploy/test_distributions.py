"""The wheel and the source distribution hold what they should and nothing else, and each extra is enough for its part.

The environments here are made of the distributions that are installed for the tests, so nothing is downloaded.
"""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import tacit
from tests.support.distributions import build, clean_copy, environment, needed, tracked
from tests.support.places import ROOT
from toolkit.install import DISTRIBUTION, install_with

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What the first steps leave in a working copy, and what a person might.
PLANTED = (
    "federation/authority/root.key",
    "aster/identity/key.pem",
    "desk.bundle/job.json",
    "deploy/secrets/pgpass",
    # Copies of the examples beside them, as their first lines say to make.
    "deploy/s3/coordinator.env",
    "deploy/systemd/edge.env",
    "deploy/.env",
    "deploy/kubernetes/.env.secret",
    "coordinator/server.key",
    "examples/desk/federation/operator/key.pem",
    "docs/passphrase.txt.key",
    "edge_client/tacit.db",
    "learning/rows.jsonl",
    "rows.jsonl",
    "coordinator/__pycache__/old.cpython-311.pyc",
)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    tree = clean_copy(tmp_path_factory.mktemp("tree"))
    for name in PLANTED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("secret")
    return tree


@pytest.fixture(scope="module")
def made(copied, tmp_path_factory):
    """Both distributions; the wheel comes from the source distribution."""
    return build(copied, tmp_path_factory.mktemp("made"))


def held(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist() if not name.endswith("/")}


def test_the_wheel_has_every_file_of_its_packages_and_nothing_else(made):
    """A file that the product reads at run time lies beside the module that reads it."""
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(each).name for each in packages} == set(PROJECT["tool"]["importlinter"]["root_packages"])
    expected = {
        str(name.relative_to(Path(package).parent))
        for name in tracked()
        for package in packages
        if name.is_relative_to(package)
    }
    info = f"tacit_federation-{tacit.__version__}.dist-info"
    about = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    assert held(made.wheel).keys() == expected | {f"{info}/{each}" for each in about}
    # The kinds that an installation needs are among them, so that an empty list of files is no pass.
    assert {".py", ".toml", ".mako", ".proto", ".typed", ".pyi"} <= {
        Path(name).suffix or name[-6:] for name in expected
    }


def test_the_wheel_imports_nothing_of_the_source_tree_that_it_lacks(made):
    files = held(made.wheel)
    inside = {name.split("/")[0] for name in files}
    ours = {each.parts[0] for each in tracked() if each.suffix == ".py" and len(each.parts) > 1} | {"tests"}
    outside = ours - inside - {"proto"}
    assert {"benchmarks", "tests", "examples"} <= outside
    for name, data in files.items():
        if not name.endswith(".py"):
            continue
        text = data.decode()
        # Importing by a computed name would escape this test.
        assert not outside & set(re.findall(r"^\s*(?:from|import) (\w+)", text, flags=re.MULTILINE)), name
        # A path is made from the module's own folder, and never leads out of the package.
        assert not re.search(r"__file__\)(\.resolve\(\))?\.(parents|parent\.parent)", text), name


def test_a_wheel_from_the_source_distribution_is_the_one_from_the_tree(made, copied, tmp_path):
    assert held(build(copied, tmp_path, "--wheel").wheel) == held(made.wheel)


def test_the_source_distribution_has_no_key_and_no_data(made):
    with tarfile.open(made.sdist) as opened:
        names = {each.name.partition("/")[2] for each in opened.getmembers()}
    assert not names & set(PLANTED)
    belong = {str(each) for each in tracked()} | {"PKG-INFO"}
    assert names <= belong
    # What the installed programs' pages ask for is there; what only a developer needs is not.
    for name in ("constraints.txt", "docs/install.md", "examples/desk/job.toml", "deploy/systemd/coordinator.service"):
        assert name in names
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/", ".ci/"))}


@pytest.fixture(scope="module")
def about(made):
    (metadata,) = (data for name, data in held(made.wheel).items() if name.endswith("/METADATA"))
    return Parser().parsestr(metadata.decode())


def test_the_metadata_say_what_is_installed(about, made):
    assert (about["Name"], about["Version"]) == (DISTRIBUTION, tacit.__version__)
    assert about["License-Expression"] == "Apache-2.0"
    for heavy in ("torch", "transformers", "onnxruntime", "sqlalchemy", "scipy"):
        assert heavy not in needed(made.requirements())
        assert heavy in needed(made.requirements(), ["coordinator", "export"])
    assert "torch" not in needed(
        made.requirements(), ["coordinator-postgres", "device", "tensorboard", "plots", "arrow"]
    )


def test_the_description_works_where_no_repository_is(about):
    assert about["Description-Content-Type"] == "text/markdown"
    text = about.get_payload()
    assert not re.findall(r"\]\((?!https://)", text), "a relative link leads nowhere on an index"
    assert "make " not in text
    listed = set(re.findall(r"^\| `([\w-]+)` \|", text, flags=re.MULTILINE))
    # The others are for developers, or a part of another one.
    assert listed == set(about.get_all("Provides-Extra")) - {"bench", "dev", "docs", "learning"}


def asked(programs: Path, what, folder: Path):
    """Types commands in an environment, outside of the source tree."""
    script = Path(__file__).parents[2] / "support" / "type_commands.py"
    done = subprocess.run(
        [programs / "python", "-P", script],
        input=json.dumps(what),
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "TYPER_USE_RICH": "0", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def smallest(made, tmp_path_factory):
    """The programs of an environment without an extra."""
    return environment(tmp_path_factory.mktemp("smallest") / "environment", made)


def test_every_command_shows_its_help_without_an_extra(smallest, tmp_path):
    told = asked(smallest, "commands", tmp_path)
    assert len(told) > 100
    for words, code, shown, _ in told:
        assert code == 0, words
        assert f"Usage: {' '.join(words[:-1])}" in re.sub(r"\s+", " ", shown), words


def operators(*extras: str) -> str:
    return install_with("coordinator", *extras)


SENTENCES = [
    # First, since it closes TLS 1.2 before anything of its process imports grpc.
    ("edge_client export desk --out model --data rows.jsonl", install_with("edge", "export")),
    ("coordinator init federation", operators()),
    ("coordinator backup out", operators()),
    ("coordinator store prune", operators()),
    ("coordinator audit verify", operators()),
    ("coordinator job bundle job.toml", operators("export")),
    ("coordinator job try job.toml --data rows.jsonl --members 3 --rows public", operators("export")),
    ("coordinator simulate job.toml --data rows.jsonl", operators("export")),
    ("coordinator finetune desk --test rows.jsonl --out model", operators("export")),
    ("coordinator sample desk --out texts.jsonl", operators("export")),
]


def test_a_missing_extra_is_named_with_the_command_to_type(smallest, tmp_path):
    (tmp_path / "job.toml").write_bytes((ROOT / "examples" / "desk" / "job.toml").read_bytes())
    (tmp_path / "rows.jsonl").write_bytes((ROOT / "examples" / "desk" / "test.jsonl").read_bytes())
    told = asked(smallest, [line.split() for line, _ in SENTENCES], tmp_path)
    for (line, command), (code, _, error) in zip(SENTENCES, told, strict=True):
        assert command in error, (line, code, error)
        assert code == 2, line


INTERFACE = """
import types, tacit
from tacit_api.simulating import Simulated

found = Simulated(types.SimpleNamespace(name="x"), None, (), ())
job = {"schema": 1, "name": "x", "labels": ["a", "b"]}
for use in (lambda: tacit.simulate(job, [("a", "a")]), lambda: found.history, found.plot):
    try:
        use()
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_python_interface_names_the_extra_that_it_misses(smallest, tmp_path):
    done = subprocess.run(
        [smallest / "python", "-P", "-c", INTERFACE], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    said = done.stdout.splitlines()
    assert [line.partition(" needs ")[0] for line in said] == ["tacit.simulate", "history", "plot"]
    assert all(line.endswith(f"which is not installed; {install_with('notebook')}") for line in said), said


@pytest.mark.parametrize(
    ("left", "command"),
    [
        (None, "`pip install '.[edge,export]'`"),
        ("pipx_metadata.json", "`pipx runpip tacit-federation install '.[edge,export]'`"),
        ("uv-receipt.toml", "`uv pip install --python {} '.[edge,export]'`"),
    ],
)
def test_a_tools_own_environment_is_filled_by_the_tool(left, command, monkeypatch, tmp_path):
    if left is not None:
        (tmp_path / left).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert install_with("edge", "export") == f"{command.format(tmp_path)} in Tacit's source folder"
