"""A backup is whole or refused, moves to another machine of the same member, and never goes silently back in time."""

import pytest

from edge_client.private_store.backup import BackupHeader, back_up, restore
from edge_client.private_store.errors import (
    StateConflict,
    StateDamaged,
    StateForeign,
    StateMissing,
    StateNewer,
    StoreBusy,
    StoreUnwritable,
)
from edge_client.private_store.upkeep import rekey
from tests.support.private_states import DOCUMENT, FEDERATION, file_key, kept, loaded, made, store_of


def saved(home, target, **how) -> BackupHeader:
    return back_up(home, target, **{"member": "north", "clock": lambda: 1700000000.0, **how})


def restored(home, source, **how):
    return restore(home, source, **{"federation": FEDERATION, "member": "north", **how})


@pytest.fixture
def other(tmp_path):
    (tmp_path / "other").mkdir(mode=0o700)
    return tmp_path / "other"


def test_all_jobs_move_to_another_machine(home, other, tmp_path):
    kept(home, 1, 2)
    kept(home, 5, job="ward", key=file_key())
    about = saved(home, tmp_path / "backup")
    assert [(entry.job, entry.sealed) for entry in about.states] == [("desk", False), ("ward", True)]
    assert (tmp_path / "backup").stat().st_mode & 0o077 == 0
    done = restored(other, tmp_path / "backup")
    assert (done.restored, done.unchanged) == (("desk", "ward"), ())
    assert loaded(other) == 2
    # The sealed state stays sealed.
    assert loaded(other, file_key(), "ward") == 5
    # The other one must be sealed before it can be continued beside it.
    assert rekey(other, None, file_key()) == ["desk"]
    with store_of(other, file_key()) as store:
        store.stage("desk", "3-aa", made(3))
        store.commit("desk", "3-aa")
        assert store.load("desk", DOCUMENT).counter == 3
    done = restored(home, tmp_path / "backup")
    assert (done.restored, done.unchanged) == ((), ("desk", "ward"))


def test_one_job_of_several_can_be_backed_up_and_restored(home, other, tmp_path):
    kept(home, 1)
    kept(home, 2, job="ward")
    saved(home, tmp_path / "both")
    assert [entry.job for entry in saved(home, tmp_path / "one", job="ward").states] == ["ward"]
    assert restored(other, tmp_path / "both", job="desk").restored == ("desk",)
    assert restored(other, tmp_path / "one").restored == ("ward",)
    with pytest.raises(StateMissing, match="one holds no state of desk"):
        restored(other, tmp_path / "one", job="desk")


def test_a_newer_state_is_overwritten_only_on_request(home, tmp_path):
    kept(home, 1)
    kept(home, 1, job="ward")
    saved(home, tmp_path / "backup")
    kept(home, 2)
    (home / "private" / "ward" / "state").unlink()
    with pytest.raises(StateConflict, match=r"or data set, for desk; nothing was changed.*--force"):
        restored(home, tmp_path / "backup")
    assert loaded(home) == 2
    assert loaded(home, job="ward") is None
    with store_of(home) as store:
        store.stage("desk", "9-aa", made(9))
    assert restored(home, tmp_path / "backup", force=True).restored == ("desk", "ward")
    assert loaded(home) == 1
    with store_of(home) as store:
        assert store.staged("desk") == []


def test_a_later_state_of_the_same_history_needs_no_force(home, other, tmp_path):
    kept(home, 1)
    saved(home, tmp_path / "first")
    restored(other, tmp_path / "first")
    kept(home, 2)
    saved(home, tmp_path / "second")
    assert restored(other, tmp_path / "second").restored == ("desk",)
    assert loaded(other) == 2


@pytest.mark.parametrize("different", [{"document": bytes(32)}, {"round": 7}])
def test_another_history_is_overwritten_only_on_request(home, other, tmp_path, different):
    kept(home, 1)
    saved(home, tmp_path / "backup")
    kept(other, 1, **different)
    with pytest.raises(StateConflict):
        restored(other, tmp_path / "backup")
    restored(other, tmp_path / "backup", force=True)
    assert loaded(other) == 1


def test_the_same_state_under_another_key_is_unchanged(home, tmp_path):
    kept(home, 1)
    saved(home, tmp_path / "backup")
    rekey(home, None, file_key())
    assert restored(home, tmp_path / "backup").unchanged == ("desk",)
    assert loaded(home, file_key()) == 1


def test_a_backup_replaces_a_damaged_state(home, tmp_path):
    file = kept(home, 1)
    saved(home, tmp_path / "backup")
    for damage in (b"", file.read_bytes()[:-1], b"x" * 500):
        file.write_bytes(damage)
        assert restored(home, tmp_path / "backup").restored == ("desk",)
        assert loaded(home) == 1


def test_a_damaged_state_is_not_backed_up(home, tmp_path):
    file = kept(home, 1)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StateDamaged, match="desk/state is damaged"):
        saved(home, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_a_changed_byte_of_a_backup_is_found_before_any_write(home, other, tmp_path):
    kept(home, 1)
    source = tmp_path / "backup"
    saved(home, source)
    whole = source.read_bytes()
    for place in range(0, len(whole), 7):
        source.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with pytest.raises((StateDamaged, StateNewer)):
            restored(other, source)
    for cut in (0, 5, 11, 40, len(whole) // 2, len(whole) - 33, len(whole) - 1):
        source.write_bytes(whole[:cut])
        with pytest.raises(StateDamaged):
            restored(other, source)
    source.write_bytes(whole + b"\0")
    with pytest.raises(StateDamaged, match="is damaged; use another copy"):
        restored(other, source)
    assert list(other.iterdir()) == []


def test_a_backup_of_another_member_or_federation_is_refused(home, other, tmp_path):
    kept(home, 1)
    saved(home, tmp_path / "backup")
    with pytest.raises(StateForeign, match="belongs to member north, but this home to south"):
        restored(other, tmp_path / "backup", member="south")
    with pytest.raises(StateForeign, match=r"another federation \(0101010101010101"):
        restored(other, tmp_path / "backup", federation=bytes(32))
    assert list(other.iterdir()) == []
    # A home that lost its identity can still be backed up.
    saved(home, tmp_path / "nameless", member=None)
    assert restored(other, tmp_path / "nameless").restored == ("desk",)


def test_states_of_two_federations_need_two_backups(home, tmp_path):
    kept(home, 1)
    with store_of(home, federation=bytes(32)) as store:
        store.stage("ward", "1-aa", made(1))
        store.commit("ward", "1-aa")
    with pytest.raises(StateForeign, match="states of 2 federations"):
        saved(home, tmp_path / "backup")
    assert saved(home, tmp_path / "backup", job="ward").federation == bytes(32)


def test_a_backup_runs_beside_the_member_but_a_restore_does_not(home, tmp_path):
    kept(home, 1)
    with store_of(home) as store:
        store.load("desk", DOCUMENT)
        saved(home, tmp_path / "backup")
        with pytest.raises(StoreBusy):
            restored(home, tmp_path / "backup")


def test_impossible_backups_and_restores_give_a_sentence(home, tmp_path):
    with pytest.raises(StateMissing, match="holds no private state; "):
        saved(home, tmp_path / "backup")
    with pytest.raises(StateMissing, match="backup does not exist"):
        restored(home, tmp_path / "backup")
    kept(home, 1)
    (tmp_path / "taken").write_bytes(b"x")
    with pytest.raises(StoreUnwritable, match="exists; choose another name"):
        saved(home, tmp_path / "taken")
    with pytest.raises(StateDamaged, match="is not a backup"):
        restored(home, tmp_path / "taken")
    with pytest.raises(StoreUnwritable, match="cannot be written"):
        saved(home, tmp_path / "nowhere" / "backup")


def test_a_backup_holds_only_committed_states(home, other, tmp_path):
    kept(home, 1)
    with store_of(home) as store:
        store.stage("desk", "2-aa", made(2))
        store.stage("ward", "1-aa", made(1))
    assert [entry.job for entry in saved(home, tmp_path / "backup").states] == ["desk"]
    restored(other, tmp_path / "backup")
    assert loaded(other) == 1
