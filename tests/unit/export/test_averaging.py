"""An average weighs the newest versions as the job orders, and is the same bytes wherever it is computed."""

import itertools

import numpy as np
import pytest

from export.averaging import RunningAverage
from tacit.documents import DocumentInvalid
from tacit.job import Average, JobSpec
from tacit.limits import MAX_AVERAGED
from tacit.manifest import Manifest


def test_a_tail_weighs_the_newest_alike_and_never_the_start():
    average = Average.model_validate({})
    assert (average.kind, average.last, average.decay) == ("tail", 5, None)
    assert average.weights(12) == {number: pytest.approx(0.2) for number in range(8, 13)}
    assert average.weights(2) == {1: 0.5, 2: 0.5}
    assert average.weights(1) == {1: 1.0}


@pytest.mark.parametrize("decay", [0.2, 0.8, 0.95])
def test_an_ema_leaves_out_less_than_a_hundredth(decay):
    average = Average.model_validate({"kind": "ema", "decay": decay})
    weights = average.weights(1000)
    assert sum(weights.values()) == pytest.approx(1)
    assert decay ** len(weights) <= 0.01 < decay ** (len(weights) - 1)
    assert len(weights) == average.width <= MAX_AVERAGED
    newest = list(weights.values())[::-1]
    assert all(after / before == pytest.approx(decay) for before, after in itertools.pairwise(newest))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"kind": "tail", "decay": 0.5}, "decay: only kind"),
        ({"kind": "ema", "last": 5}, "last: only kind"),
        ({"last": 1}, "average.last"),
        ({"last": MAX_AVERAGED + 1}, "average.last"),
        ({"kind": "ema", "decay": 1.0}, "average.decay"),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(keys, says, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        'schema = 1\nname = "desk"\nlabels = ["a", "b"]\n[vocabulary]\nkind = "words"\nfile = "w.txt"\n[average]\n'
        + "".join(f"{key} = {value!r}\n" for key, value in keys.items())
    )
    with pytest.raises(DocumentInvalid, match=says):
        JobSpec.from_toml(path)


def test_a_job_whose_members_keep_parameters_has_no_average(tmp_path):
    path = tmp_path / "job.toml"
    text = 'schema = 1\nname = "desk"\nlabels = ["a", "b"]\nmethod = "lg-fedavg"\n'
    path.write_text(text + '[vocabulary]\nkind = "words"\nfile = "w.txt"\n[average]\n')
    with pytest.raises(DocumentInvalid, match="average: members keep parameters"):
        JobSpec.from_toml(path)


def test_it_is_the_weighted_mean_in_float64():
    draw = np.random.default_rng(3)
    tensors = [{"a": draw.normal(size=(3, 2)).astype(np.float32)} for _ in range(3)]
    manifest = Manifest.of(tensors[0])
    average = RunningAverage(manifest)
    weights = [0.2, 0.3, 0.5]
    for each, weight in zip(tensors, weights, strict=True):
        average.add(manifest.encode(manifest.flatten(each)), weight)
    expected = sum(weight * each["a"].astype(np.float64) for each, weight in zip(tensors, weights, strict=True))
    assert np.array_equal(manifest.decode(average.encoded()), expected.astype(np.float32).ravel())


def test_a_version_of_another_length_is_refused():
    average = RunningAverage(Manifest.of({"a": np.zeros((3,), np.float32)}))
    with pytest.raises(DocumentInvalid, match="12"):
        average.add(bytes(8), 1.0)
