"""A coordinator creates a measurement only if everything that members fetch for it is stored and fits."""

import hashlib

import numpy as np
import pytest

from coordinator.services.job_check import check_job
from coordinator.services.live import OperatorRefused
from coordinator.storage import prune
from coordinator.storage.blobs import open_blobs
from tests.support.measurements import bundled, measuring, varied


@pytest.fixture
def parts(tmp_path):
    subject, files = bundled(tmp_path)
    version = varied(subject)
    job, added = measuring(subject, hashlib.sha256(version).digest())
    return (
        job,
        {**files, **added, hashlib.sha256(version).digest(): version},
        open_blobs(f"file://{tmp_path / 'blobs'}"),
    )


def test_it_is_created_if_the_version_is_there_and_fits(parts):
    job, files, store = parts
    for data in files.values():
        store.put(data)
    assert check_job(store, job.digest()) == job
    # What the document names stays in the store while the job is there, whatever becomes of the version's own job.
    assert job.question.weights in prune.read_document(store, job.name, job.digest()).blobs


@pytest.mark.parametrize("what", ["weights", "manifest", "tokenizer"])
def test_a_part_that_was_not_uploaded_is_named(parts, what):
    job, files, store = parts
    gone = job.tokenizer if what == "tokenizer" else getattr(job.question, what)
    for digest, data in files.items():
        if digest != gone:
            store.put(data)
    with pytest.raises(OperatorRefused, match="was not uploaded"):
        check_job(store, job.digest())


def test_a_version_of_another_size_is_refused(parts):
    job, files, store = parts
    small = np.zeros(7, "<f4").tobytes()
    changed = job.model_copy(
        update={"question": job.question.model_copy(update={"weights": hashlib.sha256(small).digest()})}
    )
    for data in (*files.values(), small, changed.canonical()):
        store.put(data)
    with pytest.raises(OperatorRefused, match="the version have 28 bytes, but the manifest needs"):
        check_job(store, changed.digest())
    changed = job.model_copy(update={"question": job.question.model_copy(update={"values": 7})})
    store.put(changed.canonical())
    with pytest.raises(OperatorRefused, match=r"the version's manifest has .* values, not 7"):
        check_job(store, changed.digest())
