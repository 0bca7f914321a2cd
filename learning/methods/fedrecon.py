"""fedrecon: reconstructs private rows of the embedding on one part of the data, and trains the rest on the other.

Singhal et al. 2021, algorithm 1. The private rows start from public numbers in every round and are forgotten after it,
so a member keeps no state.
"""

import numpy as np

from learning.methods.setting import Setting
from learning.models.division import EMBEDDING
from learning.training.phases import Phase
from tacit.method import FedRecon

__all__ = ["phases"]


def phases(method: FedRecon, setting: Setting) -> tuple[Phase, ...]:
    """Private rows on the support, then everything else on the query. A single example is in both."""
    assert setting.division.rows is not None  # noqa: S101  a fedrecon division has rows
    private = np.zeros(setting.vocabulary_size, dtype=np.bool_)
    private[setting.division.rows] = True
    order = np.random.Generator(np.random.Philox(setting.seed)).permutation(setting.examples)
    support = min(max(1, round(method.support * setting.examples)), max(1, setting.examples - 1))
    query = order[support:] if setting.examples > 1 else order
    return (
        Phase(method.epochs, frozenset({EMBEDDING}), examples=np.sort(order[:support]), rows=private),
        Phase(setting.epochs, setting.names, examples=np.sort(query), rows=~private),
    )
