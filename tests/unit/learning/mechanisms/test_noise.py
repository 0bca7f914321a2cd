"""Noise has the law it claims: goodness of fit, exact tails, one stream a call, randomness from the source alone."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from scipy import stats

from learning.mechanisms import noise
from learning.mechanisms.noise import add_gaussian, add_laplace, fill_gaussian, gaussian_like
from tests.support.random_sources import Seeded, Written

COUNT = 400_001  # Odd, and not a multiple of a block.


def gaussian(dtype, count=COUNT, std=1.0, seed="gauss"):
    out = np.zeros(count, dtype)
    add_gaussian(out, std, Seeded(seed))
    return out


def laplace(dtype, count=COUNT, scale=1.0, seed="laplace"):
    out = np.zeros(count, dtype)
    add_laplace(out, scale, Seeded(seed))
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("made", "expected", "moments"),
    # E x^2, E x^4, E x^6, E x^8: (2k - 1)!! and (2k)!.
    [(gaussian, stats.norm(), (1, 3, 15, 105)), (laplace, stats.laplace(), (2, 24, 720, 40_320))],
    ids=["gaussian", "laplace"],
)
def test_values_fit_their_distribution(dtype, made, expected, moments):
    values = made(dtype).astype(np.float64)
    assert stats.kstest(values, expected.cdf).pvalue > 0.01
    # The two halves of a block come from two functions (cosine and sine), neighbours from neighbouring bits.
    assert stats.kstest(values[: noise._PAIRS], expected.cdf).pvalue > 0.01
    assert stats.kstest(values[noise._PAIRS : 2 * noise._PAIRS], expected.cdf).pvalue > 0.01
    for power in (1, 2, 3, 4):
        moment = 0 if power % 2 else moments[power // 2 - 1]
        error = math.sqrt((moments[power - 1] - moment**2) / COUNT)
        assert abs((values**power).mean() - moment) < 4 * error, power
    for quantile in (1e-2, 1e-3, 1e-4):
        for beyond in ((values > expected.isf(quantile)).sum(), (values < expected.ppf(quantile)).sum()):
            assert abs(beyond - COUNT * quantile) < 4.5 * math.sqrt(COUNT * quantile)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_are_independent_of_each_other(dtype):
    values = gaussian(dtype).astype(np.float64)
    for lag in (1, 2, noise._PAIRS, 2 * noise._PAIRS):
        for function in (lambda x: x, np.abs, np.square):
            x = function(values) - function(values).mean()
            correlation = (x[lag:] * x[:-lag]).mean() / x.var()
            assert abs(correlation) < 4.5 / math.sqrt(COUNT), lag


def test_noise_has_the_scale_that_was_asked_for():
    assert gaussian(np.float64, std=3.5).std() == pytest.approx(3.5, rel=0.005)
    assert gaussian(np.float32, std=1e-6).std() == pytest.approx(1e-6, rel=0.005)
    # E|x| of Laplace is its scale, and its standard deviation is sqrt 2 times that.
    assert np.abs(laplace(np.float64, scale=0.25)).mean() == pytest.approx(0.25, rel=0.01)
    assert laplace(np.float64, scale=0.25).std() == pytest.approx(0.25 * math.sqrt(2), rel=0.01)


class Words:
    """A stream of given words in place of AES-256-CTR."""

    def __init__(self, words):
        self.words = list(words)

    def __call__(self, count):
        given, self.words = self.words[:count], self.words[count:]
        return np.array(given, dtype=np.uint64)

    def read(self, n, scratch):
        return self(n // 8).view(np.uint8)


def magnitude(kind, index, words):
    """The magnitude from the uniform number whose first 64 * words bits are `index` (for Laplace one bit fewer)."""
    digits = [index >> 64 * place & (2**64 - 1) for place in reversed(range(words))]
    if kind == "gaussian":
        found = noise._radius(np.array(digits[:1], dtype=np.uint64), 1.0, Words(digits[1:]), np.empty(1))
    else:
        found = noise._laplace(np.array([digits[0] << 1 | 1], dtype=np.uint64), 1.0, Words(digits[1:]))
    return float(found[0])


@pytest.mark.parametrize(
    ("kind", "beyond"),
    [
        *(("gaussian", beyond) for beyond in (0.01, 1.0, 4.0, 8.0, 9.3, 9.6, 12.0, 20.0)),
        *(("laplace", beyond) for beyond in (0.01, 1.0, 20.0, 43.0, 45.0, 80.0, 120.0, 200.0)),
    ],
)
def test_the_tail_is_exact_far_out(kind, beyond):
    """No sample shows a probability of 1e-87, but counting the digits that lead there does: exp(-r^2 / 2), exp(-x)."""
    words = 6
    width = 64 * words - (kind == "laplace")
    low, high = -1, 2**width - 1
    # Magnitudes fall as u grows.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if magnitude(kind, middle, words) > beyond else (low, middle)
    counted = math.log(low + 1) - width * math.log(2)
    assert counted == pytest.approx(-(beyond**2) / 2 if kind == "gaussian" else -beyond, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize(("add", "ends"), [(add_gaussian, 9.5), (add_laplace, 44.4)], ids=["gaussian", "laplace"])
def test_the_law_does_not_end_after_one_word(add, ends, monkeypatch):
    """A law with an end would betray what the noise was added to, so the digits go on after any word."""
    if add is add_gaussian:
        # Two radii, two angles of 0, then further digits of the first radius.
        written = [0, 2**63, 0, 0, 2**50, 2**63]
    else:
        written = [1, 2**63, 2**63, 2**63, 2**50, 2**63]
    monkeypatch.setattr(noise, "KeyStream", lambda key, scratch: Words(written))
    out = np.zeros(4)
    add(out, 1.0, Seeded("tail"))
    u = 2.0 ** (50 - 64 - (64 if add is add_gaussian else 63))
    assert out[0] == pytest.approx(math.sqrt(-2 * math.log(u)) if add is add_gaussian else -math.log(u))
    assert out[0] > ends


def test_every_lattice_value_in_the_tail_can_come_out():
    """If the rarest 63 bits gave one value each, hundreds of lattice cells between them would stay empty, and an output
    would tell which of two changes it came from. With further digits, every cell between is reached.
    """
    rare, count = 1, 1 << 14
    further = Words(np.linspace(0, 2**64 - 2**12, count).astype(np.uint64).tolist())
    values = noise._laplace(np.full(count, rare << 1 | 1, dtype=np.uint64), 1.0, further)
    cells = np.unique(np.rint(values / noise.lattice_step(1.0))).astype(int)
    between = math.log(2) / noise.lattice_step(1.0)
    assert len(cells) == cells[-1] - cells[0] + 1 == pytest.approx(between, abs=2)


def test_every_bit_pattern_gives_a_finite_value():
    bits = np.array([0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1], dtype=np.uint64)
    for width in (63, 64):
        more = Words([7] * 100)
        logarithms = noise._log_uniform(bits >> np.uint64(64 - width), width, more, np.empty(len(bits)))
        assert np.isfinite(logarithms).all()
        assert (logarithms <= 0).all()


def test_the_end_of_the_tail_adds_almost_nothing_to_delta():
    """(1 + e^epsilon) n 2^-1074, as in the module's docstring and docs/accounting.md."""
    smallest = np.nextafter(0.0, 1.0)
    assert smallest == 2.0**-1074
    assert -math.log(smallest) == pytest.approx(744.4, abs=0.1)
    assert math.sqrt(-2 * math.log(smallest)) == pytest.approx(38.6, abs=0.05)
    assert 0 < (1 + math.exp(200)) * 2.0**64 * smallest < 1e-200


@pytest.mark.parametrize("add", [add_gaussian, add_laplace])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each_key_gives_its_own_stream(add, dtype):
    key, other = bytes(range(32)), bytes(range(1, 33))
    made = []
    for each in (key, key, other):
        out, source = np.zeros(100_000, dtype), Written(each)
        add(out, 1.0, source)
        assert source.left == b""  # Takes 32 bytes and no more.
        made.append(out)
    assert np.array_equal(made[0], made[1])
    assert abs(np.corrcoef(made[0], made[2])[0, 1]) < 0.02
    assert not np.intersect1d(made[0].astype(np.float64), made[2].astype(np.float64)).size > 10_000


@pytest.mark.parametrize("made", [gaussian, laplace])
def test_no_value_comes_twice(made):
    values = made(np.float64)
    assert len(np.unique(values)) == len(values)
    # Two calls on one source get two streams.
    source = Seeded("twice")
    first, second = np.zeros(1000), np.zeros(1000)
    add_gaussian(first, 1.0, source)
    add_gaussian(second, 1.0, source)
    assert not np.intersect1d(first, second).size


def test_a_stream_has_its_golden_values():
    """For the key 00 01 .. 1f: Box-Muller of the first words of AES-256-CTR, computed by hand."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes(range(32))
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(16 * 3))
    words = [int.from_bytes(stream[8 * k : 8 * k + 8], "little") for k in range(6)]
    radii = [math.sqrt(-2 * math.log((word + 0.5) / 2**64)) for word in words[:3]]
    angles = [2 * math.pi * word / 2**64 for word in words[3:]]
    expected = [r * math.cos(a) for r, a in zip(radii, angles, strict=True)]
    expected += [r * math.sin(a) for r, a in zip(radii, angles, strict=True)]
    out = np.zeros(6)
    add_gaussian(out, 1.0, Written(key))
    assert out == pytest.approx(expected, rel=1e-12)
    # The same on any machine.
    assert out.tolist() == pytest.approx(GOLDEN, abs=1e-9)
    magnitudes = np.zeros(6)
    add_laplace(magnitudes, 2.0, Written(key))
    by_hand = [-2.0 * math.log(((word >> 1) + 0.5) / 2**63) * (1 if word & 1 else -1) for word in words]
    assert magnitudes == pytest.approx(by_hand, rel=1e-12)


GOLDEN = [0.0437140691, -0.0716535626, -0.3774950463, 0.6382741966, -1.1721343644, -0.273800455]


def test_noise_is_added_to_the_values_in_the_array():
    out = np.arange(50_000, dtype=np.float64).reshape(100, 500)
    before = out.copy()
    add_gaussian(out, 2.0, Seeded("added"))
    expected = np.zeros(50_000)
    add_gaussian(expected, 2.0, Seeded("added"))
    assert np.allclose(out - before, expected.reshape(100, 500), atol=1e-9)
    empty = np.zeros(0)
    add_gaussian(empty, 1.0, Seeded("none"))
    add_laplace(empty, 1.0, Seeded("none"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_get_the_same_stream(dtype):
    like = torch.full((123, 457), 7.0, dtype=dtype)
    made = gaussian_like(like, 0.5, Seeded("tensor"))
    expected = np.zeros((123, 457), np.float32 if dtype == torch.float32 else np.float64)
    add_gaussian(expected, 0.5, Seeded("tensor"))
    assert made.dtype == dtype
    assert np.array_equal(made.numpy(), expected)
    assert bool((like == 7).all())
    parameter = torch.nn.Parameter(like.clone())
    fill_gaussian(parameter, 0.5, Seeded("tensor"))
    assert torch.equal(parameter.detach(), made)
    assert gaussian_like(like.T, 0.5, Seeded("tensor")).shape == (457, 123)
    with pytest.raises(RuntimeError, match="view"):
        fill_gaussian(like.T, 0.5, Seeded("tensor"))  # It would fill a copy.


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_not_positive_is_refused(wrong):
    for add in (add_gaussian, add_laplace):
        out = np.zeros(10)
        with pytest.raises(ValueError, match="positive number"):
            add(out, wrong, Seeded("wrong"))
        assert not out.any()
    with pytest.raises(ValueError, match="positive number"):
        gaussian_like(torch.zeros(3), wrong, Seeded("wrong"))


def test_an_array_that_cannot_take_noise_in_place_is_refused():
    read_only = np.zeros(10)
    read_only.flags.writeable = False
    for out in (np.zeros(10, dtype=np.int64), np.zeros((10, 10)).T[::2], read_only):
        for add in (add_gaussian, add_laplace):
            with pytest.raises(ValueError, match="in place"):
                add(out, 1.0, Seeded("wrong"))


@pytest.mark.parametrize("add", [add_gaussian, add_laplace])
def test_memory_stays_at_one_block(add):
    out = np.zeros(4_000_000, dtype=np.float32)
    tracemalloc.start()
    try:
        add(out, 1.0, Seeded("memory"))
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
