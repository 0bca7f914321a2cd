"""The digest of a distribution's files: the same wherever the files are, and none where nobody can vouch for them."""

import base64
import hashlib

import pytest

from learning.plugins.installed import PluginUnusable, checked, installed_plugins
from tests.support.plugins import GOOD, found, installed, model_of


def hashed(text):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def test_the_digest_depends_on_files_and_on_nothing_that_an_installer_adds(site, tmp_path, monkeypatch):
    installed(site, {"tacit_own.py": GOOD})
    first = found()
    assert (first.unusable, first.version, dict(first.models)) == ("", "1.0", {"own": "tacit_own:own"})
    other = tmp_path / "other"
    # Byte code, a licence and what an installer notes.
    cached = dict.fromkeys(("__pycache__/tacit_own.cpython-311.pyc", "tacit_own-1.0.dist-info/licenses/LICENSE"), "")
    told = {"url": "file:///elsewhere.whl", "archive_info": {}}
    installed(other, {"tacit_own.py": GOOD}, also=cached, direct_url=told)
    monkeypatch.syspath_prepend(str(other))
    assert found().digest == first.digest
    for number, (files, more) in enumerate(
        [
            ({"tacit_own.py": GOOD + "\n"}, {}),
            ({"tacit_own.py": GOOD, "more.txt": "data"}, {}),
            ({"tacit_own2.py": GOOD}, {}),
            ({"tacit_own.py": GOOD}, {"version": "1.1"}),
            ({"tacit_own.py": GOOD}, {"entry": "tacit_own:Module"}),
        ]
    ):
        folder = tmp_path / str(number)
        installed(folder, files, **more)
        monkeypatch.syspath_prepend(str(folder))
        assert found().digest != first.digest


def test_a_file_that_was_changed_after_it_was_installed_is_noticed(site):
    installed(site, {"tacit_own.py": GOOD})
    model = model_of()
    assert checked(model).digest == model.files
    (site / "tacit_own.py").write_text(GOOD + "import os\n")
    with pytest.raises(PluginUnusable, match=r"tacit_own\.py is not the file that was installed; install the wheel"):
        checked(model)
    (site / "tacit_own.py").unlink()
    with pytest.raises(PluginUnusable, match=r"tacit_own\.py cannot be read"):
        checked(model)


def test_a_file_and_its_record_changed_together_give_another_digest(site):
    installed(site, {"tacit_own.py": GOOD})
    model = model_of()
    installed(site, {"tacit_own.py": GOOD + "import os\n"})
    with pytest.raises(PluginUnusable, match=r"has other files here .* than the job names") as refused:
        checked(model)
    assert model.files.hex() in str(refused.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"distribution": "os"}, "plugin os 1.0 is not installed here, and the job's model comes from it"),
        ({"distribution": "nobody-has-this"}, "is not installed here, and the job's model comes from it"),
        ({"version": "2.0"}, "plugin tacit-own 2.0 is not installed here: this machine has version 1.0; install the"),
        ({"files": "00" * 32}, "has other files here"),
        ({"name": "other"}, r"registers no model other \(it has: own\)"),
    ],
)
def test_what_is_not_installed_as_the_job_names_it_is_refused(site, change, says):
    installed(site, {"tacit_own.py": GOOD})
    with pytest.raises(PluginUnusable, match=says):
        checked(model_of(**change))


def test_a_distribution_without_models_registers_none(site):
    """`torch` is installed, and a job that names it gets nothing of it."""
    import torch

    installed(site, {"tacit_own.py": GOOD})
    with pytest.raises(PluginUnusable, match="plugin torch"):
        checked(model_of(distribution="torch", version=torch.__version__))


def test_the_first_distribution_of_a_name_counts_even_if_it_registers_none(site, tmp_path, monkeypatch):
    """As for an import: what is behind it on the path is not what runs."""
    installed(site, {"tacit_own.py": GOOD}, name="Tacit_Own")
    assert [each.distribution for each in installed_plugins()] == ["tacit-own"]
    other = tmp_path / "other"
    entry_points = installed(other, {"tacit_own.py": GOOD}, version="2.0") / "entry_points.txt"
    monkeypatch.syspath_prepend(str(other))
    assert [each.version for each in installed_plugins()] == ["2.0"]
    entry_points.unlink()
    assert installed_plugins() == []


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"direct_url": {"url": "file:///src", "dir_info": {"editable": True}}}, "editable mode"),
        ({"also": {"start.pth": hashed("")}}, "start.pth, which runs whenever Python starts"),
        ({"also": {"../../bin/run": hashed("")}}, "outside its folder"),
        ({"also": {"/etc/x.py": hashed("")}}, "outside its folder"),
        ({"also": {"fast.so": hashed("")}}, "compiled code"),
        ({"also": {"old.pyc": hashed("")}}, "compiled code"),
        # Python imports both of them: a folder is a package whatever its name is.
        ({"also": {"__pycache__/own.pyc": hashed("")}}, "compiled code"),
        ({"also": {"__pycache__/other.cpython-311.pyc": hashed("")}}, "compiled code"),
        ({"also": {"tacit_own-1.0.dist-info/more.py": hashed("")}}, "code in its dist-info"),
        ({"also": {"tacit_own-1.0.dist-info/__pycache__/more.cpython-311.pyc": hashed("")}}, "code in its dist-info"),
        ({"also": {"sitecustomize.py": hashed("")}}, "sitecustomize.py, which runs whenever Python starts"),
        ({"also": {"usercustomize/__init__.py": hashed("")}}, "which runs whenever Python starts"),
        ({"also": {".": hashed("")}}, "outside its folder"),
        ({"also": {"missing.py": hashed("")}}, "missing.py cannot be read"),
        ({"also": {"tacit_own.py": ""}}, "is not the file that was installed"),
    ],
    ids=[
        "editable",
        "pth",
        "outside",
        "absolute",
        "so",
        "pyc",
        "cached-alone",
        "cached-of-nothing",
        "info-py",
        "info-pyc",
        "sitecustomize",
        "usercustomize",
        "nothing",
        "missing",
        "no-hash",
    ],
)
def test_an_installation_that_nobody_can_vouch_for_has_no_digest(site, layout, says):
    installed(site, {"tacit_own.py": GOOD}, **layout)
    assert found().digest is None
    assert says in found().unusable
    with pytest.raises(PluginUnusable, match=r"plugin tacit-own 1\.0 cannot be used here"):
        checked(model_of(files="00" * 32))


def test_an_installation_without_a_record_or_with_commands_has_no_digest(site):
    info = installed(site, {"tacit_own.py": GOOD})
    (info / "RECORD").unlink()
    assert "no RECORD" in found().unusable
    info = installed(site, {"tacit_own.py": GOOD})
    (info / "entry_points.txt").write_text("[tacit.models]\nown = a:b\n[console_scripts]\nx = a:b\n")
    assert "installs commands" in found().unusable


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA"])
def test_a_record_without_a_file_that_decides_what_runs_has_no_digest(site, file):
    """Otherwise two builds with one digest could name other entry points."""
    info = installed(site, {"tacit_own.py": GOOD})
    rows = (info / "RECORD").read_text().splitlines()
    (info / "RECORD").write_text("\n".join(row for row in rows if file not in row) + "\n")
    assert f"its RECORD does not list its {file}" in found().unusable


def test_two_files_of_one_module_have_no_digest(site):
    """The order of RECORD would decide which one runs, and the digest does not hold the order."""
    installed(site, {"tacit_own.py": GOOD, "tacit_own/__init__.py": GOOD})
    assert "two files of the module tacit_own" in found().unusable
