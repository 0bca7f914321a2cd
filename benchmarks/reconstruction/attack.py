"""Attacks that recover a batch's tokens from its gradient, defences against them, and their score.

**The attacker.** It is a curious coordinator of a federation without secure aggregation (or n - 1 members that collude
with it under secure aggregation). It knows the shared parameters, and sees the gradient of one member's shared
parameters for one batch, as after a single local step of plain SGD. It is told more than it would know: the labels, the
length of every text, and that dropout was off. Several local steps, real dropout and unknown lengths would only make
its task harder.

**Tables.** A gradient of the encoder reveals vectors. Words come from a table of words and vectors (`Table`): the
member's present one, an unrelated one (Tan et al. 2023, FedVocab), or the public one that the member started from.

**Attacks**, from the shared gradient to tokens:

- `tokens_by_rows`: if the embedding is shared, the rows with a gradient are the batch's tokens. This is exact as a set
  for any batch, but gives neither order nor counts.
- `vectors_by_matching` with `nearest_words`: DLG (Zhu, Liu, Han 2019) on the encoder's input vectors. It optimises
  dummy vectors until their gradient is the observed one, and then looks up every vector. It is the FedVocab paper's
  attack.
- `tokens_by_span`: the gradient of an LSTM's input weights is sum_t g_t x_t^T, so its rows span the batch's word
  vectors, and a word of the table is in the batch if its vector is in the span. This is exact while there are fewer
  distinct tokens than embedding dimensions.
- `tokens_by_states`: the same for the recurrent weights, whose gradient spans the states h_t. A state follows from the
  words so far, so texts are read word by word, in order, while the batch has fewer tokens than the hidden state has
  dimensions, for any embedding width.
- `tokens_by_positions`: the same for the first attention's projections in a transformer, where a word's input depends
  only on its position (DAGER: Petrov et al. 2024, section 4). It also gives the order.

The span attacks need no optimisation and no labels, and dropout after the encoder does not disturb them.

`tokens` has the data, the models, and the training that moves a table away from its start.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from learning.auditing.spans import Distance, NoSpan, projections, rows_at_positions, span_of
from learning.models import TextClassifier
from learning.models.division import EMBEDDING, Division
from learning.models.lstm import LSTM

__all__ = [
    "SPECIAL",
    "Batch",
    "Gradient",
    "Matching",
    "NoSpan",
    "Observed",
    "Table",
    "Tally",
    "Values",
    "has_digit",
    "nearest_words",
    "noised",
    "shared_gradient",
    "shared_words",
    "summed",
    "tally",
    "tokens_by_positions",
    "tokens_by_rows",
    "tokens_by_span",
    "tokens_by_states",
    "vectors_by_matching",
]

# Tokens that are not part of a text, so recovering them leaks nothing.
SPECIAL = frozenset({"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"})


# Words tried at each step of a text, for each dimension of the span of input vectors.
TRIED = 2

Gradient = Mapping[str, Tensor]
Values = NDArray[np.float32]
Ids = NDArray[np.int64]


# ---- the score -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tally:
    """Token counts that add up over batches. `matched` and `matched_digits` count each reference token once."""

    matched: int = 0
    recovered: int = 0
    reference: int = 0
    matched_digits: int = 0
    reference_digits: int = 0

    def __add__(self, other: Self) -> "Tally":
        return Tally(
            self.matched + other.matched,
            self.recovered + other.recovered,
            self.reference + other.reference,
            self.matched_digits + other.matched_digits,
            self.reference_digits + other.reference_digits,
        )

    @property
    def precision(self) -> float:
        """Share of the attacker's tokens that are correct; 0 if it names none."""
        return self.matched / self.recovered if self.recovered else 0.0

    @property
    def recall(self) -> float:
        """Share of the texts' tokens that the attacker found."""
        return self.matched / self.reference if self.reference else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        both = self.recovered + self.reference
        return 2 * self.matched / both if both else 0.0

    @property
    def digit_leakage(self) -> float:
        """Share of the tokens with a digit that the attacker found."""
        return self.matched_digits / self.reference_digits if self.reference_digits else 0.0


def has_digit(token: str) -> bool:
    """Tell whether a token has a digit, which makes it private in the paper."""
    return any(character.isdigit() for character in token)


def tally(reference: Iterable[str], recovered: Iterable[str]) -> Tally:
    """Count one batch. Order does not matter. A token that occurs twice must be named twice to count twice."""
    there = Counter(token for token in reference if token not in SPECIAL)
    said = Counter(token for token in recovered if token not in SPECIAL)
    matched = there & said
    return Tally(
        matched.total(),
        said.total(),
        there.total(),
        sum(count for token, count in matched.items() if has_digit(token)),
        sum(count for token, count in there.items() if has_digit(token)),
    )


# ---- what the attacker has -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Words and their vectors, rows of shape (len(words), D)."""

    words: tuple[str, ...]
    rows: Values

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or len(self.words) != len(self.rows):
            raise ValueError(f"{len(self.words)} words need as many vectors, got an array of shape {self.rows.shape}")

    def unrelated(self, seed: int) -> "Table":
        """Return the same words with Gaussian vectors, with the mean and standard deviation of each coordinate here."""
        random = np.random.Generator(np.random.Philox(seed))
        drawn = random.standard_normal(self.rows.shape, dtype=np.float32)
        return replace(self, rows=drawn * self.rows.std(axis=0) + self.rows.mean(axis=0))

    def with_rows_of(self, other: "Table", words: frozenset[str]) -> "Table":
        """Return this table with the other's vectors for the given words.

        Raises:
            ValueError: the tables do not have the same words in the same order.
        """
        if self.words != other.words:
            raise ValueError("the tables have different words; take rows from a table with the same words")
        taken = np.array([word in words for word in self.words])
        return replace(self, rows=np.where(taken[:, None], other.rows, self.rows))

    def without_padding(self) -> "Table":
        """Return the table without padding rows.

        The other special words stay. They have vectors like any word, and without them an attack would fail after every
        unknown word.
        """
        kept = [place for place, word in enumerate(self.words) if word != "[PAD]"]
        return Table(tuple(self.words[place] for place in kept), self.rows[kept])


@dataclass(frozen=True)
class Batch:
    """Texts as the member trains on them.

    Args:
        ids: (B, S), padded at the end.
        labels: (B,).
        words: the member's, by id.
        pad_id: id of padding.
    """

    ids: Ids
    labels: Ids
    words: tuple[str, ...]
    pad_id: int

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Mask of the tokens, (B, S)."""
        found: NDArray[np.bool_] = self.ids != self.pad_id
        return found

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each text, including special ones."""
        return tuple(int(length) for length in self.seen.sum(axis=1))

    def tokens(self) -> list[str]:
        """Return all tokens of the batch, including special ones."""
        return [self.words[place] for place in self.ids[self.seen]]


def shared_gradient(module: TextClassifier, batch: Batch, division: Division) -> dict[str, Tensor]:
    """Return what leaves the member: the gradient of the batch's mean cross entropy for the shared parameters.

    The module is in evaluation mode, so dropout is off. Frozen parameters have no gradient. For an embedding with
    private rows it has the shared rows' gradients, in their order.
    """
    trained = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in division.names
    }
    module.eval()
    logits = module(torch.from_numpy(batch.ids))
    loss = functional.cross_entropy(logits, torch.from_numpy(batch.labels))
    found = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    if division.rows is not None and EMBEDDING in found:
        found[EMBEDDING] = found[EMBEDDING][torch.from_numpy(_shared_rows(division, len(batch.words)))]
    return found


def shared_words(division: Division, words: Sequence[str]) -> list[str]:
    """Return the words whose vectors the division shares, in the order of the shared embedding's rows."""
    if EMBEDDING in division.names:
        return []
    return [words[place] for place in _shared_rows(division, len(words))]


def _shared_rows(division: Division, count: int) -> Ids:
    rows: Ids = np.arange(count) if division.rows is None else np.setdiff1d(np.arange(count), division.rows)
    return rows


# ---- defences ------------------------------------------------------------------------------------------------


def noised(gradient: Gradient, clip: float, multiplier: float, seed: int) -> dict[str, Tensor]:
    """Clip the whole gradient to L2 norm `clip` and add Gaussian noise of standard deviation `multiplier` x `clip`."""
    norm = float(torch.sqrt(sum((value.square().sum() for value in gradient.values()), torch.zeros(()))))
    scale = min(1.0, clip / norm) if norm else 1.0
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value * scale + torch.randn(value.shape, generator=generator) * (multiplier * clip)
        for name, value in gradient.items()
    }


def summed(gradients: Sequence[Gradient]) -> dict[str, Tensor]:
    """Return what secure aggregation reveals of several members: the sum of each parameter."""
    return {name: torch.stack([each[name] for each in gradients]).sum(dim=0) for name in gradients[0]}


# ---- the embedding is shared ---------------------------------------------------------------------------------


def tokens_by_rows(gradient: Gradient, words: Sequence[str]) -> list[str]:
    """Return the words whose embedding row has a gradient, each once. words: by row (`shared_words`)."""
    moved = gradient[EMBEDDING].abs().amax(dim=1) > 0
    return [words[place] for place in moved.nonzero().ravel().tolist()]


# ---- spans ---------------------------------------------------------------------------------------------------


def _cells(names: Iterable[str]) -> dict[Literal["onward", "backward"], str]:
    """Return the prefix of the parameters' names for each direction of the LSTM.

    Raises:
        NoSpan: the gradient is not an LSTM's.
    """
    known = set(names)
    prefixes: dict[Literal["onward", "backward"], str] = {
        "onward": "encoder.onward.",
        "backward": "encoder.backward.",
    }
    if not all(f"{prefix}weight_{part}" in known for prefix in prefixes.values() for part in ("ih", "hh")):
        raise NoSpan("the gradient has no LSTM with two directions; use the attack for the model's architecture")
    return prefixes


def tokens_by_span(gradient: Gradient, table: Table, lengths: Sequence[int]) -> list[str]:
    """Recover an LSTM's words by the span of its input vectors: as many as the span has dimensions, each once.

    Raises:
        NoSpan: the gradient is not an LSTM's.
    """
    table = table.without_padding()
    weights = [gradient[f"{prefix}weight_ih"] for prefix in _cells(gradient).values()]
    basis, rank = span_of(weights, sum(lengths))
    distances = Distance(basis)(torch.from_numpy(table.rows))
    return [table.words[place] for place in distances.argsort()[:rank].tolist()]


@dataclass(frozen=True)
class _Reading:
    """A text as read in one direction.

    Args:
        words: their places in the table.
        distances: of each word's state from the span.
        hidden, memory: h and c after the last word, (H,).
    """

    words: tuple[int, ...]
    distances: tuple[float, ...]
    hidden: Tensor
    memory: Tensor


def tokens_by_states(
    gradient: Gradient, parameters: Mapping[str, Tensor], table: Table, lengths: Sequence[int]
) -> list[str]:
    """Recover an LSTM's words one after another by the span of its states, from both ends.

    With max pooling a state contributes to the gradient only if it, or a later one, is the largest in some feature. So
    one direction loses a text's end, and the other its beginning. If both have a word, the nearer one counts. A text of
    one word leaves no state.

    Args:
        parameters: the shared ones at which the gradient was taken.

    Raises:
        NoSpan: the gradient is not an LSTM's.
    """
    table = table.without_padding()
    prefixes = _cells(gradient)
    near, rows = _near(gradient, prefixes.values(), torch.from_numpy(table.rows), lengths)
    most = max(1, sum(length - 1 for length in lengths))
    readings = []
    for prefix in (prefixes["onward"], prefixes["backward"]):
        weights = {part: parameters[prefix + part] for part in ("weight_ih", "weight_hh", "bias")}
        basis, _ = span_of([gradient[f"{prefix}weight_hh"]], most)
        readings.append(_read(weights, basis, rows, lengths))
    return [table.words[int(near[place])] for place in _joined(readings[0], readings[1], lengths)]


def _near(gradient: Gradient, prefixes: Iterable[str], rows: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the places of the rows nearest to the span of the input vectors, and their projections onto it.

    The rest of a row is how far the table is outdated. If the span is almost the whole space, all rows are returned
    unchanged.
    """
    basis, rank = span_of([gradient[f"{prefix}weight_ih"] for prefix in prefixes], sum(lengths))
    if rank > 0.9 * rows.shape[1]:
        return torch.arange(len(rows)), rows
    near = Distance(basis)(rows).argsort()[: TRIED * rank]
    return near, rows[near] @ basis @ basis.T


def _read(weights: Mapping[str, Tensor], basis: Tensor, rows: Tensor, lengths: Sequence[int]) -> list[_Reading]:
    """Read as many texts as there are lengths, word by word.

    Each step keeps the pairs of a beginning and a next word whose state is nearest to the span. The length of each
    beginning is unknown: when a text ends, the one that fits worst is assumed to be it. The last word is left out,
    because no step follows its state, which therefore does not contribute to the gradient.
    """
    distance, size = Distance(basis), weights["weight_hh"].shape[1]
    inputs = rows @ weights["weight_ih"].T + weights["bias"]
    alive, ended = [_Reading((), (), torch.zeros(size), torch.zeros(size))], list[_Reading]()
    for step in range(max(lengths) - 1):
        wanted = sum(length - 1 > step for length in lengths)
        hidden, memory = _next_states(inputs, weights["weight_hh"], alive)
        distances = distance(hidden)
        nearest = distances.ravel().topk(min(wanted, distances.numel()), largest=False)
        followed, grown = set[int](), list[_Reading]()
        for far, place in zip(nearest.values.tolist(), nearest.indices.tolist(), strict=True):
            before, word = divmod(place, len(rows))
            followed.add(before)
            # The true state is in the span. The rest comes from the outdated table.
            state = basis @ (basis.T @ hidden[before, word])
            old = alive[before]
            grown.append(_Reading((*old.words, word), (*old.distances, far), state, memory[before, word]))
        ended += [reading for place, reading in enumerate(alive) if place not in followed]
        alive = grown
    return alive + ended


def _joined(onward: Sequence[_Reading], backward: Sequence[_Reading], lengths: Sequence[int]) -> list[int]:
    """Join the readings of both directions that agree best, longest text first, and return all words."""
    left, right, found = list(onward), list(backward), list[int]()
    for length in sorted(lengths, reverse=True):
        pairs = [(_agreement(one, other, length), a, b) for a, one in enumerate(left) for b, other in enumerate(right)]
        if not pairs:
            break
        _, a, b = max(pairs)
        one, other = left.pop(a), right.pop(b)
        for place in range(length):
            ways = [
                (reading.distances[at], reading.words[at])
                for reading, at in ((one, place), (other, length - 1 - place))
                if at < len(reading.words)
            ]
            found += [min(ways)[1]] if ways else []
    return found


def _agreement(onward: _Reading, backward: _Reading, length: int) -> tuple[int, int]:
    """Return in how many places of a text two readings agree, and how many words they have."""
    one, other = onward.words[:length], backward.words[:length]
    places = range(max(0, length - len(other)), min(length, len(one)))
    return sum(one[at] == other[length - 1 - at] for at in places), len(one) + len(other)


def _next_states(inputs: Tensor, recurrent: Tensor, readings: Sequence[_Reading]) -> tuple[Tensor, Tensor]:
    """Return h and c, (P, V, H) each, after each reading and each next word, as in `learning.models.lstm`."""
    before = torch.stack([reading.hidden for reading in readings]) @ recurrent.T
    memory = torch.stack([reading.memory for reading in readings])
    enter, forget, cell, leave = (before[:, None, :] + inputs[None]).chunk(4, dim=-1)
    kept = forget.sigmoid() * memory[:, None, :] + enter.sigmoid() * cell.tanh()
    return leave.sigmoid() * kept.tanh(), kept


def tokens_by_positions(module: TextClassifier, gradient: Gradient, table: Table, lengths: Sequence[int]) -> list[str]:
    """Recover a transformer's words by the span of the first attention's inputs, position by position.

    At each position it finds at most as many words as there are texts of that length.

    Args:
        module: used only for its shared parameters and layers, not for its embedding.
        lengths: include [CLS] and [SEP].

    Raises:
        NoSpan: the model has no attention.
    """
    table = table.without_padding()
    weights = [gradient[f"{name}.weight"] for name, _ in projections(module)]
    places = rows_at_positions(module, weights, torch.from_numpy(table.rows), lengths)
    return [table.words[place] for place in places]


# ---- matching ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matching:
    """Options of DLG's search.

    Args:
        rate: Adam's rate at the start.
        std: standard deviation of the dummy vectors at the start.
        starts: number of searches for each batch.
        whitening: None, or the ratio of singular values down to which a gradient's directions weigh as much as its
            strongest one (`_Distances`).
    """

    steps: int = 200
    rate: float = 0.1
    std: float = 0.5
    starts: int = 1
    whitening: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Observed:
    """The known facts of one batch: its gradient, its labels, (B,), and the mask of its tokens, (B, S)."""

    gradient: Gradient
    labels: Ids
    seen: NDArray[np.bool_]


# A softmax over a text's states replaces their maximum while DLG searches: its temperature at the start and at the end,
# and the share of the steps that use it.
_SOFTEST, _HARDEST, _SOFT = 0.3, 0.005, 0.9

# A gradient this much smaller than the largest is rounding noise, such as that of the keys' bias, which has no effect.
_NOTHING = 1e-6


def vectors_by_matching(module: TextClassifier, observed: Sequence[Observed], how: Matching) -> list[Values]:
    """Find dummy vectors (B, S, D) for each batch, whose gradient is nearest to the observed one.

    Labels and lengths are known. All searches run in parallel, because a step of many costs little more than one of
    one.

    This is DLG (Zhu, Liu, Han 2019) with three changes, without which it finds little in texts of thirty words. The
    distance is the sum of absolute differences, which TAG (Deng et al. 2021) uses beside the squared ones, relative to
    the size of each matrix. A maximum over positions hides from the search which word holds it, so a softmax with
    falling temperature replaces it. If a few directions drown the rest, as in a transformer, `whitening` amplifies the
    others. It matches the matrices of LSTMs and linear layers, but not the embedding's rows, positions and
    normalisations. Among several starts, the nearest gradient decides, without a table.

    Raises:
        ValueError: there are no batches, or batches of different sizes.
    """
    if len({len(each.labels) for each in observed}) != 1:
        raise ValueError("only batches of one size can be searched in parallel; pass at least one, all of equal size")
    module.eval()
    cases = [each for each in observed for _ in range(how.starts)]
    there, target = _side_by_side(cases)
    distances = [_Distances(each.gradient, how.whitening) for each in cases]
    generator = torch.Generator().manual_seed(how.seed)
    width = module.embedding.embedding_dim
    vectors = torch.randn(*there.shape, width, generator=generator).mul_(how.std).requires_grad_()
    optimiser = torch.optim.Adam([vectors], lr=how.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, how.steps, how.rate / 100)
    best, least = vectors.detach().clone(), torch.full((len(cases),), torch.inf)
    # Fused attention cannot be differentiated twice.
    with _Watched(module) as watched, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        for step in range(how.steps):
            soft = watched.pools and step < _SOFT * how.steps
            temperature = _SOFTEST * (_HARDEST / _SOFTEST) ** (step / (_SOFT * how.steps)) if soft else None
            found = watched.gradients(vectors, there, target, temperature)
            apart = torch.stack(
                [each({name: of[at] for name, of in found.items()}) for at, each in enumerate(distances)]
            )
            if not soft:
                nearer = apart.detach() < least
                least, best[nearer] = torch.where(nearer, apart.detach(), least), vectors.detach()[nearer]
            (vectors.grad,) = torch.autograd.grad(apart.sum(), [vectors])
            optimiser.step()
            schedule.step()
    chosen = least.view(-1, how.starts).argmin(dim=1) + torch.arange(0, len(cases), how.starts)
    return [best[at, :, : each.seen.shape[1]].numpy() for at, each in zip(chosen.tolist(), observed, strict=True)]


def _side_by_side(cases: Sequence[Observed]) -> tuple[Tensor, Tensor]:
    """Return the masks of tokens, (P, B, S) for the longest text, and the labels, (P, B)."""
    longest = max(each.seen.shape[1] for each in cases)
    there = [functional.pad(torch.from_numpy(each.seen), (0, longest - each.seen.shape[1])) for each in cases]
    return torch.stack(there), torch.from_numpy(np.stack([each.labels for each in cases]))


class _Distances:
    """Distances of gradients from an observed one.

    For each tensor it is the sum of absolute differences over the sum of the observed absolute values.

    With whitening, for a matrix with singular values s and vectors U, V, it is the mean over its directions of
    |diag(s)^(-1/2) U^T (f - w) V diag(s)^(-1/2)|, summed, with s at least `whitening` times the largest. The gradient
    of n words has n directions. If texts are pooled by a mean, all directions but one are weaker by orders of
    magnitude, and these distinguish the words.
    """

    def __init__(self, wanted: Gradient, whitening: float | None) -> None:
        least = _NOTHING * max(float(value.norm()) for value in wanted.values())
        self._wanted = {name: value for name, value in wanted.items() if float(value.norm()) > least}
        self._sides: dict[str, tuple[Tensor, Tensor]] = {}
        for name, value in self._wanted.items() if whitening is not None else ():
            if value.ndim == 2 and name != EMBEDDING:
                left, strengths, right = torch.linalg.svd(value.to(torch.float64), full_matrices=False)
                roots = strengths.clamp(min=float(strengths[0]) * (whitening or 0)).sqrt()
                self._sides[name] = ((left / roots).T.to(torch.float32), (right.T / roots).to(torch.float32))

    def __call__(self, found: Mapping[str, Tensor]) -> Tensor:
        """Return the distance. found: gradients of the matched tensors."""
        shares = []
        for name, value in found.items():
            if name not in self._wanted:
                continue
            apart = value - self._wanted[name]
            if name in self._sides:
                left, right = self._sides[name]
                shares.append((left @ apart @ right).abs().sum() / len(left))
            else:
                shares.append(apart.abs().sum() / self._wanted[name].abs().sum())
        return torch.stack(shares).sum()


class _Watched:
    """Observes a model's LSTMs and linear layers, and gives the gradients of several batches from one pass.

    A layer's gradient is sum_t g_t x_t^T, with g_t the loss's gradient at the layer's output. So one pass serves all
    batches, and x_t and g_t can be differentiated again.
    """

    def __init__(self, module: TextClassifier) -> None:
        self._module = module
        self._of: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []
        self._temperature: float | None = None
        self._there = torch.empty(0)
        self.pools = getattr(module, "pooling", None) == "max"

    def __enter__(self) -> Self:
        for name, layer in self._module.named_modules():
            if isinstance(layer, LSTM):
                layer.observe(self._keeper(name))
                self._handles.append(layer.register_forward_hook(self._recurrent(name)))
            elif isinstance(layer, nn.Linear):
                self._handles.append(layer.register_forward_hook(self._linear(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self._module.modules():
            if isinstance(layer, LSTM):
                layer.observe(None)

    def _keeper(self, name: str) -> Callable[[Tensor, Tensor, Tensor], None]:
        def keep(_: Tensor, __: Tensor, inputs: Tensor) -> None:
            self._of[name] = [inputs]

        return keep

    def _linear(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def keep(_: nn.Module, given: tuple[Any, ...], result: Tensor) -> None:
            self._of[name] = [result, given[0]]

        return keep

    def _recurrent(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
        def keep(_: nn.Module, given: tuple[Any, ...], states: Tensor) -> Tensor | None:
            self._of[name] += [given[0], states]
            if self._temperature is None:
                return None
            shares = (states.masked_fill(~self._there[:, :, None], -torch.inf) / self._temperature).softmax(dim=1)
            # The later maximum over equal values is that value.
            return (shares * states).sum(dim=1, keepdim=True).expand_as(states)

        return keep

    def gradients(self, vectors: Tensor, there: Tensor, target: Tensor, temperature: float | None) -> dict[str, Tensor]:
        """Return the gradients of P batches by name, (P, ...), with a graph.

        Args:
            vectors: (P, B, S, D).
            temperature: of the softmax that replaces the maximum over positions; None takes the maximum.
        """
        self._temperature, self._there, self._of = temperature, there.flatten(0, 1), {}
        logits = self._module.classify(vectors.flatten(0, 1), self._there)
        loss = functional.cross_entropy(logits, target.flatten(), reduction="sum") / target.shape[1]
        given = torch.autograd.grad(loss, [each[0] for each in self._of.values()], create_graph=True)
        found: dict[str, Tensor] = {}
        for (name, kept), at in zip(self._of.items(), given, strict=True):
            behind = _by_batch(at, len(vectors))
            if len(kept) == 3:
                before = functional.pad(kept[2][:, :-1], (0, 0, 1, 0))
                found[f"{name}.weight_ih"] = behind.mT @ _by_batch(kept[1], len(vectors))
                found[f"{name}.weight_hh"] = behind.mT @ _by_batch(before, len(vectors))
            else:
                found[f"{name}.weight"] = behind.mT @ _by_batch(kept[1], len(vectors))
            found[f"{name}.bias"] = behind.sum(dim=1)
        return found


def _by_batch(values: Tensor, batches: int) -> Tensor:
    """Reshape values (P x B, S, D) or (P x B, D) to (P, B x S, D)."""
    return values.reshape(batches, -1, values.shape[-1])


def nearest_words(vectors: Values, seen: NDArray[np.bool_], table: Table) -> list[str]:
    """Return the word with the largest cosine in the table for each vector of (B, S, D) that is a token."""
    table = table.without_padding()
    rows = functional.normalize(torch.from_numpy(table.rows), dim=1)
    asked = functional.normalize(torch.from_numpy(vectors[seen]), dim=1)
    return [table.words[place] for place in (asked @ rows.T).argmax(dim=1).tolist()]
