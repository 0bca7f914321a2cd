"""`edge_client models`: what is installed, with the lines that a person copies into a job and a policy."""

import json
import tomllib

from typer.testing import CliRunner

from edge_client.cli import app
from edge_client.policy.policy import Policy
from tacit.plugin import PluginModel
from tests.support.plugins import GOOD, found, installed


def models(home, *words):
    done = CliRunner().invoke(app, ["models", "--home", str(home), *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_its_lines_are_a_job_table_and_a_policy_and_nothing_is_imported(site, tmp_path):
    mark = tmp_path / "imported"
    installed(site, {"tacit_own.py": f"open({str(mark)!r}, 'w')\n{GOOD}"})
    shown = models(tmp_path)
    assert "does not allow it" in shown
    lines = [line.strip() for line in shown.splitlines()]
    table = lines[lines.index("[model]") : lines.index("[model]") + 6]
    model = PluginModel.model_validate(tomllib.loads("\n".join(table))["model"])
    assert (model.distribution, model.files, model.name) == ("tacit-own", found().digest, "own")
    policy = "\n".join(["schema = 1", *lines[lines.index("[plugins]") :]])
    (tmp_path / "policy.toml").write_text(policy)
    assert Policy.load(tmp_path)[0].plugins == {"tacit-own": found().digest}
    assert "this member's policy allows it" in models(tmp_path)
    assert not mark.exists()


def test_json_says_the_same_and_why_an_installation_cannot_be_used(site, tmp_path):
    installed(site, {"tacit_own.py": GOOD})
    there = {"distribution": "tacit-own", "version": "1.0", "names": ["own"], "allowed": False}
    assert json.loads(models(tmp_path, "--json")) == {
        "plugins": [{**there, "files": found().digest.hex(), "unusable": None}]
    }
    (site / "tacit_own.py").write_text(GOOD + "\n")
    why = "tacit_own.py is not the file that was installed; install the wheel again"
    assert json.loads(models(tmp_path, "--json")) == {"plugins": [{**there, "files": None, "unusable": why}]}
    assert f"cannot be used: {why}" in models(tmp_path)


def test_without_a_plugin_it_says_what_one_is(tmp_path):
    assert "No plugin is installed here" in models(tmp_path)
    assert json.loads(models(tmp_path, "--json")) == {"plugins": []}
