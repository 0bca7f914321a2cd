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
    made(None, "other").save(KIND, rows())
    # What is in clear is not left so beside a key.
    assert made(KEY, "other").load(KIND) == {}
    assert len(said) == 3


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in pieces"])
def test_a_run_that_forgot_its_key_writes_nothing_in_clear(made, tmp_path, said, in_pieces):
    (made(KEY).add if in_pieces else made(KEY).save)(KIND, rows())
    made().add(OTHER, rows(2))
    made().save(KIND, rows())
    values = next(iter(rows().values())).tobytes()
    assert not any(values in each.read_bytes() for each in (tmp_path / "features").iterdir())
    assert all("sealed" in each and "--private-key-file" in each for each in said)
    assert len(said) == 2
    assert same(made(KEY).load(KIND), rows())
    # A member that keeps nothing on the disk needs no key to remove them.
    made().remove()
    assert list((tmp_path / "features").iterdir()) == []


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
        yield places, np.stack([rows()[order[place]] for place in places])

    first = FeatureStore(keeper=made(KEY))
    assert (first.read(KIND, keys[:3], lambda places: compute(places, keys[:3])) == table[:3]).all()
    second = FeatureStore(keeper=made(KEY))
    later = keys[1:4]
    assert (second.read(KIND, later, lambda places: compute(places, later)) == table[1:4]).all()
    assert asked == [keys[:3], [keys[3]]]
    assert made(KEY).load(KIND).keys() == set(later)


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
def test_pieces_are_read_beside_the_file_until_it_holds_all(made, tmp_path, said, key):
    every = rows(9)
    first, second, third = (dict(list(every.items())[at : at + 3]) for at in (0, 3, 6))
    made(key).save(KIND, first)
    made(key).add(KIND, second)
    again = made(key)
    again.add(KIND, third)
    names = sorted(each.name for each in (tmp_path / "features").iterdir())
    assert [name[32:] for name in names] == ["", ".000001", ".000002"]
    assert same(made(key).load(KIND), every)
    # A piece that was cut counts for nothing, and the others count.
    piece = tmp_path / "features" / names[1]
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1])
    assert same(made(key).load(KIND), first | third)
    assert ".000001 cannot be used (it was cut" in said.pop() or key is not None
    piece.write_bytes(whole)
    made(key).save(KIND, every)
    assert [each.name for each in (tmp_path / "features").iterdir()] == names[:1]
    assert same(made(key).load(KIND), every)


def test_pieces_of_another_kind_make_room_and_a_member_that_keeps_nothing_removes_all(made, tmp_path):
    made().save(KIND, rows())
    made().add(OTHER, rows(2))
    made().add(OTHER, rows(3))
    later = made()
    later.add(KIND, rows(4))
    later.add(KIND, rows(6))
    assert made().load(OTHER) == {}
    assert same(made().load(KIND), rows() | rows(4) | rows(6))
    made(None, "other").save(KIND, rows())
    (tmp_path / "features" / f".{hashlib.sha256(b'data').hexdigest()[:32]}.000009.partial").write_bytes(b"half")
    made().remove()
    assert len(list((tmp_path / "features").iterdir())) == 1


def test_pieces_hold_no_more_than_the_store_and_rows_that_are_gone_go_first(made, tmp_path):
    keys, table = list(rows(8)), rows(8)

    def ends(order):
        def compute(places):
            for place in places:
                yield [place], table[order[place]][None]
            raise KeyboardInterrupt

        return compute

    # Room for three rows of seven values.
    for order, kept in ((keys[:5], keys[:3]), (keys[3:7], keys[3:6]), (keys[2:4], [keys[3], keys[2]])):
        store = FeatureStore(3 * 28, made(), piece_seconds=0.0)
        with pytest.raises(KeyboardInterrupt):
            store.read(KIND, order, ends(order))
        assert list(made().load(KIND)) == kept


def test_a_stop_writes_what_no_piece_has_yet(made, tmp_path):
    keys, table = list(rows()), rows()

    def ends(places):
        for place in places[:3]:
            yield [place], table[keys[place]][None]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FeatureStore(keeper=made(), piece_seconds=3600.0).read(KIND, keys, ends)
    assert same(made().load(KIND), {key: table[key] for key in keys[:3]})
    assert [each.suffix for each in (tmp_path / "features").iterdir()] == [".000001"]
