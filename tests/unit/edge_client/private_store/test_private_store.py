"""A state comes back as it was stored, only for its job, and a staged one counts once it is committed."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.private_store import PrivateState, PrivateStore
from edge_client.private_store.container import header_of
from edge_client.private_store.errors import (
    StateDamaged,
    StateForeign,
    StateMissing,
    StateNewer,
    StoreBusy,
    StoreError,
    StoreUnusable,
    StoreUnwritable,
)
from edge_client.private_store.store import read_header
from tests.support.private_states import DOCUMENT, FEDERATION, VERSION, kept, loaded, made, store_of


def test_a_state_comes_back_as_it_was(home):
    arrays = {
        "embedding.weight": np.random.default_rng(1).normal(size=(50, 4)).astype(np.float32),
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "one": np.full((), 2.5, dtype=np.float32),
        "none": np.zeros((0, 3), dtype=np.float32),
    }
    state = PrivateState(DOCUMENT, 4, VERSION, arrays, b'{"vocab": 1}', frozenset({"personalised", "adapted"}))
    with store_of(home) as store:
        store.stage("desk", "4-ab", state)
        assert store.load("desk", DOCUMENT) is None
        assert store.staged("desk") == ["4-ab"]
        store.commit("desk", "4-ab")
        found = store.load("desk", DOCUMENT)
        assert store.staged("desk") == []
    assert found is not None
    assert (found.document, found.round, found.version) == (DOCUMENT, 4, VERSION)
    assert (found.tokenizer, found.flags, found.counter) == (b'{"vocab": 1}', {"personalised", "adapted"}, 1)
    assert found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found.arrays[name].dtype == np.float32
        assert found.arrays[name].shape == array.shape
        assert np.array_equal(found.arrays[name], array)


def test_a_state_without_its_own_tokenizer_has_none(home):
    kept(home, 1, tokenizer=None)
    with store_of(home) as store:
        assert store.load("desk", DOCUMENT).tokenizer is None
        assert store.load("ward", DOCUMENT) is None


def test_only_the_owner_can_read_the_folder(home):
    file = kept(home, 1)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == stat.S_IMODE(file.parent.parent.stat().st_mode) == 0o700
    file.parent.parent.chmod(0o750)
    with store_of(home) as store, pytest.raises(StoreUnusable, match="chmod 700"):
        store.load("desk", DOCUMENT)


def test_a_printed_state_reveals_nothing(home):
    state = made(3, tokenizer=b"secretword", arrays={"embedding.weight": np.full(2, 0.125, np.float32)})
    assert "secretword" not in repr(state)
    assert "0.125" not in repr(state)


def test_committing_or_discarding_again_changes_nothing(home):
    with store_of(home) as store:
        store.stage("desk", "1-aa", made(1))
        store.commit("desk", "1-aa")
        store.commit("desk", "1-aa")
        store.stage("desk", "2-aa", made(2))
        store.discard("desk", "2-aa")
        store.discard("desk", "2-aa")
        with pytest.raises(StateMissing, match="nothing of desk is staged under 2-aa"):
            store.commit("desk", "2-aa")
    assert loaded(home) == 1


def test_staging_again_replaces_the_staged_state(home):
    with store_of(home) as store:
        store.stage("desk", "1-aa", made(1))
        store.stage("desk", "1-aa", made(2))
        store.commit("desk", "1-aa")
    assert loaded(home) == 2


def test_an_older_update_never_replaces_a_newer_one(home):
    with store_of(home) as store:
        # "9" sorts after "10": the order is that of staging, not of names.
        for number in (9, 10, 11):
            store.stage("desk", f"{number}-aa", made(number))
        assert store.staged("desk") == ["9-aa", "10-aa", "11-aa"]
        store.commit("desk", "10-aa")
        store.commit("desk", "9-aa")
        assert store.staged("desk") == ["11-aa"]
    assert loaded(home) == 10


def test_a_start_commits_what_was_confirmed_and_discards_the_rest(home):
    kept(home, 1)
    with store_of(home) as store:
        for token, number in (("9-aa", 9), ("10-aa", 10), ("11-aa", 11)):
            store.stage("desk", token, made(number))
        store.stage("ward", "1-bb", made(1))
    asked = []
    with store_of(home) as store:
        found = store.recover(lambda job, token: asked.append((job, token)) or token in ("9-aa", "10-aa"))
        assert found.committed == (("desk", "9-aa"), ("desk", "10-aa"))
        assert found.discarded == (("desk", "11-aa"), ("ward", "1-bb"))
        assert found.problems == ()
        assert store.staged("desk") == store.staged("ward") == []
        assert store.load("ward", DOCUMENT) is None
    assert asked == [("desk", "9-aa"), ("desk", "10-aa"), ("desk", "11-aa"), ("ward", "1-bb")]
    assert loaded(home) == 10


def test_a_start_without_states_creates_nothing(home):
    with store_of(home) as store:
        assert store.recover(lambda job, token: True).committed == ()
        assert store.load("desk", DOCUMENT) is None
    assert list(home.iterdir()) == []


def test_a_start_leaves_states_staged_for_others_alone(home):
    with store_of(home, data_name="other") as store:
        store.stage("desk", "1-aa", made(1))
    with store_of(home) as store:
        assert store.recover(lambda job, token: True).committed == ()
    with store_of(home, data_name="other") as store:
        assert store.recover(lambda job, token: True).committed == (("desk", "1-aa"),)


def test_a_damaged_staged_file_replaces_nothing_and_blocks_no_start(home):
    kept(home, 1)
    with store_of(home) as store:
        store.stage("desk", "2-aa", made(2))
        store.stage("desk", "3-aa", made(3))
    flipped(home / "private" / "desk" / "staged-2-aa", -40)
    flipped(home / "private" / "desk" / "staged-3-aa", 20)
    with store_of(home) as store:
        with pytest.raises(StateDamaged, match="staged-2-aa is damaged: its SHA-256"):
            store.commit("desk", "2-aa")
        found = store.recover(lambda job, token: True)
    assert len(found.problems) == len(found.discarded) == 2
    assert "The earlier state counts" in found.problems[0]
    assert loaded(home) == 1


def flipped(path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("other", "document", "says"),
    [
        ({"federation": bytes(32)}, DOCUMENT, r"belongs to another federation \(0101010101010101"),
        ({"data_name": "other"}, DOCUMENT, "was trained on the data named data, and not on other"),
        ({}, bytes(32), r"another document of this job \(0202020202020202"),
    ],
)
def test_a_foreign_state_is_refused_and_kept(home, other, document, says):
    file = kept(home, 1)
    before = file.read_bytes()
    with store_of(home, **other) as store:
        for attempt in (
            lambda: store.load("desk", document),
            lambda: store.stage("desk", "2-aa", made(2, document=document)),
        ):
            with pytest.raises(StateForeign, match=says) as caught:
                attempt()
            assert "edge_client private backup" in str(caught.value)
            assert "edge_client private remove desk" in str(caught.value)
    assert file.read_bytes() == before


def test_a_commit_does_not_replace_a_foreign_state(home):
    with store_of(home, data_name="other") as store:
        store.stage("desk", "5-aa", made(5))
    kept(home, 1)
    with store_of(home, data_name="other") as store:
        with pytest.raises(StateForeign):
            store.commit("desk", "5-aa")
        found = store.recover(lambda job, token: True)
    assert (found.committed, found.discarded) == ((), ())
    assert "the data named data, and not on other" in found.problems[0]
    assert loaded(home) == 1


def test_a_file_put_under_another_jobs_name_is_refused(home):
    file = kept(home, 1)
    (file.parent.parent / "ward").mkdir()
    file.rename(file.parent.parent / "ward" / "state")
    with store_of(home) as store, pytest.raises(StateForeign, match="is of the job desk"):
        store.load("ward", DOCUMENT)


@pytest.mark.parametrize("kept_bytes", [0, 4, 8, 11, 30, 0.5, -33, -32, -1])
def test_a_file_that_was_cut_is_named(home, kept_bytes):
    file = kept(home, 1)
    data = file.read_bytes()
    length = int(len(data) * kept_bytes) if isinstance(kept_bytes, float) else kept_bytes % len(data)
    file.write_bytes(data[:length])
    with store_of(home) as store, pytest.raises(StateDamaged, match=r"private/desk/state is .*private restore FILE"):
        store.load("desk", DOCUMENT)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_changed_byte_is_found(tmp_path_factory, place, flip):
    home = tmp_path_factory.mktemp("home", numbered=True)
    file = kept(home, 1)
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= flip
    file.write_bytes(data)
    with store_of(home) as store, pytest.raises(StoreError):
        store.load("desk", DOCUMENT)


def test_bytes_after_the_end_are_damage(home):
    file = kept(home, 1)
    file.write_bytes(file.read_bytes() + b"\0")
    with store_of(home) as store, pytest.raises(StateDamaged):
        store.load("desk", DOCUMENT)


def test_newer_software_is_not_called_damage(home):
    file = kept(home, 1)
    file.write_bytes(b"TACITPS2" + file.read_bytes()[8:])
    with store_of(home) as store, pytest.raises(StateNewer, match="upgrade edge_client"):
        store.load("desk", DOCUMENT)


def test_a_store_is_used_by_one_process_at_a_time(home):
    kept(home, 1)
    with store_of(home) as one, store_of(home) as other:
        one.load("desk", DOCUMENT)
        for attempt in (
            lambda: other.load("desk", DOCUMENT),
            lambda: other.stage("desk", "2-aa", made(2)),
            lambda: other.recover(lambda job, token: True),
        ):
            with pytest.raises(StoreBusy, match="stop the `edge_client run`"):
                attempt()
    assert loaded(home) == 1


@pytest.mark.parametrize("job", ["../desk", "", "Desk", ".lock", "a/b"])
def test_an_invalid_job_name_reaches_no_file(home, job):
    with store_of(home) as store, pytest.raises(StoreError, match="is not the name of a job"):
        store.load(job, DOCUMENT)


@pytest.mark.parametrize("token", ["../../x", "", "A", "a/b", "x" * 128])
def test_an_invalid_token_reaches_no_file(home, token):
    with store_of(home) as store, pytest.raises(ValueError, match="token"):
        store.stage("desk", token, made(1))
    assert [path.name for path in home.rglob("*") if path.is_file()] == [".lock"]


def test_only_float32_is_stored(home):
    with store_of(home) as store, pytest.raises(ValueError, match="array wide is float64"):
        store.stage("desk", "1-aa", made(1, arrays={"wide": np.zeros(2)}))


# ---- a disk that takes no more -------------------------------------------------------------------------------------

_FULL = """
import resource, sys
from pathlib import Path
from edge_client.private_store.errors import StoreUnwritable
from tests.support.private_states import kept, loaded, made, store_of
home = Path(sys.argv[1])
with store_of(home) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    try:
        store.stage("desk", "2-aa", made(2))
    except StoreUnwritable as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert store.staged("desk") == []
    store.stage("desk", "3-aa", made(3))
    store.commit("desk", "3-aa")
"""


def test_a_full_disk_leaves_the_old_state_and_allows_a_retry(home):
    kept(home, 1)
    done = subprocess.run([sys.executable, "-c", _FULL, home], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot be written (File too large); check free space" in done.stdout
    assert "is still there" in done.stdout
    assert loaded(home) == 3
    assert not list(home.rglob("*.partial"))


@pytest.mark.parametrize("point", ["stage.opening", "stage.opened", "stage.written", "stage.synced", "commit.renaming"])
def test_a_failure_at_any_step_gives_a_sentence_and_changes_nothing(home, point):
    file = kept(home, 1)
    before = file.read_bytes()

    def full(at: str) -> None:
        if at == point:
            raise OSError(errno.ENOSPC, "No space left on device")

    def save(store: PrivateStore) -> None:
        store.stage("desk", "2-aa", made(2))
        store.commit("desk", "2-aa")

    with PrivateStore(home, FEDERATION, "data", faults=full) as store, pytest.raises(StoreUnwritable, match="No space"):
        save(store)
    assert file.read_bytes() == before
    with store_of(home) as store:
        save(store)
    assert loaded(home) == 2


def test_a_call_flushes_before_it_returns(home, monkeypatch):
    """The content is flushed first, then its name, then the name again when it changes."""
    happened = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        happened.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", fsync)
    with store_of(home, faults=happened.append) as store:
        store.stage("desk", "1-aa", made(1))
        store.commit("desk", "1-aa")
        store.stage("desk", "2-aa", made(2))
        store.discard("desk", "2-aa")
    order = [
        *("folder.making", "folder.made", "private"),
        *("stage.opening", "stage.opened", "stage.written", ".staged-1-aa.partial", "stage.synced"),
        *("stage.renamed", "desk", "stage.folder-synced"),
        *("commit.renaming", "commit.renamed", "desk", "commit.folder-synced"),
    ]
    assert happened[happened.index("folder.making") :][: len(order)] == order
    assert happened[-4:] == ["discard.removing", "discard.removed", "desk", "discard.folder-synced"]


@pytest.mark.parametrize("name", ["staged-2-aa", "state"])
def test_a_start_does_not_discard_what_newer_software_wrote(home, name):
    kept(home, 1)
    with store_of(home) as store:
        store.stage("desk", "2-aa", made(2))
    file = home / "private" / "desk" / name
    file.write_bytes(b"TACITPS2" + file.read_bytes()[8:])
    before = file.read_bytes()
    with store_of(home) as store, pytest.raises(StateNewer):
        store.recover(lambda job, token: True)
    assert file.read_bytes() == before


def test_a_header_shows_the_round_without_reading_values(home):
    file = kept(home, 1, 2)
    header = read_header(file)
    assert header is not None
    assert (header.job, header.round, header.counter, header.token) == ("desk", 2, 2, "2-aa")
    assert header == header_of(file.read_bytes(), "it")[0]
