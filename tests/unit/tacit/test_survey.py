"""Questions as data: closed kinds, public bins, and a sentence for each mistake."""

import json

import pytest

from tacit.documents import DocumentInvalid
from tacit.job import JobDocument, JobSpec
from tacit.survey import LabelHistogram, LengthHistogram, RowHistogram, Survey, UnknownHistogram
from tacit.survey_file import SurveySpec
from tests.support.surveys import ASKED, survey_job

FILE = """schema = 1
name = "before-desk"
[noise]
std = 10.0
[vocabulary]
kind = "words"
file = "words.txt"
[[histograms]]
kind = "labels"
labels = ["a", "b"]
[[histograms]]
kind = "lengths"
at_most = [8, 16]
"""


def test_the_bins_have_names_and_the_last_one_takes_what_fits_no_other():
    assert LabelHistogram(labels=("a", "b")).names == ("a", "b", "other")
    assert LengthHistogram(at_most=(1, 2, 8)).names == ("0 to 1", "2", "3 to 8", "more than 8")
    assert RowHistogram(at_most=(0, 9)).names == ("0", "1 to 9", "more than 9")
    assert UnknownHistogram(at_most=(0, 5)).names == ("at most 0 %", "above 0 to 5 %", "above 5 %")
    assert ASKED.bins == 6
    assert not ASKED.reads_tokens
    assert Survey(histograms=(UnknownHistogram(at_most=(5,)),)).reads_tokens


def test_a_survey_document_is_read_as_it_was_written():
    job = survey_job()
    assert JobDocument.from_json(job.canonical()) == job
    assert JobDocument.from_json(job.canonical()).digest() == job.digest()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mechanism": {"name": "none"}}, "mechanism: answers are noised by discrete-gaussian"),
        ({"values": 7}, "values: the answer has 6 numbers, not 7"),
        ({"tokenizer": "00" * 32}, "tokenizer: the question reads no tokens"),
        ({"rounds": {"count": 2}}, "rounds.count: a question is asked in one round"),
        ({"aggregation": {"groups": 3}}, "aggregation: an answer has one sum"),
        ({"aggregation": {"noise_after": 1.0}}, "aggregation: an answer has one sum"),
        ({"aggregation": {"clip": 1.0}}, "aggregation: an answer has one sum"),
        ({"labels": ["a", "b"]}, "labels: a job with a question trains nothing"),
        ({"method": "fedprox"}, "method: a job with a question trains nothing"),
        ({"server": "fedadam"}, "server: a job with a question trains nothing"),
        ({"training": {"epochs": 2}}, "training: a job with a question trains nothing"),
        ({"model": {"architecture": "textcnn"}}, "model: a job with a question trains nothing"),
        ({"question": None}, "question: missing; a job without one trains a model"),
        ({"frozen": {"manifest": "00" * 32, "weights": "00" * 32, "values": 1}}, "frozen: this job freezes nothing"),
        ({"question": {"kind": "survey", "histograms": []}}, "question.histograms: must have 1 entries or more"),
        ({"question": {"kind": "survey", "code": "x"}}, "question.code: survey has no such key"),
        (
            {"mechanism": {"name": "discrete-gaussian", "std": 60000.0, "bound": 10_000_000}},
            "bound, rounds.target_members",
        ),
    ],
)
def test_a_document_that_asks_says_only_what_it_asks(changes, said):
    if "bound" in said:
        changes["rounds"] = {"count": 1, "target_members": 10_000}
    content = json.loads(survey_job().canonical()) | changes
    with pytest.raises(DocumentInvalid) as refused:
        JobDocument.from_json(json.dumps(content).encode())
    assert said.split(",")[0] in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("histogram", "said"),
    [
        ({"kind": "texts"}, "texts"),
        ({"kind": "labels"}, "labels: missing"),
        ({"kind": "labels", "labels": ["a", "a"]}, "names a label twice"),
        ({"kind": "labels", "labels": ["a\u202e"]}, "control or formatting character"),
        (
            {"kind": "labels", "labels": ["a"], "at_most": [1]},
            "labels has no such key (lengths, unknown, rows have)",
        ),
        ({"kind": "lengths", "at_most": [8, 8]}, "must rise from each bound to the next"),
        ({"kind": "lengths", "at_most": [0]}, "must be 1 or more"),
        ({"kind": "lengths", "at_most": [5000]}, "must be at most 4,096"),
        ({"kind": "unknown", "at_most": [100]}, "must be at most 99"),
        ({"kind": "rows", "at_most": []}, "must have 1 entries or more"),
    ],
)
def test_bins_are_public_and_bounded(histogram, said):
    content = json.loads(survey_job().canonical())
    content["question"]["histograms"] = [histogram]
    with pytest.raises(DocumentInvalid) as refused:
        JobDocument.from_json(json.dumps(content).encode())
    assert said in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("schema = 1", "schema = 2", "has schema = 2"),
        ("std = 10.0", "", "noise.std: missing"),
        ("std = 10.0", "std = 0.01", "noise.std"),
        ('kind = "labels"', 'kind = "lengths"', "lengths has no such key"),
        ('[vocabulary]\nkind = "words"\nfile = "words.txt"', "", "vocabulary: missing; histograms of lengths"),
        (
            'file = "words.txt"',
            'file = "words.txt"\npretrained = "x"',
            "vocabulary.pretrained: a survey has no embedding",
        ),
        ('kind = "lengths"\nat_most = [8, 16]', 'kind = "labels"\nlabels = ["c"]', "histograms: asks one kind twice"),
        ("[noise]", "[rounds]\ncount = 2\n[noise]", "rounds.count: unknown key"),
        ("[noise]", "[rounds]\nmin_members = 9\ntarget_members = 8\n[noise]", "target_members must be min_members"),
    ],
)
def test_a_file_that_asks_has_a_sentence_for_each_mistake(tmp_path, before, after, said):
    path = tmp_path / "survey.toml"
    path.write_text(FILE)
    spec = SurveySpec.from_toml(path)
    assert (spec.rounds.rounds.count, spec.question.bins) == (1, 6)
    path.write_text(FILE.replace(before, after))
    with pytest.raises(DocumentInvalid) as refused:
        SurveySpec.from_toml(path)
    assert said in str(refused.value), refused.value


def test_a_vocabulary_that_no_histogram_reads_is_an_error(tmp_path):
    path = tmp_path / "survey.toml"
    path.write_text(FILE.split('[[histograms]]\nkind = "lengths"', maxsplit=1)[0])
    with pytest.raises(DocumentInvalid, match="no histogram reads tokens"):
        SurveySpec.from_toml(path)


@pytest.mark.parametrize(
    "line", ['[model]\narchitecture = "none"', '[mechanism]\nname = "discrete-gaussian"\nstd = 10.0']
)
def test_a_job_file_cannot_ask(tmp_path, line):
    path = tmp_path / "job.toml"
    job = 'schema = 1\nname = "desk"\nlabels = ["a", "b"]\n[vocabulary]\nkind = "words"\nfile = "words.txt"\n'
    path.write_text(job)
    JobSpec.from_toml(path)
    path.write_text(job + line)
    with pytest.raises(DocumentInvalid, match="`coordinator survey new` writes a file that asks"):
        JobSpec.from_toml(path)
    path.write_text(job + '[model]\narchitecture = "cnn"\n')
    with pytest.raises(DocumentInvalid) as refused:
        JobSpec.from_toml(path)
    assert "none" not in str(refused.value)
