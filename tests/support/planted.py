"""Texts with two planted canaries, and how much a model exposes them among candidates that were never in its data."""

import numpy as np
import torch

from learning.synthesis.model import Coins, Rvae
from learning.synthesis.quality import exposure
from learning.synthesis.words import PublicWords
from tests.support.toy_texts import DIGITS, toy_texts

CANDIDATES, CANARIES = 66, 2


def candidates() -> list[str]:
    """Texts with different codes of four digits. The canaries come first."""
    random = np.random.default_rng(4)
    codes: dict[tuple[int, ...], None] = {}
    while len(codes) < CANDIDATES:
        codes[tuple(int(each) for each in random.integers(len(DIGITS), size=4))] = None
    return [f"the code is {' '.join(DIGITS[digit] for digit in code)} ." for code in codes]


def planted_ids(words: PublicWords, canaries: int = CANARIES) -> np.ndarray:
    """30 common texts, and the first `canaries` canaries once each."""
    texts, labels = toy_texts(30)
    return words.encode([*texts, *candidates()[:canaries]], np.append(labels, [1] * canaries))


@torch.no_grad()
def mean_exposure(module: Rvae, words: PublicWords) -> float:
    """The canaries' mean exposure, from losses with every word of the decoder's input replaced.

    It is at most 6, and 1.4 by chance.
    """
    ids = torch.from_numpy(words.encode(candidates(), np.ones(CANDIDATES, dtype=np.int64)))
    kept = torch.zeros(len(ids), ids.shape[1] - 1, dtype=torch.bool)
    losses = (
        module.eval().losses(ids, Coins(torch.zeros(len(ids), module.setting.latent), kept)).reconstruction.tolist()
    )
    found = [exposure(losses[place], losses[CANARIES:]) for place in range(CANARIES)]
    return float(np.mean(found))
