"""A zero-knowledge argument from hashes: committed numbers are bits, have these squares, and satisfy linear equations.

Ligero (Ames, Hazay, Ishai and Venkitasubramaniam 2017; analysis of the version of 2023). The witness is a matrix. Each
row is encoded by a Reed-Solomon code with random values, and the columns are committed in a hash tree. Three tests are
random combinations of rows: all rows are near codewords, all rows satisfy the quadratic equations, and all satisfy the
linear ones. The verifier opens `QUERIES` columns to check the combinations. A second commitment holds numbers that the
prover knows only after a challenge, and what blinds the tests.

Sound in the random oracle model, and zero-knowledge: fewer than `QUERIES` + 1 columns are independent of the witness.
It needs no structured reference string, no discrete logarithm and no native code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256, shake_256
from math import log2

import numpy as np
from numpy.typing import NDArray

from benchmarks.secure_aggregation.bounds.field import (
    ELEMENT_BYTES,
    Elements,
    Limbs,
    P,
    dot,
    drawn,
    hashed,
    interpolation,
    mul,
    reduce,
    sub,
    total,
)
from benchmarks.secure_aggregation.bounds.merkle import HASH_BYTES, opening, root_of, tree
from secure_agg.randomness import RandomSource

__all__ = [
    "WIDTH",
    "Committed",
    "Equations",
    "Proof",
    "ProofInvalid",
    "Relation",
    "commit",
    "prove",
    "soundness_bits",
    "verify",
]

WIDTH = 256
"""Numbers of the witness in a row."""
QUERIES = 170
_DEGREE = WIDTH + QUERIES
_PRODUCT = 2 * _DEGREE - 1
_COLUMNS = 4096
_REPEATED = 2
_SALT_BYTES = 32
_LIMIT = np.uint64(P)


class ProofInvalid(ValueError):
    """A proof does not show what it claims; the text says which test failed."""


@dataclass(frozen=True)
class Equations:
    """The left sides of linear equations: a sparse matrix, one entry a place.

    Args:
        rows: the equation of each entry.
        places: the number of the witness, row by row, of each entry.
        values: the coefficients.
        width: numbers of the witness.
    """

    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    values: Elements
    width: int

    def combined(self, weights: Elements) -> Elements:
        """Returns the coefficients of a combination of the equations, shape (width,)."""
        terms = mul(weights[self.rows], self.values)
        # Halves, so that sums of 2^20 of them are exact in float64.
        low, high = (
            np.bincount(self.places, part.astype(np.float64), self.width).astype(np.uint64)
            for part in (terms & np.uint64(2**31 - 1), terms >> np.uint64(31))
        )
        return reduce(low + mul(reduce(high), np.full(1, 2**31, dtype=np.uint64)))


@dataclass(frozen=True)
class Relation:
    """What is proved about a witness of several rows of `WIDTH` numbers.

    All numbers of the first `bit_rows` rows are 0 or 1. The next row holds any numbers, the one after it their squares.
    The remaining rows are of the second commitment and hold 0 or 1. And the linear equations hold.

    Args:
        bit_rows: the number of rows of bits in the first commitment.
        late_rows: the number of rows of the second commitment.
        linear: the left sides.
        right: the right sides, one for each equation.
    """

    bit_rows: int
    late_rows: int
    linear: Equations
    right: Elements

    @property
    def rows(self) -> int:
        """Rows of the witness."""
        return self.bit_rows + 2 + self.late_rows


@dataclass(frozen=True)
class Committed:
    """What the prover keeps of a commitment until the proof: the rows as values at the first points, their columns."""

    root: bytes
    rows: Elements
    columns: Elements
    salts: Sequence[bytes]
    levels: Sequence[Sequence[bytes]]


@dataclass(frozen=True)
class Proof:
    """A proof.

    Args:
        late_root: of the second commitment.
        near: combinations of rows as values at the first `_DEGREE` points, one row for each repetition.
        linear: the linear test's polynomials, as values at all `_PRODUCT` points.
        quadratic: the quadratic test's polynomials, as values behind the witness, where they are zero.
        columns: the opened columns of both commitments, each of shape (rows, `QUERIES`).
        salts: of the opened columns.
        hashes: the rest of the hash trees.
    """

    late_root: bytes
    near: Elements
    linear: Elements
    quadratic: Elements
    columns: tuple[Elements, Elements]
    salts: tuple[Sequence[bytes], Sequence[bytes]]
    hashes: tuple[Sequence[bytes], Sequence[bytes]]

    @property
    def size(self) -> int:
        """Bytes of the proof on the wire."""
        numbers = sum(each.size for each in (self.near, self.linear, self.quadratic, *self.columns))
        hashes = 1 + sum(map(len, self.hashes))
        return ELEMENT_BYTES * numbers + _SALT_BYTES * sum(map(len, self.salts)) + HASH_BYTES * hashes


def soundness_bits() -> float:
    """Returns -log2 of the error of the column queries. A prover that tries 2^g proofs gains g bits."""
    distance = _COLUMNS - _DEGREE + 1
    far = (distance - 1) // 3
    return min(-QUERIES * log2(1 - far / _COLUMNS), -QUERIES * log2((far + _PRODUCT) / _COLUMNS))


def commit(witness: Elements, random: RandomSource) -> Committed:
    """Commits to rows of a witness.

    Args:
        witness: shape (rows, `WIDTH`).
        random: source of the blinding.
    """
    rows = np.hstack([witness, drawn(random, witness.shape[0], QUERIES)])
    return _committed(rows, dot(rows, _matrices()[0]), random)


def prove(relation: Relation, first: Committed, late: Elements, seed: bytes, random: RandomSource) -> Proof:
    """Proves the relation for a committed witness and further rows.

    Args:
        relation: what the witness satisfies.
        first: the commitment to the first rows.
        late: the remaining rows, shape (late_rows, `WIDTH`).
        seed: digest of all that the proof is bound to, the right sides included.
        random: source of the blinding.
    """
    second = _commit_late(late, random)
    late_rows, blinds = second.rows[: relation.late_rows, :_DEGREE], second.rows[relation.late_rows :]
    points = np.hstack([np.vstack([first.rows, late_rows]), _code(first, second, relation)[:, : _PRODUCT - _DEGREE]])
    roots = first.root + second.root
    near, linear, quadratic = [], [], []
    for repetition in range(_REPEATED):
        combined, equations, squares = _challenges(relation, roots, seed, repetition)
        blind = blinds[repetition::_REPEATED]
        near.append(reduce(dot(combined[None, :], points[:, :_DEGREE])[0] + blind[0, :_DEGREE]))
        coefficients = relation.linear.combined(equations).reshape(relation.rows, WIDTH)
        coefficients = np.hstack([coefficients, dot(coefficients, _matrices()[2])])
        linear.append(reduce(_sum(mul(coefficients, points)) + blind[1]))
        quadratic.append(reduce(_quadratic(relation, squares, points) + blind[2])[WIDTH:])
    tests = (np.array(near), np.array(linear), np.array(quadratic))
    places = _places(roots, seed, tests)
    chosen = places.tolist()
    return Proof(
        second.root,
        *tests,
        columns=(first.columns[:, places], second.columns[:, places]),
        salts=([first.salts[place] for place in chosen], [second.salts[place] for place in chosen]),
        hashes=(opening(first.levels, chosen), opening(second.levels, chosen)),
    )


def _commit_late(late: Elements, random: RandomSource) -> Committed:
    """Commits to the late rows and, below them, to the blinds of the three tests."""
    to_code, to_code_product, _ = _matrices()
    rows = np.vstack([np.hstack([late, drawn(random, late.shape[0], QUERIES)]), drawn(random, _REPEATED, _DEGREE)])
    products = drawn(random, 2 * _REPEATED, _PRODUCT)
    # The linear test's blind sums to zero over the witness, the quadratic test's blind is zero there.
    for row in products[:_REPEATED]:
        row[0] = (int(row[0]) - total(row[:WIDTH])) % P
    products[_REPEATED:, :WIDTH] = 0
    # The first columns of the code are points at which the products are given.
    blinds = np.hstack([products[:, _DEGREE:], dot(products, to_code_product)])
    columns = np.vstack([dot(rows, to_code), blinds])
    return _committed(np.vstack([np.pad(rows, ((0, 0), (0, _PRODUCT - _DEGREE))), products]), columns, random)


def _committed(rows: Elements, columns: Elements, random: RandomSource) -> Committed:
    salts = [random.bytes(_SALT_BYTES) for _ in range(_COLUMNS)]
    levels = tree(_leaves(columns, salts))
    return Committed(levels[-1][0], rows, columns, salts, levels)


def _code(first: Committed, second: Committed, relation: Relation) -> Elements:
    return np.vstack([first.columns, second.columns[: relation.late_rows]])


def verify(relation: Relation, root: bytes, proof: Proof, seed: bytes) -> None:
    """Verifies a proof.

    Args:
        relation: what is proved.
        root: of the first commitment.
        proof: the proof.
        seed: as in `prove`.

    Raises:
        ProofInvalid: a test fails.
    """
    tests = (proof.near, proof.linear, proof.quadratic)
    parts = (*tests, *proof.columns)
    late = relation.late_rows + 3 * _REPEATED
    shapes = ((_REPEATED, _DEGREE), (_REPEATED, _PRODUCT), (_REPEATED, _PRODUCT - WIDTH))
    columns = ((relation.rows - relation.late_rows, QUERIES), (late, QUERIES))
    if tuple(part.shape for part in parts) != (*shapes, *columns) or any((part >= _LIMIT).any() for part in parts):
        raise ProofInvalid("the proof has the wrong shape")
    if any(len(salts) != QUERIES or any(len(salt) != _SALT_BYTES for salt in salts) for salts in proof.salts):
        raise ProofInvalid("the proof has the wrong salts")
    roots = root + proof.late_root
    places = _places(roots, seed, tests)
    for index, committed in enumerate((root, proof.late_root)):
        leaves = dict(zip(places.tolist(), _leaves(proof.columns[index], proof.salts[index]), strict=True))
        try:
            opened = root_of(leaves, _COLUMNS, proof.hashes[index])
        except ValueError as wrong:
            raise ProofInvalid(f"the columns do not open: {wrong}") from wrong
        if opened != committed:
            raise ProofInvalid("the columns are not those committed to")
    points = places + _DEGREE
    values = np.vstack([proof.columns[0], proof.columns[1][: relation.late_rows]])
    blinds = proof.columns[1][relation.late_rows :]
    at_near, at_witness = interpolation(_DEGREE, points), interpolation(WIDTH, points)
    for repetition in range(_REPEATED):
        combined, equations, squares = _challenges(relation, roots, seed, repetition)
        blind = blinds[repetition::_REPEATED]
        near = dot(at_near, proof.near[repetition][:, None])[:, 0]
        if (near != reduce(dot(combined[None, :], values)[0] + blind[0])).any():
            raise ProofInvalid("the rows are not near codewords")
        coefficients = relation.linear.combined(equations).reshape(relation.rows, WIDTH)
        if total(proof.linear[repetition][:WIDTH]) != total(mul(equations, relation.right)):
            raise ProofInvalid("the linear equations do not hold")
        found = reduce(_sum(mul(dot(coefficients, at_witness.T), values)) + blind[1])
        if (_at(proof.linear[repetition], places) != found).any():
            raise ProofInvalid("the linear test does not match the columns")
        quadratic = np.concatenate([np.zeros(WIDTH, dtype=np.uint64), proof.quadratic[repetition]])
        if (_at(quadratic, places) != reduce(_quadratic(relation, squares, values) + blind[2])).any():
            raise ProofInvalid("a number that should be a bit or a square is none")


def _at(values: Elements, places: NDArray[np.int64]) -> Elements:
    """Returns a polynomial of the product's degree at some columns, given its values at the first points."""
    found = np.empty(places.size, dtype=np.uint64)
    given = places + _DEGREE < _PRODUCT
    found[given] = values[places[given] + _DEGREE]
    if not given.all():
        found[~given] = dot(interpolation(_PRODUCT, places[~given] + _DEGREE), values[:, None])[:, 0]
    return found


def _quadratic(relation: Relation, squares: Elements, values: Elements) -> Elements:
    k = relation.bit_rows
    bits, root, square = np.vstack([values[:k], values[k + 2 :]]), values[k], values[k + 1]
    of_bits = dot(squares[None, :-1], sub(mul(bits, bits), bits))[0]
    return reduce(of_bits + mul(squares[-1:], sub(mul(root, root), square)))


def _sum(rows: Elements) -> Elements:
    """Returns the sum over rows. Seven elements fit into 64 bits, so it folds as it goes."""
    result: Elements = rows[0]
    for row in rows[1:]:
        result = reduce(result + row)
    return result


def _challenges(relation: Relation, root: bytes, seed: bytes, repetition: int) -> tuple[Elements, Elements, Elements]:
    counts = (relation.rows, relation.right.size, relation.bit_rows + relation.late_rows + 1)
    drawn_all = hashed(sum(counts), b"challenges", root, seed, bytes([repetition]))
    combined, equations, squares = np.split(drawn_all, np.cumsum(counts)[:-1])
    return combined, equations, squares


def _places(root: bytes, seed: bytes, tests: Sequence[Elements]) -> NDArray[np.int64]:
    """Returns the columns to open, all different."""
    transcript = sha256(b"places" + root + seed + b"".join(part.tobytes() for part in tests)).digest()
    words = np.frombuffer(shake_256(transcript).digest(16 * QUERIES), dtype="<u4") % _COLUMNS
    distinct = list(dict.fromkeys(words.tolist()))
    return np.array(sorted(distinct[:QUERIES]), dtype=np.int64)


def _leaves(columns: Elements, salts: Sequence[bytes]) -> list[bytes]:
    across = np.ascontiguousarray(columns.T)
    return [sha256(b"leaf" + salt + column.tobytes()).digest() for salt, column in zip(salts, across, strict=True)]


@lru_cache(maxsize=1)
def _matrices() -> tuple[Limbs, Limbs, Limbs]:
    """Returns the code's matrix for rows, that for products beyond their given points, and the witness's to products.

    They are public, transposed, and the same for every proof.
    """
    code, beyond = np.arange(_DEGREE, _DEGREE + _COLUMNS), np.arange(_PRODUCT, _DEGREE + _COLUMNS)
    to_code, to_product = interpolation(_DEGREE, code), interpolation(WIDTH, np.arange(WIDTH, _PRODUCT))
    return Limbs.of(to_code.T), Limbs.of(interpolation(_PRODUCT, beyond).T), Limbs.of(to_product.T)
