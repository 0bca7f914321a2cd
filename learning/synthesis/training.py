"""Variant `sound`: the autoencoder through the product's own DP-SGD, and why any amount of text costs nothing more.

`train_sound` calls `learning.training.private.train_private` as every other model does: each text drawn with a rate,
its gradient over all trained parameters (encoder, decoder, embedding) clipped, noise on the sum. What it leans on is
written there and in `learning.training.clipping`; what this model owes it, that a text's loss is its own, stands in
`learning.synthesis.model`.

Theorem (post-processing; Dwork and Roth 2014, Proposition 2.1). Let M map a member's texts to what its events in the
ledger paid for: the weights after the noised steps, and the noised label histogram. If M is (epsilon, delta)-
differentially private and f is any randomised function whose coins do not depend on the texts, f(M) is
(epsilon, delta)-differentially private, too. Sampling is such an f: it reads weights, histogram, public words and fresh
coins. So a text costs as much as a million: nothing beyond M.

It rests on these, and falls with each of them:

    1. Every event is charged before anything is released: each DP-SGD step, and the histogram.
    2. The words, the labels, and the weights that training starts from are public or paid for.
    3. z comes from the prior. A posterior is a function of a private text: `learning.synthesis.published` does that.
    4. How many texts, how long, which temperature and guidance, and when training stops follow from M and from what is
       public. No loss, perplexity or distance that was measured on private text chooses any of them.
    5. No text is left out because it resembles a private one: who drops a copy tells what it is a copy of. Whether a
       member vetoes its corpus is its own decision after reading, and no part of the claim.
    6. One text is protected, once. Whoever has k of them among a member's has the guarantee of groups of k; a text that
       several members hold is in several ledgers.

DP promises nothing about words that many texts share, and a name that half of the texts hold may well come out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from learning.synthesis.model import Losses, Rvae
from learning.synthesis.quality import active_units
from learning.training.local import Progress, TrainingResult, train
from learning.training.private import train_private
from secure_agg import RandomSource
from tacit.job import Training
from tacit.mechanism import DpSgd

__all__ = ["Measured", "measure", "train_plain", "train_sound"]

Ids = NDArray[np.int64]


def train_sound(
    module: Rvae,
    ids: Ids,
    recipe: Training,
    mechanism: DpSgd,
    *,
    random: RandomSource,
    population: int | None = None,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """DP-SGD in place, `mechanism.steps` steps. ids: (N, S), of `PublicWords.encode`. population: all of the member's
    texts, those without one of the job's labels among them, as its event says; N if None.

    Raises:
        ValueError: fewer in the population than ids. Else as `train_private`.
    """
    if population is not None and population < len(ids):
        raise ValueError(f"a population of {population} cannot hold {len(ids)} texts")
    count = len(ids) if population is None else population
    rate = min(1.0, mechanism.lot / count) if count else None
    return train_private(
        module,
        ids,
        _places(ids),
        recipe,
        mechanism,
        random=random,
        seed=0,
        rate=rate,
        device=device,
        progress=progress,
        cancelled=cancelled,
    )


def train_plain(
    module: Rvae,
    ids: Ids,
    recipe: Training,
    *,
    seed: int,
    free_embedding: bool = False,
    kl_weight: Callable[[int], float] | None = None,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda _: None,
) -> TrainingResult:
    """Plain steps in place: on public text, for the weights a job starts from, or without any protection.

    free_embedding: a frozen embedding moves, too. kl_weight: of each epoch from 0, in place of the setting's
    (annealing, Bowman et al. 2016); each epoch then has an optimiser of its own.

    Raises: as `learning.training.local.train`.
    """
    setting = module.setting
    trained = module.embedding.weight.requires_grad
    module.embedding.weight.requires_grad_(trained or free_embedding)
    try:
        if kl_weight is None:
            return train(module, ids, _places(ids), recipe, seed=seed, device=device, progress=progress)
        once, result = recipe.model_copy(update={"epochs": 1}), None
        for epoch in range(recipe.epochs):
            module.setting = replace(setting, kl_weight=kl_weight(epoch))
            result = train(module, ids, _places(ids), once, seed=seed + epoch, device=device, progress=progress)
        if result is None:
            raise ValueError("a training has one epoch at least")
        return result
    finally:
        module.setting = setting
        module.embedding.weight.requires_grad_(trained)


@dataclass(frozen=True)
class Measured:
    """Of texts, with z drawn from the posterior and every word kept. Not noised: for tests, benchmarks, public text.

    nll: nats a word. divergence: nats a text. perplexity: e to the bound on the negative log likelihood of a word.
    prior_perplexity: the same with z from the prior and no divergence: what sampling meets. active: dimensions of z in
    use.
    """

    texts: int
    words: int
    nll: float
    divergence: float
    perplexity: float
    prior_perplexity: float
    active: int


@torch.no_grad()
def measure(module: Rvae, ids: Ids, *, seed: int, batch: int = 128) -> Measured:
    """What the model makes of these texts, (N, S).

    Raises:
        ValueError: no texts.
    """
    if not len(ids):
        raise ValueError("no texts to measure")
    module.eval()
    module.seed(seed)
    sums, means = np.zeros(4), []
    try:
        for first in range(0, len(ids), batch):
            rows = torch.from_numpy(ids[first : first + batch])
            coins = module.toss(rows, word_dropout=0.0)
            found: Losses = module.losses(rows, coins)
            means.append(module.posterior(rows)[0].numpy())
            of_prior = module.losses(rows, coins, prior=True).reconstruction
            parts = (found.words, found.reconstruction, found.divergence, of_prior)
            sums += [float(each.double().sum()) for each in parts]
    finally:
        module.unseed()
    words, nll, divergence, of_prior_sum = sums.tolist()
    return Measured(
        len(ids),
        int(words),
        nll / words,
        divergence / len(ids),
        float(np.exp((nll + divergence) / words)),
        float(np.exp(of_prior_sum / words)),
        active_units(np.concatenate(means)),
    )


def _places(ids: Ids) -> Ids:
    """The loss stands at place 0 of what the model gives (`Rvae.forward`)."""
    return np.zeros(len(ids), dtype=np.int64)
