"""A module that a process keeps for the next member trains it to the same bits as a new one."""

import numpy as np
import pytest

from export.bundle import make_job_bundle, read_job_bundle
from learning.backbones.stored import read_backbone
from learning.mechanisms.protection import protection_of
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.training import divergence, outcome, update
from learning.training import kept as kept_training
from learning.training.kept import Kept
from learning.training.outcome import VersionDiverged
from learning.training.update import train_update
from simulation.kept_features import StoredFeatures
from tacit.job import JobSpec
from tacit.mechanism import DpSgd, NoMechanism
from tests.support.tiny_jobs import TinyJob
from tests.support.toy_texts import Seeded

WORDS = ["great", "bad", "good", "film", "movie", "is", "was", "it", "the"]
DP_SGD = DpSgd(noise_multiplier=1.0, clip=0.5, lot=4, steps=2)
RECON = {"method": {"name": "fedrecon", "tokens": ["film", "movie"]}}
OWN = {
    "textcnn": ({"architecture": "textcnn", "embedding": 6, "widths": [1, 2], "maps": 3}, {}),
    "bilstm": ({"architecture": "bilstm", "embedding": 6, "hidden": 4}, {}),
    "textcnn-recon": ({"architecture": "textcnn", "embedding": 6, "widths": [1, 2], "maps": 3}, RECON),
}
TINY = ["bert", "prompt", "cloze-bert", "lora-bert", "bitfit-head", "none-layers"]


@pytest.fixture(scope="module", params=[*OWN, *TINY, pytest.param("lora-t5", marks=pytest.mark.long)])
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    if request.param not in OWN:
        tiny = TinyJob(request.param, folder)
        return tiny.job, read_backbone(tiny.job.backbone, tiny.document.model.config) if tiny.job.backbone else None
    model, more = OWN[request.param]
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n")
    vocabulary = {"kind": "words", "file": "words.txt"}
    spec = {"schema": 1, "name": "own", "labels": ["bad", "good"], "model": model, "vocabulary": vocabulary, **more}
    make_job_bundle(JobSpec.model_validate(spec), folder, folder / "bundle")
    return read_job_bundle(folder / "bundle"), None


def member(bundle, number, like=None, features=None):
    labels = bundle.document.labels
    rows = [
        Example(" ".join(WORDS[(number + at * step) % len(WORDS)] for step in range(1, 2 + at % 4)), labels[at % 2])
        for at in range(7)
    ]
    return EncodedExamples(rows, bundle.document, bundle.public_tokenizer, features, like=like)


def trained(bundle, backbone, mechanism, corpus, base, kept=None):
    document = bundle.document.model_copy(update={"mechanism": mechanism})
    private = {}
    if bundle.private is not None:
        manifest, data = bundle.private
        private = {name: each.copy() for name, each in manifest.unflatten(manifest.decode(data)).items()}
    found = train_update(
        job=document,
        manifest=bundle.manifest,
        corpus=corpus,
        base=base,
        protection=protection_of(document, corpus.population),
        private=private,
        frozen=bundle.frozen,
        backbone=backbone,
        random=Seeded("kept"),
        seed=3,
        device="cpu",
        progress=lambda *_: None,
        cancelled=lambda: False,
        kept=kept,
    )
    return found.change, found.private


@pytest.mark.parametrize("mechanism", [NoMechanism(), DP_SGD], ids=["none", "dp-sgd"])
def test_a_kept_module_trains_as_a_new_one(job, mechanism, tmp_path):
    bundle, backbone = job
    if bundle.private is not None and mechanism is DP_SGD:
        pytest.skip("this method has no mechanism here")
    start = bundle.manifest.decode(bundle.weights)
    random = np.random.default_rng(0)
    versions = [(start + 0.1 * random.standard_normal(len(start))).astype("<f4").tobytes() for _ in range(2)]
    shared = [member(bundle, number, features=StoredFeatures(tmp_path)) for number in (0, 4)]
    kept, seen = Kept(), []
    # Another version, then another member on the first one again.
    for place, version in ((0, versions[0]), (0, versions[1]), (1, versions[0])):
        change, private = trained(bundle, backbone, mechanism, member(bundle, 4 * place), version)
        again, also = trained(bundle, backbone, mechanism, shared[place], version, kept)
        assert np.array_equal(change, again)
        assert (private is None) == (also is None)
        if private is not None:
            assert all(np.array_equal(each, also[name]) for name, each in private.items())
        seen.append(change.tobytes())
    assert len(set(seen)) == 3


def test_one_member_finds_out_for_all_whether_a_version_has_diverged(job, monkeypatch):
    bundle, backbone = job
    if bundle.private is not None:
        pytest.skip("a method that keeps parameters tells nothing about the version")
    seeds = []
    real = divergence.check_not_diverged
    monkeypatch.setattr(
        update, "check_not_diverged", lambda module, recipe, seed: (seeds.append(seed), real(module, recipe, seed))
    )
    spread = outcome.check_spread
    monkeypatch.setattr(kept_training, "check_spread", lambda found, recipe: (seeds.append(-1), spread(found, recipe)))
    kept, members = Kept(), [member(bundle, 0), member(bundle, 4)]
    for corpus in members * 2:
        trained(bundle, backbone, NoMechanism(), corpus, bundle.weights, kept)
    assert len(seeds) == 1
    # Another version is looked at, by whichever member comes first and with the same probe.
    start = bundle.manifest.decode(bundle.weights)
    other = (start * np.float32(1.5)).astype("<f4").tobytes()
    for corpus in members:
        trained(bundle, backbone, NoMechanism(), corpus, other, Kept())
    assert len(seeds) == 3
    assert seeds[1] == seeds[2]

    def diverges(*_):
        raise VersionDiverged("it has")

    monkeypatch.setattr(update, "check_not_diverged", diverges)
    monkeypatch.setattr(kept_training, "check_spread", diverges)
    # Nothing of a version that was found bad is remembered as sound.
    for _ in range(2):
        with pytest.raises(VersionDiverged):
            trained(bundle, backbone, NoMechanism(), members[0], other, kept)


def test_members_of_one_tokenizer_share_its_encoder(job):
    bundle, _ = job
    first = member(bundle, 0)
    second = member(bundle, 4, like=first)
    assert second.encoder is first.encoder
    assert np.array_equal(second.read().ids, member(bundle, 4).read().ids)
    shorter = bundle.document.model.model_copy(update={"max_tokens": 9})
    other = bundle.document.model_copy(update={"model": shorter})
    with pytest.raises(ValueError, match="another encoder"):
        EncodedExamples([], other, bundle.public_tokenizer, like=first)
