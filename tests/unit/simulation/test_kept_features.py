"""Features in a simulation's folder are computed once for all processes, and are those that were computed."""

import sqlite3

import numpy as np
import pytest

from simulation.kept_features import SharedFeatures, StoredFeatures

KINDS = b"k" * 32, b"l" * 32
KEYS = [bytes([number]) * 32 for number in range(5)]


class Computing:
    def __init__(self):
        self.rows = 0

    def __call__(self, places):
        self.rows += len(places)
        for at in range(0, len(places), 2):
            yield places[at : at + 2], np.array([[p, 0.1 * p, -1] for p in places[at : at + 2]], np.float32)


@pytest.mark.parametrize("store", [SharedFeatures, StoredFeatures], ids=["memory", "file"])
def test_a_row_is_computed_once(store, tmp_path):
    features, computing = store() if store is SharedFeatures else store(tmp_path / "features"), Computing()
    first = features.read(KINDS[0], [*KEYS[:3], KEYS[0]], computing)
    assert np.array_equal(first[0], first[3])
    assert features.read(KINDS[0], KEYS[:3][::-1], computing).tolist() == first[:3][::-1].tolist()
    assert features.read(KINDS[0], KEYS[2:4], computing)[0].tolist() == first[2].tolist()
    # What else computes them has rows of its own.
    features.read(KINDS[1], KEYS[:2], computing)
    assert computing.rows == 3 + 1 + 2


@pytest.mark.parametrize("store", [SharedFeatures, StoredFeatures], ids=["memory", "file"])
def test_what_was_computed_before_an_end_stays(store, tmp_path):
    features, computing = store() if store is SharedFeatures else store(tmp_path / "features"), Computing()

    def ends(places):
        yield next(computing(places))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        features.read(KINDS[0], KEYS, ends)
    computing.rows = 0
    assert features.read(KINDS[0], KEYS, computing).shape == (5, 3)
    assert computing.rows == 3


def test_another_process_finds_what_the_first_computed(tmp_path):
    first, second, computing = StoredFeatures(tmp_path), StoredFeatures(tmp_path), Computing()
    assert not list(tmp_path.iterdir())
    found = first.read(KINDS[0], KEYS, computing)
    assert second.read(KINDS[0], KEYS, computing).tobytes() == found.tobytes()
    assert computing.rows == len(KEYS)
    # Both computed a row at once.
    one, other = (store.read(KINDS[1], KEYS[:1], Computing()) for store in (first, second))
    assert one.tobytes() == other.tobytes()


def test_a_process_that_ends_while_it_writes_leaves_no_half_rows(tmp_path):
    first = StoredFeatures(tmp_path)
    first.read(KINDS[0], KEYS[:1], Computing())
    (path,) = tmp_path.glob("*.sqlite")
    cut = sqlite3.connect(path, isolation_level=None)
    cut.execute("BEGIN IMMEDIATE")
    cut.execute("INSERT INTO features VALUES (?, ?)", (KINDS[0] + KEYS[1], b"\0" * 12))
    cut.close()
    computing = Computing()
    assert first.read(KINDS[0], KEYS[1:2], computing)[0, 2] == -1
    assert computing.rows == 1
