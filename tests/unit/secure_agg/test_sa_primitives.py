"""Published vectors, and what each primitive refuses."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_agg import Reason, Refusal, SystemRandom, masking, merkle
from secure_agg.masking import BLOCK_BYTES, MaskStream, apply_streams
from secure_agg.randomness import KeyStream, StreamScratch
from secure_agg.sealing import (
    PUBLIC_KEY_BYTES,
    SEAL_OVERHEAD,
    KeyInvalid,
    PublicKey,
    SealBroken,
    SecretKey,
    derive,
    lock,
    unlock,
)
from secure_agg.secret import Once, Secret
from secure_agg.shamir import PRIME, ShareInvalid, combine, combine_secret, deal, deal_secret, read_share
from tests.support import places
from tests.support.sum_fleet import SeededRandom

VECTORS = places.VECTORS / "secure_agg"
PUBLISHED: dict[str, Any] = json.loads((VECTORS / "published.json").read_text())


def unhex(text: str) -> bytes:
    return bytes.fromhex(text)


# Published vectors.


def test_hkdf_as_rfc_5869() -> None:
    case = PUBLISHED["hkdf_sha256"]
    key = derive(unhex(case["ikm"]), unhex(case["salt"]), unhex(case["info"]), 42)
    assert key == unhex(case["okm"])


def test_the_stream_is_aes_256_ctr_as_sp_800_38a() -> None:
    case = PUBLISHED["aes_256_ctr"]
    scratch = StreamScratch(64)
    stream = KeyStream(unhex(case["key"]), scratch, unhex(case["counter"])).read(64, scratch).tobytes()
    plain = unhex(case["plaintext"])
    assert bytes(a ^ b for a, b in zip(plain, stream, strict=True)) == unhex(case["ciphertext"])


def test_any_three_shares_of_33_give_33_over_the_published_prime() -> None:
    prime = 2**31 + 11
    shares = deal(33, 3, range(1, 6), SystemRandom(), prime)
    for three in itertools.permutations(zip(range(1, 6), shares, strict=True), 3):
        assert combine(three, 3, prime) == 33


@pytest.mark.parametrize("case", json.loads((VECTORS / "shamir.json").read_text()), ids=lambda case: case["name"])
def test_shamir_as_pinned(case: dict[str, Any]) -> None:
    shares = [(point, unhex(share)) for point, share in case["shares"]]
    assert combine_secret(shares, case["threshold"]).hex() == case["secret"]


@pytest.mark.parametrize("case", json.loads((VECTORS / "bad_shamir.json").read_text()), ids=lambda case: case["name"])
def test_shares_that_nobody_dealt_are_refused(case: dict[str, Any]) -> None:
    shares = [(point, unhex(share)) for point, share in case["shares"]]
    with pytest.raises(ShareInvalid, match=case["says"]):
        combine_secret(shares, case["threshold"])


# Shamir.


def test_the_field_is_prime() -> None:
    # Fermat tests to several bases, which suffice for a known constant.
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11, 13, 17))
    assert not any(pow(3, 2**256 + offset - 1, 2**256 + offset) == 1 for offset in range(1, 297, 2))


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, bytes(31) + b"\x01"])
def test_every_32_byte_secret_survives_sharing(secret: bytes) -> None:
    shares = list(zip(range(1, 8), deal_secret(secret, 4, range(1, 8), SystemRandom()), strict=True))
    for chosen in itertools.combinations(shares, 4):
        assert combine_secret(chosen, 4) == secret


def test_fewer_shares_than_the_threshold_fit_every_secret() -> None:
    # Over a field of 13: given two shares of three, every secret is completed by exactly one third share.
    shares = deal(5, 3, (1, 2, 3), SystemRandom(), 13)
    completed = {combine([(1, shares[0]), (2, shares[1]), (3, third)], 3, 13) for third in range(13)}
    assert completed == set(range(13))


@pytest.mark.parametrize(
    ("secret", "threshold", "points"),
    [
        (5, 2, (0, 1)),
        (5, 2, (1, 1)),
        (5, 2, (1, 13)),
        (13, 2, (1, 2)),
        (-1, 2, (1, 2)),
        (5, 3, (1, 2)),
        (5, 0, (1, 2)),
    ],
)
def test_dealing_refuses_what_cannot_be_shared(secret: int, threshold: int, points: tuple) -> None:
    with pytest.raises(ShareInvalid):
        deal(secret, threshold, points, SystemRandom(), 13)


def test_combining_needs_exactly_the_threshold() -> None:
    shares = list(zip((1, 2, 3), deal(5, 2, (1, 2, 3), SystemRandom()), strict=True))
    for wrong in (shares[:1], shares):
        with pytest.raises(ShareInvalid):
            combine(wrong, 2)


def test_a_secret_and_a_share_have_their_length() -> None:
    with pytest.raises(ShareInvalid):
        deal_secret(bytes(31), 2, (1, 2), SystemRandom())
    for share in (bytes(32), bytes(34), PRIME.to_bytes(33, "big")):
        with pytest.raises(ShareInvalid):
            read_share(share)


# Keys and seals.

SECRET = bytes(range(96))
PUBLIC = SecretKey(SECRET).public


@pytest.mark.parametrize("length", [0, 32, PUBLIC_KEY_BYTES - 1, PUBLIC_KEY_BYTES + 1])
def test_a_public_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(KeyInvalid, match="1216 bytes"):
        PublicKey((PUBLIC + b"\0")[:length])


def test_a_public_key_with_a_coefficient_out_of_range_is_refused() -> None:
    # Two coefficients of 12 bits, little-endian. The modulus is 3329.
    largest = PublicKey((3328).to_bytes(2, "little") + bytes(1) + PUBLIC[3:])
    assert largest.seal(b"", b"m")
    with pytest.raises(KeyInvalid, match="out of range"):
        PublicKey((3329).to_bytes(2, "little") + bytes(1) + PUBLIC[3:])


@pytest.mark.parametrize("length", [0, 32, 95, 97])
def test_a_secret_key_of_another_length_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match="96 bytes"):
        SecretKey(bytes(length))


def test_a_key_pair_follows_from_the_secret_key() -> None:
    assert SecretKey(SECRET).public == PUBLIC
    # The first bits of X25519's scalar are ignored. The last 32 bytes only matter for ciphertexts that do not open.
    for at in (1, 32, 63):
        other = bytearray(SECRET)
        other[at] ^= 1
        assert SecretKey(bytes(other)).public != PUBLIC


def test_a_seal_opens_for_its_key_and_purpose_only() -> None:
    key = SecretKey(SECRET)
    sealed = PublicKey(PUBLIC).seal(b"info", b"message")
    assert len(sealed) == len(b"message") + SEAL_OVERHEAD
    assert key.open(b"info", sealed) == b"message"
    assert PublicKey(PUBLIC).seal(b"info", b"message") != sealed
    for at in (0, 1087, 1088, 1119, 1120, len(sealed) - 1):
        bent = bytearray(sealed)
        bent[at] ^= 1
        with pytest.raises(SealBroken):
            key.open(b"info", bytes(bent))
    for info, wrong in ((b"other", sealed), (b"", sealed), (b"info", sealed[:-1]), (b"info", sealed + b"\0")):
        with pytest.raises(SealBroken):
            key.open(info, wrong)
    for length in (0, 16, 1088, 1119, 1120, 1135):
        with pytest.raises(SealBroken):
            key.open(b"info", sealed[:length])


@pytest.mark.parametrize("half", [slice(0, 32), slice(32, 96)], ids=["X25519", "ML-KEM-768"])
def test_a_seal_does_not_open_with_one_half_of_the_secret_key(half: slice) -> None:
    sealed = PublicKey(PUBLIC).seal(b"info", b"message")
    known = bytearray(b"\x42" * 96)
    known[half] = SECRET[half]
    with pytest.raises(SealBroken):
        SecretKey(bytes(known)).open(b"info", sealed)


def test_a_lock_opens_with_its_key_and_header_only() -> None:
    locked = lock(b"k" * 32, b"header", b"message")
    assert unlock(b"k" * 32, b"header", locked) == b"message"
    for wrong in (
        (b"l" * 32, b"header", locked),
        (b"k" * 32, b"other", locked),
        (b"k" * 32, b"header", locked[:-1]),
        (b"k" * 32, b"header", bytes([locked[0] ^ 1]) + locked[1:]),
        (b"k" * 32, b"header", b""),
    ):
        with pytest.raises(SealBroken):
            unlock(*wrong)


def test_an_erased_secret_key_opens_nothing() -> None:
    key = SecretKey(SECRET)
    sealed = PublicKey(PUBLIC).seal(b"info", b"message")
    assert SECRET[:8].hex() not in repr(key)
    with pytest.raises(TypeError):
        pickle.dumps(key)
    key.erase()
    key.erase()
    for use in (key.reveal, lambda: key.public, lambda: key.open(b"info", sealed)):
        with pytest.raises(LookupError):
            use()
    assert (key._key, key._halves) == (None, None)


# The hash tree.


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9])
def test_a_path_leads_to_the_root_from_its_own_leaf_and_place_only(count: int) -> None:
    leaves = [bytes([i]) * 32 for i in range(1, count + 1)]
    root = merkle.root_of(leaves)
    paths = merkle.paths_of(leaves)
    for i, j in itertools.product(range(count), repeat=2):
        reached = merkle.root_from_path(leaves[i], j, count, paths[j])
        assert (reached == root) == (i == j)
    assert merkle.root_from_path(leaves[0], count, count, paths[0]) is None
    assert merkle.root_from_path(leaves[0], 0, count, (*paths[0], bytes(32))) is None
    assert merkle.root_of([*leaves, bytes(32)]) != root


# Masks.


def stream_of(key: bytes, values: int) -> np.ndarray:
    scratch = StreamScratch(4 * values)
    return KeyStream(key, scratch).read(4 * values, scratch).view("<u4").copy()


@pytest.mark.parametrize("bits", [7, 32])
@pytest.mark.parametrize("values", [1, 3, BLOCK_BYTES // 4, BLOCK_BYTES // 4 + 5])
def test_streams_are_added_block_by_block_as_if_whole(values: int, bits: int) -> None:
    one, other = b"1" * 32, b"2" * 32
    vector = np.arange(values, dtype="<u4") & np.uint32(2**bits - 1)
    expected = (vector + stream_of(one, values) - stream_of(other, values)) & np.uint32(2**bits - 1)
    apply_streams(vector, [MaskStream(one, add=True), MaskStream(other, add=False)], bits)
    np.testing.assert_array_equal(vector, expected)


def test_subtracting_an_added_stream_restores_the_vector() -> None:
    vector = np.arange(1000, dtype="<u4")
    apply_streams(vector, [MaskStream(b"k" * 32, add=True)], 32)
    assert (vector != np.arange(1000)).mean() > 0.99
    apply_streams(vector, [MaskStream(b"k" * 32, add=False)], 32)
    np.testing.assert_array_equal(vector, np.arange(1000))


@settings(max_examples=60, deadline=None)
@given(
    size=st.one_of(
        st.integers(1, 70),
        st.builds(lambda blocks, more: blocks * BLOCK_BYTES // 4 + more, st.integers(1, 3), st.integers(-17, 17)),
    ),
    threads=st.integers(1, 4),
    bits=st.sampled_from([2, 7, 31, 32]),
    signs=st.lists(st.booleans(), max_size=4),
)
def test_any_number_of_threads_gives_the_same_bits(size: int, threads: int, bits: int, signs: list[bool]) -> None:
    ring = np.uint32(2**bits - 1)
    vector = (np.arange(size, dtype="<u4") * np.uint32(2654435761)) & ring
    expected = vector.copy()
    for i, add in enumerate(signs):
        mask = stream_of(bytes([i]) * 32, size)
        expected = expected + mask if add else expected - mask
    apply_streams(vector, [MaskStream(bytes([i]) * 32, add) for i, add in enumerate(signs)], bits, threads=threads)
    np.testing.assert_array_equal(vector, expected & ring)


@pytest.mark.parametrize("threads", [1, 3])
def test_more_streams_than_are_open_at_a_time(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_BATCH", 4)
    vector = np.zeros(100, dtype="<u4")
    expected = sum((stream_of(bytes([i]) * 32, 100) for i in range(11)), np.zeros(100, "<u4"))
    apply_streams(vector, (MaskStream(bytes([i]) * 32, add=True) for i in range(11)), 32, threads=threads)
    np.testing.assert_array_equal(vector, expected)


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_ranges_cover_the_vector_and_start_on_cipher_blocks(values: int, parts: int) -> None:
    ranges = masking.split(values, parts)
    assert 1 <= len(ranges) <= parts
    assert [part.start for part in ranges] == [0, *(part.stop for part in ranges[:-1])]
    assert ranges[-1].stop == values
    assert all(part.start % 4 == 0 for part in ranges)
    assert len(ranges) == 1 or all(part.start < part.stop for part in ranges)


def test_threads_are_used_where_they_pay_up_to_the_number_of_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)
    assert masking.threads_for(4_000_000, 50) == 3
    # Little work in total, and vectors too short to be split, or to be split twice.
    assert masking.threads_for(4_000_000, 1) == 1
    assert masking.threads_for(100_000, 5000) == 1
    assert masking.threads_for(140_000, 5000) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert masking.threads_for(4_000_000, 50) == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert masking.threads_for(4_000_000, 50) == 1


def watch_ranges(monkeypatch: pytest.MonkeyPatch, fail_above: int | None = None) -> list[tuple[slice, int]]:
    """Records (range, thread) of every range processed from now on; those that start above `fail_above` fail."""
    seen: list[tuple[slice, int]] = []
    apply = masking._apply

    def watched(vector: np.ndarray, streams: Any, bits: int, part: slice) -> None:
        seen.append((part, threading.get_ident()))
        if fail_above is not None and part.start > fail_above:
            raise MemoryError
        apply(vector, streams, bits, part)

    monkeypatch.setattr(masking, "_apply", watched)
    return seen


def test_the_work_is_spread_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_ranges(monkeypatch)
    apply_streams(np.zeros(48, dtype="<u4"), [MaskStream(b"k" * 32, add=True)], 32, threads=3)
    assert sorted((part.start, part.stop) for part, _ in seen) == [(0, 16), (16, 32), (32, 48)]
    here = threading.get_ident()
    assert all((thread == here) == (part.start == 0) for part, thread in seen)


def test_the_default_is_as_many_threads_as_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    seen = watch_ranges(monkeypatch)
    streams = [MaskStream(bytes([i]) * 32, add=True) for i in range(20)]
    vector = np.zeros(120_000, dtype="<u4")
    apply_streams(vector, streams, 32)
    assert len(seen) == 2
    apply_streams(vector, streams[:2], 32)
    assert len(seen) == 3


def test_an_error_in_another_thread_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_ranges(monkeypatch, fail_above=0)
    with pytest.raises(MemoryError):
        apply_streams(np.zeros(48, dtype="<u4"), [MaskStream(b"k" * 32, add=True)], 32, threads=2)


@pytest.mark.parametrize("threads", [0, -1])
def test_masks_need_a_thread(threads: int) -> None:
    vector = np.zeros(4, dtype="<u4")
    with pytest.raises(ValueError, match="at least one thread"):
        apply_streams(vector, [MaskStream(b"k" * 32, add=True)], 32, threads=threads)
    assert not vector.any()


# Secrets and latches.


def test_a_secret_shows_and_copies_nothing() -> None:
    secret = Secret(b"hush")
    assert "hush" not in f"{secret} {secret!r}"
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            copying(secret)
    assert secret.reveal() == b"hush"
    secret.erase()
    secret.erase()
    with pytest.raises(LookupError):
        secret.reveal()


def test_a_latch_lets_one_of_many_threads_through() -> None:
    once = Once(Reason.SECOND_MASKING)
    through: list[int] = []
    start = threading.Barrier(8)

    def push(number: int) -> None:
        start.wait()
        try:
            once.spend()
        except Refusal:
            return
        through.append(number)

    threads = [threading.Thread(target=push, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(through) == 1
    with pytest.raises(Refusal, match="second_masking"):
        once.check()


def test_system_and_test_sources_return_the_requested_bytes() -> None:
    for source in (SystemRandom(), SeededRandom("x")):
        assert len(source.bytes(33)) == 33
        assert source.bytes(16) != source.bytes(16)
