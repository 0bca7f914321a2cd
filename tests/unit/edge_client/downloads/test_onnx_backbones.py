"""A member without torch gets the job's ONNX file from its coordinator: once, checked, and for as long as the job."""

import asyncio
import hashlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from coordinator.services.job_check import check_job
from coordinator.services.live import OperatorRefused
from coordinator.storage.blobs import open_blobs
from edge_client.downloads.backbones import BackboneMissing, Backbones, Wanted
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.writer_thread import WriterThread
from edge_client.session.preparation import Preparer
from learning.backbones.layout import BackboneInvalid, layout_of
from tests.unit.edge_client.downloads.test_backbone_sources import Coordinator, Hub
from tests.unit.learning.training.test_head_update import DP, SGD, bundled


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    return folder, bundled(folder, mechanism=DP, training=SGD)


@pytest.fixture
def cache(tmp_path):
    return BlobCache(tmp_path / "cache")


def opened(backbones, wanted, fetch):
    return asyncio.run(backbones.open_onnx(wanted, fetch))


def test_it_is_fetched_once_and_may_be_deleted_once_the_job_is_over(place, cache):
    folder, job = place
    wanted, coordinator = Wanted.onnx(job.document.model), Coordinator(folder / "bundle" / "backbone.onnx")
    backbones = Backbones(cache, folders=[folder / "base"], hub=Hub(folder / "base"))
    first = opened(backbones, wanted, coordinator)
    assert opened(backbones, wanted, coordinator) is first
    # Another process of this member finds the file.
    opened(Backbones(cache), wanted, coordinator)
    assert coordinator.limits == [job.document.model.onnx.size]
    assert not cache.clear(bytes(32))
    member = object.__new__(Preparer)
    digests, budget = (
        {"heads": wanted.digest, "more": wanted.digest},
        SimpleNamespace(job_over=lambda name: None, writer=WriterThread()),
    )
    vars(member).update(_answers=None, _budget=budget, _digests=digests, _backbones=backbones)
    asyncio.run(member.job_over("heads"))
    assert not cache.clear(bytes(32))
    asyncio.run(member.job_over("more"))
    assert cache.clear(bytes(32))
    assert opened(backbones, wanted, coordinator) is not first
    assert len(coordinator.limits) == 2


def test_a_damaged_file_is_fetched_again(place, cache):
    folder, job = place
    wanted, coordinator = Wanted.onnx(job.document.model), Coordinator(folder / "bundle" / "backbone.onnx")
    cache.path(wanted.digest).write_bytes(b"x" * wanted.size)
    opened(Backbones(cache), wanted, coordinator)
    assert coordinator.limits == [wanted.size]
    assert hashlib.sha256(cache.path(wanted.digest).read_bytes()).digest() == wanted.digest


def test_nobody_but_the_coordinator_is_asked_and_the_advice_says_so(place, cache):
    folder, job = place
    hub = Hub(folder / "base")
    backbones = Backbones(cache, folders=[folder / "base"], hub=hub, allowed=["disk", "hub"])
    with pytest.raises(BackboneMissing, match="Allow the coordinator in the policy's `backbones`") as missing:
        opened(backbones, Wanted.onnx(job.document.model), Coordinator(None))
    assert "--backbone" not in str(missing.value)
    assert "disk" not in str(missing.value)
    assert hub.asked == []


def test_a_file_much_larger_than_the_weights_is_not_asked_for(place):
    model = place[1].document.model
    most = layout_of(model.config).size + (1 << 24)
    assert Wanted.onnx(model.model_copy(update={"onnx": model.onnx.model_copy(update={"size": most})})).size == most
    with pytest.raises(BackboneInvalid, match="its config needs"):
        Wanted.onnx(model.model_copy(update={"onnx": model.onnx.model_copy(update={"size": most + 1})}))


def test_a_coordinator_refuses_a_job_whose_onnx_file_it_lacks_or_has_in_another_size(place, tmp_path):
    folder, job = place
    store = open_blobs(f"file://{tmp_path / 'blobs'}")
    for name in job.document.files:
        if name != "backbone.onnx":
            store.put((folder / "bundle" / name).read_bytes())
    digest = store.put(job.document.canonical())
    with pytest.raises(OperatorRefused, match=r"the ONNX backbone \(.*\) was not uploaded"):
        check_job(store, digest)
    store.put((folder / "bundle" / "backbone.onnx").read_bytes())
    assert check_job(store, digest) == job.document
    model = job.document.model
    other = model.model_copy(update={"onnx": model.onnx.model_copy(update={"size": 7})})
    wrong = store.put(replace(job, document=job.document.model_copy(update={"model": other})).document.canonical())
    with pytest.raises(OperatorRefused, match=r"has \d+ bytes, and the job document says 7"):
        check_job(store, wrong)
