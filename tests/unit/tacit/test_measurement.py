"""The document that asks for a measurement, and the operator's file: closed kinds, and a sentence for each mistake."""

import json

import pytest

from export.measurement import Subject, make_measurement
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.measurement import metric_noise
from tacit.measurement_file import MeasurementSpec
from tests.support.measurements import LABELS, bundled, measuring

FILE = """schema = 1
name = "how-well"
version = "desk:best"
[noise]
std = 10.0
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return bundled(tmp_path_factory.mktemp("subject"))[0]


def test_the_job_carries_the_versions_model_and_names_all_that_members_fetch(subject):
    version = b"\x07" * 32
    job, _ = measuring(subject, version, by="label", rows="all", noise={"std": 20.0, "max_units": 500})
    question = job.question
    assert (question.job, question.number, question.document) == ("desk", 1, subject.digest())
    assert (question.weights, question.manifest, question.values) == (version, subject.manifest, subject.values)
    assert (question.breakdown, question.rows, job.values) == (LABELS, "all", 9)
    assert (job.model, job.labels, job.tokenizer) == (subject.model, LABELS, subject.tokenizer)
    assert {version, subject.manifest, subject.tokenizer, job.manifest, job.weights} == set(job.blobs)
    assert metric_noise(job.mechanism).max_units == 500
    assert metric_noise(job.mechanism).std == pytest.approx(20.0)
    assert JobDocument.from_json(job.canonical()) == job


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mechanism": "none"}, "mechanism: answers are noised by discrete-gaussian"),
        ({"mechanism": {"name": "discrete-gaussian", "std": 9.0, "bound": 100}}, "mechanism.bound: must be 32 times"),
        ({"values": 6}, "values: the answer has 3 numbers, not 6; make the job with `coordinator measure`"),
        ({"tokenizer": None}, "tokenizer: the question needs a tokenizer"),
        ({"rounds": {"count": 2}}, "rounds.count: a question is asked in one round"),
        ({"labels": ["a"]}, "labels: must be those of the version"),
        ({"labels": ["a", "a"]}, "labels: must be those of the version"),
        ({"model": {"architecture": "none"}}, "model: a measurement is of a classifier"),
        ({"method": "fedprox"}, "method: a job with a question trains nothing"),
        ({"training": {"epochs": 2}}, "training: a job with a question trains nothing"),
        ({"metrics": {"noise_multiplier": 9.0}}, "metrics: a job with a question trains nothing"),
        ({"frozen": {"manifest": "00" * 32, "weights": "00" * 32, "values": 1}}, "frozen: this job freezes nothing"),
        ({"private": {"manifest": "00" * 32, "weights": "00" * 32, "values": 1}}, "private, base_tokenizer, earlier: "),
        ({"aggregation": {"groups": 3}}, "aggregation: an answer has one sum"),
    ],
)
def test_a_document_says_only_what_it_asks(subject, changes, said):
    job, _ = measuring(subject, bytes(32))
    content = json.loads(job.canonical()) | changes
    with pytest.raises(DocumentInvalid) as refused:
        JobDocument.from_json(json.dumps(content).encode())
    assert said in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "code"}, "is not one of survey, measure"),
        ({"code": "x"}, "measure has no such key"),
        ({"rows": "training"}, "rows"),
        ({"loss_bound": 0}, "loss_bound"),
        ({"breakdown": ["a", "b"]}, "question.breakdown: must be all labels"),
        ({"breakdown": ["c", "b", "a"]}, "question.breakdown: must be all labels"),
    ],
)
def test_a_question_is_of_a_closed_kind(subject, changes, said):
    job, _ = measuring(subject, bytes(32))
    content = json.loads(job.canonical())
    content["question"] |= changes
    content["values"] = 3 * max(1, len(content["question"].get("breakdown", ())))
    with pytest.raises(DocumentInvalid) as refused:
        JobDocument.from_json(json.dumps(content).encode())
    assert said in str(refused.value), refused.value


def test_a_breakdown_is_refused_where_one_unit_has_rows_of_several_labels(subject):
    job, _ = measuring(subject, bytes(32), by="label")
    content = json.loads(job.canonical())
    content["mechanism"]["unit"] = "member"
    with pytest.raises(DocumentInvalid, match="would move all their means"):
        JobDocument.from_json(json.dumps(content).encode())


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("schema = 1", "schema = 2", "has schema = 2"),
        ("std = 10.0", "std = 0.01", "noise.std"),
        ('version = "desk:best"', "", "version, bundle: name one of them"),
        ('version = "desk:best"', 'version = "desk:1"\nbundle = "folder"', "version, bundle: name one of them"),
        ('version = "desk:best"', 'version = "desk:newest"', "names no version"),
        ('version = "desk:best"', 'version = "desk:1"\nby = "age"', "by"),
        ("std = 10.0", 'std = 10.0\nunit = "member"\n[x]', "x: unknown key"),
    ],
)
def test_a_file_has_a_sentence_for_each_mistake(tmp_path, before, after, said):
    file = tmp_path / "how-well.toml"
    file.write_text(FILE)
    assert MeasurementSpec.from_toml(file).subject == ("desk", "best")
    file.write_text(FILE.replace(before, after))
    with pytest.raises(DocumentInvalid) as refused:
        MeasurementSpec.from_toml(file)
    assert said in str(refused.value), refused.value


def test_a_model_that_members_keep_in_part_is_not_measured(tmp_path):
    kept, _ = bundled(tmp_path, '[method]\nname = "lg-fedavg"\nprivate = ["embedding"]\n')
    with pytest.raises(DocumentInvalid, match="keep a part of the model"):
        make_measurement(
            MeasurementSpec.model_validate({"schema": 1, "name": "x", "version": "desk:1", "noise": {"std": 9.0}}),
            Subject(kept, bytes(32), 1),
        )


def test_a_question_is_not_measured_itself(subject):
    asked, _ = measuring(subject, bytes(32))
    spec = MeasurementSpec.model_validate({"schema": 1, "name": "x", "version": "asked:1", "noise": {"std": 9.0}})
    with pytest.raises(DocumentInvalid, match="asks a question and has no model"):
        make_measurement(spec, Subject(asked, bytes(32), 1))


def test_a_frozen_embedding_goes_with_the_version(tmp_path):
    frozen, files = bundled(tmp_path, "freeze_embedding = true\n")
    job, _ = measuring(frozen, bytes(32))
    assert job.frozen == frozen.frozen
    assert {frozen.frozen.manifest, frozen.frozen.weights} <= set(job.blobs)
    assert {frozen.frozen.manifest, frozen.frozen.weights} <= set(files)
