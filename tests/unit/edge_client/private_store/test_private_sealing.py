"""Sealed states open only with their key, and reveal nothing without it."""

import hashlib
import os
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from edge_client.private_store import StoreKey, store_key
from edge_client.private_store import sealing as sealing_module
from edge_client.private_store.container import check_whole, decode, header_of, padded_length
from edge_client.private_store.errors import KeyUnusable, StateDamaged, StateMissing, StateSealed
from edge_client.private_store.sealing import CHUNK, ScryptNumbers, Sealing, sealed_length
from edge_client.private_store.upkeep import held_all, look, rekey, remove
from tests.support.private_states import DOCUMENT, file_key, kept, loaded, made, store_of

PASSPHRASE = "correct horse battery"


def test_a_passphrase_alone_opens_a_state_in_another_process(home):
    file = kept(home, 1, 2, key=StoreKey.from_passphrase(PASSPHRASE), tokenizer=b"myelodysplasia")
    data = file.read_bytes()
    assert b"myelodysplasia" not in data
    assert b"embedding" not in data
    with store_of(home, StoreKey.from_passphrase(PASSPHRASE)) as store:
        assert store.load("desk", DOCUMENT).tokenizer == b"myelodysplasia"


def test_a_wrong_passphrase_gives_a_sentence_and_loses_nothing(home):
    key = StoreKey.from_passphrase(PASSPHRASE)
    file = kept(home, 1, key=key)
    before = file.read_bytes()
    wrong, says = StoreKey.from_passphrase(PASSPHRASE + "!"), "TACIT_PASSPHRASE is not the one it was sealed with"
    with store_of(home, wrong) as store, pytest.raises(StateSealed, match=f"{says}; nothing was changed"):
        store.load("desk", DOCUMENT)
    with store_of(home) as store:
        for attempt in (lambda: store.load("desk", DOCUMENT), lambda: store.stage("desk", "2-aa", made(2))):
            with pytest.raises(StateSealed, match="in the environment as TACIT_PASSPHRASE"):
                attempt()
    with store_of(home, file_key()) as store, pytest.raises(StateSealed, match="sealed with a passphrase"):
        store.load("desk", DOCUMENT)
    assert file.read_bytes() == before
    assert loaded(home, key) == 1


def test_a_key_for_a_state_that_is_not_sealed_is_refused(home):
    """A member that gives a passphrase believes that the disk holds nothing readable."""
    kept(home, 1)
    with store_of(home, file_key()) as store, pytest.raises(StateSealed, match="is not sealed, although a key file"):
        store.load("desk", DOCUMENT)


@pytest.mark.parametrize("other", [{}, {"data_name": "other"}, {"federation": bytes(32)}], ids=str)
@pytest.mark.parametrize("staged", [False, True], ids=["committed", "staged"])
def test_without_the_key_nothing_is_written_beside_a_sealed_state(home, staged, other):
    """This holds over all jobs, federations and data sets, since they share one folder."""
    with store_of(home, file_key(), **other) as store:
        store.stage("ward", "1-aa", made(1))
        if not staged:
            store.commit("ward", "1-aa")
    says = "state of ward: it is sealed with a key file; .*nothing of desk is written in clear.*private remove ward"
    with store_of(home) as store:
        assert store.load("desk", DOCUMENT) is None
        with pytest.raises(StateSealed, match=says):
            store.stage("desk", "1-aa", made(1))
    assert all(header_of(path.read_bytes(), "it")[0].sealing for path in home.rglob("*-aa"))
    assert not (home / "private" / "desk").exists() or not list((home / "private" / "desk").iterdir())
    # Writing works with the key, and without it once nothing is sealed.
    with store_of(home, file_key()) as store:
        store.stage("desk", "1-aa", made(1))
    rekey(home, file_key(), None)
    with store_of(home) as store:
        store.stage("desk", "2-aa", made(2))
        assert store.staged("desk") == ["1-aa", "2-aa"]


def test_staged_states_are_settled_without_the_passphrase(home):
    with store_of(home, file_key()) as store:
        store.stage("desk", "1-aa", made(1))
    with store_of(home) as store:
        assert store.recover(lambda job, token: True).committed == (("desk", "1-aa"),)
    assert loaded(home, file_key()) == 1


def test_one_accent_has_one_spelling():
    composed = "Güterzüge fahren"
    sealing = StoreKey.from_passphrase(composed).new_sealing()
    other = StoreKey.from_passphrase(unicodedata.normalize("NFD", composed))
    sealed = b"".join(StoreKey.from_passphrase(composed).seal(sealing, b"h", b"text"))
    assert other.open(sealing, b"h", memoryview(sealed), 4) == b"text"


def test_a_sealed_file_has_the_documented_format(monkeypatch):
    """Opened here by hand: HKDF of the key file, AES-256-GCM, nonce = chunk number and last flag, header as data."""
    monkeypatch.setattr(sealing_module, "CHUNK", 10)
    key, header, content = file_key(7), b"header", b"twenty-five bytes of text"
    sealing = key.new_sealing()
    chunks = list(key.seal(sealing, header, content))
    derived = HKDF(algorithm=hashes.SHA256(), length=32, salt=sealing.salt, info=b"tacit/private-state/v1")
    cipher = AESGCM(derived.derive(bytes([7]) * 32))
    opened = [
        cipher.decrypt(number.to_bytes(11, "big") + bytes([number == 2]), chunk, header)
        for number, chunk in enumerate(chunks)
    ]
    assert opened == [b"twenty-fiv", b"e bytes of", b" text"]
    assert sum(map(len, chunks)) == sealed_length(25)
    assert key.open(sealing, header, memoryview(b"".join(chunks)), 25) == content


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_content_of_any_length_comes_back(length):
    key, content = file_key(), os.urandom(length)
    sealing = key.new_sealing()
    sealed = b"".join(key.seal(sealing, b"h", content))
    assert len(sealed) == sealed_length(length)
    assert key.open(sealing, b"h", memoryview(sealed), length) == content


def test_chunks_cannot_be_cut_swapped_or_mixed_between_files(monkeypatch):
    monkeypatch.setattr(sealing_module, "CHUNK", 10)
    key = file_key()
    sealing, other = key.new_sealing(), key.new_sealing()
    assert sealing.salt != other.salt
    one, two, three = key.seal(sealing, b"h", b"a" * 10 + b"b" * 10 + b"c" * 10)
    foreign = next(key.seal(other, b"h", b"a" * 30))
    for forged, length, header in (
        (one + two, 20, b"h"),
        (two + one + three, 30, b"h"),
        (foreign + two + three, 30, b"h"),
        (one + two + three, 30, b"H"),
        (bytes([one[0] ^ 1]) + one[1:] + two + three, 30, b"h"),
    ):
        with pytest.raises(StateSealed):
            key.open(sealing, header, memoryview(forged), length)
    assert key.open(sealing, b"h", memoryview(one + two + three), 30)[-1:] == b"c"


def test_a_header_changed_together_with_its_digest_does_not_open(home):
    """SHA-256 finds accidents; the seal finds an attacker that changes both."""
    file = kept(home, 5, key=file_key())
    forged = file.read_bytes()[:-32].replace(b'"round":5', b'"round":6')
    file.write_bytes(forged + hashlib.sha256(forged).digest())
    with store_of(home, file_key()) as store, pytest.raises(StateSealed):
        store.load("desk", DOCUMENT)


def test_damage_is_not_reported_as_a_wrong_key(home):
    file = kept(home, 1, key=file_key())
    data = bytearray(file.read_bytes())
    data[-60] ^= 1
    file.write_bytes(data)
    with store_of(home, file_key()) as store, pytest.raises(StateDamaged, match="SHA-256"):
        store.load("desk", DOCUMENT)


def test_scrypt_runs_once_for_all_states_of_one_key(home, monkeypatch):
    calls = []
    real = sealing_module.Scrypt  # type: ignore[attr-defined]
    monkeypatch.setattr(sealing_module, "Scrypt", lambda **how: calls.append(how["n"]) or real(**how))
    kept(home, 1, 2, 3, key=StoreKey.from_passphrase(PASSPHRASE))
    assert calls == [2**15]
    key = StoreKey.from_passphrase(PASSPHRASE)
    assert loaded(home, key) == 3
    kept(home, 4, key=key)
    assert calls == [2**15, 2**15]
    assert loaded(home, key) == 4


@pytest.mark.parametrize("weak", [{"n": 2**14}, {"n": 2**21}, {"n": 2**15 + 2}, {"p": 0}, {"p": 17}, {"r": 1}])
def test_scrypt_parameters_are_bounded_on_both_sides(weak):
    with pytest.raises(ValueError, match=r"scrypt|equal to"):
        ScryptNumbers(salt=bytes(32), **weak)


def test_a_sealing_is_for_a_passphrase_or_a_key_file():
    with pytest.raises(ValueError, match="has scrypt's numbers"):
        Sealing(kind="passphrase", salt=bytes(32))


# ---- where keys come from ------------------------------------------------------------------------------------------


def test_a_key_comes_from_the_environment_or_a_private_file(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(os.urandom(32))
    file.chmod(0o600)
    assert store_key(None, {}) is None
    assert store_key(None, {"TACIT_PASSPHRASE": PASSPHRASE}).kind == "passphrase"
    assert store_key(file, {}).kind == "key-file"
    with pytest.raises(KeyUnusable, match="not both"):
        store_key(file, {"TACIT_PASSPHRASE": PASSPHRASE})
    file.chmod(0o640)
    with pytest.raises(KeyUnusable, match=r"can be used by others \(mode 0640\); close it with `chmod 600"):
        store_key(file, {})


@pytest.mark.parametrize(("size", "says"), [(0, "holds 0 bytes"), (31, "holds 31 bytes"), (2**20 + 1, "more than")])
def test_a_key_file_of_another_size_is_refused(tmp_path, size, says):
    file = tmp_path / "key"
    file.write_bytes(bytes(size))
    file.chmod(0o600)
    with pytest.raises(KeyUnusable, match=says):
        StoreKey.from_file(file)


def test_a_missing_key_file_is_named_with_how_to_make_one(tmp_path):
    with pytest.raises(KeyUnusable, match="does not exist; make a key with"):
        StoreKey.from_file(tmp_path / "key")


@pytest.mark.parametrize("short", ["", "seven77"])
def test_a_short_passphrase_is_refused_not_ignored(short):
    with pytest.raises(KeyUnusable, match=f"has {len(short)} characters"):
        store_key(None, {"TACIT_PASSPHRASE": short})


def test_a_key_does_not_print_itself():
    assert PASSPHRASE not in repr(StoreKey.from_passphrase(PASSPHRASE))


# ---- changing and removing it --------------------------------------------------------------------------------------


def test_rekey_seals_changes_and_unseals_staged_states_too(home):
    kept(home, 1)
    kept(home, 1, job="ward")
    with store_of(home) as store:
        store.stage("desk", "2-aa", made(2))
    steps = [None, file_key(1), StoreKey.from_passphrase(PASSPHRASE), None]
    for old, new in pairwise(steps):
        assert rekey(home, old, new) == ["desk", "ward"]
        assert rekey(home, old, new) == []
        assert loaded(home, new) == loaded(home, new, "ward") == 1
        for path in home.rglob("*-aa"):
            sealing = header_of(path.read_bytes(), "it")[0].sealing
            assert (sealing and sealing.kind) == (new and new.kind)
    with store_of(home) as store:
        store.commit("desk", "2-aa")
    assert loaded(home) == 2


def test_a_wrong_old_key_changes_nothing_anywhere(home):
    kept(home, 1, job="desk", key=file_key(1))
    kept(home, 1, job="ward", key=file_key(2))
    before = {path: path.read_bytes() for path in home.rglob("state")}
    with pytest.raises(StateSealed, match="ward/state: the key file is not the one"):
        rekey(home, file_key(1), file_key(3))
    assert {path: path.read_bytes() for path in home.rglob("state")} == before


def test_a_damaged_state_stops_a_rekey_by_name(home):
    kept(home, 1)
    file = kept(home, 1, job="ward")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StateDamaged, match="ward/state is damaged"):
        rekey(home, None, file_key())
    assert loaded(home) == 1


def test_a_sealed_state_shows_its_round_and_no_names(home):
    kept(home, 3, key=file_key())
    header, state = look(home, "desk", None)
    assert (header.round, state) == (3, None)
    assert look(home, "desk", file_key())[1].arrays.keys() == {"embedding.weight", "output.bias"}
    (held,) = held_all(home)
    assert (held.job, held.header, held.staged) == ("desk", header, 0)


def test_remove_deletes_staged_states_too(home):
    kept(home, 1)
    with store_of(home) as store:
        store.stage("desk", "2-aa", made(2))
    (home / "private" / "desk" / ".staged-3-aa.partial").write_bytes(b"half")
    remove(home, "desk")
    assert held_all(home) == []
    assert not (home / "private" / "desk").exists()
    with pytest.raises(StateMissing, match="holds no private state of desk"):
        remove(home, "desk")


# ---- what the length tells -------------------------------------------------------------------------------------------


def test_one_word_more_does_not_show_in_a_sealed_file(home):
    def sizes(key) -> set[int]:
        found = set()
        for words in (11_900, 11_901, 11_950):
            with store_of(home, key) as store:
                rows, tokenizer = np.ones((words, 50), np.float32), b"token, " * words
                store.stage("desk", "1-aa", made(1, arrays={"embedding.weight": rows}, tokenizer=tokenizer))
            file = home / "private" / "desk" / "staged-1-aa"
            header, _ = check_whole(file.read_bytes(), "it")
            found |= {header.length, file.stat().st_size}
            state = decode(file.read_bytes(), "it", key)[1]
            assert (len(state.arrays["embedding.weight"]), state.tokenizer) == (words, tokenizer)
        return found

    assert len(sizes(None)) == 6
    # All contents have one length, and so do all files.
    assert len(sizes(file_key())) == 2


@pytest.mark.parametrize("power", range(3, 40))
def test_sealed_lengths_are_few_and_cost_less_than_an_eighth(power):
    octave = range(2**power + 1, 2 ** (power + 1) + 1, max(1, 2**power // 997))
    padded = [padded_length(length) for length in octave]
    assert len(set(padded)) <= 8
    assert all(0 <= more - length < max(2**16, length / 8) for length, more in zip(octave, padded, strict=True))
    assert all(padded_length(more) == more for more in padded)


def test_wrong_padding_is_damage_and_no_crash(home):
    """Only somebody with the key can make such a file."""
    key = file_key()
    file = kept(home, 1, key=key)
    header, _ = header_of(file.read_bytes(), "it")
    for content in (b"", b"1234567", (9).to_bytes(8, "big") + b"12345678"):
        shorter = header.model_copy(update={"length": len(content)})
        canonical = shorter.canonical()
        prefix = file.read_bytes()[:8] + len(canonical).to_bytes(4, "big") + canonical
        data = prefix + b"".join(key.seal(shorter.sealing, prefix, content))
        with pytest.raises(StateDamaged, match="shorter than it says"):
            decode(data + hashlib.sha256(data).digest(), "it", key)


def test_an_older_sealed_file_put_back_opens(home):
    """As the page says, a seal does not show which file is the newest."""
    older = kept(home, 1, key=file_key()).read_bytes()
    kept(home, 2, key=file_key()).write_bytes(older)
    assert loaded(home, file_key()) == 1


def test_large_states_are_sealed_in_chunks(home):
    values = np.random.default_rng(2).normal(size=(3000, 300)).astype(np.float32)
    file = kept(home, 1, key=file_key(), arrays={"embedding.weight": values})
    assert file.stat().st_size > values.nbytes > 3 * CHUNK
    with store_of(home, file_key()) as store:
        assert np.array_equal(store.load("desk", DOCUMENT).arrays["embedding.weight"], values)
