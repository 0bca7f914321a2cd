"""The version that an option names: a number, `best`, or none for the newest."""

import pytest

from coordinator.cli.estimated import chosen_version
from tacit.v1 import operator_pb2 as pb
from toolkit.console import CommandFailed, ExitCode

DETAIL = pb.JobDetail(
    job=pb.Job(name="desk", version_number=3), versions=[pb.Version(number=number) for number in range(4)]
)


def test_a_number_names_that_version_and_none_the_newest():
    assert chosen_version(DETAIL, "2").number == 2
    assert chosen_version(DETAIL, None).number == 3


def test_an_average_has_no_round_to_show():
    with pytest.raises(CommandFailed, match="has no round of its own; name a version by its number, or best"):
        chosen_version(DETAIL, "average")


@pytest.mark.parametrize("wanted", ["-1", "1.0", "\u0663", "1" * 5000, "", "2\n"])
def test_what_is_no_number_is_a_mistake_of_use(wanted):
    with pytest.raises(CommandFailed, match="is not a version's number, best or average") as failed:
        chosen_version(DETAIL, wanted)
    assert failed.value.code == ExitCode.USAGE
    assert len(str(failed.value)) < 100
