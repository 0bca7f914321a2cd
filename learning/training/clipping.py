"""Sums clipped per-example gradients exactly, without ever holding a gradient for each example.

This is ghost clipping (Goodfellow 2015; Li et al. 2022, "Large language models can be strong differentially private
learners") with the book-keeping of Bu et al. 2023 ("Differentially private optimization on large model at small cost").
One backward pass leaves, for every layer, its input (x) and the loss's gradient at its output (g). Both have a row for
every example. The norm of each example's gradient, and the weighted sum of all gradients, follow from them layer by
layer:

    1. forward          hooks keep x and the output of each layer that has trained parameters
    2. backward         g of all these outputs; no weight gradients are made
    3. norms            |gradient of example b|^2, summed over every trained parameter of the module
    4. weights          min(1, clip / norm)
    5. exact sums       each example's weighted gradient, rounded to a grid, is added to each parameter's sum

The last step makes each example's gradient by a layer, a few examples at a time, and no longer.

For this, an LSTM is unrolled. x is then a step's input next to the state before it, and g is taken where both meet, so
its tensors are those of linear layers over positions (`learning.models.lstm`).

Claim. Let v_b be what example b adds, in units of the clip. Then |v_b| <= 1 (L2, jointly over all trained parameters),
and `sums` is exactly the sum of all v_b. So two draws that differ in one example, and in whose pieces every other
example has the same x and g and is added up alike, differ by one vector of norm at most 1: for any number of examples,
in any order, in any pieces, and for all numbers that the author of the weights and the job can choose.

What the claim assumes. (1) float64 is IEEE's, rounded to nearest. (2) A layer has at most 2^22 positions (a person's
rows together) and the model fewer than 2^31 values. (3) x and g do not depend on the other examples of a piece. They
are float32, and kernels may round them otherwise beside other rows; a version can be made in which that
matters, and nothing here bounds it. On the CPU this was tried for layers 384 wide: rows were the same to the bit in all
pieces of two rows or more. They are not in narrow layers, nor on a GPU: an H200 moved the logits of SmolLM2's 30 layers
by some thousandths of the largest. (4) A device adds an example's own positions in an order that does not depend on the
other examples. A piece helps: all of its rows are equally long, and all of its persons have equally many rows, so
nobody is laid out wider because of somebody else. On the CPU no dependence was found. A GPU's reductions and atomics
promise nothing; there each of the others moves by at most 2^-32 (T^2 + in + out) of a clip for T positions, because
what cancels counts in its norm (layers of other kinds than those named here: without such a bound).

Proof. *Exact.* v_b is a vector of multiples of the grid 2^(k - 53), where 2^k is at least the number of examples, and
no coordinate exceeds 1. So every partial sum is a whole number of at most 2^53 steps, which float64 holds: no addition
rounds. In float32 each would, relative to the sum so far, and rows can be chosen for which these errors differ between
neighbours by more than a clip at 2,048 rows and by 65 clips at 65,536.

*Bounded.* Let G be an example's gradient of a layer, with T positions, from its x and g in real numbers. Let A = sum_t
|x_t| |g_t|, u = 2^-53, and e = 2^-10. The norm that is clipped is

    n^2 = (1 + 2^-19) (|G|^2 + (e^2 + 2^-52 (m + 2^20)) A^2),   summed over layers, where |G|^2 is a sum of m products

Rounding |G|^2 costs at most the second term (Higham 2002, section 3.1; in and out are below 2^20). So n^2 is at least
(1 + 2^-20) (|G|^2 + e^2 A^2): the rest of the first factor is for sums of positive terms, of fewer than 2^31 terms
each. The weighted product of a layer is off by at most T u w A, with w = 1 / max(n, clip). By Cauchy and Schwarz, w
(|G| + T u A) <= w sqrt(|G|^2 + e^2 A^2) sqrt(1 + (T u / e)^2), and T u / e <= 2^-21. So before rounding to the grid,
|v_b| is at most 1 less what the factor leaves. Sums of g alone (biases, layer norms, the words of an embedding) have
the same norm with |x_t| = 1, and are weighted as their norm has them, so only w rounds. Last, w is scaled by 1 -
sqrt(d) / 2 grid steps for d values, since rounding to the grid adds at most that. QED.

The norm is never less than the gradient's own norm and, where nothing is made to cancel, about 1e-5 more. Norms and
weights are float64 throughout, where squares of float32 numbers, and products of two of them, neither overflow nor
underflow: a norm of 0 means a gradient of 0. An example whose gradient is not finite adds nothing, so it cannot spoil a
sum. Nor does one whose x or weighted g exceeds 2^100, since the other could lie where float32 has few bits left.

Cost. The sums are a float64 copy of what is trained. A step of training takes 1.3 to 1.8 times as long as with float32
sums where all of a small model is trained, and about as long where a large one is frozen.

Persons. If several rows belong to one person, its gradient is a weighted sum of theirs (`Groups`), and that is what is
clipped. For a layer whose gradient is a sum over positions, this is the gradient of one example that has the positions
of all the person's rows, each row's g times its weight. So the rows are laid side by side, and everything above holds
for the person in place of the example. A layer whose gradient is no such sum is refused.

All of this assumes two things of the module: every trained parameter acts through one call of a layer that this module
knows, and no example sees another. At every batch, `ClippedGradients` refuses a module that visibly breaks this.
`check_examples_apart` compares it, for the given module, with one backward pass an example. Neither can detect a module
that behaves on these texts and not on others; a `TextModel` must not be one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from learning.models.classifier import TextModel
from learning.models.lstm import LSTM
from learning.models.widened import FrozenLinear
from learning.training.outcome import ModelUnsuitable, PerExampleGradientsUnavailable, TrainingDiverged
from learning.training.probes import probe_rows

__all__ = [
    "ClippedGradients",
    "Groups",
    "ModelUnsuitable",
    "PerExampleGradientsUnavailable",
    "check_examples_apart",
    "clip_factors",
    "probe_ids",
]

# Float64 holds whole numbers up to 2 to this power.
_WHOLE_BITS = 53
# Values of examples' gradients that are held at a time.
_HELD = 1 << 17
_HELD_ON_A_GPU = 1 << 24
# What the rounding of float64 may take from a squared norm.
_MARGIN = 1 + 2.0**-19

# How far the two sides of the self-check may be apart, relative to a clipped gradient's norm.
_PROBE_TOLERANCE = 1e-3
# If softmax is saturated, a gradient can be denormal: float32 keeps few of its bits, and the two sides round them
# differently. The clip is derived from gradients of at least this part of the largest one. Smaller gradients are
# compared on the scale of the others.
_SMALLEST_JUDGED = 2.0**-20
# Below this, float32 has too few bits for any comparison.
_VANISHED = 2.0**-100
# How far a text's logits may move with the size of its batch and its place in it: so much of the largest one, and ten
# times so much of themselves. A GPU takes other kernels for other sizes: with SmolLM2, whose inner states reach 25,000,
# an H200 moved by seven times what the CPU may.
_ALONE_ON_THE_CPU = 1e-4
_ALONE_ELSEWHERE = 2e-3

# Layers whose gradient is a sum over positions, so that rows can be laid side by side.
_SUMS_OVER_POSITIONS = (nn.Linear, FrozenLinear, nn.Embedding, nn.LayerNorm, LSTM)
# The part of sum_t |x_t| |g_t| that counts in the norm, squared.
_CANCELLATION = 2.0**-20
# The largest x, or weighted g, of an example that adds anything.
_LARGEST = 2.0**100


class _Contribution(Protocol):
    """One layer's part in one batch of B examples."""

    def squared_norms(self) -> Mapping[str, Tensor]:
        """The squared norms, (B,) float64, of each trained parameter of the layer, by its name in the layer."""

    def add_weighted(self, weights: Tensor, sums: "_Sums") -> None:
        """Adds weights[b] times the gradient of each example to the sum of each trained parameter of the layer.

        `weights` is (B,) float64, in steps of the grid, and multiplies in float64.
        """


@dataclass(frozen=True)
class _Sums:
    """Where a layer's gradients are added up, and how: each example's is rounded to the grid before it meets another.

    Attributes:
        of: The sums, float64 in units of the clip, by the parameter's name in the layer.
        grid: The step of the grid, a power of two, in units of the clip.
        left_out: (B,) The examples that add nothing. They are not multiplied by zero, which would not make them finite.
    """

    of: Mapping[str, Tensor]
    grid: float
    left_out: Tensor

    def add(self, name: str, gradients: Tensor, first: int = 0) -> None:
        """Adds weighted gradients (b, ...), float64, of the examples from `first` on. Overwrites them."""
        gradients.round_()[self.left_out[first : first + len(gradients)]] = 0
        # Whole numbers that float64 holds, so neither the order of these additions nor the batch changes the sum.
        self.of[name].add_(gradients.sum(dim=0) if len(gradients) > 1 else gradients[0], alpha=self.grid)

    def add_products(self, name: str, g: Tensor, x: Tensor) -> None:
        """Adds sum_t outer(g_t, x_t) of each example: g (B, T, out) float64, weighted; x (B, T, in)."""
        into = self.of[name]
        held = max(1, (_HELD_ON_A_GPU if g.is_cuda else _HELD) // into.numel())
        for first in range(0, len(x), held):
            made = g[first : first + held].transpose(1, 2) @ x[first : first + held].double()
            self.add(name, made.view(-1, *into.shape), first)


class _Embedding:
    """An example's gradient has a row for each distinct id: the sum of g where x, (B, ...) ids, has that id."""

    def __init__(self, layer: nn.Embedding, x: Tensor, g: Tensor) -> None:
        self.layer = layer
        ids, rows = x.reshape(len(x), -1), g.reshape(-1, layer.embedding_dim)
        example = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
        pairs, place = torch.unique(example * layer.num_embeddings + ids.flatten(), return_inverse=True)
        self.batch = len(ids)
        self.example, self.id = pairs // layer.num_embeddings, pairs % layer.num_embeddings
        self.sums = rows.new_zeros(len(pairs), layer.embedding_dim, dtype=torch.float64)
        rows = rows.double()
        self.sums.index_add_(0, place, rows)
        self.lengths = self.sums.new_zeros(len(pairs)).index_add_(0, place, rows.norm(dim=1))
        self.positions = ids.shape[1]
        if layer.padding_idx is not None:
            self.sums[self.id == layer.padding_idx] = 0
            self.lengths[self.id == layer.padding_idx] = 0

    def squared_norms(self) -> Mapping[str, Tensor]:
        squared = self.sums.square().sum(dim=1) + _apart(self.positions) * self.lengths.square()
        return {"weight": self.sums.new_zeros(self.batch).index_add_(0, self.example, squared)}

    def add_weighted(self, weights: Tensor, sums: _Sums) -> None:
        rounded = (self.sums * weights[self.example, None]).round_()
        rounded[sums.left_out[self.example]] = 0
        sums.of["weight"].index_add_(0, self.id, rounded.mul_(sums.grid))


class _Linear:
    """An example's weight gradient is the sum over positions of outer(g_t, x_t).

    Its squared norm is the sum over t, u of <x_t, x_u> <g_t, g_u>.
    """

    def __init__(self, layer: nn.Linear, x: Tensor, g: Tensor) -> None:
        self.layer = layer
        self.x, self.g = x.reshape(len(x), -1, layer.in_features), g.reshape(len(g), -1, layer.out_features).double()
        self.along = self.g.sum(dim=1)

    def squared_norms(self) -> Mapping[str, Tensor]:
        found = {}
        if self.layer.weight.requires_grad:
            x, g = self.x.double(), self.g
            if x.shape[1] ** 2 > self.layer.weight.numel():
                # The gradients themselves are smaller than the products of positions (Bu et al. 2022, mixed ghost
                # clipping): a person's rows have many positions together, and an adapter's matrix is narrow.
                gradients = (g.transpose(1, 2) @ x).square().sum(dim=(1, 2))
                found["weight"] = _safe_norms(self.x, gradients, x.norm(dim=2), g.norm(dim=2), x.shape[1])
            else:
                found["weight"] = _squared_norms(self.x, x @ x.transpose(1, 2), g @ g.transpose(1, 2))
        if self.layer.bias is not None and self.layer.bias.requires_grad:
            found["bias"] = _norms_of_sums(self.along, self.g.norm(dim=2))
        return found

    def add_weighted(self, weights: Tensor, sums: _Sums) -> None:
        if self.layer.weight.requires_grad:
            sums.add_products("weight", self.g * weights[:, None, None], self.x)
        if self.layer.bias is not None and self.layer.bias.requires_grad:
            sums.add("bias", self.along * weights[:, None])


class _Conv1d:
    """A convolution is a linear layer over windows. x (B, channels, S), g (B, maps, T), T = S - width + 1.

    The products of windows are sums along the diagonals of the products of positions, so no window is ever copied out:
    <window_t, window_u> = sum over k of <x_(t + k), x_(u + k)>.
    """

    def __init__(self, layer: nn.Conv1d, x: Tensor, g: Tensor) -> None:
        self.layer, self.x, self.g = layer, x, g.double()
        self.along = self.g.sum(dim=2)

    def squared_norms(self) -> Mapping[str, Tensor]:
        found = {}
        if self.layer.weight.requires_grad:
            length = self.g.shape[2]
            x, g = self.x.double(), self.g
            positions = x.transpose(1, 2) @ x
            windows = positions[:, :length, :length].clone()
            for k in range(1, self.layer.kernel_size[0]):
                windows += positions[:, k : k + length, k : k + length]
            found["weight"] = _squared_norms(self.x, windows, g.transpose(1, 2) @ g)
        if self.layer.bias is not None and self.layer.bias.requires_grad:
            found["bias"] = _norms_of_sums(self.along, self.g.norm(dim=1))
        return found

    def add_weighted(self, weights: Tensor, sums: _Sums) -> None:
        if self.layer.weight.requires_grad:
            # (B, T, channels * width), as the weight has them.
            windows = self.x.unfold(2, self.layer.kernel_size[0], 1).transpose(1, 2).flatten(2)
            sums.add_products("weight", (self.g * weights[:, None, None]).transpose(1, 2), windows)
        if self.layer.bias is not None and self.layer.bias.requires_grad:
            sums.add("bias", self.along * weights[:, None])


class _LSTM:
    """An LSTM is two linear layers over positions, one of x_t and one of h_(t - 1), whose sum is the gates' input.

    x (B, S, width + hidden) holds x_t next to h_(t - 1); g (B, S, 4 hidden) is taken at the gates' input.
    """

    def __init__(self, layer: LSTM, x: Tensor, g: Tensor) -> None:
        self.layer, self.g = layer, g.double()
        self.along = self.g.sum(dim=1)
        self.seen = {"weight_ih": x[:, :, : -layer.hidden], "weight_hh": x[:, :, -layer.hidden :]}

    def squared_norms(self) -> Mapping[str, Tensor]:
        found = {}
        of_g = self.g @ self.g.transpose(1, 2)
        for name, x in self.seen.items():
            if self.layer.get_parameter(name).requires_grad:
                found[name] = _squared_norms(x, x.double() @ x.double().transpose(1, 2), of_g)
        if self.layer.bias.requires_grad:
            found["bias"] = _norms_of_sums(self.along, self.g.norm(dim=2))
        return found

    def add_weighted(self, weights: Tensor, sums: _Sums) -> None:
        g = self.g * weights[:, None, None]
        for name, x in self.seen.items():
            if self.layer.get_parameter(name).requires_grad:
                sums.add_products(name, g, x)
        if self.layer.bias.requires_grad:
            sums.add("bias", self.along * weights[:, None])


class _LayerNorm:
    """An example's gradient is small, so it is computed: the sum over positions of g times the normalised x, and of g.

    x and g are (B, ..., *normalized_shape).
    """

    def __init__(self, layer: nn.LayerNorm, x: Tensor, g: Tensor) -> None:
        self.layer = layer
        x, g = x.double(), g.double()
        between = tuple(range(1, x.ndim - len(layer.normalized_shape)))
        normal = functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        made = {"weight": g * normal, "bias": g}
        self.samples, self.lengths = {}, {}
        for name, _ in _trained(layer):
            # An empty tuple would mean all dimensions.
            self.samples[name] = made[name].sum(dim=between) if between else made[name]
            positions = made[name].flatten(len(between) + 1)
            self.lengths[name] = positions.norm(dim=-1).flatten(1) if between else positions.norm(dim=1)[:, None]

    def squared_norms(self) -> Mapping[str, Tensor]:
        return {name: _norms_of_sums(sample.flatten(1), self.lengths[name]) for name, sample in self.samples.items()}

    def add_weighted(self, weights: Tensor, sums: _Sums) -> None:
        _add_samples(self.samples, weights, sums)


class _Materialised:
    """Any other layer that Opacus has a sampler for: it holds a gradient for each example of the batch."""

    def __init__(self, sampler: Callable[..., Any], layer: nn.Module, x: Tensor, g: Tensor) -> None:
        names = {parameter: name for name, parameter in _trained(layer)}
        self.layer = layer
        self.samples: dict[str, Tensor] = {
            names[parameter]: sample for parameter, sample in sampler(layer, [x], g).items() if parameter in names
        }

    def squared_norms(self) -> Mapping[str, Tensor]:
        return {name: sample.double().flatten(1).square().sum(dim=1) for name, sample in self.samples.items()}

    def add_weighted(self, weights: Tensor, sums: _Sums) -> None:
        _add_samples(self.samples, weights, sums)


def _add_samples(samples: Mapping[str, Tensor], weights: Tensor, sums: _Sums) -> None:
    """Adds the gradients of a layer that holds one for each example, (B, ...)."""
    for name, sample in samples.items():
        sums.add(name, sample.double() * weights.view(-1, *[1] * (sample.ndim - 1)))


def _squared_norms(x: Tensor, of_x: Tensor, of_g: Tensor) -> Tensor:
    """(B,) Upper bounds on |sum_t outer(g_t, x_t)|^2, from the products of positions, (B, T, T) float64.

    Infinite for an example whose x (B, ...) has a value that is too large to be added.
    """
    along_x, along_g = (each.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt() for each in (of_x, of_g))
    return _safe_norms(x, (of_x * of_g).sum(dim=(1, 2)).clamp(min=0), along_x, along_g, of_x.shape[1] ** 2)


def _norms_of_sums(along: Tensor, lengths: Tensor) -> Tensor:
    """(B,) Upper bounds on |sum_t g_t|^2, from that sum (B, width) and |g_t| (B, T)."""
    return along.square().sum(dim=1) + _apart(lengths.shape[1]) * lengths.sum(dim=1).square()


def _apart(terms: int) -> float:
    """The part of (sum_t |x_t| |g_t|)^2 that counts in a squared norm which sums so many terms."""
    # Rounding is below a unit for each sum and product of a term (Higham 2002, section 3.1).
    return _CANCELLATION + 2.0**-52 * (terms + 2**20)


def _safe_norms(x: Tensor, squared: Tensor, along_x: Tensor, along_g: Tensor, terms: int) -> Tensor:
    """(B,) `squared` plus what may have cancelled, from |x_t| and |g_t| (B, T); `squared` sums so many terms."""
    norms = squared + _apart(terms) * (along_x * along_g).sum(dim=1).square()
    return norms.masked_fill(~(x.flatten(1).abs().amax(dim=1) <= _LARGEST), torch.inf)


@dataclass(frozen=True)
class Groups:
    """Which rows of a batch are one person's, and with which weight each row's gradient counts in the person's.

    Attributes:
        person: (B,) The number of each row's person, 0 to P - 1; each has a row.
        weights: (B,) float64, positive.
    """

    person: Tensor
    weights: Tensor

    def together(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's input and the gradient at its output, with all positions of a person in one row.

        Args:
            x: (B, ..., in), or (B, ...) ids.
            g: (B, ..., out).

        Returns:
            (P, T, in) or (P, ...) ids, and (P, T, ..., out), where T is the most rows of a person times a row's
            positions. What no row fills is zero.
        """
        order = torch.argsort(self.person, stable=True)
        counts = torch.bincount(self.person)
        first = torch.cumsum(counts, 0) - counts
        at = self.person[order], torch.arange(len(order), device=order.device) - first[self.person[order]]
        # float64: a small weight alone may underflow in float32.
        g = g.double() * self.weights.to(g.device).view(-1, *[1] * (g.ndim - 1))
        made = []
        for each in (x, g):
            laid = each.new_zeros(len(counts), int(counts.max()), *each.shape[1:])
            laid[at] = each[order]
            made.append(laid.flatten(1, 2) if each.ndim > 2 else laid)
        return made[0], made[1]


@dataclass(frozen=True)
class _Call:
    """A layer's call in the forward pass: its input and output, or for an LSTM the tensors that its gradients need."""

    name: str
    x: Tensor
    output: Tensor


Make = Callable[[Any, Tensor, Tensor], _Contribution]


class ClippedGradients:
    """Records layers' inputs during the forward pass, and turns them into clipped sums. A context manager.

        with ClippedGradients(module) as clipped:
            losses = functional.cross_entropy(module(ids), labels, reduction="none")
            clipped.add(losses, clip=1.0)
            total = clipped.sums

    Args:
        module: The module.
        units: The most examples or persons that are added up. It decides the grid, so it must not depend on the data.

    Attributes:
        sums: The sum of each trained parameter, by its name in the module: float64, in units of the clip, multiples of
            the grid. Zeros at first, and after `clear`.

    Raises:
        PerExampleGradientsUnavailable: A trained parameter is in a layer that is not known here, or in two layers.
    """

    def __init__(self, module: nn.Module, units: int = 1 << 16) -> None:
        # A coordinate of a clipped gradient is at most one clip, so `units` of them add up to at most 2^53 steps.
        self._units, self._added = units, 0
        self._grid = math.ldexp(1.0, (units - 1).bit_length() - _WHOLE_BITS)
        self._values = 0
        self._layers: dict[str, nn.Module] = {}
        self._makers: dict[str, Make] = {}
        self._calls: list[_Call] = []
        self._recording = True
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.sums: dict[str, Tensor] = {}
        owners: dict[nn.Parameter, str] = {}
        for name, layer in module.named_modules():
            if not (trained := _trained(layer)):
                continue
            for short, parameter in trained:
                full = f"{name}.{short}" if name else short
                if parameter in owners:
                    raise PerExampleGradientsUnavailable(
                        f"parameters {full} and {owners[parameter]} are tied, so their gradients cannot be told apart "
                        "by example; untie them"
                    )
                owners[parameter] = full
                self._values += parameter.numel()
                self.sums[full] = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
            self._layers[name] = layer
            self._makers[name] = _maker(name, layer)
        if not owners:
            raise PerExampleGradientsUnavailable("the module has no parameter to train; unfreeze one")

    def __enter__(self) -> Self:
        for name, layer in self._layers.items():
            # partial binds the name now; a closure over the loop variable would see the last one.
            if type(layer) is LSTM:
                layer.observe(partial(self._keep_unrolled, name))
            else:
                self._handles.append(layer.register_forward_hook(partial(self._keep, name), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self._layers.values():
            if type(layer) is LSTM:
                layer.observe(None)
        self._handles, self._calls = [], []

    def _keep_unrolled(self, name: str, x: Tensor, before: Tensor, inputs: Tensor) -> None:
        if torch.is_grad_enabled():
            self._calls.append(_Call(name, torch.cat([x, before], dim=2), inputs))

    def _keep(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and self._recording):
            return
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            raise PerExampleGradientsUnavailable(
                f"layer {name} is called with more than one tensor, so its gradient cannot be told apart by example; "
                "pass it one"
            )
        self._calls.append(_Call(name, args[0].detach(), output))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records no call inside. A backward pass calls a checkpointed layer again, for the same gradient."""
        self._recording = False
        try:
            yield
        finally:
            self._recording = True

    def gradients(self, loss: Tensor, batch: int, *, keep_graph: bool = False) -> dict[str, Tensor]:
        """The gradient of `loss`, shape (), at each layer's output, after a forward pass with `batch` examples.

        Raises:
            PerExampleGradientsUnavailable: A layer was not called exactly once with a row for each example.
        """
        self._check_calls(batch)
        outputs = [call.output for call in self._calls]
        with self.paused():
            found = torch.autograd.grad(loss, outputs, allow_unused=True, retain_graph=keep_graph)
        return {
            call.name: torch.zeros_like(call.output) if g is None else g
            for call, g in zip(self._calls, found, strict=True)
        }

    def clear(self) -> None:
        """Sets the sums to zero."""
        self._added = 0
        for each in self.sums.values():
            each.zero_()

    def add(self, losses: Tensor, clip: float, groups: Groups | None = None) -> None:
        """Adds min(1, clip / |gradient|) * gradient / clip of each example, rounded to the grid, to the sums.

        Args:
            losses: (B,) The loss of each example, from one forward pass inside this context. The call uses it up.
            clip: The largest L2 norm of an example's gradient, or of a person's.
            groups: The persons whose gradients are summed and clipped; None: each example is its own.

        Raises:
            PerExampleGradientsUnavailable: A layer was not called exactly once with a row for each example, or has no
                norm for one of its parameters, or its gradients cannot be added up by person.
            ValueError: More than `units` examples or persons were added since the sums were zero.
        """
        gradients = self.gradients(losses.sum(), len(losses))
        calls, self._calls = self._calls, []
        with torch.no_grad():
            seen = [(call.name, call.x, gradients[call.name]) for call in calls]
            count = len(losses)
            if groups is not None:
                self._check_sums_over_positions()
                seen = [(name, *groups.together(x, g)) for name, x, g in seen]
                count = len(seen[0][1])
            self._added += count
            if self._added > self._units:
                raise ValueError(
                    f"{self._added} examples or persons are added up, and the sums are exact for {self._units}; name "
                    "all of a member's"
                )
            made = [self._makers[name](self._layers[name], x, g) for name, x, g in seen]
            squared = self._squared_norms([call.name for call in calls], made, count)
            # Rounding to the grid moves a gradient by up to half a step in each coordinate.
            room = 1 - self._grid * math.sqrt(self._values) / 2
            weights = clip_factors(squared, clip) / clip * room
            counts = torch.isfinite(squared)
            for _, _, g in seen:
                counts &= g.flatten(1).abs().amax(dim=1) * weights <= _LARGEST
            for (name, _, _), contribution in zip(seen, made, strict=True):
                contribution.add_weighted(weights / self._grid, self._sums_of(name, ~counts))

    def _sums_of(self, name: str, left_out: Tensor) -> _Sums:
        shorts = [short for short, _ in _trained(self._layers[name])]
        own = {short: self.sums[f"{name}.{short}" if name else short] for short in shorts}
        return _Sums(own, self._grid, left_out)

    def _squared_norms(self, names: list[str], made: list[_Contribution], batch: int) -> Tensor:
        """(B,) The squared norms over all trained parameters together."""
        parts = []
        for name, contribution in zip(names, made, strict=True):
            norms = contribution.squared_norms()
            for short, _ in _trained(self._layers[name]):
                if short not in norms or norms[short].shape != (batch,):
                    raise PerExampleGradientsUnavailable(
                        f"parameter {name}.{short} has no gradient norm for each of {batch} examples; freeze it, or "
                        "use another layer"
                    )
            parts += [part.clamp(min=0) for part in norms.values()]
        return torch.stack(parts).sum(dim=0) * _MARGIN

    def _check_sums_over_positions(self) -> None:
        for name, layer in self._layers.items():
            if type(layer) not in _SUMS_OVER_POSITIONS:
                raise PerExampleGradientsUnavailable(
                    f"the gradients of layer {name} ({type(layer).__name__}) cannot be added up by person; train a "
                    'head, a prompt or an adapter, or set unit = "example"'
                )

    def _check_calls(self, batch: int) -> None:
        called = [call.name for call in self._calls]
        for name in self._layers:
            if called.count(name) != 1:
                raise PerExampleGradientsUnavailable(
                    f"layer {name} was called {called.count(name)} times in a forward pass, so the norm of its "
                    "gradient would be wrong; call it once"
                )
        for call in self._calls:
            for what, rows in (("takes", len(call.x)), ("gives", len(call.output))):
                if rows != batch:
                    raise PerExampleGradientsUnavailable(
                        f"layer {call.name} {what} {rows} rows for {batch} examples (a tensor broadcast over the "
                        "batch?), so the batch would be clipped as fewer; repeat its input for each example"
                    )


def clip_factors(squared_norms: Tensor, clip: float) -> Tensor:
    """min(1, clip / norm) of each example, from squared norms (B,); float64."""
    return clip / squared_norms.double().sqrt().clamp(min=clip)


def check_examples_apart(module: TextModel, seed: int) -> None:
    """Compares `ClippedGradients` with one backward pass an example, on a few probe texts.

    Run it in training mode at the start of each training; it costs about eight small passes. It needs no parameter's
    .grad, and leaves none. The two sides are compared on the scale of the gradients that float32 holds well. A
    saturated model passes: an example whose gradient vanishes next to the others' is no evidence against it.

    Args:
        module: The module to check.
        seed: Draws the probe texts. They do not depend on the data, so a refusal does not either. Choose a seed that
            nobody else can know: a module can be made to behave on the texts of a known one.

    Raises:
        ModelUnsuitable: The two differ, an example's loss depends on another example, or the forward pass changes a
            buffer (such as a running mean).
        TrainingDiverged: A probe text's logits, or its gradient, are not finite.
    """
    try:
        _check_examples_apart(module, np.random.Generator(np.random.Philox(seed)))
    except PerExampleGradientsUnavailable as error:
        raise ModelUnsuitable(str(error)) from error


def _check_examples_apart(module: TextModel, random: np.random.Generator) -> None:
    ids = probe_ids(module, random)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with ClippedGradients(module) as clipped:
        parameters = [module.get_parameter(name) for name in clipped.sums]
        logits, losses = module.probed(ids)
        if logits.ndim < 2 or len(logits) != len(ids) or losses.shape != (len(ids),):
            raise PerExampleGradientsUnavailable(
                f"{len(ids)} texts give logits of shape {tuple(logits.shape)}; the model must give one row a text"
            )
        if not bool(torch.isfinite(logits).all()):
            raise TrainingDiverged("the model's logits are not finite before training begins; start a new job")
        for name, buffer in module.named_buffers():
            if name not in buffers or not torch.equal(buffer, buffers[name]):
                raise PerExampleGradientsUnavailable(
                    f"a forward pass in training mode changes {name}, so it would keep data without noise; use a layer "
                    "without running statistics"
                )
        alone = []
        for number in range(len(ids)):
            for name, g in clipped.gradients(losses[number], len(ids), keep_graph=True).items():
                others = torch.arange(len(ids), device=g.device) != number
                if bool((g[others] != 0).any()):
                    raise PerExampleGradientsUnavailable(
                        f"an example's loss depends on other examples of its batch, seen at layer {name} (a "
                        "normalisation over the batch?); use layers that treat each example alone"
                    )
            with clipped.paused():
                alone.append(torch.autograd.grad(losses[number], parameters, allow_unused=True, retain_graph=True))
        norms = [sum(float(g.double().square().sum()) for g in each if g is not None) ** 0.5 for each in alone]
        if not all(math.isfinite(norm) for norm in norms):
            raise TrainingDiverged("the model's gradients are not finite before training begins; start a new job")
        clip = _probe_clip(norms)
        clipped.add(losses, clip)
        error = _probe_error([*clipped.sums.values()], alone, norms, clip)
    if not error <= _PROBE_TOLERANCE * clip:
        raise PerExampleGradientsUnavailable(
            "clipped gradients are not those of a backward pass for each example: a parameter acts outside its layer's "
            "one call, or an output is changed in place; change the model"
        )
    _check_alone(module, ids)


def _probe_clip(norms: Sequence[float]) -> float:
    """Half the smallest norm that can be judged: every such example is then clipped, and a wrong norm shows."""
    largest = max(norms)
    if not largest >= _VANISHED:
        return 1.0
    return min(norm for norm in norms if norm >= _SMALLEST_JUDGED * largest) / 2


def _probe_error(
    sums: Sequence[Tensor], alone: Sequence[Sequence[Tensor | None]], norms: Sequence[float], clip: float
) -> float:
    """The largest L2 distance, over parameters, of our clipped sum from that of one backward pass an example."""
    error = 0.0
    for place, found in enumerate(sums):
        expected = torch.zeros_like(found)
        for each, norm in zip(alone, norms, strict=True):
            if (g := each[place]) is not None:
                expected.add_(g.double(), alpha=1 / max(norm, clip))
        error = max(error, clip * float((found - expected).norm()))
    return error


def _check_alone(module: TextModel, ids: Tensor) -> None:
    """Checks the contract of TextModel: a text's logits do not depend on its batch.

    Each text is read once among copies of itself, in its own place. That batch has the shape of the other, so a device
    uses the same kernels, and what is left of a difference comes from the other texts. Then it is read alone.
    """
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            together = module(ids)
            copies = torch.stack([module(one.expand_as(ids).contiguous())[at] for at, one in enumerate(ids.split(1))])
            alone = torch.cat([module(one) for one in ids.split(1)])
    finally:
        module.train(training)
    # Sums of large terms are rounded on the scale of the terms, even if a logit itself is small.
    scale = together.abs().amax(dim=-1, keepdim=True).clamp(min=1.0)
    room = _ALONE_ON_THE_CPU if _on_the_cpu(ids) else _ALONE_ELSEWHERE
    for other, factor in ((copies, _ALONE_ON_THE_CPU), (alone, room)):
        if not bool(((together - other).abs() <= factor * (10 * together.abs() + scale)).all()):
            raise PerExampleGradientsUnavailable(
                "a text's logits depend on the other texts of its batch; use layers that treat each example alone"
            )


def _on_the_cpu(values: Tensor) -> bool:
    return values.device.type == "cpu"


def probe_ids(module: TextModel, random: np.random.Generator) -> Tensor:
    """Probe texts of different lengths, (B, S), with some words repeated in a text and across texts."""
    embedding = module.embedding
    ids = probe_rows(embedding.num_embeddings, module.pad_id, module.min_tokens, random)
    return torch.from_numpy(ids).to(embedding.weight.device)


def _maker(name: str, layer: nn.Module) -> Make:
    """The class for a layer's contribution. It compares exact types, since a subclass may compute something else."""
    # A frozen matrix's bias may be trained, and then the layer computes what nn.Linear does.
    if type(layer) is nn.Linear or type(layer) is FrozenLinear:
        return _Linear
    if type(layer) is nn.Embedding:
        # These options depend on the whole batch, or write to the rows that are looked up.
        if layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse:
            return _Embedding
    elif type(layer) is nn.Conv1d and _slides_simply(layer):
        return _Conv1d
    elif type(layer) is nn.LayerNorm:
        return _LayerNorm
    elif type(layer) is LSTM:
        return _LSTM
    else:
        # Importing Opacus takes seconds, so only a layer that needs it does.
        from opacus.grad_sample import GradSampleModule

        if (sampler := GradSampleModule.GRAD_SAMPLERS.get(type(layer))) is not None:
            return lambda layer, x, g: _Materialised(sampler, layer, x, g)
    parameters = ", ".join(short for short, _ in _trained(layer))
    raise PerExampleGradientsUnavailable(
        f"no per-example gradient is known for {parameters} of {name or 'the module itself'} "
        f"({type(layer).__name__}, with its options); put it into a layer that has one, or freeze it"
    )


def _slides_simply(layer: nn.Conv1d) -> bool:
    simple = (layer.stride, layer.dilation, layer.groups) == ((1,), (1,), 1)
    return simple and layer.padding in ((0,), "valid")


def _trained(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trained parameters of the layer itself, without its children's."""
    return [(name, parameter) for name, parameter in layer.named_parameters(recurse=False) if parameter.requires_grad]
