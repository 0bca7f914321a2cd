"""Features on a member's disk: sealed with its key, remade when damaged, gone when the member no longer keeps them."""

import hashlib

import numpy as np
import pytest

from edge_client.private_store.features import FeatureFile
from edge_client.private_store.sealing import StoreKey
from learning.prompts.features import FeatureStore

KIND, OTHER = b"\1" * 32, b"\2" * 32


def rows(count=5, width=7):
    random = np.random.default_rng(count)
    return {
        hashlib.sha256(bytes([place])).digest(): random.standard_normal(width).astype(np.float32)
        for place in range(count)
    }


def same(found, expected):
    return found.keys() == expected.keys() and all((found[key] == expected[key]).all() for key in expected)


@pytest.fixture
def said():
    return []


@pytest.fixture
def made(tmp_path, said):
    return lambda key=None, name="data": FeatureFile(tmp_path, name, key, said.append)


KEY = StoreKey("key-file", b"k" * 32)


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
def test_rows_come_back_under_their_kind_and_name_alone(made, tmp_path, said, key):
    made(key).save(KIND, rows())
    assert same(made(key).load(KIND), rows())
    assert made(key).load(OTHER) == {}
    assert made(key, "other").load(KIND) == {}
    assert said == []
    (file,) = (tmp_path / "features").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    values = next(iter(rows().values())).tobytes()
    assert (values in file.read_bytes()) == (key is None)
    made(key).save(OTHER, rows(2))
    assert made(key).load(KIND) == {}
    made(key).remove()
    assert not file.exists()
    assert made(key).load(OTHER) == {}


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
def test_a_changed_byte_anywhere_is_found_and_features_are_made_again(made, tmp_path, said, key):
    made(key).save(KIND, rows(2, 3))
    (file,) = (tmp_path / "features").iterdir()
    whole = file.read_bytes()
    for place in [*range(0, len(whole), 5), len(whole) - 1]:
        changed = bytearray(whole)
        changed[place] ^= 1
        file.write_bytes(changed)
        # A kind that was changed is another kind; every other change is told.
        assert made(key).load(KIND) == {}, place
    for cut in (0, 3, 40, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert made(key).load(KIND) == {}
    assert said
    assert all("features are computed again" in each for each in said)
    file.write_bytes(whole)
    assert same(made(key).load(KIND), rows(2, 3))


def test_nothing_is_read_with_another_key_or_without(made, said):
    made(KEY).save(KIND, rows())
    assert made(StoreKey("key-file", b"l" * 32)).load(KIND) == {}
    assert made(None).load(KIND) == {}
    made(None).save(KIND, rows())
    # What is in clear is not left so beside a key.
    assert made(KEY).load(KIND) == {}
    assert len(said) == 3


def test_a_folder_open_to_others_is_not_used(made, tmp_path, said):
    made().save(KIND, rows())
    (tmp_path / "features").chmod(0o755)
    assert made().load(KIND) == {}
    made().save(KIND, rows(1))
    assert len(said) == 2
    assert "chmod 700" in said[0]


def test_a_store_reads_what_the_last_process_kept_and_drops_rows_that_are_gone(made):
    keys, asked = list(rows()), []
    table = np.stack(list(rows().values()))

    def compute(places, order):
        asked.append([order[place] for place in places])
        return np.stack([rows()[order[place]] for place in places])

    first = FeatureStore(keeper=made(KEY))
    assert (first.read(KIND, keys[:3], lambda places: compute(places, keys[:3])) == table[:3]).all()
    second = FeatureStore(keeper=made(KEY))
    later = keys[1:4]
    assert (second.read(KIND, later, lambda places: compute(places, later)) == table[1:4]).all()
    assert asked == [keys[:3], [keys[3]]]
    assert made(KEY).load(KIND).keys() == set(later)
