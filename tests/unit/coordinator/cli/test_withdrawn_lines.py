"""What `coordinator member withdraw` says of each job."""

import pytest

from coordinator.cli import withdrawn
from tacit.v1 import federation_pb2

ADVICE = "to start the job anew without aster: `coordinator member withdraw aster --job s3 --restart`"


def _said(capsys, *, restart, **held):
    every = [federation_pb2.HeldContributions(job="s3", **held)]
    withdrawn._say("aster", every, [], dry_run=True, restart=restart)
    return capsys.readouterr().out


def test_a_restart_that_was_asked_for_is_not_advised(capsys):
    # Whether it is planned or refused is said beside it.
    assert ADVICE not in _said(capsys, restart=True, first=1, newest=2, sums=1)
    assert ADVICE in _said(capsys, restart=False, first=1, newest=2, sums=1)


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        ({"first": 1, "newest": 1, "sums": 1}, "s3: version 1 holds its updates, in 1 sum of this job; it would be"),
        ({"first": 1, "newest": 3, "sums": 2}, "s3: versions 1 to 3 hold its updates, in 2 sums of this job; they"),
        ({"first": 0, "newest": 0}, "s3: version 0 holds its updates, because the job started from such a one; it"),
        ({"first": 2, "newest": 2, "sums": 1, "marked_before": 1}, "s3: version 2 holds its updates, in 1 sum of this"),
    ],
)
def test_one_is_not_several(capsys, held, sentence):
    assert sentence in _said(capsys, restart=False, **held)
