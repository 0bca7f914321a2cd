"""Numbers of a caller that cannot be: one sentence names the argument and what it may be, before anything is done."""

import numpy as np
import pytest

import tacit
from export.predictor import Predictor
from learning.text.encoder import TextEncoder, word_tokenizer
from tests.support.tried_jobs import written_job, written_rows
from toolkit.whole import whole


@pytest.mark.parametrize("given", [0, -1, 1.5, "3", None, True, float("nan")], ids=str)
def test_what_is_no_whole_number_is_refused(given):
    with pytest.raises(ValueError, match=r"members=.* is not possible; give a whole number, 1 or more"):
        whole(given, "members", 1)


def test_numpys_whole_numbers_are_whole_numbers():
    assert type(whole(np.int64(3), "members", 1)) is int


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"members": 0}, "members=0 is not possible; give a whole number, 2 or more"),
        ({"members": "3"}, "members='3' is not possible"),
        ({"members": 2.5}, "members=2.5 is not possible"),
        ({"seed": -1}, "seed=-1 is not possible; give a whole number, 0 or more"),
        ({"seed": None}, "seed=None is not possible"),
        ({"cohort": 0}, "cohort=0 is not possible; give a whole number, 2 or more"),
        ({"workers": 0}, "workers=0 is not possible; give a whole number, 1 or more"),
        ({"test": 0}, "test=0 is no share of the rows; give one from 0.01 to 0.9, or rows"),
        ({"test": 1}, "test=1 is no share of the rows"),
    ],
    ids=str,
)
def test_a_simulation_that_cannot_be(given, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        tacit.simulate(written_job(tmp_path)[0], written_rows(60), folder=tmp_path / "played", **given)
    assert not (tmp_path / "played").exists()


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (-1, "members=-1 is not possible; give a whole number, 0 or more"),
        (2.5, "members=2.5 is not possible"),
        (None, "members=None is not possible"),
        (["north", "south", "north"], "members names 'north' twice; give each member its own name"),
    ],
    ids=str,
)
def test_a_local_federation_that_cannot_be(members, says, tmp_path):
    with pytest.raises(ValueError, match=says), tacit.local_federation(members, folder=tmp_path / "town"):
        pytest.fail("it started")
    assert not (tmp_path / "town").exists()


@pytest.mark.parametrize("batch", [0, -1])
def test_texts_in_no_batch_are_refused(batch):
    """A batch of -1 would predict nothing of any text, and say nothing."""
    encoder = TextEncoder(word_tokenizer(["the", "sun"]), 8, 1)
    predictor = Predictor(lambda ids: pytest.fail("ran"), encoder, ("day", "night"), None)
    for call in (predictor.predict, predictor.logits):
        with pytest.raises(ValueError, match=f"batch={batch} is not possible; give a whole number, 1 or more"):
            call(["the sun"], batch=batch)
