"""The server optimiser's state in the blob store: in blocks, checked before it counts, nothing left over."""

import hashlib
import tracemalloc

import numpy as np
import pytest

from coordinator.rounds.optimiser import StateVectors, state_names
from coordinator.rounds.publish import next_version
from coordinator.rounds.server_state import stored_state
from coordinator.storage import open_blobs
from coordinator.storage.errors import BlobCorrupt, BlobMissing, ServerStateUnusable, StoreUnusable
from tacit.job import Aggregation
from tacit.server_optimiser import FedAdamServer, FedAvgServer
from tacit.vector import layout_of
from tests.support.fleet import job_document

VALUES = 1000
SERVER = FedAdamServer(learning_rate=0.1)


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    if request.param == "folder":
        return open_blobs(f"file://{tmp_path / 'store'}")
    return open_blobs(f"memory://state-{tmp_path.name}", staging=tmp_path / "staging")


def a_job(server=SERVER, values=VALUES):
    return job_document(Aggregation(max_weight=1)).model_copy(update={"server": server, "values": values})


def a_state(store, seed=0, values=VALUES):
    random = np.random.default_rng(seed)
    vectors = {name: random.uniform(0.1, 1, values).astype("<f4") for name in state_names(SERVER)}
    return vectors, {name: store.put(vector.tobytes()) for name, vector in vectors.items()}


def copied(store, number, digests, sizes=(300, 700)):
    """The digests of a state that is written as it was read."""
    with stored_state(store, a_job(), number, digests) as state:
        for size in sizes:
            state.give(state.take(size))
        return state.finish()


def leftovers(store):
    return list(store._staging.iterdir())


def test_a_state_is_stored_by_its_digest_and_read_again(store):
    vectors, digests = a_state(store)
    with stored_state(store, a_job(), 3, digests) as state:
        for start, end in ((0, 1), (1, 998), (998, VALUES)):
            taken = state.take(end - start)
            assert {name: taken[name].tobytes() for name in taken} == {
                name: vectors[name][start:end].tobytes() for name in taken
            }
            state.give({name: block * np.float32(2) for name, block in taken.items()})
        kept = state.finish()
    assert kept == {name: hashlib.sha256((vector * 2).tobytes()).digest() for name, vector in vectors.items()}
    assert all(store.get(kept[name]) == (vectors[name] * 2).tobytes() for name in kept)
    assert leftovers(store) == []
    assert copied(store, 4, kept) == kept


def test_version_zero_starts_without_a_stored_state(store):
    kept = copied(store, 0, {})
    assert not np.frombuffer(store.get(kept["momentum"]), "<f4").any()
    assert set(np.frombuffer(store.get(kept["accumulator"]), "<f4")) == {np.float32(1e-6)}


def test_fedavg_has_no_state_and_touches_no_store():
    with stored_state(None, a_job(FedAvgServer()), 3, {}) as state:
        assert state.finish() == {}


def test_the_store_gives_the_same_next_version_as_vectors_in_memory(store):
    vectors, digests = a_state(store)
    job, layout = a_job(), layout_of(a_job(), 3)
    total = np.random.default_rng(5).integers(0, 1000, layout.values, dtype=np.uint32)
    total[VALUES:] = [round(3 * layout.segments[1].scale), 0, 0, 0]
    memory = StateVectors(SERVER, VALUES, vectors)
    plain = next_version(job, 3, 3, total.copy(), np.ones(VALUES, np.float32), state=memory)
    with stored_state(store, job, 1, digests) as state:
        streamed = next_version(job, 3, 3, total.copy(), np.ones(VALUES, np.float32), state=state)
        kept = state.finish()
    assert streamed.values.tobytes() == plain.values.tobytes()
    assert {name: store.get(kept[name]) for name in kept} == {
        name: memory.after[name].tobytes() for name in memory.after
    }


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("changed", "is damaged"),
        ("longer", "is damaged, or longer than the version"),
        ("shorter", "is shorter than the version"),
        ("gone", "is not in the store"),
        ("unnamed", "is not on record"),
    ],
)
def test_a_changed_state_makes_no_version(tmp_path, harm, says):
    store = open_blobs(f"file://{tmp_path / 'store'}")
    _, digests = a_state(store)
    path = tmp_path / store._path(digests["accumulator"])
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    elif harm == "unnamed":
        del digests["accumulator"]
    else:
        path.write_bytes({"changed": data[:-1] + b"\0", "longer": data + bytes(4), "shorter": data[:-4]}[harm])
    before = {each for each in (tmp_path / "store" / "blobs").rglob("*") if each.is_file()}
    with pytest.raises(ServerStateUnusable) as refused:
        copied(store, 7, digests)
    sentence = str(refused.value)
    assert says in sentence
    assert "the accumulator of version 7 of questions" in sentence
    assert "coordinator job resume questions" in sentence
    assert {each for each in (tmp_path / "store" / "blobs").rglob("*") if each.is_file()} == before
    assert leftovers(store) == []


@pytest.mark.parametrize("taken", [0, 1, VALUES - 1, VALUES])
@pytest.mark.parametrize("at", [0, 1, VALUES - 1])
@pytest.mark.parametrize("what", ["momentum", "accumulator"])
def test_check_finds_damage_before_and_after_what_was_taken(tmp_path, what, at, taken):
    store = open_blobs(f"file://{tmp_path / 'store'}")
    _, digests = a_state(store)
    with stored_state(store, a_job(), 7, digests) as state:
        state.take(taken)
        state.check()
    path = tmp_path / store._path(digests[what])
    data = bytearray(path.read_bytes())
    data[4 * at + 3] ^= 0x80
    path.write_bytes(data)
    with stored_state(store, a_job(), 7, digests) as state:
        state.take(taken)
        with pytest.raises(ServerStateUnusable, match=f"the {what} of version 7 of questions is damaged; restore that"):
            state.check()
    assert leftovers(store) == []


def test_a_round_that_breaks_off_leaves_nothing(store):
    _, digests = a_state(store)
    with pytest.raises(ServerStateUnusable, match="shorter"):
        # Takes more than there is, after most of it was written.
        copied(store, 1, digests, sizes=(900, 900))
    assert leftovers(store) == []


def test_a_full_disk_is_named_in_a_sentence(store, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    _, digests = a_state(store)
    monkeypatch.setattr("coordinator.storage.blobs.os.fsync", full)
    with stored_state(store, a_job(), 1, digests) as state:
        state.give({name: block + np.float32(1) for name, block in state.take(VALUES).items()})
        with pytest.raises(StoreUnusable, match="No space left on device; check free space"):
            state.finish()
    assert leftovers(store) == []


def test_a_state_costs_blocks_of_memory_and_no_vector(tmp_path):
    """Measured without the sum and the base, which fedavg needs too."""
    store, values = open_blobs(f"file://{tmp_path / 'store'}"), 2_000_000
    job, base = a_job(values=values), np.zeros(values, np.float32)
    layout = layout_of(job, 3)
    total = np.zeros(layout.values, np.uint32)
    total[values] = round(3 * layout.segments[1].scale)
    with stored_state(store, job, 0, {}) as state:
        next_version(job, 3, 3, total.copy(), base, state=state)
        digests = state.finish()
    tracemalloc.start()
    try:
        with stored_state(store, job, 1, digests) as state:
            next_version(job, 3, 3, total, base, state=state)
            state.finish()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A vector is 8 MB.
    assert most < 6_500_000


# ---- the store's own pieces -----------------------------------------------------------------------------------------


def test_a_blob_written_in_pieces_equals_the_whole_blob(store):
    data = bytes(range(256)) * 1000
    with store.writing() as writer:
        for start in range(0, len(data), 999):
            writer.write(data[start : start + 999])
        digest = writer.finish()
    assert digest == hashlib.sha256(data).digest()
    assert store.get(digest) == data
    with store.reading(digest) as reader:
        found = b""
        while piece := reader.read(4096):
            found += piece
        reader.finish()
    assert found == data
    # A blob that is there already is not written again.
    with store.writing() as writer:
        writer.write(data)
        assert writer.finish() == digest
    assert leftovers(store) == []
    with store.reading(digest) as reader:
        reader.read(10)
        with pytest.raises(BlobCorrupt):
            reader.finish()
    with pytest.raises(BlobMissing), store.reading(bytes(32)):
        pass
