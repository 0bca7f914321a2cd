"""A low-rank change is merged to the same bytes whatever BLAS, processor or number of threads there is."""

import numpy as np
import pytest
import torch

from learning.models.merging import add_change
from learning.prompts.injectors import Adapted
from learning.prompts.setting import LoRA
from tests.support.plain_merging import Matrix, looped


def drawn(out: int, inner: int, rank: int, seed: int = 4) -> tuple[Matrix, Matrix, Matrix]:
    random = np.random.default_rng(seed)
    matrix, up, down = (random.normal(size=shape) for shape in ((out, inner), (out, rank), (rank, inner)))
    return matrix.astype(np.float32), (up / 10).astype(np.float32), (down / 10).astype(np.float32)


# With these and rank 8, OpenBLAS has other bytes on two threads than on one.
@pytest.mark.parametrize(("out", "inner"), [(576, 1536), (896, 896)])
def test_the_bytes_are_those_of_a_plain_loop(out: int, inner: int) -> None:
    matrix, up, down = drawn(out, inner, 8)
    expected = looped(matrix, up, down, 2.0)
    add_change(matrix, up, down, 2.0)
    assert matrix.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("out", "inner", "rank"), [(1, 1, 1), (5, 3, 2), (3, 70_000, 1), (70_000, 2, 3)])
def test_matrices_of_any_shape_lie_in_blocks(out: int, inner: int, rank: int) -> None:
    matrix, up, down = drawn(out, inner, rank)
    expected = looped(matrix, up, down, 0.75)
    turned = matrix.copy(order="F")
    add_change(matrix, up, down, 0.75)
    add_change(turned, up, down, 0.75)
    assert matrix.tobytes() == expected.tobytes() == np.ascontiguousarray(turned).tobytes()


def test_a_prompted_encoders_matrix_is_merged_the_same_way() -> None:
    torch.manual_seed(1)
    layer = Adapted(torch.nn.Linear(96, 40), LoRA(rank=8, alpha=24.0))
    for each in layer.parameters():
        torch.nn.init.normal_(each)
    frozen, up, down = (each.weight.numpy(force=True).copy() for each in (layer.frozen, layer.up, layer.down))
    assert layer.merged().tobytes() == looped(frozen, up, down, 3.0).tobytes()
    assert layer.frozen.weight.numpy(force=True).tobytes() == frozen.tobytes()


@pytest.mark.filterwarnings("error")
def test_a_value_that_overflows_is_infinite() -> None:
    """The export finds it when it compares logits."""
    matrix = np.ones((1, 2), np.float32)
    add_change(matrix, np.full((1, 1), 3e38, np.float32), np.array([[3e38, 0]], np.float32), 1.0)
    np.testing.assert_array_equal(matrix, [[np.inf, 1]])
