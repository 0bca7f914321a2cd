"""A frozen backbone that performs a task, and the few values that are trained for it.

Guarantees:

- `named_parameters` has what is trained and sent (a prompt with its encoder, a prefix, LoRA's matrices, biases, a
  head), what centres a head's features, and nothing else of the backbone.
- The backbone is in memory once, however many modules use it. It has no gradients, and lets them through.
- Padding is never attended to.
- Every dropout draws from the single source that `seed` or `draw_from` starts.
- No example sees another, not even through a broadcast row of positions, prompt or prefix.
- Features of a head over chosen layers have at most unit length.

    encoders     [prompt] [CLS] text [SEP]      The prompt comes before everything, as in the paper ("in the head") and
                                                in Lester et al. 2021; positions count from its first vector.
    T5           [prompt] text                  The prompt comes before the encoder's input; positions are relative.

A cloze reads the state at the text's last mask. A text without a mask (such as a probe text) is read at its last token.
The position follows from the text alone, so examples stay apart. Only that state goes through the vocabulary
projection, of which only the label words' rows exist here.

T5 was trained to answer a text that has <extra_id_0> with "<extra_id_0> word ...". So the decoder gets the start token
and the sentinel in one pass, and words are scored at its second position. At the first, where the library would start
to generate, it says <extra_id_0> whatever the text is. T5 reads no position of the text, so a text without a sentinel
needs no rule.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learning.models.classifier import TextClassifier
from learning.models.transformer import EncoderDropout
from learning.prompts.backbone import Backbone, BackboneInvalid
from learning.prompts.injectors import Adapted, Prompt, prompt_for
from learning.prompts.over_frozen import OverFrozen
from learning.prompts.reading import EncoderReader, Matrix, T5Reader, WordScores, clear_prefix, prefix_shape, reader_for
from learning.prompts.setting import (
    BitFit,
    Cloze,
    Head,
    Injection,
    LoRA,
    PrefixTuning,
    PromptTuning,
    Task,
    prompt_positions,
)
from tacit.method import ModelPart

__all__ = ["LabelScores", "PromptedModel"]

# Below any square that float32 means of a text leave.
_SMALLEST_SQUARE = 1e-12
# The shortest text: [CLS], a token, [SEP].
_MIN_TOKENS = 3


class LabelScores(nn.Module):
    """Turns scores of words (B, words) into logits of labels (B, labels), as `Cloze` defines."""

    def __init__(self, task: Cloze) -> None:
        super().__init__()
        self.words = tuple(len(words) for words in task.label_words)
        self._single = all(len(words) == 1 for words in task.label_words)
        most = max(len(words) for words in task.label_words)
        self._at: list[list[int]] = []
        self._weights: list[list[float]] = []
        first = 0
        for words in task.label_words:
            surplus = most - len(words)
            self._at.append([*range(first, first + len(words)), *[first] * surplus])
            # Low enough to add nothing; minus infinity would have no gradient.
            self._weights.append([-float(np.log(len(words)))] * len(words) + [-1e30] * surplus)
            first += len(words)

    def forward(self, scores: Tensor) -> Tensor:
        """Logits (B, labels)."""
        if self._single:
            return scores
        at, weights = torch.tensor(self._at, device=scores.device), scores.new_tensor(self._weights)
        return (scores[:, at] + weights).logsumexp(dim=2)


class PromptedModel(OverFrozen, TextClassifier):
    """Maps ids (B, S) to logits (B, labels), with S at most `room`.

    With a seed, a prompt starts as rows of the word embedding, LoRA as no change, biases as the backbone's, and a head
    as N(0, 0.02).

    Args:
        backbone: The frozen model.
        injection: What is trained before or inside the backbone.
        task: What the model answers.
        labels: The number of labels.
        pad_id: The id of padding.
        mask_id: The id at which a word is scored; None with `Head`.
        seed: Seeds the trained values; with None they are all zero, to be loaded next.
        dropout: The rate of the backbone's dropouts and the head's.
        separator_id: The id that ends the first text of a pair, if nothing else tells the two apart. In a family with
            several token types, tokens after the first separator get the second type.

    Raises:
        BackboneInvalid: The backbone cannot do the task, a word is outside its vocabulary, or the prompt does not fit.
    """

    parts: ClassVar[Mapping[str, ModelPart]] = {
        "prompt": "encoder",
        "lora": "encoder",
        "output": "head",
        "centre": "encoder",
        "layers": "encoder",
    }

    def __init__(
        self,
        backbone: Backbone,
        injection: Injection,
        task: Task,
        labels: int,
        pad_id: int,
        mask_id: int | None,
        seed: int | None,
        dropout: float = 0.0,
        separator_id: int | None = None,
    ) -> None:
        super().__init__()
        _check_task(backbone, task, labels, mask_id)
        self.pad_id, self.min_tokens, self.labels = pad_id, _MIN_TOKENS, labels
        self.mask_id, self.separator_id = mask_id, separator_id
        self.head_layers: tuple[int, ...] = ()
        self.backbone = backbone
        self._refer_to(backbone)
        self.dropout = EncoderDropout(dropout)
        with torch.device("meta"):
            self.embedding = nn.Embedding(backbone.vocabulary_size, backbone.width)
        self._tables.put(self.embedding, "weight", lambda values: values[backbone.words_name])
        reader = reader_for(backbone, self._network, self.dropout)
        self._reader = reader
        self.room = _room(reader, injection)
        layers, heads, size = prefix_shape(backbone.config)
        self._prefix = (layers, 2, heads, size) if isinstance(injection, PrefixTuning) else None
        # Trained parts are registered before the layers that contain them: a parameter's first name counts.
        if (prompt := prompt_for(injection, backbone.width, layers * 2 * heads * size)) is not None:
            self.prompt: Prompt = prompt
        if isinstance(injection, LoRA):
            if injection.train != "both":
                raise BackboneInvalid(
                    "model.injection.train: a prompted model that labels texts trains both matrices; leave it out"
                )
            self.lora = nn.ModuleDict()
            for matrix in _changed(reader, injection, task):
                layer = cast(nn.Linear, matrix.owner.get_submodule(matrix.attribute))
                adapted = Adapted(layer, injection)
                self.lora[matrix.name] = adapted
                setattr(matrix.owner, matrix.attribute, adapted)
        if isinstance(injection, BitFit):
            _check_biases(backbone)
            for read in _last(reader.stack[: _read_by(reader, task)], injection.last_layers):
                self._network.train(read, "bias")
        if isinstance(task, Cloze):
            self.words = WordScores(backbone, self._tables, [word for each in task.label_words for word in each])
            self.scores = LabelScores(task)
        else:
            _check_layers(backbone, task.layers)
            self.head_layers = task.layers
            width = backbone.states_width * max(1, len(task.layers))
            if task.layers:
                # Public numbers of the bundle that nobody trains.
                self.centre = nn.Parameter(torch.zeros(width), requires_grad=False)
            with torch.device("meta"):
                output = nn.Linear(width, labels)
            self.output = output.to_empty(device="cpu")
            for parameter in self.output.parameters():
                parameter.data.zero_()
            # Next to features of unit length, a bias would be half of an example's gradient, and of its clip.
            self.output.bias.requires_grad_(not task.layers)
        self.layers = reader.layers
        self._bind()
        if seed is not None:
            self._start(np.random.Generator(np.random.Philox(seed)), isinstance(injection, PromptTuning))
            self._start_biases()

    # ---- from ids to logits ----------------------------------------------------------------------------------

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, labels) for ids (B, S) with `min_tokens` <= S <= `room`."""
        return self.answer(ids, self.prompt_values(ids.shape[0]))

    def classify(self, vectors: Tensor, seen: Tensor) -> Tensor:
        """As in `TextClassifier`. Without ids no mask is known, so a cloze reads the last token."""
        at = torch.arange(seen.shape[1], device=seen.device)
        place = torch.where(seen, at, 0).amax(dim=1)
        return self._logits(self._scaled(self._features(vectors, seen, place, self.prompt_values(seen.shape[0]))))

    def prompt_values(self, batch: int) -> Tensor | None:
        """The prompt, (batch, tokens, values): vectors, or a prefix's keys and values; None if there is none."""
        return self.prompt(batch) if "prompt" in self._modules else None

    def answer(self, ids: Tensor, prompt: Tensor | None) -> Tensor:
        """Logits (B, labels) with the given prompt."""
        return self._logits(self.features(ids, prompt))

    def features(self, ids: Tensor, prompt: Tensor | None) -> Tensor:
        """(B, width) The vectors by which the label words' rows are multiplied.

        With a head: (B, width of its features), before the head's dropout.
        """
        return self._scaled(self._read(ids, prompt))

    def uncentred(self, ids: Tensor) -> Tensor:
        """(B, width of its features) The layers' means side by side, before they are centred and scaled."""
        return self._read(ids, self.prompt_values(ids.shape[0]))

    def _read(self, ids: Tensor, prompt: Tensor | None) -> Tensor:
        seen = ids != self.pad_id
        at = torch.arange(ids.shape[1], device=ids.device)
        place = torch.where(seen, at, 0).amax(dim=1)
        if self.mask_id is not None:
            masks = torch.where(ids == self.mask_id, at, -1).amax(dim=1)
            place = torch.where(masks < 0, place, masks)
        types = None
        if self.separator_id is not None:
            # Counts separators before a token: none in the first text and at its own separator, then one.
            ends = (ids == self.separator_id).to(torch.int64)
            types = (ends.cumsum(dim=1) - ends).clamp(max=1)
        return self._features(self.embedding(ids), seen, place, prompt, types)

    def readout(self) -> tuple[NDArray[np.float32], NDArray[np.float32], tuple[int, ...]]:
        """Copies of the last layer, which turns `features` into scores.

        Returns:
            Rows (words, width), a bias (words,), and how many of these words each label has. A head has one row a
            label.
        """
        if "words" not in self._modules:
            weight, bias = (
                each.detach().to("cpu", copy=True).numpy() for each in (self.output.weight, self.output.bias)
            )
            return weight, bias, (1,) * self.labels
        rows = self.words.rows.to("cpu", copy=True).numpy()
        added = np.zeros(len(rows), dtype=np.float32)
        if self.words.bias is not None:
            added = self.words.bias.to("cpu", copy=True).numpy()
        return rows, added, self.scores.words

    def _features(
        self, vectors: Tensor, seen: Tensor, place: Tensor, prompt: Tensor | None, types: Tensor | None = None
    ) -> Tensor:
        if seen.shape[1] > self.room:
            raise ValueError(f"a text has {seen.shape[1]} tokens, and the prompt leaves {self.room}; cut texts shorter")
        ahead, visible = 0, seen
        if prompt is not None and self._prefix is None:
            # The length of this prompt: an exported backbone takes prompts of any length.
            ahead = prompt.shape[1]
            vectors = torch.cat([prompt, vectors], dim=1)
            visible = torch.cat([seen.new_ones(prompt.shape[:2]), seen], dim=1)
            if types is not None:
                types = torch.cat([types.new_zeros(prompt.shape[:2]), types], dim=1)
        try:
            if prompt is not None and self._prefix is not None:
                self._reader.place_prefix(prompt.unflatten(2, self._prefix).to(self._kind), seen.shape[1])
            if self.head_layers and isinstance(self._reader, EncoderReader):
                found = self._reader.layer_states(vectors.to(self._kind), visible, types, self.head_layers)
                return torch.cat([self._mean(each[:, ahead:], seen) for each in found], dim=1)
            states = self._reader.states(vectors.to(self._kind), visible, types)
        finally:
            clear_prefix(self._reader.attentions)
        # A text without tokens would otherwise read states at padding, which depend on the amount of padding.
        states = states.masked_fill(~visible[:, :, None], 0)
        if isinstance(self._reader, T5Reader):
            begun = torch.tensor([self.backbone.config["decoder_start_token_id"], self.mask_id], device=seen.device)
            # Repeated, not broadcast, since LoRA's matrices are in the decoder too.
            vectors = self.embedding(begun.repeat(seen.shape[0], 1)).to(self._kind)
            return self.words.transformed(self._reader.answer(states, visible, vectors).to(torch.float32))
        states = states[:, ahead:].to(torch.float32)
        if "words" in self._modules:
            return self.words.transformed(states[torch.arange(seen.shape[0], device=seen.device), place])
        return self._mean(states, seen)

    @staticmethod
    def _mean(states: Tensor, seen: Tensor) -> Tensor:
        """(B, width) The mean over the text's own positions. A text without tokens has zeros."""
        states = states.to(torch.float32).masked_fill(~seen[:, :, None], 0)
        return states.sum(dim=1) / seen.sum(dim=1, keepdim=True).clamp(min=1)

    def _scaled(self, means: Tensor) -> Tensor:
        """(B, width of features) Means over chosen layers, centred, of unit length; anything else as it is.

        The bound on the length is what makes an example's gradient small whatever its text is.
        """
        if not self.head_layers:
            return means
        apart = means - self.centre
        # Never a division by zero: a text exactly at the centre has zeros.
        return apart / apart.square().sum(dim=1, keepdim=True).clamp(min=_SMALLEST_SQUARE).sqrt()

    def _logits(self, features: Tensor) -> Tensor:
        if "words" in self._modules:
            return cast(Tensor, self.scores(self.words.scored(features)))
        return cast(Tensor, self.output(self.dropout(features)))

    # ---- where the values start ------------------------------------------------------------------------------

    @torch.no_grad()
    def _start_biases(self) -> None:
        values = self.backbone.on("cpu")
        for name, parameter in self.layers.named_parameters():
            if name in values:
                parameter.copy_(values[name])

    def _start(self, random: np.random.Generator, from_words: bool) -> None:
        if "prompt" in self._modules:
            words = None
            if from_words:
                table = self.embedding.weight
                rows = random.integers(len(table), size=self.prompt.tokens)
                words = table[torch.from_numpy(rows)].numpy()
            self.prompt.start(random, words)
        if "lora" in self._modules:
            for adapted in self.lora.values():
                cast(Adapted, adapted).start(random)
        if "output" in self._modules:
            weight = self.output.weight
            values = random.standard_normal(tuple(weight.shape), dtype=np.float32) * np.float32(0.02)
            with torch.no_grad():
                weight.copy_(torch.from_numpy(values))


def _check_task(backbone: Backbone, task: Task, labels: int, mask_id: int | None) -> None:
    if isinstance(task, Head):
        if backbone.kind == "t5":
            raise BackboneInvalid("a classification head needs an encoder; use a cloze with T5")
        return
    if not backbone.has_words_head:
        raise BackboneInvalid(
            "the backbone has no head for masked words, which a cloze needs; use one that was saved with it (such as "
            "BertForMaskedLM), or a classification head"
        )
    if mask_id is None or not 0 <= mask_id < backbone.vocabulary_size:
        raise BackboneInvalid(
            f"the mask's id is {mask_id}, which is not one of the backbone's {backbone.vocabulary_size} rows; use the "
            "job's tokenizer"
        )
    if len(task.label_words) != labels:
        raise BackboneInvalid(f"there are words for {len(task.label_words)} labels, and {labels} labels; match them")
    if (largest := max(word for words in task.label_words for word in words)) >= backbone.vocabulary_size:
        raise BackboneInvalid(
            f"label word {largest} is not one of the backbone's {backbone.vocabulary_size} rows; use the job's "
            "tokenizer"
        )


def _read_by(reader: EncoderReader | T5Reader, task: Task) -> int:
    """The number of layers that read a text."""
    return task.layers[-1] if isinstance(task, Head) and task.layers else len(reader.stack)


def _last(layers: Sequence[nn.Module], count: int | None) -> Sequence[nn.Module]:
    return layers if count is None else layers[-count:]


def _changed(reader: EncoderReader | T5Reader, injection: LoRA, task: Task) -> list[Matrix]:
    """The matrices that an injection changes. A layer that no text goes through would never be called."""
    found = []
    for matrix in reader.matrices:
        count = max(each.layer for each in reader.matrices if each.decodes == matrix.decodes)
        read = count if matrix.decodes else _read_by(reader, task)
        first = 1 if injection.last_layers is None else read - injection.last_layers + 1
        if matrix.kind in injection.matrices and first <= matrix.layer <= read:
            found.append(matrix)
    if len({matrix.kind for matrix in found}) != len(injection.matrices):
        raise BackboneInvalid(
            f"the backbone has no such matrices in the layers that read a text: {', '.join(injection.matrices)}; "
            "choose others, or let the head read a later layer"
        )
    return found


def _check_biases(backbone: Backbone) -> None:
    if backbone.kind == "t5":
        raise BackboneInvalid("T5 has no biases, which bitfit trains; use lora")


def _check_layers(backbone: Backbone, layers: tuple[int, ...]) -> None:
    count, _, _ = prefix_shape(backbone.config)
    if layers and layers[-1] > count:
        raise BackboneInvalid(
            f"model.task.layers names layer {layers[-1]}, and the backbone has {count}; name layers from 0 to {count}"
        )


def _room(reader: EncoderReader | T5Reader, injection: Injection) -> int:
    """How many tokens of text fit next to the prompt."""
    if isinstance(reader, T5Reader):
        # Relative positions have no limit, but memory has.
        return 1 << 16
    room = reader.room - prompt_positions(injection)
    # The probe texts of `check_examples_apart` have seven tokens.
    if room < _MIN_TOKENS + 4:
        raise BackboneInvalid(
            f"a prompt of {prompt_positions(injection)} tokens leaves {room} of the backbone's {reader.room} positions "
            "to a text; use a shorter prompt"
        )
    return room
