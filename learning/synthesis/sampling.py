"""Texts from the prior and a label: what the sound variant releases.

    z ~ N(0, I); then word after word from the decoder's scores, until it says that the text ends, or max_tokens
    scores      s_y + guidance (s_y - mean of s over labels), of one decoder for each label that reads the same words:
                p(word | label) times the `guidance`th power of how much more this label likes it than labels do on
                average (classifier-free guidance, Ho and Salimans 2022, the mean in place of a model without label)

Guarantees: nothing of a private text is read, so that this is post-processing of weights and histogram
(`learning.synthesis.training` has the theorem and what it assumes); all randomness is the source's that is handed
in, so that a seeded one gives the same texts on the same machine, and from the system's nobody can foretell them;
neither padding nor [UNK] nor a label is ever written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learning.mechanisms.noise import gaussian_like
from learning.synthesis.labels import Counts, allocated
from learning.synthesis.model import Rvae
from learning.synthesis.words import PAD_ID, UNKNOWN_ID, PublicWords
from secure_agg import RandomSource
from tacit.corpus import MAX_GUIDED_LABELS

__all__ = ["Sampling", "SyntheticText", "draw_words", "sample"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How words are drawn. temperature: scores are divided by it; top_k: only so many of the best words are drawn from
    (None: all), after guidance. guidance: see above; 0, the default here and not of a job's `corpus`, leaves the scores
    as they are. max_tokens: a longer text is cut. batch: decoders at a time, one for each text, under guidance one for
    each text and label.
    """

    temperature: float = 1.0
    top_k: int | None = None
    guidance: float = 0.0
    max_tokens: int = 32
    batch: int = 256

    def __post_init__(self) -> None:
        if not 0.05 <= self.temperature <= 20:
            raise ValueError(f"temperature must lie between 0.05 and 20, is {self.temperature}; 1 is plain sampling")
        if not 0 <= self.guidance <= 20:
            raise ValueError(f"guidance must lie between 0 and 20, is {self.guidance}; 0 is plain sampling")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is 1 at least, is {self.top_k}; leave it out for all words")
        if self.max_tokens < 1 or self.batch < 1:
            raise ValueError(f"max_tokens and batch are 1 at least, are {self.max_tokens} and {self.batch}")


@dataclass(frozen=True, slots=True)
class SyntheticText:
    """A made-up text, possibly empty. label: its place in the job's list."""

    text: str
    label: int


@torch.no_grad()
def sample(
    module: Rvae,
    words: PublicWords,
    histogram: Counts,
    count: int,
    random: RandomSource,
    sampling: Sampling | None = None,
    progress: Callable[[int, int], None] = lambda made, count: None,
) -> list[SyntheticText]:
    """`count` texts, their labels in the histogram's proportions (noised: `labels.noised_histogram`), in random order.

    progress: told (texts made, count) before each word of a batch and after it; what it raises ends the sampling.

    Raises:
        ValueError: a histogram with other than one count for each label, or a negative count; guidance by more labels
            than `MAX_GUIDED_LABELS`.
    """
    sampling = sampling or Sampling()
    if sampling.guidance and words.labels > MAX_GUIDED_LABELS:
        raise ValueError(f"guidance by {words.labels} labels needs as many decoders; above {MAX_GUIDED_LABELS}, set 0")
    if histogram.shape != (words.labels,):
        raise ValueError(f"a histogram of {words.labels} labels has as many counts, got shape {histogram.shape}")
    places = np.repeat(np.arange(words.labels), allocated(histogram, count))
    # In random order, so that a corpus that is cut to a size keeps its proportions.
    places = places[np.argsort(_uniforms(len(places), random), kind="stable")]
    module.eval()
    found: list[SyntheticText] = []
    streams = words.labels if sampling.guidance else 1
    batch = max(1, sampling.batch // streams)
    for first in range(0, count, batch):
        part = places[first : first + batch]
        z = gaussian_like(torch.empty(len(part), module.setting.latent), 1.0, random)
        rows = _rows(module, words, z, part, random, sampling, partial(progress, len(found), count))
        found += [SyntheticText(words.text(row), int(place)) for row, place in zip(rows, part, strict=True)]
        progress(len(found), count)
    return found


def _rows(
    module: Rvae,
    words: PublicWords,
    z: Tensor,
    places: NDArray[np.int64],
    random: RandomSource,
    sampling: Sampling,
    progress: Callable[[], None],
) -> list[list[int]]:
    """Ids of words for each z (B, latent) under the label at its place (B,)."""
    # Under guidance every label's decoder reads along: streams (L, B), one behind the other.
    streams = words.labels if sampling.guidance else 1
    labels = np.repeat(np.arange(words.labels), len(z)) if sampling.guidance else places
    scores, told, state = module.begin(z.repeat(streams, 1), torch.from_numpy(words.label_ids(labels)))
    # Which of the streams is a text's own.
    own = torch.from_numpy(places) if sampling.guidance else torch.zeros(len(z), dtype=torch.int64)
    ended = torch.zeros(len(z), dtype=torch.bool)
    drawn = []
    for _ in range(sampling.max_tokens):
        progress()
        following = draw_words(_guided(scores, own, streams, sampling.guidance), words, random, sampling)
        ended |= following == words.end_id
        drawn.append(following.masked_fill(ended, words.end_id))
        if bool(ended.all()):
            break
        scores, state = module.step(drawn[-1].repeat(streams), told, state)
    rows: list[list[int]] = torch.stack(drawn, dim=1).tolist()
    return rows


def _guided(scores: Tensor, own: Tensor, streams: int, guidance: float) -> Tensor:
    """Scores (B, rows) of each text's own label, made more of it; of scores (streams * B, rows), own (B,)."""
    by_label = scores.view(streams, len(own), -1)
    chosen = by_label[own, torch.arange(len(own))]
    return chosen + guidance * (chosen - by_label.mean(dim=0)) if guidance else chosen


def draw_words(scores: Tensor, words: PublicWords, random: RandomSource, sampling: Sampling) -> Tensor:
    """One word's id for each row of scores (B, rows): (B,). By inverting the distribution at one uniform number each.

    Raises:
        ValueError: scores that are not finite.
    """
    allowed = scores[:, : words.end_id + 1].double() / sampling.temperature
    if not bool(torch.isfinite(allowed).all()):
        raise ValueError("the model's scores are not finite numbers: its weights are spoilt")
    allowed[:, [PAD_ID, UNKNOWN_ID]] = -torch.inf
    if sampling.top_k is not None and sampling.top_k < allowed.shape[1] - 2:
        best = allowed.topk(sampling.top_k, dim=1).indices
        allowed = torch.full_like(allowed, -torch.inf).scatter(1, best, allowed.gather(1, best))
    masses = allowed.softmax(dim=1).cumsum(dim=1)
    at = torch.from_numpy(_uniforms(len(scores), random))[:, None] * masses[:, -1:]
    # The first place whose mass passes the number: never one without mass of its own.
    return torch.searchsorted(masses, at, right=True).squeeze(1).clamp(max=words.end_id)


def _uniforms(count: int, random: RandomSource) -> NDArray[np.float64]:
    """In [0, 1), 53 bits each."""
    bits = np.frombuffer(random.bytes(8 * count), dtype="<u8")
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
