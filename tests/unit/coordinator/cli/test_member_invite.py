"""`coordinator member invite`: what is refused before anything is asked of a coordinator."""

import pytest
from typer.testing import CliRunner

from coordinator.cli.member import app
from toolkit.console import CommandFailed, ExitCode


def _refusal(*words):
    done = CliRunner().invoke(app, ["invite", *words, "--operator", "nowhere"])
    assert isinstance(done.exception, CommandFailed), done.output
    return done.exception


@pytest.mark.parametrize("valid", ["0h", "0m", "000d"])
def test_a_token_cannot_be_valid_for_no_time(valid):
    # The message's 0 means: as the coordinator is configured.
    refusal = _refusal("elm", "--valid", valid)
    assert refusal.code is ExitCode.USAGE
    assert refusal.sentence == f"--valid is {valid}, and an invitation is valid for 1 minute to 30 days; give a time"


def test_a_time_that_is_none_is_refused():
    assert "'soon' is not a duration" in _refusal("elm", "--valid", "soon").sentence


@pytest.mark.parametrize("name", ["Dr. House", "North", "", "a" * 64])
def test_a_name_that_no_member_may_have_is_refused_with_the_rule(name):
    refusal = _refusal(name)
    assert refusal.code is ExitCode.USAGE
    assert refusal.sentence == (
        f"{name!r} is not a valid member name; use 1 to 63 of a-z, 0-9, dot, dash and underscore, starting with a "
        "letter or digit"
    )


def test_another_request_goes_on_to_the_coordinator():
    assert _refusal("dr.house", "--valid", "1h").code is ExitCode.NOT_FOUND
    assert "nowhere is not an operator's folder" in _refusal("dr.house").sentence
