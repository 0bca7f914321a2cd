"""Noise is what it says: goodness of fit, exact tails, one stream for each call, nothing but the source."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from scipy import stats

from edge_client.privacy import noise
from edge_client.privacy.noise import add_gaussian, add_laplace, fill_gaussian, gaussian_like
from tests.unit.private_training.sources import Seeded, Written

COUNT = 400_001  # Odd, and no multiple of a block.


def gaussian(dtype, count=COUNT, deviation=1.0, seed="gauss"):
    out = np.zeros(count, dtype)
    add_gaussian(out, deviation, Seeded(seed))
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
    # Each half of a block comes from another function, neighbours from neighbouring bits.
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


def test_the_scale_is_the_one_that_was_asked_for():
    assert gaussian(np.float64, deviation=3.5).std() == pytest.approx(3.5, rel=0.005)
    assert gaussian(np.float32, deviation=1e-6).std() == pytest.approx(1e-6, rel=0.005)
    # E|x| of Laplace is its scale, its deviation sqrt 2 times that.
    assert np.abs(laplace(np.float64, scale=0.25)).mean() == pytest.approx(0.25, rel=0.01)
    assert laplace(np.float64, scale=0.25).std() == pytest.approx(0.25 * math.sqrt(2), rel=0.01)


def smallest_radius_index(beyond):
    """How many of the 2^64 radii lie beyond; they fall as k grows."""

    def radius(k):
        return float(noise._radius(np.array([k], dtype=np.uint64), 1.0, np.empty(1))[0])

    low, high = -1, 2**64 - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if radius(middle) > beyond else (low, middle)
    return low + 1


@pytest.mark.parametrize("beyond", [0.01, 1.0, 4.0, 6.0, 8.0, 8.5])
def test_the_tail_is_exact_to_a_thousandth_beyond_eight_deviations(beyond):
    """No sample shows a probability of 1e-15; counting the radii does. P(radius > r) = exp(-r^2 / 2)."""
    assert smallest_radius_index(beyond) / 2**64 == pytest.approx(math.exp(-(beyond**2) / 2), rel=1e-3)


def test_every_bit_pattern_gives_a_finite_value():
    bits = np.array([0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1], dtype=np.uint64)
    for width in (63, 64):
        logarithms = noise._log_uniform(bits >> np.uint64(64 - width), width, np.empty(len(bits)))
        assert np.isfinite(logarithms).all()
        assert (logarithms <= 0).all()
    radii = noise._radius(bits, 1.0, np.empty(len(bits)))
    assert np.isfinite(radii).all()
    assert radii[0] == pytest.approx(math.sqrt(2 * 65 * math.log(2)))  # The largest there is: u = 2^-65.


def test_the_tail_of_laplace_keeps_every_bit():
    """The rarest magnitudes, u = (k + 1/2) / 2^63 for k = 0, 1, 2, each with either sign."""
    rarest = noise._laplace(np.arange(6, dtype=np.uint64), 3.0)
    expected = [-3.0 * (math.log(k + 0.5) - 63 * math.log(2)) for k in range(3)]
    assert rarest.tolist() == pytest.approx([sign * value for value in expected for sign in (-1, 1)])


@pytest.mark.parametrize("add", [add_gaussian, add_laplace])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_key_is_a_stream(add, dtype):
    key, other = bytes(range(32)), bytes(range(1, 33))
    made = []
    for each in (key, key, other):
        out, source = np.zeros(100_000, dtype), Written(each)
        add(out, 1.0, source)
        assert source.left == b""  # 32 bytes, and nothing else.
        made.append(out)
    assert np.array_equal(made[0], made[1])
    assert abs(np.corrcoef(made[0], made[2])[0, 1]) < 0.02
    assert not np.intersect1d(made[0].astype(np.float64), made[2].astype(np.float64)).size > 10_000


@pytest.mark.parametrize("made", [gaussian, laplace])
def test_no_value_comes_twice(made):
    values = made(np.float64)
    assert len(np.unique(values)) == len(values)
    # Two calls on one source: two streams.
    source = Seeded("twice")
    first, second = np.zeros(1000), np.zeros(1000)
    add_gaussian(first, 1.0, source)
    add_gaussian(second, 1.0, source)
    assert not np.intersect1d(first, second).size


def test_the_stream_is_the_written_one():
    """Golden values for the key 00 01 .. 1f, from AES-256-CTR by hand: Box-Muller of the first words."""
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
    # And they are these, on any machine.
    assert out.tolist() == pytest.approx(GOLDEN, abs=1e-9)
    magnitudes = np.zeros(6)
    add_laplace(magnitudes, 2.0, Written(key))
    by_hand = [-2.0 * math.log(((word >> 1) + 0.5) / 2**63) * (1 if word & 1 else -1) for word in words]
    assert magnitudes == pytest.approx(by_hand, rel=1e-12)


GOLDEN = [0.0437140691, -0.0716535626, -0.3774950463, 0.6382741966, -1.1721343644, -0.273800455]


def test_noise_is_added_to_what_is_there():
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
        fill_gaussian(like.T, 0.5, Seeded("tensor"))  # Would be the noise of a copy.


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_no_positive_number_is_refused(wrong):
    for add in (add_gaussian, add_laplace):
        out = np.zeros(10)
        with pytest.raises(ValueError, match="positive number"):
            add(out, wrong, Seeded("wrong"))
        assert not out.any()
    with pytest.raises(ValueError, match="positive number"):
        gaussian_like(torch.zeros(3), wrong, Seeded("wrong"))


def test_noise_that_would_go_nowhere_is_refused():
    read_only = np.zeros(10)
    read_only.flags.writeable = False
    for out in (np.zeros(10, dtype=np.int64), np.zeros((10, 10)).T[::2], read_only):
        for add in (add_gaussian, add_laplace):
            with pytest.raises(ValueError, match="in place"):
                add(out, 1.0, Seeded("wrong"))


@pytest.mark.parametrize("add", [add_gaussian, add_laplace])
def test_memory_is_one_block(add):
    out = np.zeros(4_000_000, dtype=np.float32)
    tracemalloc.start()
    try:
        add(out, 1.0, Seeded("memory"))
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
