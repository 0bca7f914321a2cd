"""Members prove that the very vectors they masked are short, and the coordinator verifies.

The masked vector y = x + PRG(b) +- masks is already shared: the coordinator has y and later b, and each neighbour knows
its own mask. So any public linear combination of x is y's, less that of PRG(b), less what each neighbour says of its
mask. No second copy of x exists that a liar could prove instead. In order:

1. *mask*: x is followed by one random pad for each combination. Pads are masked with x.
2. *confirm*: the digests of all masked vectors give R. A member commits to its projections R x and its pads (`commit`).
3. *unmask*: as today. The seeds b of all survivors come out. Nobody could predict them together, and each was committed
   to before masks were made, so nobody can show two members different ones. They give the weights W.
4. *prove*: both ends of a pair send W R of their mask, plus the mask at the pads (`prove`). A member proves that its
   projections are short, and that W of them plus pads is the number that the coordinator computes (`Verifier`).

**Theorem.** Let S be members that lie together, all others in U3 honest, and X = the sum over S of (y - PRG(b)), less
the masks between S and the others. This is all that S adds to the opened sum. If the verifier accepts all of S, and S
has at most `together` members, |X| <= |S| max_norm modulo 2^b, except with probability 2^-39 and the argument's error.
*Proof.* Masks inside S cancel, whatever S says of them, since both ends must say the same. So the accepted numbers of S
add up to W R X + (pads in X). X, the projections and the pads of S were fixed before W, so their sums agree with R X
modulo 2^b except with probability 2^-64. Each coordinate of R X is then at most |S| T, and |R X| <= |S| sqrt(K). X was
fixed before R. Lemmas 1 and 2 (`numbers`), with |S| T for T, end the proof.

*Assumptions.* The coordinator is honest (it is the verifier, so only itself would be deceived); SHA-256 and SHAKE256
are random oracles. **Hiding** holds against a malicious coordinator with up to n_C members: what it receives is uniform
given the opened sum, by the pads, and the argument is zero-knowledge. It assumes that members answer only after `t` of
them confirmed the same digests, that they check seeds against the commitments, and that they answer once.

If the two ends of a pair differ, one of them lies. Then the pair's key is opened and settles it (`settle`). An honest
pair never differs, so no mask between honest members is ever opened.

Keys and seeds are drawn here rather than agreed; `secure_agg` agrees on them in its first two phases.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256, shake_256

import numpy as np
from numpy.typing import NDArray

from benchmarks.secure_aggregation.bounds.argument import (
    Committed,
    Equations,
    Proof,
    ProofInvalid,
    commit,
    prove,
    verify,
)
from benchmarks.secure_aggregation.bounds.projection import combine, project
from benchmarks.secure_aggregation.bounds.statement import Statement
from secure_agg.masking import RING_DTYPE, MaskStream, apply_streams
from secure_agg.randomness import RandomSource

__all__ = ["Answer", "Challenge", "Member", "Pair", "Verdict", "Verifier", "coins_of", "settle", "weights_of"]

Ring = NDArray[np.uint32]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Challenge:
    """What all parties derive. coins: seed of R. weights: W, shape (combinations, projections)."""

    coins: bytes
    weights: NDArray[np.uint8]


@dataclass(frozen=True)
class Answer:
    """A member's last message.

    Args:
        public: W R x plus pads modulo 2^b, as the member computes it.
        pairs: for each other member, W R of the mask between them, plus that mask at the pads.
        proof: of the statement.
    """

    public: NDArray[np.int64]
    pairs: Mapping[int, NDArray[np.int64]]
    proof: Proof


@dataclass(frozen=True)
class Verdict:
    """proven: members whose proofs hold. refused: the others, each with a reason. disputed: pairs that differ."""

    proven: frozenset[int]
    refused: Mapping[int, str]
    disputed: frozenset[Pair]


def coins_of(session: bytes, masked: Mapping[int, Ring]) -> bytes:
    """Returns the seed of R: all masked vectors determine it."""
    return _digest(b"coins", session, *(sha256(masked[member].tobytes()).digest() for member in sorted(masked)))


def weights_of(session: bytes, seeds: Mapping[int, bytes], statement: Statement) -> NDArray[np.uint8]:
    """Returns W, uniform zeros and ones: the seeds of all self-masks determine it."""
    shape = statement.numbers.combinations, statement.numbers.projections
    key = _digest(b"weights", session, *(seeds[member] for member in sorted(seeds)))
    bits = np.unpackbits(np.frombuffer(shake_256(key).digest(shape[0] * shape[1] // 8), dtype=np.uint8))
    return bits.reshape(shape)


def _digest(*parts: bytes) -> bytes:
    return sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def _transcript(challenge: Challenge, member: int, root: bytes, public: NDArray[np.int64]) -> bytes:
    fields = (challenge.coins, challenge.weights.tobytes(), member.to_bytes(8, "big"), root, public.tobytes())
    return _digest(b"proof", *fields)


def _mask(key: bytes, values: int, bits: int) -> Ring:
    mask = np.zeros(values, dtype=RING_DTYPE)
    apply_streams(mask, [MaskStream(key, add=True)], bits)
    return mask


def _combined(challenge: Challenge, vectors: NDArray[np.uint32], bits: int) -> NDArray[np.int64]:
    """Returns, for vectors with pads behind them, W R of the vector plus the pads modulo 2^bits."""
    values = vectors.shape[1] - challenge.weights.shape[0]
    result: NDArray[np.int64] = (
        combine(challenge.coins, challenge.weights, vectors[:, :values], bits) + vectors[:, values:]
    ) % (1 << bits)
    return result


@dataclass
class Member:
    """One member.

    Args:
        rank: its place in the roster.
        statement: what everybody proves.
        vector: x, the encoding that it masks, values below 2^b.
        keys: the key that it shares with each other member.
        seed: of its self-mask.
        random: its random source.
    """

    rank: int
    statement: Statement
    vector: Ring
    keys: Mapping[int, bytes]
    seed: bytes
    random: RandomSource = field(repr=False)
    _pads: NDArray[np.int64] = field(init=False, repr=False)
    _kept: Committed | None = field(default=None, repr=False)
    _projected: NDArray[np.int64] | None = field(default=None, repr=False)

    def mask(self) -> Ring:
        """Returns the masked vector with its masked pads."""
        bits = self.statement.bits
        words = np.frombuffer(self.random.bytes(4 * self.statement.numbers.combinations), dtype=RING_DTYPE)
        self._pads = words.astype(np.int64) % (1 << bits)
        masked = np.concatenate([self.vector, self._pads.astype(RING_DTYPE)])
        streams = [MaskStream(self.seed, add=True)]
        streams += [MaskStream(key, add=self.rank < other) for other, key in self.keys.items()]
        apply_streams(masked, streams, bits)
        return masked

    def commit(self, coins: bytes) -> bytes:
        """Commits to the projections and the pads, and returns the commitment.

        Raises:
            OutOfBounds: the vector is too long.
        """
        self._projected = project(coins, self.vector, self.statement.numbers.projections, self.statement.bits)
        self._kept = commit(self.statement.first(self._projected, self._pads), self.random)
        return self._kept.root

    def prove(self, challenge: Challenge) -> Answer:
        """Returns the answers for all masks, and the proof. It answers once."""
        if self._kept is None or self._projected is None:
            raise RuntimeError("the member has nothing left to prove; it answers once, after `commit`")
        sums = challenge.weights.astype(np.int64) @ self._projected + self._pads
        public = sums % (1 << self.statement.bits)
        relation = self.statement.relation(self.statement.linear(challenge.weights), public)
        seed = _transcript(challenge, self.rank, self._kept.root, public)
        proof = prove(relation, self._kept, self.statement.late(sums), seed, self.random)
        self._kept = None
        return Answer(public, self._pairs(challenge), proof)

    def _pairs(self, challenge: Challenge) -> dict[int, NDArray[np.int64]]:
        length = self.vector.size + self._pads.size
        masks = np.stack([_mask(key, length, self.statement.bits) for key in self.keys.values()])
        return dict(zip(self.keys, _combined(challenge, masks, self.statement.bits), strict=True))


@dataclass
class Verifier:
    """The coordinator, once it has opened the sum.

    Args:
        statement: what everybody proves.
        challenge: R and W.
        masked: every member's masked vector.
        seeds: of the self-masks.
        roots: every member's commitment.
        settled: what a pair's opened key showed, for pairs in dispute.
    """

    statement: Statement
    challenge: Challenge
    masked: Mapping[int, Ring]
    seeds: Mapping[int, bytes]
    roots: Mapping[int, bytes]
    settled: Mapping[Pair, NDArray[np.int64]] = field(default_factory=dict)

    def verify(self, answers: Mapping[int, Answer]) -> Verdict:
        """Verifies all answers. Members of a disputed pair are neither proven nor refused for it."""
        refused = dict.fromkeys(self.masked.keys() - answers.keys(), "it did not answer")
        disputed = {pair for pair in self._pairs() if self._of_pair(answers, pair) is None}
        for (low, high), said in self.settled.items():
            for member, other in ((low, high), (high, low)):
                if member in answers and not _same(answers[member].pairs.get(other), said):
                    refused[member] = f"it lied about its mask with member {other}"
        linear = self.statement.linear(self.challenge.weights)
        for member, answer in answers.items():
            pairs = [pair for pair in self._pairs() if member in pair]
            if member not in refused and disputed.isdisjoint(pairs):
                try:
                    self._verify_one(member, answer, linear, answers, pairs)
                except ProofInvalid as wrong:
                    refused[member] = str(wrong)
        open_ = {member for pair in disputed for member in pair}
        return Verdict(frozenset(answers.keys() - refused.keys() - open_), refused, frozenset(disputed))

    def with_settled(self, pair: Pair, key: bytes) -> "Verifier":
        """Returns a verifier that uses a pair's opened key instead of either end's word."""
        length = next(iter(self.masked.values())).size
        said = settle(self.challenge, key, length, self.statement.bits)
        return replace(self, settled={**self.settled, pair: said})

    def _pairs(self) -> list[Pair]:
        ranks = sorted(self.masked)
        return [(low, high) for low in ranks for high in ranks if low < high]

    def _of_pair(self, answers: Mapping[int, Answer], pair: Pair) -> NDArray[np.int64] | None:
        """Returns what both ends say, or None if they differ or one is silent."""
        if pair in self.settled:
            return self.settled[pair]
        low, high = pair
        if low not in answers or high not in answers:
            return None
        one, other = answers[low].pairs.get(high), answers[high].pairs.get(low)
        return one if _same(one, other) else None

    def _verify_one(
        self, member: int, answer: Answer, linear: Equations, answers: Mapping[int, Answer], pairs: list[Pair]
    ) -> None:
        bits, masked = self.statement.bits, self.masked[member].copy()
        apply_streams(masked, [MaskStream(self.seeds[member], add=False)], bits)
        public = _combined(self.challenge, masked[None, :], bits)[0]
        for pair in pairs:
            said = self._of_pair(answers, pair)
            if said is None:
                raise ProofInvalid(f"nobody vouches for the mask of {pair}")
            public = public - said if member == pair[0] else public + said
        if not np.array_equal(public % (1 << bits), answer.public):
            raise ProofInvalid("what it proves is not about the vector that it masked")
        root = self.roots[member]
        relation = self.statement.relation(linear, answer.public)
        verify(relation, root, answer.proof, _transcript(self.challenge, member, root, answer.public))


def _same(one: NDArray[np.int64] | None, other: NDArray[np.int64] | None) -> bool:
    return one is not None and other is not None and bool(np.array_equal(one, other))


def settle(challenge: Challenge, key: bytes, length: int, bits: int) -> NDArray[np.int64]:
    """Returns what an honest end of a pair says, from the pair's key."""
    said: NDArray[np.int64] = _combined(challenge, _mask(key, length, bits)[None, :], bits)[0]
    return said
