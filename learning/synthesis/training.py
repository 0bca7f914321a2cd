"""Variant `sound`: trains the autoencoder with DP-SGD, after which any amount of text costs nothing more.

`train_sound` calls `learning.training.private.train_private` like every other model: each text is drawn with a rate,
its gradient over all trained parameters (encoder, decoder, embedding) is clipped, and noise is added to the sum. The
assumptions are stated there and in `learning.training.clipping`. This model's part, that a text's loss is its own, is
in `learning.synthesis.model`.

Theorem (post-processing; Dwork and Roth 2014, Proposition 2.1). Let M map a member's texts to what its events in the
ledger paid for: the weights after the noised steps, and the noised label histogram. If M is (epsilon, delta)-
differentially private and f is any randomised function whose coins do not depend on the texts, then f(M) is
(epsilon, delta)-differentially private too. Sampling is such an f: it reads weights, histogram, public words and fresh
coins. So one text costs as much as a million: nothing beyond M.

This needs each of the following assumptions:

    1. Every event is charged before anything is released: each DP-SGD step, and the histogram.
    2. The words, the labels, and the weights that training starts from are public or paid for.
    3. z comes from the prior. A posterior is a function of a private text; `learning.synthesis.published` uses it.
    4. The number and length of texts, temperature, guidance, and when training stops follow from M and from public
       facts. No loss, perplexity or distance measured on private text chooses any of them.
    5. No text is left out because it resembles a private one: dropping a copy reveals what it is a copy of. Whether a
       member vetoes its corpus is its own decision after reading, and no part of the claim.
    6. One text is protected, once. A person with k of a member's texts has the guarantee for groups of k. A text that
       several members have is in several ledgers.

DP promises nothing about words that many texts share: a name that half of the texts have may well come out.
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
    """Trains in place with DP-SGD for `mechanism.steps` steps.

    Args:
        module: The model.
        ids: (N, S), from `PublicWords.encode`.
        recipe, mechanism, random, device, progress, cancelled: As in `train_private`.
        population: All of the member's texts, including those without a label of the job, as its event counts them; N
            if None.

    Raises:
        ValueError: The population is smaller than the number of texts; else as in `train_private`.
    """
    if population is not None and population < len(ids):
        raise ValueError(f"a population of {population} is smaller than its {len(ids)} texts; count all texts")
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
        population=population,
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
    """Trains in place with plain steps: on public text for the weights that a job starts from, or without protection.

    Args:
        module: The model.
        ids: (N, S), from `PublicWords.encode`.
        recipe, seed, device, progress: As in `learning.training.local.train`.
        free_embedding: Whether a frozen embedding is trained too.
        kl_weight: The weight of each epoch, counted from 0, in place of the setting's (annealing, Bowman et al. 2016).
            Each epoch then has its own optimiser.

    Raises:
        TrainingDiverged, ValueError: As in `learning.training.local.train`.
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
            raise ValueError("a training needs at least one epoch")
        return result
    finally:
        module.setting = setting
        module.embedding.weight.requires_grad_(trained)


@dataclass(frozen=True)
class Measured:
    """Measures of a model on texts, with z from the posterior and every word kept.

    They have no noise: they are for tests, benchmarks and public text.

    Attributes:
        texts, words: How many were measured.
        nll: Negative log likelihood, nats a word.
        divergence: KL divergence, nats a text.
        perplexity: e to the bound on the negative log likelihood of a word.
        prior_perplexity: The same with z from the prior and no divergence, as in sampling.
        active: Dimensions of z in use.
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
    """Measures the model on texts (N, S).

    Raises:
        ValueError: There are no texts.
    """
    if not len(ids):
        raise ValueError("there are no texts to measure; give at least one")
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
    """Labels of zeros: the loss is at index 0 of the model's output (`Rvae.forward`)."""
    return np.zeros(len(ids), dtype=np.int64)
