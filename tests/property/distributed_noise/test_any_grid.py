"""For any valid grid and any clipped vectors, norms hold, nothing wraps, and sums decode."""

from __future__ import annotations

import numpy as np
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from secure_agg import (
    DiscreteGaussian,
    Grid,
    LayoutInvalid,
    clip_l2,
    decode_distributed,
    encode_distributed,
    round_conditionally,
)
from tests.support.sum_fleet import SeededRandom


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Grid, list[np.ndarray], str]:
    """A grid, the clipped vectors of its members (at most six are drawn), and a seed."""
    members = draw(st.integers(1, 200))
    honest = draw(st.integers(1, members))
    values = draw(st.integers(1, 40))
    clip = 10 ** draw(st.floats(-6, 6))
    multiplier = 10 ** draw(st.floats(-6, 8))
    try:
        grid = Grid(clip, multiplier, honest, values, members)
    except LayoutInvalid:
        # The ring can only be too wide if there is little noise.
        if multiplier >= 0.1:
            raise
        reject()
    rows = draw(
        st.lists(
            st.lists(st.floats(-1, 1), min_size=values, max_size=values),
            min_size=1,
            max_size=min(6, members),
        )
    )
    # Long vectors are clipped exactly to the limit, where rounding needs the most tries.
    stretch = draw(st.sampled_from([0.0, 0.3, 1.0, 50.0]))
    return grid, [clip_l2(np.array(row) * clip * stretch, clip) for row in rows], draw(st.text(max_size=5))


@settings(max_examples=120, deadline=None)
@given(jobs())
def test_norms_hold_nothing_wraps_and_sums_decode(job: tuple[Grid, list[np.ndarray], str]) -> None:
    grid, rows, seed = job
    bits = grid.bits_needed(grid.members)
    mask = np.uint32(2**bits - 1)
    noise_end = DiscreteGaussian(grid.std).largest
    total = np.zeros(grid.values, dtype="<u4")
    whole = np.zeros(grid.values, dtype=np.int64)
    for member, row in enumerate(rows):
        rounded = round_conditionally(row, grid, SeededRandom(f"{seed}/{member}"))
        assert sum(value * value for value in rounded.tolist()) <= grid.bound**2
        assert np.abs(rounded - row * grid.scale).max() <= 1
        encoded = encode_distributed(row, grid, bits, SeededRandom(f"{seed}/{member}"))
        # The same randomness rounds in the same way, so the difference is the noise.
        noise = np.rint(decode_distributed(encoded, grid, bits) * grid.scale).astype(np.int64) - rounded
        assert np.abs(noise).max() <= noise_end
        assert np.abs(noise + rounded).max() <= grid.largest
        assert np.abs(decode_distributed(encoded, grid, bits) - row).max() <= (noise_end + 1.001) * grid.gamma
        total += encoded
        whole += noise + rounded
    np.testing.assert_array_equal(decode_distributed(total & mask, grid, bits), whole / grid.scale)


@settings(max_examples=50, deadline=None)
@given(jobs(), st.integers(-1, 1))
def test_the_worst_sum_of_all_members_still_fits(job: tuple[Grid, list[np.ndarray], str], sign: int) -> None:
    grid = job[0]
    bits = grid.bits_needed(grid.members)
    worst = sign * grid.members * grid.largest
    total = np.full(grid.values, worst % 2**bits, dtype="<u4")
    np.testing.assert_array_equal(decode_distributed(total, grid, bits), worst / grid.scale)
