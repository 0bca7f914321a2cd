"""The prototype of proofs about masked vectors: what passes, what fails, and what the numbers promise."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.secure_aggregation.bounds import argument, field
from benchmarks.secure_aggregation.bounds.costs import reach
from benchmarks.secure_aggregation.bounds.lies import Cohort, aim_together, honest_vector, statement_of
from benchmarks.secure_aggregation.bounds.merkle import opening, root_of, tree
from benchmarks.secure_aggregation.bounds.numbers import Numbers, longest_share, noise_norm, shortest_share
from benchmarks.secure_aggregation.bounds.projection import combine, project
from benchmarks.secure_aggregation.bounds.protocol import Challenge, _transcript, settle
from benchmarks.secure_aggregation.bounds.statement import OutOfBounds, Statement, bits_of, weights_up_to
from secure_agg.discrete_gaussian import DiscreteGaussian
from secure_agg.distributed import Grid
from secure_agg.masking import MaskStream, apply_streams
from secure_agg.randomness import SystemRandom

RANDOM = SystemRandom()
GRID = Grid(clip=1.0, noise_multiplier=1.0, honest=2, values=300, members=3)
STATEMENT = statement_of(GRID, together=2)
RING = 1 << STATEMENT.bits


def honest():
    return honest_vector(GRID, STATEMENT.bits, RANDOM)


def shifted(vector, times):
    """The vector with its first coordinate moved by a multiple of the longest vector that may pass."""
    moved = vector.copy()
    moved[0] = (int(moved[0]) + int(times * STATEMENT.numbers.max_norm)) % RING
    return moved


@pytest.fixture(scope="module")
def cohort():
    cohort = Cohort.of(STATEMENT, [honest() for _ in range(3)], RANDOM)
    cohort.run()
    return cohort


def test_honest_vectors_with_noise_pass(cohort):
    verdict = cohort.checking.verify(cohort.answers)
    assert verdict.proven == {0, 1, 2}
    assert not verdict.refused
    assert not verdict.disputed


def test_the_masked_vectors_still_add_up(cohort):
    total = sum(masked[: GRID.values].astype(np.int64) for masked in cohort.masked.values())
    for member in cohort.members:
        total -= self_mask(member.seed)
    assert (total % RING == sum(member.vector.astype(np.int64) for member in cohort.members) % RING).all()


def self_mask(key):
    mask = np.zeros(GRID.values, dtype="<u4")
    apply_streams(mask, [MaskStream(key, add=True)], STATEMENT.bits)
    return mask.astype(np.int64)


def test_a_member_that_masks_one_vector_and_proves_another_is_refused():
    sent, proved = honest(), honest()
    cohort = Cohort.of(STATEMENT, [honest(), sent, honest()], RANDOM)
    verdict = cohort.run(proved={1: proved})
    assert verdict.proven == {0, 2}
    assert "not about the vector that it masked" in verdict.refused[1]


def test_a_difference_of_one_step_is_enough():
    sent = honest()
    proved = sent.copy()
    proved[7] = (int(proved[7]) + 1) % RING
    verdict = Cohort.of(STATEMENT, [sent, honest()], RANDOM).run(proved={0: proved})
    assert verdict.refused.keys() == {0}


def test_a_vector_over_the_bound_has_nothing_to_prove():
    cohort = Cohort.of(STATEMENT, [shifted(honest(), 1.1), honest()], RANDOM)
    with pytest.raises(OutOfBounds):
        cohort.run()


@pytest.mark.parametrize("value", [RING // 2, RING // 2 - 1, RING // 4])
def test_a_vector_that_wraps_the_ring_has_nothing_to_prove(value):
    vector = np.zeros(GRID.values, dtype="<u4")
    vector[:40] = value
    projected = project(RANDOM.bytes(32), vector, 256, STATEMENT.bits)
    with pytest.raises(OutOfBounds):
        STATEMENT.first(projected, np.zeros(64, dtype=np.int64))


def test_two_liars_cannot_carry_one_over_the_bound():
    proved = honest()
    sent = shifted(proved, 3)
    cohort = Cohort.of(STATEMENT, [sent, honest(), honest()], RANDOM)
    verdict = cohort.run(proved={0: proved}, lie=aim_together(0, 1, sent, proved))
    assert 0 in verdict.proven, "the lie about the mask lets the liar pass"
    assert verdict.refused.keys() == {1}, "and its helper fails for it"


def test_what_two_liars_hide_between_them_cancels():
    one, other = honest(), honest()
    sent, back = shifted(one, 3), shifted(other, -3)
    cohort = Cohort.of(STATEMENT, [sent, back, honest()], RANDOM)
    verdict = cohort.run(proved={0: one, 1: other}, lie=aim_together(0, 1, sent, one))
    assert verdict.proven == {0, 1, 2}
    added = (sent.astype(np.int64) + back.astype(np.int64)) % RING
    assert (added == (one.astype(np.int64) + other.astype(np.int64)) % RING).all(), "what they add is short"


def test_a_false_word_about_a_mask_is_settled_by_its_key(cohort):
    wrong = (cohort.answers[2].pairs[0] + 1) % RING
    answers = {**cohort.answers, 2: replace(cohort.answers[2], pairs={**cohort.answers[2].pairs, 0: wrong})}
    verdict = cohort.checking.verify(answers)
    assert verdict.disputed == {(0, 2)}
    assert verdict.proven == {1}
    settled = cohort.checking.with_settled((0, 2), cohort.members[0].keys[2]).verify(answers)
    assert settled.proven == {0, 1}
    assert "lied about its mask with member 0" in settled.refused[2]


def test_both_ends_of_an_honest_pair_say_what_the_key_says(cohort):
    length = GRID.values + STATEMENT.numbers.combinations
    said = settle(cohort.checking.challenge, cohort.members[0].keys[1], length, STATEMENT.bits)
    assert (cohort.answers[0].pairs[1] == said).all()
    assert (cohort.answers[1].pairs[0] == said).all()


def test_a_silent_member_is_refused_and_leaves_its_pairs_open(cohort):
    verdict = cohort.checking.verify({rank: cohort.answers[rank] for rank in (0, 1)})
    assert verdict.refused.keys() == {2}
    assert verdict.proven == frozenset()


def test_a_proof_of_another_member_or_challenge_is_refused(cohort):
    swapped = {**cohort.answers, 0: replace(cohort.answers[0], proof=cohort.answers[1].proof)}
    assert cohort.checking.verify(swapped).refused.keys() == {0}
    with pytest.raises(RuntimeError, match="answers once"):
        cohort.members[0].prove(cohort.checking.challenge)


@pytest.mark.parametrize("part", ["near", "linear", "quadratic", "columns", "hashes", "salts", "late_root"])
def test_a_changed_proof_is_refused(cohort, part):
    proof = cohort.answers[0].proof
    value = getattr(proof, part)
    changed: object
    match part:
        case "columns":
            first = value[0].copy()
            first[3, 5] ^= 1
            changed = (first, value[1])
        case "hashes" | "salts":
            changed = ([bytes(32), *value[0][1:]], value[1])
        case "late_root":
            changed = bytes(32)
        case _:
            copied = value.copy()
            copied[1, 4] ^= 1
            changed = copied
    answers = {**cohort.answers, 0: replace(cohort.answers[0], proof=replace(proof, **{part: changed}))}
    assert cohort.checking.verify(answers).refused.keys() == {0}


def forged(change, spoil=lambda kept: kept, seed=b"seed"):
    """Proves a witness that is changed after it was made honestly, and verifies the proof.

    spoil: changes what the prover committed to. seed: what the verifier takes the proof to be bound to.
    """
    numbers = Numbers(1000.0, 10)
    statement = Statement(numbers, 24)
    projected = np.arange(256, dtype=np.int64) - 128
    pads = np.arange(64, dtype=np.int64)
    weights = np.ones((64, 256), dtype=np.uint8)
    sums = weights.astype(np.int64) @ projected + pads
    witness = statement.first(projected, pads)
    change(witness, statement)
    kept = spoil(argument.commit(witness, RANDOM))
    relation = statement.relation(statement.linear(weights), sums % (1 << 24))
    proof = argument.prove(relation, kept, statement.late(sums), b"seed", RANDOM)
    argument.verify(relation, kept.root, proof, seed)


def test_an_unchanged_witness_is_accepted():
    forged(lambda witness, statement: None)


def places(statement):
    """Bits of each projection."""
    return len(weights_up_to(2 * statement.numbers.max_projection))


def no_bit(witness, statement):
    # Two in the place of weight 1 instead of one in the place of weight 2: every linear equation still holds.
    bits, width = witness.ravel(), places(statement)
    at = next(start for start in range(0, 256 * width, width) if bits[start : start + 2].tolist() == [0, 1])
    bits[at], bits[at + 1] = 2, 0


def no_square(witness, statement):
    # The sum of squares still holds.
    witness[-1, 3], witness[-1, 4] = witness[-1, 4], witness[-1, 3]


def other_pad(witness, statement):
    rest = len(weights_up_to(statement.numbers.max_squares))
    witness.ravel()[256 * places(statement) + rest] ^= np.uint64(1)


def other_projection(witness, statement):
    witness[-2, 0] = 7
    witness[-1, 0] = 49


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_bit, "a bit or a square"),
        (no_square, "a bit or a square"),
        (other_pad, "equations do not hold"),
        (other_projection, "equations do not hold"),
    ],
)
def test_a_false_witness_is_refused(change, reason):
    with pytest.raises(argument.ProofInvalid, match=reason):
        forged(change)


def test_a_linear_test_that_is_made_to_fit_does_not_match_the_columns(monkeypatch):
    places = argument._places

    def fit(roots, seed, tests):
        # The prover corrects its polynomials until their sums are what the verifier expects.
        if not tests[1].flags.writeable:
            return places(roots, seed, tests)
        for repetition, row in enumerate(tests[1]):
            row[0] = (int(row[0]) + expected(roots, repetition) - field.total(row[: argument.WIDTH])) % field.P
        tests[1].flags.writeable = False
        return places(roots, seed, tests)

    def expected(roots, repetition):
        _, equations, _ = argument._challenges(relations[0], roots, b"seed", repetition)
        return field.total(field.mul(equations, relations[0].right))

    relations = []
    of = Statement.relation
    monkeypatch.setattr(Statement, "relation", lambda *given: relations.append(of(*given)) or relations[0])
    monkeypatch.setattr(argument, "_places", fit)
    with pytest.raises(argument.ProofInvalid, match="linear test does not match"):
        forged(other_pad)


def test_rows_that_are_no_codewords_are_refused():
    def spoil(kept):
        columns = kept.columns.copy()
        columns[0] = field.drawn(RANDOM, columns.shape[1])
        return argument._committed(kept.rows, columns, RANDOM)

    with pytest.raises(argument.ProofInvalid, match="near codewords"):
        forged(lambda witness, statement: None, spoil)


def test_a_proof_is_bound_to_its_seed():
    with pytest.raises(argument.ProofInvalid):
        forged(lambda witness, statement: None, seed=b"other")


def test_the_seed_covers_challenge_member_commitment_and_numbers():
    public, weights = np.zeros(64, dtype=np.int64), np.zeros((64, 256), dtype=np.uint8)
    base = (Challenge(bytes(32), weights), 1, bytes(32), public)
    seeds = {
        _transcript(*base),
        _transcript(Challenge(b"1" * 32, weights), *base[1:]),
        _transcript(Challenge(bytes(32), weights + 1), *base[1:]),
        _transcript(base[0], 2, *base[2:]),
        _transcript(*base[:2], b"1" * 32, public),
        _transcript(*base[:3], public + 1),
    }
    assert len(seeds) == 6


def test_the_argument_is_sound_to_80_bits():
    assert argument.soundness_bits() > 80


@pytest.mark.parametrize("most", [1, 2, 3, 6, 7, 8, 100])
def test_weights_reach_every_number_and_no_other(most):
    weights = weights_up_to(most)
    sums = {sum(w for i, w in enumerate(weights) if choice >> i & 1) for choice in range(1 << len(weights))}
    assert sums == set(range(most + 1))
    for number in range(most + 1):
        assert sum(w * bit for w, bit in zip(weights, bits_of(number, most), strict=True)) == number


def test_field_arithmetic_is_exact():
    left, right = field.drawn(RANDOM, 3, 40), field.drawn(RANDOM, 40, 2)
    left[0, 0] = right[0, 0] = field.P - 1
    expected = [[sum(int(a) * int(b) for a, b in zip(row, c, strict=True)) % field.P for c in right.T] for row in left]
    assert field.dot(left, right).tolist() == expected
    coefficients = [int(c) for c in field.drawn(RANDOM, 6)]

    def at(x):
        return sum(c * x**i for i, c in enumerate(coefficients)) % field.P

    values = np.array([[at(x)] for x in range(6)], dtype=np.uint64)
    assert field.dot(field.interpolation(6, np.array([6, 99])), values)[:, 0].tolist() == [at(6), at(99)]


def test_a_hash_tree_opens_to_its_root_only():
    leaves = [bytes([i]) * 32 for i in range(16)]
    levels = tree(leaves)
    needed = opening(levels, [1, 2, 9])
    assert root_of({i: leaves[i] for i in (1, 2, 9)}, 16, needed) == levels[-1][0]
    assert root_of({1: leaves[1], 2: leaves[2], 9: leaves[8]}, 16, needed) != levels[-1][0]
    with pytest.raises(ValueError, match="too few"):
        root_of({1: leaves[1]}, 16, needed[:1])


def test_projections_are_those_of_whole_numbers():
    seed, values = RANDOM.bytes(32), 5000
    vector = np.frombuffer(RANDOM.bytes(4 * values), dtype="<u4") % np.uint32(1 << 20)
    units = np.zeros((2, values), dtype="<u4")
    units[0, 17] = units[1, 4500] = 1
    coins = [project(seed, unit, 256, 20) for unit in units]
    assert set(np.concatenate(coins).tolist()) == {-1, 0, 1}
    assert (project(seed, units[0] * 3 + units[1] * 5, 256, 20) == 3 * coins[0] + 5 * coins[1]).all()
    weights = np.frombuffer(RANDOM.bytes(64 * 256), dtype=np.uint8).reshape(64, 256) % 2
    expected = weights.astype(np.int64) @ project(seed, vector, 256, 20)
    assert (combine(seed, weights, vector[None, :], 20)[0] == expected % (1 << 20)).all()


def test_the_numbers_hold_for_chi_squared():
    """The bounds on squared lengths are valid, and not far, for the Gaussian, which has the largest fourth moment."""
    from scipy.stats import chi2

    assert chi2.sf(256 * longest_share(256), 256) < 2.0**-30
    assert chi2.cdf(256 * shortest_share(256), 256) < 2.0**-40
    assert 2.4 < Numbers(1.0, 1000).slack < 2.8


def test_the_noise_stays_within_its_tail():
    noise = np.zeros(GRID.values, dtype="<i4")
    DiscreteGaussian(GRID.std).add_into(noise, RANDOM)
    length = np.linalg.norm(noise.astype(np.float64))
    assert 0.5 * noise_norm(GRID.std, GRID.values) < length < noise_norm(GRID.std, GRID.values)


def test_a_ring_too_narrow_for_the_test_is_refused():
    with pytest.raises(ValueError, match="ring of"):
        Statement(STATEMENT.numbers, STATEMENT.numbers.bits - 1)


def test_a_proof_bounds_a_liar_by_less_than_groups_do():
    figures = {figure.name: figure.value for figure in reach(10, 3, 1, 10_000)}
    assert figures["moved_with_proofs"] < figures["moved_in_groups"] < figures["moved_in_one_sum"]
    # sqrt(d / (h s)) clips at h = 2 and groups of three.
    assert figures["moved_in_groups"] == pytest.approx((10_000 / 6) ** 0.5, abs=0.1)
