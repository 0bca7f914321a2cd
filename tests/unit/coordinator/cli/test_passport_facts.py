"""What a passport says of estimates follows from the journal alone."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from coordinator.cli.passport_facts import ExportUnknown, JobHistory, export_facts
from coordinator.cli.passport_page import estimate_of
from coordinator.storage import open_blobs, open_database, records
from coordinator.storage.journal import journal
from tacit.bundle import ModelFacts, write_bundle
from tacit.job import Average
from tacit.mechanism import GaussianUpdate
from tacit.passport import EstimateFacts, VersionFacts
from tests.support.stored_job import fill

NUMBERS = {
    "accuracy": 0.6,
    "accuracy_error": 0.02,
    "loss": 0.7,
    "loss_error": 0.01,
    "units": 400.0,
    "units_error": 5.0,
}


def test_estimates_and_the_best_version_come_from_the_journal(tmp_path):
    database, store = open_database(f"sqlite:///{tmp_path}/tacit.db"), open_blobs(str(tmp_path / "store"))
    document = fill(database, store)
    history = JobHistory("desk")
    for entry in database.run_now(journal):
        history.take(entry)
    best = database.run_now(lambda s: records.load_job(s, "desk")).best
    database.close()
    _, versions = history.facts(document, document.digest())
    # Version 0 was measured, of version 1 too few units were, and nobody measured version 2.
    assert versions[0].estimate == EstimateFacts(members=2, selected=True, **NUMBERS)
    assert versions[1].estimate == EstimateFacts(members=2)
    assert versions[2].estimate is None
    assert best is not None
    assert best.version_number == 0
    assert [estimate_of(each) for each in versions] == [
        "60.0 % ± 2 (best, selected)",
        "too few units",
        "not measured",
    ]


def test_private_rows_that_tuned_the_job_come_from_its_document(tmp_path):
    database, store = open_database(f"sqlite:///{tmp_path}/tacit.db"), open_blobs(str(tmp_path / "store"))
    document = fill(database, store)
    history = JobHistory("desk")
    for entry in database.run_now(journal):
        history.take(entry)
    database.close()
    for tuned_on in (None, "own-private"):
        job, _ = history.facts(document.model_copy(update={"tuned_on": tuned_on}), document.digest())
        assert job.tuned_on == tuned_on


@pytest.mark.parametrize(("reported", "told"), [(3.2001, 4.0), (0.8312, 0.9), (2.0, 2.0)])
def test_a_reported_epsilon_is_told_with_one_digit_rounded_up(tmp_path, reported, told):
    """All digits of it would reveal how many rows the member with the largest has."""
    database, store = open_database(f"sqlite:///{tmp_path}/tacit.db"), open_blobs(str(tmp_path / "store"))
    document = fill(database, store).model_copy(update={"mechanism": GaussianUpdate(noise_multiplier=1.0)})
    history = JobHistory("desk")
    for entry in database.run_now(journal):
        if entry.kind == "attempt_ended" and entry.fields["outcome"] == "published":
            fields = {**entry.fields, "epsilon": reported, "reported": 1, "delta": 1e-6}
            assert history._sum(replace(entry, fields=fields), document)["spend"].largest_epsilon == told
    database.close()


@pytest.mark.parametrize("without", NUMBERS)
def test_a_number_without_its_error_is_no_estimate(without):
    rest = {name: value for name, value in NUMBERS.items() if name != without}
    with pytest.raises(ValidationError, match="all its numbers and their errors"):
        EstimateFacts(members=2, **rest)


def test_only_a_version_with_an_estimate_is_selected():
    with pytest.raises(ValidationError, match="is selected"):
        EstimateFacts(members=2, selected=True)


def test_an_average_of_other_versions_than_the_job_orders_is_no_export_of_it(tmp_path):
    files = {"model.onnx": b"m", "tokenizer.json": b"t", "labels.json": b"l"}
    told = {"job": "desk", "version": bytes(32), "max_tokens": 8, "min_tokens": 1, "parity": 0.0, "texts": 1}
    write_bundle(tmp_path / "out", "model", files, model=ModelFacts(averaged=(1, 2), **told))
    versions = tuple(
        VersionFacts(
            number=number, version=bytes([number]) * 32, at_ms=1, entry=1, entry_hash=bytes(32), mechanism="none",
            round=number,
        )
        for number in range(4)
    )  # fmt: skip
    ordered = Average(kind="tail", last=2)
    facts = export_facts(tmp_path / "out", versions, average=ordered)
    assert (facts.number, facts.averaged) == (2, (1, 2))
    with pytest.raises(ExportUnknown, match="other versions than this job orders"):
        export_facts(tmp_path / "out", versions)
    write_bundle(tmp_path / "later", "model", files, model=ModelFacts(averaged=(1, 3), **told))
    with pytest.raises(ExportUnknown, match="other versions than this job orders"):
        export_facts(tmp_path / "later", versions, average=ordered)
