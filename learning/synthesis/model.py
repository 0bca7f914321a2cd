"""The recurrent variational autoencoder (Bowman et al. 2016, "Generating sentences from a continuous space").

    encoder     words and label through an LSTM; two linear layers of its last state: mean and log variance of z
    z           mean + deviation * noise (Kingma and Welling 2014)
    context     tanh of a linear layer of z and the label's vector
    decoder     an LSTM whose first step reads the label's vector and the context, and no word: the state from which
                the first word is guessed is made of z and the label. The context stands beside every later word, too
    label_bias  a vector of each label, label_weight times, on the decoder's state before words are scored: which words
                a label likes. It starts at zero. Without it texts hardly know their label (docs/decisions/0028)
    loss        of each text: its words' negative log likelihood plus kl_weight times its KL divergence, of which each
                dimension counts as free_bits / latent at least; divided by a constant, max_tokens + 1

Guarantees: a text's loss is a function of its own row of ids and its own coins (the noise of z, which words are
replaced): no mean over a batch, no normalisation, no broadcast row. Every trained parameter acts through one call of
one layer, whose gradients `learning.training.clipping` tells apart by example: hence one look-up for the encoder's
and the decoder's words together, and LSTMs that begin at zero. Coins come from what `seed` or `draw_from` starts and
depend on no text; under DP-SGD they come from the noise's own source and are nobody's to know.

For the product's training loops it is a `TextClassifier`: it maps ids (B, S) to two log-probabilities, whose cross
entropy with place 0 is exactly the loss above. So `learning.training.local` and `learning.training.private` train
it as they are, with labels of zeros; the text's own label is the first of its ids (`learning.synthesis.words`).
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from learning.models.classifier import Dropout, TextClassifier
from learning.models.lstm import LSTM
from learning.synthesis.setting import RvaeSetting
from learning.synthesis.words import PAD_ID, UNKNOWN_ID
from tacit.method import ModelPart
from tacit.model import RvaeModel

__all__ = ["Coins", "Losses", "Rvae", "State", "Told", "rvae"]

# Beyond, a deviation is 0 or enormous for float32, and its gradient with it.
_LOG_VARIANCE = 10.0
# A loss below this has no logarithm of its complement in float32.
_MIN_LOSS = 1e-6

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Coins:
    """What is random in a forward pass, by text. noise: (B, latent), of z. kept: (B, S - 1) bool, which of the
    decoder's input words stay. shift: (B, S - 1, embedding), added to the decoder's input; the published variant's.
    """

    noise: Tensor
    kept: Tensor
    shift: Tensor | None = None


@dataclass(frozen=True)
class Told:
    """What the decoder knows of each text besides its words, the same at every step. context: (B, embedding), beside
    every word. label_bias: (B, hidden), the label's own offset to the states that words are scored by.
    """

    context: Tensor
    label_bias: Tensor


@dataclass(frozen=True)
class Losses:
    """By text, (B,), in nats. paid: the divergence as the loss has it, no dimension below its free bits. words: how
    many were guessed, the end among them.
    """

    reconstruction: Tensor
    divergence: Tensor
    paid: Tensor
    words: Tensor


class Rvae(TextClassifier):
    """ids (B, S) of `PublicWords.encode` to (B, 2) log-probabilities. In evaluation mode z is the mean and no word is
    replaced.

    Weights as the product's other LSTMs have them: embedding N(0, embedding_std), the rest uniform within
    1 / sqrt(fan in), log variances begin near zero, what a label adds to the states at zero; without a seed all are
    zero.
    """

    parts: ClassVar[Mapping[str, ModelPart]] = {
        "embedding": "embedding",
        "encoder": "encoder",
        "mean": "encoder",
        "log_variance": "encoder",
        "context": "head",
        "label_bias": "head",
        "decoder": "head",
        "narrow": "head",
        "output": "head",
    }
    # Layers whose gradient the published variant perturbs.
    encoding: ClassVar[frozenset[str]] = frozenset({"encoder", "mean", "log_variance"})

    def __init__(self, setting: RvaeSetting, entries: int, labels: int, seed: int | None) -> None:
        """entries: of `PublicWords`. labels: how many."""
        super().__init__()
        self.setting, self.pad_id, self.min_tokens = setting, PAD_ID, 2
        self.label_row, rows = entries + 1, entries + 1 + labels
        table = np.zeros((rows, setting.embedding), dtype=np.float32)
        self.embedding = nn.Embedding(rows, setting.embedding, padding_idx=PAD_ID, _weight=torch.from_numpy(table))
        self.embedding.weight.requires_grad_(not setting.freeze_embedding)
        # Holds what all coins are tossed from; words are replaced, so that nothing is scaled.
        self.dropout = Dropout(0.0)
        self.encoder = LSTM(setting.embedding, setting.hidden)
        self.decoder = LSTM(2 * setting.embedding, setting.hidden)
        self.label_bias = nn.Embedding(labels, setting.hidden, _weight=torch.zeros(labels, setting.hidden))
        # Torch fills a linear layer from its global generator: put that back.
        with torch.random.fork_rng(devices=[]):
            self.mean = nn.Linear(setting.hidden, setting.latent)
            self.log_variance = nn.Linear(setting.hidden, setting.latent)
            self.context = nn.Linear(setting.latent + setting.embedding, setting.embedding)
            if setting.tied:
                self.narrow: nn.Linear | None = nn.Linear(setting.hidden, setting.embedding)
                self.output: nn.Linear | None = None
            else:
                self.narrow, self.output = None, nn.Linear(setting.hidden, rows)
        self._fill(table, seed)

    def _fill(self, table: NDArray[np.float32], seed: int | None) -> None:
        random = None if seed is None else np.random.Generator(np.random.Philox(seed))
        if random is not None:
            random.standard_normal(dtype=np.float32, out=table)
            # The embedding shares the table's memory.
            table *= np.float32(self.setting.embedding_std)
            table[PAD_ID] = 0
        for layer in self.children():
            if isinstance(layer, LSTM | nn.Linear):
                width = layer.hidden if isinstance(layer, LSTM) else layer.in_features
                for parameter in layer.parameters():
                    values = np.zeros(tuple(parameter.shape), dtype=np.float32)
                    if random is not None:
                        uniform = random.random(values.shape, dtype=np.float32)
                        values = (2 * uniform - 1) * np.float32(1 / math.sqrt(width))
                    with torch.no_grad():
                        parameter.copy_(torch.from_numpy(values))

    @contextmanager
    def narrowed(self, ids: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """All rows stay: every word is scored at every position, and ids name words in both places."""
        if ids.size and not 0 <= ids.min() <= ids.max() < self.embedding.num_embeddings:
            raise ValueError(
                f"ids outside the embedding of {self.embedding.num_embeddings} rows; is it the job's tokenizer?"
            )
        yield ids

    def toss(self, ids: Tensor, word_dropout: float | None = None) -> Coins:
        """Coins for a forward pass over ids (B, S), of what `seed` or `draw_from` started. They depend on its shape
        alone. word_dropout: the setting's if None.
        """
        share = self.setting.word_dropout if word_dropout is None else word_dropout
        batch, length = ids.shape[0], ids.shape[1] - 1
        draws, device = self.dropout.draws, ids.device
        noise = draws.normal(batch, self.setting.latent, device=device)
        return Coins(noise, draws.uniform(batch, length, device=device) >= share)

    def losses(self, ids: Tensor, coins: Coins | None = None, *, prior: bool = False) -> Losses:
        """Each text's terms. coins: None: z is the mean, and every word stays. prior: z is the coins' noise itself."""
        before, after = ids[:, :-1], ids[:, 1:]
        read = before
        if coins is not None:
            # The first of the ids is the label, which is never replaced.
            spare = ~coins.kept & (before != PAD_ID)
            read = before.masked_fill(functional.pad(spare[:, 1:], (1, 0)), UNKNOWN_ID)
        vectors: Tensor = self.embedding(torch.cat([ids, read], dim=1))
        mean, log_variance = self._posterior(vectors[:, : ids.shape[1]], ids)
        z = mean if coins is None else mean + (log_variance / 2).exp() * coins.noise
        if prior and coins is not None:
            z = coins.noise
        inputs = vectors[:, ids.shape[1] :]
        if coins is not None and coins.shift is not None:
            inputs = inputs + coins.shift
        states = self.decoder(self._beside(inputs, self._context(z, vectors[:, 0])))
        scores = self._scores(states + self._label_bias(ids[:, :1]))
        seen = after != PAD_ID
        losses = functional.cross_entropy(scores.flatten(0, 1), after.flatten(), reduction="none").view_as(after)
        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1)
        paid = divergence.clamp(min=self.setting.free_bits / self.setting.latent)
        return Losses((losses * seen).sum(dim=1), divergence.sum(dim=1), paid.sum(dim=1), seen.sum(dim=1))

    def loss(self, ids: Tensor, coins: Coins | None = None) -> Tensor:
        """(B,), what training lowers: of each text alone."""
        found = self.losses(ids, coins)
        return (found.reconstruction + self.setting.kl_weight * found.paid) / (self.setting.max_tokens + 1)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, 2): log-probabilities -l and ln(1 - e^-l), l the text's loss. Their cross entropy with place 0 is l."""
        loss = self.loss(ids, self.toss(ids) if self.training else None).clamp(min=_MIN_LOSS)
        return torch.stack([-loss, torch.log(-torch.expm1(-loss))], dim=1)

    def posterior(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of z, (B, latent) each."""
        return self._posterior(self.embedding(ids), ids)

    def _posterior(self, vectors: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        last = ((ids != PAD_ID).sum(dim=1) - 1).clamp(min=0)
        states = self.encoder(vectors)
        state = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)
        return self.mean(state), self.log_variance(state).clamp(-_LOG_VARIANCE, _LOG_VARIANCE)

    def _context(self, z: Tensor, label: Tensor) -> Tensor:
        return torch.tanh(self.context(torch.cat([z, label], dim=1)))

    def _beside(self, inputs: Tensor, context: Tensor) -> Tensor:
        return torch.cat([inputs, context[:, None].expand(-1, inputs.shape[1], -1)], dim=2)

    def _label_bias(self, labels: Tensor) -> Tensor:
        """Of ids of labels, one vector of the decoder's width each."""
        # The probe for examples that mix puts words where a label stands: they read the nearest label's.
        places = (labels - self.label_row).clamp(0, self.label_bias.num_embeddings - 1)
        vectors: Tensor = self.label_bias(places)
        return self.setting.label_weight * vectors

    def _scores(self, states: Tensor) -> Tensor:
        if self.narrow is not None:
            return functional.linear(self.narrow(states), self.embedding.weight)
        if self.output is None:
            raise RuntimeError("a model has one of two layers that score words")
        scores: Tensor = self.output(states)
        return scores

    @torch.no_grad()
    def begin(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Told, State]:
        """The scores (B, rows) of a first word, what later ones are to be told, and the decoder's state, from z
        (B, latent) and ids of labels (B,).
        """
        vectors = self.embedding(labels)
        told = Told(self._context(z, vectors), self._label_bias(labels))
        nothing = z.new_zeros(len(z), self.setting.hidden)
        scores, state = self._step(vectors, told, (nothing, nothing))
        return scores, told, state

    @torch.no_grad()
    def step(self, words: Tensor, told: Told, state: State, shift: Tensor | None = None) -> tuple[Tensor, State]:
        """The scores (B, rows) of the word behind these (B,), and the state. shift: added to their vectors."""
        vectors = self.embedding(words)
        return self._step(vectors if shift is None else vectors + shift, told, state)

    def _step(self, vectors: Tensor, told: Told, state: State) -> tuple[Tensor, State]:
        """One position of `learning.models.lstm`."""
        before, cell = state
        layer = self.decoder
        inputs = functional.linear(torch.cat([vectors, told.context], dim=1), layer.weight_ih, layer.bias)
        i, f, g, o = torch.addmm(inputs, before, layer.weight_hh.T).chunk(4, dim=1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        return self._scores(hidden + told.label_bias), (hidden, cell)


def rvae(model: RvaeModel, vocabulary_size: int, labels: int, pad_id: int, seed: int | None) -> Rvae:
    """As `learning.models.build` asks for an architecture. Raises: ValueError: not a list of words."""
    if pad_id != PAD_ID:
        raise ValueError(f"a list of words has its padding at {PAD_ID}, not at {pad_id}")
    setting = RvaeSetting(**model.model_dump(exclude={"architecture", "variant"}))
    return Rvae(setting, min(vocabulary_size, setting.words), labels, seed)
