"""A plugin's model under methods that keep parts, with members' own words, and in a simulation."""

import numpy as np
import pytest

import tacit
from export.bundle import make_job_bundle, read_job_bundle
from learning.plugins.loading import admit
from learning.text.vocabulary import own_tokenizer
from learning.training.start import first_private
from tacit.documents import DocumentInvalid
from tacit.job import JobSpec
from tests.support.plugins import GOOD, forgotten, installed, model_of
from tests.support.tried_jobs import written_job, written_rows


@pytest.fixture
def spec(site, tmp_path):
    installed(site, {"tacit_own.py": GOOD})
    written, _ = written_job(tmp_path)
    table = JobSpec.from_toml(written).model_dump(mode="json", exclude_none=True)

    def spec(**changes):
        model = model_of(**changes.pop("model", {})).model_dump(mode="json")
        return JobSpec.model_validate(table | {"model": model} | changes)

    return spec


def bundled(spec, folder):
    make_job_bundle(spec, folder, folder / "bundle")
    return read_job_bundle(folder / "bundle")


SHARED = {
    "fedavg": {"hidden.weight", "hidden.bias", "output.weight", "output.bias", "embedding.weight"},
    "fedvocab": {"hidden.weight", "hidden.bias", "output.weight", "output.bias"},
    "lg-fedavg": {"output.weight", "output.bias"},
}


@pytest.mark.parametrize("method", SHARED)
def test_a_method_shares_the_parts_that_the_plugin_names(spec, tmp_path, method):
    bundle = bundled(spec(method={"name": method}, mechanism="none"), tmp_path)
    assert {each.name for each in bundle.manifest.tensors} == SHARED[method]


def test_members_with_their_own_words_start_from_a_secret(spec, tmp_path):
    own = {"kind": "words", "size": 50}
    bundle = bundled(spec(method={"name": "fedvocab"}, vocabulary=own, mechanism="none"), tmp_path)
    job, tokenizer = bundle.document, own_tokenizer(["the sun", "a moon"], "words", 50, 1, ())
    one, other = (first_private(job, tokenizer, None, None, seed=seed)["embedding.weight"] for seed in (7, 7 + 2**40))
    assert one.shape == other.shape == (6, 6)
    assert not np.any((one == other) & (one != 0))


def test_a_frozen_embedding_is_in_no_version(spec, tmp_path):
    bundle = bundled(spec(model={"freeze_embedding": True}), tmp_path)
    assert bundle.document.frozen is not None
    assert "embedding.weight" not in {each.name for each in bundle.manifest.tensors}


def test_logit_adjustment_is_refused(spec):
    with pytest.raises(ValueError, match=r"training\.logit_adjustment"):
        spec(mechanism="none", training={"logit_adjustment": True})


def test_a_framed_model_needs_word_pieces(spec):
    with pytest.raises(ValueError, match="a plugin puts texts between"):
        spec(model={"frame": True})


@pytest.mark.long
def test_a_simulation_plays_it_in_worker_processes_with_the_same_result(spec, tmp_path):
    words = {"kind": "words", "file": str(tmp_path / "words.txt")}
    job = spec(rounds={"count": 2, "min_members": 3}, vocabulary=words)
    rows = [(row["text"], row["label"]) for row in written_rows(240)]
    versions = []
    for workers in (1, 2):
        result = tacit.simulate(job, rows, members=3, folder=tmp_path / str(workers), workers=workers)
        versions.append(result.version())
    assert versions[0].any()
    assert np.array_equal(*versions)


def test_a_bundle_of_another_build_is_not_played(spec, tmp_path, site):
    bundle = bundled(spec(), tmp_path)
    forgotten()
    installed(site, {"tacit_own.py": GOOD + "\n"})
    admit(bundle.document.model)
    with pytest.raises(DocumentInvalid, match="has other files here"):
        make_job_bundle(spec(model={"files": bundle.document.model.files}), tmp_path, tmp_path / "again")
