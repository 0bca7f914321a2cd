"""A recorded attempt, and a quantum computer years later.

Such a machine computes X25519's secret keys from the public ones; here it is handed them. From a classic transcript it
opens a member's vector: the shares of the self-mask's seed fall with the sealing keys, the pairwise masks with the
masking keys. From ours it computes the same secrets of X25519, and opens nothing, because ML-KEM-768 holds.
"""

import hashlib
import itertools

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_agg import Phase
from secure_agg.masking import MaskStream, apply_streams
from secure_agg.sealing import SealBroken, SecretKey, derive
from secure_agg.session import seed_key
from secure_agg.shamir import combine_secret, deal_secret
from tests.support.sum_fleet import Fleet, SeededRandom

VICTIM, MEMBERS, THRESHOLD, VALUES = 0, 5, 3, 16


def agreed(secret: bytes, public: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))


def public(secret: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def sealed(shared: bytes, message: bytes) -> bytes:
    return AESGCM(derive(shared, b"session", b"seal")).encrypt(bytes(12), message, None)


def opened(shared: bytes, message: bytes) -> bytes:
    return AESGCM(derive(shared, b"session", b"seal")).decrypt(bytes(12), message, None)


def pair_stream(shared: bytes, one: int, other: int, *, add: bool) -> MaskStream:
    return MaskStream(derive(shared, b"session", bytes(sorted((one, other)))), add=add)


class Classic:
    """What a coordinator records of the victim in a classic attempt: public keys, seals, the masked vector."""

    def __init__(self) -> None:
        random = SeededRandom("classic")
        sealing = [random.bytes(32) for _ in range(MEMBERS)]
        masking = [random.bytes(32) for _ in range(MEMBERS)]
        seed = random.bytes(32)
        shares = deal_secret(seed, THRESHOLD, range(1, MEMBERS + 1), random)
        self.sealing_keys, self.masking_keys = list(map(public, sealing)), list(map(public, masking))
        self.sealed = [
            sealed(agreed(sealing[VICTIM], self.sealing_keys[other]), shares[other]) for other in range(1, MEMBERS)
        ]
        self.vector = np.arange(VALUES, dtype="<u4")
        self.masked = self.vector.copy()
        streams = [MaskStream(derive(seed, b"session", b"self"), add=True)]
        for other in range(1, MEMBERS):
            shared = agreed(masking[VICTIM], self.masking_keys[other])
            streams.append(pair_stream(shared, VICTIM, other, add=True))
        apply_streams(self.masked, streams, 32)
        # What a quantum computer finds: secret keys for these public keys.
        self.broken = {public(secret): secret for secret in (*sealing, *masking)}


def test_a_classic_transcript_falls_with_x25519() -> None:
    recorded = Classic()
    sealing = recorded.broken[recorded.sealing_keys[VICTIM]]
    shares = [
        (other + 1, opened(agreed(sealing, recorded.sealing_keys[other]), recorded.sealed[other - 1]))
        for other in range(1, THRESHOLD + 1)
    ]
    streams = [MaskStream(derive(combine_secret(shares, THRESHOLD), b"session", b"self"), add=False)]
    masking = recorded.broken[recorded.masking_keys[VICTIM]]
    for other in range(1, MEMBERS):
        shared = agreed(masking, recorded.masking_keys[other])
        streams.append(pair_stream(shared, VICTIM, other, add=False))
    apply_streams(recorded.masked, streams, 32)
    np.testing.assert_array_equal(recorded.masked, recorded.vector)


def recorded() -> tuple[Fleet, dict[str, tuple[SecretKey, SecretKey]]]:
    """An attempt of ours, and every member's two secret keys, which the tests break in part."""
    fleet = Fleet(5).until(Phase.SHARE)
    secrets = {}
    for member, state in fleet.states.items():
        own = seed_key(fleet.context, member, state._root.reveal())
        secrets[member] = (SecretKey(state._sealing.reveal()), SecretKey(own.reveal()))
    fleet.play()
    return fleet, secrets


def every_seal(fleet: Fleet) -> list[tuple[str, int, bytes, bytes]]:
    """(receiver, which of its keys, info, what was sealed to it) of everything that was sealed in an attempt."""
    session, found = fleet.server.session, []
    for dealer, dealing in fleet.sent[Phase.SHARE].items():
        for share in dealing.shares:
            if share.sealed_key:
                found.append((share.receiver, 0, session.share_key_info(dealer, share.receiver), share.sealed_key))
            if share.sealed_pair_seed:
                info = session.pair_seed_info(dealer, share.receiver)
                found.append((share.receiver, 1, info, share.sealed_pair_seed))
    return found


def test_with_both_halves_everything_opens() -> None:
    """The control: what the next tests fail to open does open, so they fail for the missing half alone."""
    fleet, secrets = recorded()
    seals = every_seal(fleet)
    assert len(seals) == 5 * 4 + 5 * 4 // 2
    for receiver, which, info, ciphertext in seals:
        assert len(secrets[receiver][which].open(info, ciphertext)) == 32


@pytest.mark.parametrize("broken", ["X25519", "ML-KEM-768"])
def test_ours_opens_nothing_while_either_half_holds(broken: str) -> None:
    fleet, secrets = recorded()
    half = slice(0, 32) if broken == "X25519" else slice(32, 96)
    for receiver, which, info, ciphertext in every_seal(fleet):
        known = bytearray(96)
        known[half] = secrets[receiver][which].reveal()[half]
        with pytest.raises(SealBroken):
            SecretKey(bytes(known)).open(info, ciphertext)


def test_x25519s_agreements_alone_are_no_key_of_ours() -> None:
    """All that follows from X25519 in the record, taken for each key that protects something in it."""
    fleet, secrets = recorded()
    session = fleet.server.session
    victim = fleet.sent[Phase.SHARE]["m0"]
    for share in victim.shares:
        if not share.sealed_key:
            continue
        scalar = secrets[share.receiver][0].reveal()[:32]
        point = share.sealed_key[1088:1120]
        shared = agreed(scalar, point)
        guesses = (shared, hashlib.sha256(shared).digest(), hashlib.sha3_256(shared + point).digest())
        for guess, salt in itertools.product(guesses, (session.id, b"")):
            key = derive(guess, salt, session.share_key_info("m0", share.receiver))
            for candidate in (guess, key):
                with pytest.raises(InvalidTag):
                    AESGCM(candidate).decrypt(
                        bytes(12), share.locked_shares, session.shares_header("m0", share.receiver)
                    )


def test_what_the_coordinator_may_rebuild_opens_no_share() -> None:
    """With the root of a member that was lost, everything of its pairs opens and nothing that was dealt to it.

    The sealing key does not follow from the root. If it did, the coordinator would hold one more share of everybody's
    secrets than the threshold counts.
    """
    fleet = Fleet(5).until(Phase.SHARE)
    root = fleet.states["m2"]._root.reveal()
    fleet.play()
    session = fleet.server.session
    seeds = seed_key(fleet.context, "m2", root)
    pairs, shares = 0, 0
    for dealer, dealing in fleet.sent[Phase.SHARE].items():
        share = next(each for each in dealing.shares if each.receiver == "m2")
        if dealer == "m2":
            continue
        if share.sealed_pair_seed:
            seed = seeds.open(session.pair_seed_info(dealer, "m2"), share.sealed_pair_seed)
            assert session.pair_seed_commitment(dealer, "m2", seed) == share.pair_seed_commitment
            pairs += 1
        for info in (session.share_key_info(dealer, "m2"), session.pair_seed_info(dealer, "m2")):
            with pytest.raises(SealBroken):
                seeds.open(info, share.sealed_key)
        shares += 1
    assert (pairs, shares) == (2, 4)
