"""Samples texts from the prior and a label, which is what the sound variant releases.

    z ~ N(0, I); then word after word from the decoder's scores, until it ends the text, or max_tokens
    scores      s_y + guidance (s_y - mean of s over labels), with one decoder for each label, all reading the same
                words: p(word | label) times the `guidance`th power of how much more this label prefers the word than
                labels do on average (classifier-free guidance, Ho and Salimans 2022, with the mean in place of a model
                without label)

Guarantees: nothing of a private text is read, so sampling is post-processing of weights and histogram
(`learning.synthesis.training` has the theorem and its assumptions). All randomness comes from the source that the
caller passes in: a seeded one gives the same texts on the same machine, and with the system's nobody can predict them.
Neither padding nor [UNK] nor a label is ever written.
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
    """How words are drawn.

    Attributes:
        temperature: Divides the scores.
        top_k: Words are drawn only from this many of the best, after guidance; None means all.
        guidance: See above. 0 leaves the scores unchanged; it is the default here, but not of a job's `corpus`.
        max_tokens: A longer text is cut.
        batch: Decoders at a time: one for each text, or with guidance one for each text and label.
    """

    temperature: float = 1.0
    top_k: int | None = None
    guidance: float = 0.0
    max_tokens: int = 32
    batch: int = 256

    def __post_init__(self) -> None:
        if not 0.05 <= self.temperature <= 20:
            raise ValueError(f"temperature must lie between 0.05 and 20, got {self.temperature}; 1 is plain sampling")
        if not 0 <= self.guidance <= 20:
            raise ValueError(f"guidance must lie between 0 and 20, got {self.guidance}; 0 is plain sampling")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; leave it out for all words")
        if self.max_tokens < 1 or self.batch < 1:
            raise ValueError(f"max_tokens and batch must be at least 1, got {self.max_tokens} and {self.batch}")


@dataclass(frozen=True, slots=True)
class SyntheticText:
    """A synthetic text, possibly empty. `label` is its index in the job's list."""

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
    """Samples texts in random order, with labels in the histogram's proportions.

    Args:
        module: The model.
        words: The job's words.
        histogram: (L,) A count for each label, noised by `labels.noised_histogram`.
        count: How many texts to sample.
        random: The source of all randomness.
        sampling: How words are drawn.
        progress: Called with (texts made, count) before each word of a batch and after it. An exception of its own
            ends the sampling.

    Raises:
        ValueError: The histogram has not one count for each label, or a negative one; or guidance has more labels than
            `MAX_GUIDED_LABELS`.
    """
    sampling = sampling or Sampling()
    if sampling.guidance and words.labels > MAX_GUIDED_LABELS:
        raise ValueError(
            f"guidance by {words.labels} labels needs as many decoders, and {MAX_GUIDED_LABELS} is the limit; set "
            "guidance to 0"
        )
    if histogram.shape != (words.labels,):
        raise ValueError(f"a histogram of {words.labels} labels needs as many counts, got shape {histogram.shape}")
    places = np.repeat(np.arange(words.labels), allocated(histogram, count))
    # In random order, so a corpus that is cut to a size keeps its proportions.
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
    """The ids of words for each z (B, latent) under the label of its index (B,)."""
    # With guidance every label's decoder reads the same words: streams (L, B), flattened.
    streams = words.labels if sampling.guidance else 1
    labels = np.repeat(np.arange(words.labels), len(z)) if sampling.guidance else places
    scores, told, state = module.begin(z.repeat(streams, 1), torch.from_numpy(words.label_ids(labels)))
    # The stream of each text's own label.
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
    """Guided scores (B, rows) of each text's own label, from scores (streams * B, rows) and `own` (B,)."""
    by_label = scores.view(streams, len(own), -1)
    chosen = by_label[own, torch.arange(len(own))]
    return chosen + guidance * (chosen - by_label.mean(dim=0)) if guidance else chosen


def draw_words(scores: Tensor, words: PublicWords, random: RandomSource, sampling: Sampling) -> Tensor:
    """Draws one word's id for each row of scores (B, rows), by inverting its distribution at a uniform number.

    Returns:
        Ids, (B,).

    Raises:
        ValueError: A score is not finite.
    """
    allowed = scores[:, : words.end_id + 1].double() / sampling.temperature
    if not bool(torch.isfinite(allowed).all()):
        raise ValueError("the model's scores are not finite, so its weights are spoilt; use an earlier version")
    allowed[:, [PAD_ID, UNKNOWN_ID]] = -torch.inf
    if sampling.top_k is not None and sampling.top_k < allowed.shape[1] - 2:
        best = allowed.topk(sampling.top_k, dim=1).indices
        allowed = torch.full_like(allowed, -torch.inf).scatter(1, best, allowed.gather(1, best))
    masses = allowed.softmax(dim=1).cumsum(dim=1)
    at = torch.from_numpy(_uniforms(len(scores), random))[:, None] * masses[:, -1:]
    # The first index whose cumulated mass exceeds the number, so never a word without mass.
    return torch.searchsorted(masses, at, right=True).squeeze(1).clamp(max=words.end_id)


def _uniforms(count: int, random: RandomSource) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits each."""
    bits = np.frombuffer(random.bytes(8 * count), dtype="<u8")
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
