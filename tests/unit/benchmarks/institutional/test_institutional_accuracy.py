"""TREC is dealt in equal parts, a cell has the right job file, and missing data is reported."""

import tomllib
from itertools import chain

import pytest

from benchmarks.institutional import accuracy as institutional
from benchmarks.institutional import setup
from benchmarks.institutional.accuracy import GLOVE, PIECES, Cell, check_data, deal  # type: ignore[attr-defined]
from benchmarks.library.record import NoData
from edge_client.policy.policy import Policy
from tacit.job import JobSpec


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_parts_are_equal_and_hold_every_row_once(members):
    rows = [str(number) for number in range(5452)]
    parts = deal(rows, members, 0)
    assert sorted(chain(*parts), key=int) == rows
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == deal(rows, members, 0) != deal(rows, members, 1)


@pytest.mark.parametrize("members", [1, 2, 3, 4])
@pytest.mark.parametrize("vocabulary", [PIECES, GLOVE])
def test_the_job_has_defaults_except_for_the_cells_options(tmp_path, members, vocabulary):
    text = Cell(members, vocabulary, 2).specification(["a", "b"])
    (tmp_path / "job.toml").write_text(text)
    spec = JobSpec.from_toml(tmp_path / "job.toml")
    assert spec.seed == 2
    assert spec.rounds.count == institutional.ROUNDS
    assert spec.training == type(spec.training)()
    default = type(spec.model)()  # type: ignore[call-arg]
    assert spec.model == default.model_copy(update={"embedding": vocabulary.embedding})
    assert ("assumed_corrupt" in tomllib.loads(text).get("aggregation", {})) is (members == 2)


def test_only_two_members_need_an_exception(tmp_path):
    for text, cohort in ((institutional.POLICY, 3), (institutional.POLICY_OF_TWO, 2)):
        (tmp_path / "policy.toml").write_text(text)
        policy = Policy.from_toml(tmp_path / "policy.toml")
        assert policy.mechanisms == ("none",)
        assert policy.min_cohort == cohort
        assert policy.allow_two_party_sums is (cohort == 2)


def test_missing_data_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "TREC", tmp_path / "trec")
    with pytest.raises(NoData, match="TREC questions"):
        check_data(PIECES)
