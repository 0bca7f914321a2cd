"""Variant `published`: DP-RVAE as its authors describe it. No differential privacy guarantee.

    encoder     average gradient of a batch, clipped to C in L2, plus Laplace noise (equations 8 to 11)
    decoder     plain gradient; its input is the text itself, each word replaced by [UNK] with probability rho, plus
                Laplace noise of scale gamma on every coordinate (equations 12 to 15)
    texts       for each private text: z from its posterior, the decoder fed with the perturbed text, and its own label

Why this bounds nothing, whatever its formula says:

    1. The decoder and the embedding step along gradients without any noise, and the words that they guess are the raw
       text. Two data sets that differ in one text certainly give different weights. Noise on the decoder's input does
       not touch its targets: with a gamma so large that the formula says 0.0004, the decoder still memorises a text.
    2. The encoder's average is clipped as a whole, not by text. Laplace noise is calibrated by an L1 sensitivity,
       which an L2 clip does not bound.
    3. Delta f = 1 is claimed for vectors of words that nothing bounds, and a text of n words is n releases. Word
       dropout at a rate of 0.6 shows a word with probability 0.4 each time, anew in every epoch.
    4. At the published numbers (gamma 0.001, rho 0.6) the formula itself gives 999.08: e^999 allows anything.
    5. The texts are made from the private texts one by one, with their true labels, as many as there are.

The variant exists so that figures can be compared. It must carry `NO_GUARANTEE` wherever it or its texts are shown. It
charges nothing, since there is no event to charge, so a policy that requires a mechanism must refuse it.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from learning.mechanisms.noise import add_laplace
from learning.synthesis.model import Coins, Rvae
from learning.synthesis.sampling import Sampling, SyntheticText, draw_words
from learning.synthesis.setting import PublishedSetting
from learning.synthesis.words import PAD_ID, UNKNOWN_ID, PublicWords
from learning.training.local import Progress, TrainingCancelled, TrainingDiverged
from secure_agg import RandomSource

__all__ = ["published_step", "rewrite", "train_published"]

Ids = NDArray[np.int64]


def train_published(
    module: Rvae,
    ids: Ids,
    setting: PublishedSetting,
    *,
    random: RandomSource,
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Trains in place with plain SGD over ids (N, S). No differential privacy guarantee.

    `cancelled` is asked before every step.

    Raises:
        TrainingCancelled: `cancelled` returned True.
        TrainingDiverged: A weight is not finite.
        ValueError: There are no texts.
    """
    if not len(ids):
        raise ValueError("there are no texts; a member needs at least one to take part")
    module.train()
    module.draw_from(random)
    shuffle = np.random.Generator(np.random.Philox(int.from_bytes(random.bytes(8), "little")))
    steps, step = setting.epochs * math.ceil(len(ids) / setting.batch), 0
    try:
        for epoch in range(setting.epochs):
            order = shuffle.permutation(len(ids))
            for first in range(0, len(ids), setting.batch):
                if cancelled():
                    raise TrainingCancelled(f"training was stopped after step {step} of {steps}")
                loss = published_step(module, ids[order[first : first + setting.batch]], setting, random)
                step += 1
                progress(Progress(step, steps, epoch + 1, setting.epochs, loss))
    finally:
        module.unseed()
        module.eval()
    if not all(bool(torch.isfinite(each).all()) for each in module.parameters()):
        raise TrainingDiverged("a weight was not a finite number; lower training.learning_rate in the job")


def published_step(module: Rvae, ids: Ids, setting: PublishedSetting, random: RandomSource) -> float:
    """Takes one step on a batch (B, S) and returns its mean loss, in nats a text (equations 8 and 9 sum over words)."""
    rows = torch.from_numpy(np.ascontiguousarray(ids[:, : int((ids != PAD_ID).sum(axis=1).max())]))
    named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    loss = (module.setting.max_tokens + 1) * module.loss(rows, _coins(module, rows, setting, random)).mean()
    gradients = dict(
        zip((name for name, _ in named), torch.autograd.grad(loss, [each for _, each in named]), strict=True)
    )
    encoding = [name for name in gradients if name.split(".", 1)[0] in Rvae.encoding]
    norm = math.sqrt(sum(float(gradients[name].double().square().sum()) for name in encoding))
    with torch.no_grad():
        for name, parameter in named:
            gradient = gradients[name]
            if name in encoding:
                noised = gradient.double().mul_(min(1.0, setting.clip / norm) if norm else 1.0).contiguous()
                add_laplace(noised.numpy(), setting.gradient_scale * setting.clip**2, random)
                gradient = noised.float()
            parameter.sub_(gradient, alpha=setting.learning_rate)
    return loss.item()


@torch.no_grad()
def rewrite(
    module: Rvae,
    words: PublicWords,
    ids: Ids,
    setting: PublishedSetting,
    random: RandomSource,
    sampling: Sampling | None = None,
) -> list[SyntheticText]:
    """Writes a text for each row of ids (N, S), with its label, from its perturbed words. No differential privacy
    guarantee.

    A text ends where the decoder ends it, or at the length of its original. Nothing is guided, whatever `sampling`
    says.
    """
    sampling = sampling or Sampling()
    module.eval()
    module.draw_from(random)
    found: list[SyntheticText] = []
    try:
        for first in range(0, len(ids), sampling.batch):
            rows = torch.from_numpy(ids[first : first + sampling.batch])
            coins = _coins(module, rows, setting, random)
            mean, log_variance = module.posterior(rows)
            z = mean + (log_variance / 2).exp() * coins.noise
            scores, told, state = module.begin(z, rows[:, 0])
            drawn = [draw_words(scores, words, random, sampling)]
            for at in range(1, min(rows.shape[1] - 1, sampling.max_tokens)):
                read = rows[:, at].masked_fill(~coins.kept[:, at] & (rows[:, at] != PAD_ID), UNKNOWN_ID)
                shift = None if coins.shift is None else coins.shift[:, at]
                scores, state = module.step(read, told, state, shift)
                drawn.append(draw_words(scores, words, random, sampling))
            lengths = (rows != PAD_ID).sum(dim=1) - 2
            for row, length, label in zip(
                torch.stack(drawn, dim=1).tolist(), lengths.tolist(), rows[:, 0], strict=True
            ):
                found.append(SyntheticText(words.text(row[:length]), int(label) - module.label_row))
    finally:
        module.unseed()
    return found


def _coins(module: Rvae, rows: torch.Tensor, setting: PublishedSetting, random: RandomSource) -> Coins:
    coins = module.toss(rows, word_dropout=setting.word_dropout)
    shift = np.zeros((len(rows), rows.shape[1] - 1, module.setting.embedding), dtype=np.float32)
    add_laplace(shift, setting.input_scale, random)
    return Coins(coins.noise, coins.kept, torch.from_numpy(shift))
