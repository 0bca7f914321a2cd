"""`edge_client run` says in a sentence what keeps it from starting, and with which exit code."""

import json
from dataclasses import replace

import pytest

from edge_client.agent import runner
from edge_client.agent.dry_run import describing
from tests.support import party
from toolkit.console import CommandFailed, ExitCode


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    home = party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441").home
    data = home.parent / "data.jsonl"
    data.write_text(json.dumps({"text": "one", "label": "a"}) + "\n")
    return runner.RunOptions(data=data, home=home, embedded=True)


def refused(options):
    with pytest.raises(CommandFailed) as failed:
        runner.run_member(options, describe=describing(options))
    return failed.value


@pytest.mark.parametrize("name", ["receipts", "cache"])
def test_a_file_in_the_place_of_a_folder_is_named(joined, name):
    place = joined.home / name
    place.touch()
    try:
        failed = refused(joined)
    finally:
        place.unlink()
    assert failed.code is ExitCode.USAGE
    assert str(place) in failed.sentence


def test_what_was_mistyped_is_wrong_input_and_no_refusal(joined, tmp_path):
    failed = refused(replace(joined, data_name="Desk"))
    assert (failed.code, "'Desk' cannot name data" in failed.sentence) == (ExitCode.USAGE, True)
    failed = refused(replace(joined, private_key_file=tmp_path / "no.key"))
    assert (failed.code, "no.key does not exist" in failed.sentence) == (ExitCode.USAGE, True)
