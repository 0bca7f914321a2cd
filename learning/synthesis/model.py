"""The recurrent variational autoencoder (Bowman et al. 2016, "Generating sentences from a continuous space").

    encoder     words and label through an LSTM; two linear layers turn its last state into mean and log variance of z
    z           mean + std * noise (Kingma and Welling 2014)
    context     tanh of a linear layer of z and the label's vector
    decoder     an LSTM whose first step reads the label's vector and the context, and no word. So the state from which
                the first word is guessed depends on z and the label. Every later word gets the context too
    label_bias  a vector of each label, times label_weight, added to the decoder's state before words are scored: which
                words a label prefers. It starts at zero. Without it, texts hardly know their label
                (docs/decisions/0028)
    loss        for each text: its words' negative log likelihood plus kl_weight times its KL divergence, of which each
                dimension counts as at least free_bits / latent; divided by a constant, max_tokens + 1

Guarantees: a text's loss is a function of its own row of ids and its own coins (the noise of z, and which words are
replaced). There is no mean over a batch, no normalisation and no broadcast row. Every trained parameter acts through
one call of one layer, whose gradients `learning.training.clipping` tells apart by example. That is why one look-up
serves the words of encoder and decoder, and why LSTMs start at zero. Coins come from the generator that `seed` or
`draw_from` starts, and depend on no text. Under DP-SGD they come from the noise's own source, so nobody knows them.

For the training loops the model is a `TextClassifier`: it maps ids (B, S) to two log-probabilities, whose cross entropy
with index 0 is exactly the loss above. So `learning.training.local` and `learning.training.private` train it without
changes, with labels of zeros. A text's own label is the first of its ids (`learning.synthesis.words`).
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

# Beyond this, a standard deviation and its gradient are 0 or enormous in float32.
_LOG_VARIANCE = 10.0
# Below this loss l, float32 has no ln(1 - e^-l).
_MIN_LOSS = 1e-6

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Coins:
    """The randomness of a forward pass, by text.

    Attributes:
        noise: (B, latent) The noise of z.
        kept: (B, S - 1) bool, the decoder's input words that are not replaced.
        shift: (B, S - 1, embedding) Added to the decoder's input, in the published variant.
    """

    noise: Tensor
    kept: Tensor
    shift: Tensor | None = None


@dataclass(frozen=True)
class Told:
    """What the decoder knows of each text besides its words, the same at every step.

    Attributes:
        context: (B, embedding) Input next to every word.
        label_bias: (B, hidden) The label's offset to the states by which words are scored.
    """

    context: Tensor
    label_bias: Tensor


@dataclass(frozen=True)
class Losses:
    """The parts of each text's loss, (B,), in nats.

    Attributes:
        reconstruction: The words' negative log likelihood.
        divergence: The KL divergence.
        paid: The divergence as it counts in the loss: no dimension below its free bits.
        words: Words guessed, including the end.
    """

    reconstruction: Tensor
    divergence: Tensor
    paid: Tensor
    words: Tensor


class Rvae(TextClassifier):
    """Maps ids (B, S) of `PublicWords.encode` to (B, 2) log-probabilities.

    In evaluation mode z is the mean and no word is replaced. Initial weights are as in the other LSTMs: the embedding
    N(0, embedding_std), the rest uniform within 1 / sqrt(fan in). Log variances start near zero, and what a label adds
    to the states starts at zero. Without a seed all weights are zero.
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
    # A batch in three pieces, however short its rows are, so that a seed draws what it drew where this was measured.
    piece_positions = 1
    # Layers whose gradient the published variant perturbs.
    encoding: ClassVar[frozenset[str]] = frozenset({"encoder", "mean", "log_variance"})

    def __init__(self, setting: RvaeSetting, entries: int, labels: int, seed: int | None) -> None:
        """`entries` is the number of `PublicWords.entries`, and `labels` the number of labels."""
        super().__init__()
        self.setting, self.pad_id, self.min_tokens = setting, PAD_ID, 2
        self.label_row, rows = entries + 1, entries + 1 + labels
        table = np.zeros((rows, setting.embedding), dtype=np.float32)
        self.embedding = nn.Embedding(rows, setting.embedding, padding_idx=PAD_ID, _weight=torch.from_numpy(table))
        self.embedding.weight.requires_grad_(not setting.freeze_embedding)
        # Holds the generator of all coins. It drops nothing itself: words are replaced instead, so nothing is scaled.
        self.dropout = Dropout(0.0)
        self.encoder = LSTM(setting.embedding, setting.hidden)
        self.decoder = LSTM(2 * setting.embedding, setting.hidden)
        self.label_bias = nn.Embedding(labels, setting.hidden, _weight=torch.zeros(labels, setting.hidden))
        # Torch fills a linear layer from its global generator, which is restored afterwards.
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
        """Keeps all rows: every word is scored at every position."""
        if ids.size and not 0 <= ids.min() <= ids.max() < self.embedding.num_embeddings:
            raise ValueError(
                f"ids are outside the embedding of {self.embedding.num_embeddings} rows; use the job's tokenizer"
            )
        yield ids

    def toss(self, ids: Tensor, word_dropout: float | None = None) -> Coins:
        """Draws coins for a forward pass over ids (B, S), from the generator that `seed` or `draw_from` started.

        They depend on the shape of `ids` alone. `word_dropout` is the setting's if None.
        """
        share = self.setting.word_dropout if word_dropout is None else word_dropout
        batch, length = ids.shape[0], ids.shape[1] - 1
        draws, device = self.dropout.draws, ids.device
        noise = draws.normal(batch, self.setting.latent, device=device)
        return Coins(noise, draws.uniform(batch, length, device=device) >= share)

    def losses(self, ids: Tensor, coins: Coins | None = None, *, prior: bool = False) -> Losses:
        """The parts of each text's loss. Without coins, z is the mean and no word is replaced; with `prior`, z is the
        coins' noise itself.
        """
        before, after = ids[:, :-1], ids[:, 1:]
        read = before
        if coins is not None:
            # The first id is the label, which is never replaced.
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
        """(B,) The loss that training lowers, each text's own."""
        found = self.losses(ids, coins)
        return (found.reconstruction + self.setting.kl_weight * found.paid) / (self.setting.max_tokens + 1)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, 2) Log-probabilities -l and ln(1 - e^-l) of a text's loss l. Their cross entropy with index 0 is l."""
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
        """One vector of the decoder's width for each label id."""
        # Probe texts have words in the label's place; those read the nearest label's vector.
        places = (labels - self.label_row).clamp(0, self.label_bias.num_embeddings - 1)
        vectors: Tensor = self.label_bias(places)
        return self.setting.label_weight * vectors

    def _scores(self, states: Tensor) -> Tensor:
        if self.narrow is not None:
            return functional.linear(self.narrow(states), self.embedding.weight)
        if self.output is None:
            raise RuntimeError("the model has no layer that scores words")
        scores: Tensor = self.output(states)
        return scores

    @torch.no_grad()
    def begin(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Told, State]:
        """Starts decoding from z (B, latent) and label ids (B,).

        Returns:
            The first word's scores (B, rows), what later steps need, and the decoder's state.
        """
        vectors = self.embedding(labels)
        told = Told(self._context(z, vectors), self._label_bias(labels))
        nothing = z.new_zeros(len(z), self.setting.hidden)
        scores, state = self._step(vectors, told, (nothing, nothing))
        return scores, told, state

    @torch.no_grad()
    def step(self, words: Tensor, told: Told, state: State, shift: Tensor | None = None) -> tuple[Tensor, State]:
        """The scores (B, rows) of the words after these (B,), and the new state. `shift` is added to their vectors."""
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
    """Builds the model for `learning.models.build`. Raises ValueError if the tokenizer is no list of words."""
    if pad_id != PAD_ID:
        raise ValueError(f"a list of words must have its padding at {PAD_ID}, got {pad_id}")
    setting = RvaeSetting(**model.model_dump(exclude={"architecture", "variant"}))
    return Rvae(setting, min(vocabulary_size, setting.words), labels, seed)
