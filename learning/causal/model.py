"""A frozen causal language model that learns to write, and the few values that are trained for it.

Guarantees:

- `named_parameters` has what is trained and sent (LoRA's matrices, a soft prompt, a prefix), LoRA's `down` matrices
  where these are public and frozen, and nothing of the backbone.
- The backbone is in memory once, however many modules use it. It has no gradients, and lets them through.
- A position sees itself and what is before it. So no padding is attended to, whatever its id is, and no example sees
  another: nothing is packed into one row.
- The loss of an example is the mean over its own targets, in nats, so a long answer weighs as much as a short one, and
  an example's loss is a function of that example alone.
- Every dropout draws from the single source that `seed` or `draw_from` starts. It acts on what LoRA's matrices read and
  on the values of a soft prompt; the frozen layers drop nothing.
- Trained values, the loss and all gradients of trained values are float32, whatever the frozen network computes in.

    LoRA            text at positions 0, 1, ...
    prompt tuning   P vectors at positions 0 to P - 1, then the text from P on (Lester et al. 2021)
    prefix tuning   P keys and values before every layer's own, the text from P on (Li and Liang 2021)

Only the states that have a target go through the vocabulary projection, in blocks. Its table is frozen, so one pass
over a block gives the losses and their gradients at the states, and no scores are kept for the backward pass.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learning.causal.backbone import CausalBackbone, library_layers, rotary_frequencies
from learning.causal.config import sizes_of
from learning.causal.layers import CausalLayers, again, name_matrices
from learning.causal.sizes import IGNORED, frozen_values, trained_values
from learning.models.classifier import Adjusted
from learning.models.transformer import EncoderDropout
from learning.models.widened import let_go
from learning.prompts.backbone import BackboneInvalid, hollow
from learning.prompts.injectors import Adapted, Prompt, prompt_for
from learning.prompts.over_frozen import KINDS, OverFrozen
from learning.prompts.reading import Matrix
from learning.prompts.setting import Injection, LoRA, PrefixTuning, PromptTuning
from tacit.job import Precision
from tacit.method import ModelPart

__all__ = ["IGNORED", "CausalModel", "frozen_values", "trained_values"]

# Scores that are in memory at a time.
_BLOCK = 1 << 23
_MIN_TOKENS = 2


class CausalModel(OverFrozen):
    """Maps ids (B, S) to the next word's scores, with S at most `room`.

    With a seed, LoRA starts as no change, a soft prompt as rows of the word embedding, and a prefix as the keys and
    values of such rows.

    Args:
        backbone: The frozen model.
        injection: What is trained: `LoRA`, `PromptTuning` or `PrefixTuning`.
        pad_id: The id of padding, which comes after a text. It may be a word's, such as the end token's.
        seed: Seeds the trained values; with None they are all zero, to be loaded next.
        dropout: The rate of dropout.

    Raises:
        BackboneInvalid: The injection does not fit the backbone.
    """

    parts: ClassVar[Mapping[str, ModelPart]] = {"prompt": "encoder", "lora": "encoder", "layers": "encoder"}

    def __init__(
        self, backbone: CausalBackbone, injection: Injection, pad_id: int, seed: int | None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if not isinstance(injection, LoRA | PromptTuning | PrefixTuning):
            raise BackboneInvalid("a model that writes is trained with lora, prompt-tuning or prefix-tuning")
        self.pad_id, self.min_tokens = pad_id, _MIN_TOKENS
        self.backbone = backbone
        self._refer_to(backbone)
        self.dropout = EncoderDropout(dropout)
        with torch.device("meta"):
            self.embedding = nn.Embedding(backbone.vocabulary_size, backbone.width)
        self._tables.put(self.embedding, "weight", lambda values: values[backbone.words_name])
        self._answers: Tensor
        self._tables.put(self, "_answers", lambda values: values[backbone.answers_name])
        sizes = sizes_of(backbone.config)
        # The positions that a prompt or a prefix takes from the text.
        self.ahead = 0 if isinstance(injection, LoRA) else injection.tokens
        self.room = sizes.room - self.ahead
        # The probe texts of `check_examples_apart` need four positions more.
        if self.room < _MIN_TOKENS + 4:
            raise BackboneInvalid(
                f"a prompt of {self.ahead} tokens leaves {self.room} of the backbone's {sizes.room} positions to a "
                "text; use a shorter prompt"
            )
        tree = library_layers(backbone.config)
        gpt2 = backbone.kind == "gpt2"
        if gpt2:
            name_matrices(tree, backbone.width, self._network.put)
        hollow(self._network, tree, "transformer" if gpt2 else "model")
        self._layers = CausalLayers(tree, None if gpt2 else rotary_frequencies(backbone.config))
        self._prefix = (sizes.layers, 2, sizes.key_heads, sizes.head) if isinstance(injection, PrefixTuning) else None
        # Trained parts are registered before the layers that contain them: a parameter's first name counts.
        if (
            prompt := prompt_for(injection, backbone.width, sizes.layers * 2 * sizes.key_heads * sizes.head)
        ) is not None:
            self.prompt: Prompt = prompt
        if isinstance(injection, LoRA):
            self.lora = nn.ModuleDict()
            for matrix in _changed(self._layers, injection):
                layer = cast(nn.Linear, matrix.owner.get_submodule(matrix.attribute))
                adapted = Adapted(layer, injection, self.dropout)
                self.lora[matrix.name] = adapted
                setattr(matrix.owner, matrix.attribute, adapted)
        self.layers = tree
        self._bind()
        if seed is not None:
            self._start(np.random.Generator(np.random.Philox(seed)))

    # ---- from ids to losses ----------------------------------------------------------------------------------

    def forward(self, ids: Tensor) -> Tensor:
        """(B, S, V) The scores of the next word at every position. Training uses `losses`, which needs far less."""
        return self.states(ids) @ self._answers.T

    def losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """(B,) The mean loss over each row's targets, in nats; 0 for a row that has none. Arguments as below."""
        losses, _, count = self.token_scores(ids, targets)
        return losses / count.clamp(min=1)

    def judged(self, ids: Tensor, targets: Tensor, adjusted: Adjusted | None = None) -> tuple[Tensor, Tensor]:
        """As in `TextModel`. A row is right if each of its targets is the most likely word."""
        if adjusted is not None:
            raise ValueError("a model that writes has no labels whose logits could be adjusted")
        losses, correct, count = self.token_scores(ids, targets)
        return losses / count.clamp(min=1), correct == count

    def token_scores(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over each row's targets.

        Args:
            ids: (B, S) with S at most `room`.
            targets: (B, S) The id that each position must predict, `IGNORED` where there is no loss.

        Returns:
            The sum of losses in nats (B,), how many targets are the most likely word (B,), and how many there are (B,).
        """
        chosen = targets != IGNORED
        row = chosen.nonzero()[:, 0]
        losses, right = cast(
            tuple[Tensor, Tensor], _WordLosses.apply(self.states(ids)[chosen], self._answers, targets[chosen])
        )
        total = losses.new_zeros(len(ids)).index_add(0, row, losses)
        correct = row.new_zeros(len(ids)).index_add(0, row, right.to(row.dtype))
        return total, correct, chosen.sum(dim=1)

    def states(self, ids: Tensor) -> Tensor:
        """(B, S, width) float32, the last states of a text: their products with the words' rows are scores."""
        if ids.shape[1] > self.room:
            raise ValueError(f"a text has {ids.shape[1]} tokens, and there is room for {self.room}; cut texts shorter")
        vectors, prefix, first = self.embedding(ids), None, self.ahead
        if "prompt" in self._modules:
            prompt = self.dropout(self.prompt(len(ids)))
            if self._prefix is None:
                vectors, first = torch.cat([prompt, vectors], dim=1), 0
            else:
                prefix = prompt.unflatten(2, self._prefix).to(self._kind)
        states = self._layers.states(vectors.to(self._kind), first, prefix, self._run)
        return states[:, self.ahead - first :].to(torch.float32)

    def lengths(self, ids: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """(N,) As in `TextModel`: up to a row's last word that is not the padding's id, or that has a target."""
        if not ids.size:
            return np.zeros(len(ids), dtype=np.int64)
        counts = (ids != self.pad_id) | (targets != IGNORED)
        ends: NDArray[np.int64] = ids.shape[1] - counts[:, ::-1].argmax(axis=1)
        return np.where(counts.any(axis=1), ends, 0)

    def probed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As in `TextModel`."""
        states = self.states(ids)
        scores = states.detach() @ self._answers.T
        losses, _ = _WordLosses.apply(states.flatten(0, 1), self._answers, scores.argmin(dim=2).flatten())
        return scores, cast(Tensor, losses.view(ids.shape).mean(dim=1))

    @contextmanager
    def keeping_in(self, precision: Precision) -> Iterator[None]:
        """As in `TextModel`.

        Raises:
            RuntimeError: The network computes in less than float32 already.
        """
        if self._kind is not torch.float32:
            raise RuntimeError("inside computing_in, states are not float32; keep matrices outside of it")
        if precision == "float32":
            yield
            return
        try:
            self._network.bind(self._device, KINDS[precision], matrices=True)
            yield
        finally:
            self._network.bind(self._device)
            let_go()

    @torch.no_grad()
    def cache(self) -> Tensor | None:
        """(P, layers, 2, key heads, size) What a soft prompt or a prefix amounts to: keys and values at the first P
        positions, after which a text starts. None for LoRA.
        """
        if "prompt" not in self._modules:
            return None
        prompt: Tensor = self.prompt(1)
        if self._prefix is not None:
            return cast(Tensor, prompt[0].unflatten(1, self._prefix))
        return self._layers.keys_and_values(prompt.to(self._kind))[0].to(torch.float32)

    def _run(self, call: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        """Runs a layer, with `checkpointing` twice: both runs drop the same."""
        if not (self.checkpointing and torch.is_grad_enabled()):
            return call(states)
        if not self.training or self.dropout.probability == 0:
            return again(call, states)
        start = self.dropout.draws.fork(states.device)

        def seeded(states: Tensor) -> Tensor:
            outer, self.dropout.draws = self.dropout.draws, start()
            try:
                return call(states)
            finally:
                self.dropout.draws = outer

        return again(seeded, states)

    def _start(self, random: np.random.Generator) -> None:
        if "prompt" in self._modules:
            table = self.embedding.weight
            words = table[torch.from_numpy(random.integers(len(table), size=self.ahead))]
            if self._prefix is not None:
                words = self._layers.keys_and_values(words[None])[0].flatten(1)
            self.prompt.start(random, words.numpy())
        if "lora" in self._modules:
            for adapted in self.lora.values():
                cast(Adapted, adapted).start(random)


class _WordLosses(torch.autograd.Function):
    """Cross entropy of states against a frozen table of words, in blocks.

    Its gradient at a state is (probabilities - one) @ table, made in the forward pass while the block's scores exist.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss (n,) of each state (n, width), and whether its target (n,) is the most likely row of (V, width)."""
        losses, right = states.new_empty(len(states)), targets.new_empty(len(states), dtype=torch.bool)
        gradients = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        size = max(1, _BLOCK // len(table))
        for first in range(0, len(states), size):
            here = slice(first, first + size)
            target = targets[here, None]
            scores = states[here] @ table.T
            right[here] = scores.argmax(dim=1) == target[:, 0]
            total = scores.logsumexp(dim=1, keepdim=True)
            losses[here] = (total - scores.gather(1, target))[:, 0]
            if gradients is not None:
                probabilities = scores.sub_(total).exp_()
                probabilities.scatter_add_(1, target, -torch.ones_like(target, dtype=scores.dtype))
                torch.mm(probabilities, table, out=gradients[here])
        if gradients is not None:
            ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(right)
        return losses, right

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_losses: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        """The gradient at the states."""
        (gradients,) = ctx.saved_tensors
        return gradients * of_losses[:, None], None, None


def _changed(layers: CausalLayers, injection: LoRA) -> list[Matrix]:
    """The matrices that an injection changes."""
    first = 1 if injection.last_layers is None else len(layers.stack) - injection.last_layers + 1
    found = [each for each in layers.matrices if each.kind in injection.matrices and each.layer >= first]
    if missing := set(injection.matrices) - {each.kind for each in found}:
        raise BackboneInvalid(f"the backbone has no such matrices: {', '.join(sorted(missing))}; choose others")
    return found
