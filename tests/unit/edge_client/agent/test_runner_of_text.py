"""`edge_client run` gives the part that makes synthetic text what the part that trains has."""

import json

import pytest

from edge_client.agent import runner
from edge_client.agent.dry_run import describing
from edge_client.approval.desk import Desk
from tests.support import party
from tests.support.stewards import MARY


class Started(BaseException):
    """Ends the run where the agent would begin."""


def test_text_is_made_under_the_rules_that_training_has(tmp_path, monkeypatch):
    home = party.member(tmp_path / "home", "localhost:7441").home
    (home / "policy.toml").write_text(f'schema = 1\njobs = "ask"\nstewards = {{ mary = "{MARY.public.hex()}" }}\n')
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"text {number}", "label": "a"}) + "\n" for number in range(10)))
    given = {}

    def agent(*arguments, desk, releaser, **more):
        given.update(desk=desk, releaser=releaser)
        raise Started

    monkeypatch.setattr(runner, "Agent", agent)
    options = runner.RunOptions(data=data, home=home, jobs=("ward*",), embedded=True)
    with pytest.raises(Started):
        runner.run_member(options, describe=describing(options))
    releaser = given["releaser"]
    assert isinstance(given["desk"], Desk)
    assert releaser._desk is given["desk"]
    assert releaser._jobs == ("ward*",)
    assert releaser._conditions().device == "cpu"
