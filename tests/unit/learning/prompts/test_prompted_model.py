"""Prompted models against the library's own models, and what they share, send and refuse."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from learning.models.division import division_of, load_shared, shared_parameters
from learning.prompts.backbone import Backbone, BackboneInvalid
from learning.prompts.model import LabelScores, PromptedModel
from learning.prompts.setting import Cloze, Head, LoRA, PrefixTuning, PromptTuning, PTuning
from learning.training.local import evaluate, train
from tacit.job import Training
from tacit.method import FedAvg
from tests.support.tiny_prompts import (
    CLOZE,
    FAMILIES,
    INJECTIONS,
    LABELS,
    PAIRS,
    VOCABULARY,
    WIDTH,
    backbone,
    library,
    prompted,
    texts,
)

torch.set_num_threads(1)
of_each = pytest.mark.parametrize("family", FAMILIES)
of_each_pair = pytest.mark.parametrize(("family", "injection"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
with_each = pytest.mark.parametrize("injection", INJECTIONS)
ENCODERS = ["bert", "roberta", "distilbert", "electra"]


# ---- against the library -------------------------------------------------------------------------------------


def word_scores(family: str, model: Any, ids: Tensor, prompt: Tensor | None = None, **more: Any) -> Tensor:
    """The library's scores of all words (B, V), at the last mask of each text, with `prompt` (P, width) before it."""
    made = FAMILIES[family]
    vectors = model.get_input_embeddings()(ids)
    visible = (ids != made.pad).long()
    ahead = 0
    if prompt is not None:
        ahead = len(prompt)
        vectors = torch.cat([prompt[None].expand(len(ids), -1, -1), vectors], dim=1)
        visible = torch.cat([visible.new_ones(len(ids), ahead), visible], dim=1)
    if family.startswith("t5"):
        begun = torch.tensor([[0, made.mask]]).repeat(len(ids), 1)
        return model(inputs_embeds=vectors, attention_mask=visible, decoder_input_ids=begun, **more).logits[:, 1]
    if family == "roberta":
        more.setdefault("position_ids", (2 + torch.arange(vectors.shape[1])).repeat(len(ids), 1))
    scores = model(inputs_embeds=vectors, attention_mask=visible, **more).logits
    place = [int((row == made.mask).nonzero()[-1]) for row in ids]
    return scores[torch.arange(len(ids)), torch.tensor(place) + ahead]


def of_labels(scores: Tensor) -> Tensor:
    """The formula of `Cloze`, written out."""
    return torch.stack([scores[:, list(words)].exp().mean(dim=1).log() for words in CLOZE.label_words], dim=1)


def with_masks(family: str) -> Tensor:
    return texts(family)[0][:-2]


@of_each
@torch.no_grad()
def test_without_a_change_it_answers_like_the_librarys_model(family) -> None:
    """LoRA starts as no change."""
    module = prompted(family, LoRA(rank=2, alpha=4), seed=None).eval()
    ids = with_masks(family)
    torch.testing.assert_close(module(ids), of_labels(word_scores(family, library(family), ids)), rtol=1e-4, atol=1e-5)


@of_each
@pytest.mark.parametrize("injection", ["prompt", "mlp", "lstm"])
@torch.no_grad()
def test_a_prompt_is_vectors_before_the_texts(family, injection) -> None:
    module = prompted(family, injection).eval()
    ids = with_masks(family)
    prompt = module.prompt_values(1)
    expected = of_labels(word_scores(family, library(family), ids, prompt[0]))
    torch.testing.assert_close(module(ids), expected, rtol=1e-4, atol=1e-5)
    without = of_labels(word_scores(family, library(family), ids))
    assert float((expected - without).abs().max()) > 0.01


@of_each
@torch.no_grad()
def test_lora_is_the_same_as_merged_weights(family) -> None:
    """peft is not a dependency; merged weights are the definition."""
    module = prompted(family, "lora").eval()
    merged = copy.deepcopy(library(family))
    changed = 0
    for name, layer in merged.named_modules():
        short = name.rsplit(".", 1)[-1]
        what = {"query": "query", "q_lin": "query", "q": "query", "value": "value", "v_lin": "value", "v": "value"}
        if short not in what:
            continue
        number = next(part for part in name.split(".") if part.isdigit())
        place = f"layer{number}_{what[short]}"
        if family.startswith("t5"):
            stack = name.split(".")[0]
            place = f"{stack}{number}_{'cross_' if 'EncDec' in name else ''}{what[short]}"
        adapted = module.lora[place]
        layer.weight += 4 / 2 * adapted.up.weight @ adapted.down.weight
        changed += 1
    assert changed == len(module.lora)
    ids = with_masks(family)
    torch.testing.assert_close(module(ids), of_labels(word_scores(family, merged, ids)), rtol=1e-4, atol=1e-5)


def attended(prefix: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor) -> Tensor:
    """Attention with a prefix of keys and values, one example and one head at a time, in float64.

    prefix (P, layers, 2, heads, size); q, k, v (S, heads, size); seen (S,); bias (heads, S, P + S).
    """
    found = torch.zeros_like(q, dtype=torch.float64)
    for head in range(q.shape[1]):
        keys = torch.cat([prefix[:, layer, 0, head], k[:, head]]).double()
        values = torch.cat([prefix[:, layer, 1, head], v[:, head]]).double()
        scores = q[:, head].double() @ keys.T + bias[head].double()
        scores[:, len(prefix) :][:, ~seen] = -torch.inf
        found[:, head] = scores.softmax(dim=1) @ values
    return found


@of_each
@torch.no_grad()
def test_a_prefix_is_keys_and_values_before_every_layers(family) -> None:
    """A plain reference in place of peft's: the library's attention with a prefix added inside."""
    from transformers import AttentionInterface

    module = prompted(family, "prefix-mlp").eval()
    ids = with_masks(family)
    t5 = family.startswith("t5")
    heads, size = (3, 6) if t5 else (4, 4)
    prefix = module.prompt_values(1)[0].reshape(-1, 2, 2, heads, size)
    tokens = len(prefix)
    model = copy.deepcopy(library(family))
    order = [
        layer for layer in model.modules() if type(layer).__name__.endswith("Attention") and hasattr(layer, "scaling")
    ]
    seen = ids != FAMILIES[family].pad

    def attend(layer, query, key, value, mask, scaling, position_bias=None, **_):
        number = order.index(layer)
        length = query.shape[2]
        if t5 and number >= 2:  # The decoder's.
            scores = (query @ key.transpose(2, 3)) * scaling + position_bias
            if mask is None or mask.ndim != 4:
                onward = torch.ones(length, key.shape[2], dtype=torch.bool).tril()
                full = onward[None, None] if key.shape[2] == length else seen[:, None, None, :]
                scores = scores.masked_fill(~full, -torch.inf)
            return (scores.softmax(dim=-1) @ value).transpose(1, 2), None
        bias = torch.zeros(heads, length, tokens + length)
        if t5:
            bias = order[0].compute_bias(length + tokens, length + tokens)[0, :, tokens:]
        rows = [
            attended(  # type: ignore[call-arg]
                prefix, number, *(each[b].transpose(0, 1) for each in (query * scaling, key, value)), seen[b], bias
            )
            for b in range(len(query))
        ]
        return torch.stack(rows).float(), None

    AttentionInterface.register("tests-prefix", attend)
    model.set_attn_implementation("tests-prefix")
    expected = of_labels(word_scores(family, model, ids))
    torch.testing.assert_close(module(ids), expected, rtol=1e-4, atol=1e-5)
    assert float((expected - of_labels(word_scores(family, library(family), ids))).abs().max()) > 0.01


@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_a_head_sees_the_mean_of_the_text_without_the_prompt(family) -> None:
    module = prompted(family, "prompt", Head()).eval()
    ids, _ = texts(family)
    ids = ids[:-1]
    seen = ids != FAMILIES[family].pad
    model: Any = library(family)
    more = {"position_ids": (2 + torch.arange(4 + ids.shape[1])).repeat(len(ids), 1)} if family == "roberta" else {}
    vectors = torch.cat([module.prompt_values(len(ids)), model.get_input_embeddings()(ids)], dim=1)
    states = model.base_model(
        inputs_embeds=vectors, attention_mask=functional.pad(seen.long(), (4, 0), value=1), **more
    ).last_hidden_state[:, 4:]
    mean = (states * seen[:, :, None]).sum(dim=1) / seen.sum(dim=1, keepdim=True)
    torch.testing.assert_close(module(ids), module.output(mean), rtol=1e-4, atol=1e-5)


# ---- texts ---------------------------------------------------------------------------------------------------


@of_each_pair
@torch.no_grad()
def test_padding_and_other_texts_have_no_influence(family, injection) -> None:
    module = prompted(family, injection).eval()
    ids, _ = texts(family)
    together = module(functional.pad(ids, (0, 5), value=FAMILIES[family].pad))
    assert bool(torch.isfinite(together).all())
    for row in range(len(ids)):
        length = max(int((ids[row] != FAMILIES[family].pad).sum()), 3)
        alone = module(ids[row : row + 1, :length])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ENCODERS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_cloze_reads_the_last_mask_or_else_the_last_token(family, data) -> None:
    made = FAMILIES[family]
    module = prompted(family).eval()
    length = data.draw(st.integers(1, 9))
    tokens = data.draw(st.lists(st.sampled_from([made.mask, 20, 21, 22, 23]), min_size=length, max_size=length))
    ids = torch.tensor([tokens + [made.pad] * (10 - length)])
    place = max((at for at, token in enumerate(tokens) if token == made.mask), default=length - 1)
    prompt = module.prompt_values(1)
    seen = ids != made.pad
    with torch.no_grad():
        vectors = torch.cat([prompt, module.embedding(ids)], dim=1)
        states = module._reader.states(vectors, functional.pad(seen, (4, 0), value=True))[:, 4:]
        torch.testing.assert_close(module.features(ids, prompt), module.words.transformed(states[:, place]))


@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    numbers=st.lists(st.floats(-30, 30), min_size=20, max_size=20),
)
@settings(deadline=None)
def test_a_labels_probability_is_the_mean_of_its_words(counts, numbers) -> None:
    total = sum(counts)
    words = iter(range(total))
    task = Cloze(tuple(tuple(next(words) for _ in range(count)) for count in counts))
    scores = torch.tensor([numbers[:total]], dtype=torch.float64, requires_grad=True)
    logits = LabelScores(task)(scores)
    expected = torch.stack([part.exp().mean().log() for part in scores[0].split(counts)])
    torch.testing.assert_close(logits[0], expected)
    (g,) = torch.autograd.grad(logits.sum(), [scores])
    assert bool(torch.isfinite(g).all())
    # A label has one unit of gradient, however many words share it.
    torch.testing.assert_close(torch.stack([part.sum() for part in g[0].split(counts)]), torch.ones_like(expected))


def test_a_text_that_leaves_no_room_is_refused() -> None:
    module = prompted("bert")
    assert module.room == 48 - 4
    assert prompted("roberta").room == 48 - 2 - 4
    assert prompted("bert", "prefix").room == 48
    with pytest.raises(ValueError, match="45 tokens, and the prompt leaves 44"):
        module(torch.full((1, 45), 20))
    with torch.no_grad():
        assert module(torch.full((1, 44), 20)).shape == (1, LABELS)


# ---- what is sent and what stays ---------------------------------------------------------------------------


@of_each_pair
def test_only_trained_values_are_parameters_and_nothing_is_a_buffer(family, injection) -> None:
    module = prompted(family, injection)
    names = [name for name, _ in module.named_parameters()]
    parts = {"lora": "lora", "bitfit": "layers"}
    assert {name.split(".")[0] for name in names} == {parts.get(injection.split("-")[0], "prompt")}
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert not list(module.named_buffers())
    shared = division_of(FedAvg(), module).shared(module)
    assert list(shared) == names
    assert sum(each.size for each in shared.values()) < 3000
    other = prompted(family, injection, seed=None)
    assert not any(bool(parameter.any()) for name, parameter in other.named_parameters() if ".up." not in name)
    load_shared(other, shared)
    ids, _ = texts(family)
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(ids), module.eval()(ids), rtol=0, atol=0)


@of_each
def test_modules_on_one_backbone_share_its_memory(family) -> None:
    tensors = {name: each.detach().numpy().copy() for name, each in library(family).state_dict().items()}
    for each in tensors.values():
        each.flags.writeable = False  # Like a memory map.
    loaded = Backbone(backbone(family).config, tensors)
    made = FAMILIES[family]
    modules = [
        PromptedModel(loaded, injection, CLOZE, LABELS, made.pad, made.mask, 1) for injection in INJECTIONS.values()
    ]
    table = tensors["shared.weight" if family.startswith("t5") else f"{loaded.kind}.embeddings.word_embeddings.weight"]
    for module in modules:
        assert module.embedding.weight.data_ptr() == table.ctypes.data
    ids, labels = texts(family)
    for module in modules:
        train(module, ids.numpy(), labels.numpy(), Training(learning_rate=0.01, batch=3), seed=1)
    for module in modules:
        assert module.embedding.weight.data_ptr() == table.ctypes.data
    for name, each in tensors.items():
        np.testing.assert_array_equal(each, library(family).state_dict()[name].numpy())


@of_each
def test_another_device_has_the_backbone_once(family) -> None:
    """torch's meta device stands in for one that a test machine may not have."""
    loaded = Backbone(
        backbone(family).config, {name: each.numpy() for name, each in library(family).state_dict().items()}
    )
    made = FAMILIES[family]
    first, second = (
        PromptedModel(loaded, PromptTuning(4), CLOZE, LABELS, made.pad, made.mask, 1).to("meta") for _ in range(2)
    )
    assert first.embedding.weight is second.embedding.weight
    frozen = [each for layer in first.modules() for each in vars(layer).values() if isinstance(each, Tensor)]
    assert frozen
    assert all(each.device.type == "meta" for each in frozen)
    assert first(torch.zeros(2, 5, dtype=torch.int64, device="meta")).shape == (2, LABELS)
    assert loaded.on("cpu")[loaded.words_name].device.type == "cpu"


def test_frozen_values_pass_gradients_on_and_have_none() -> None:
    module = prompted("bert")
    ids, labels = texts("bert")
    functional.cross_entropy(module(ids), labels).backward()
    assert float(module.prompt.vectors.weight.grad.norm()) > 0
    assert all(each.grad is None for each in module.backbone.on("cpu").values())


def test_narrowing_keeps_the_word_embedding_and_checks_ids() -> None:
    module = prompted("bert")
    with module.narrowed(np.array([[1, 2, 49]])) as ids:
        assert ids.tolist() == [[1, 2, 49]]
        assert module.embedding.num_embeddings == VOCABULARY
    with pytest.raises(ValueError, match="outside the backbone's 50 words"), module.narrowed(np.array([[50]])):
        pass


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in ("bert", "t5") else pytest.mark.long) for each in FAMILIES]
)
def test_training_lowers_the_loss(family) -> None:
    module = prompted(family, "prompt")
    ids, _ = texts(family, batch=30)
    labels = (ids[:, 0] % LABELS).numpy()
    before = evaluate(module, ids.numpy(), labels).loss
    optimiser = "adafactor" if family.startswith("t5") else "adam"
    recipe = Training(epochs=8, batch=10, optimiser=optimiser, learning_rate=0.1)
    train(module, ids.numpy(), labels, recipe, seed=3)
    assert evaluate(module, ids.numpy(), labels).loss < before - 0.05


# ---- randomness ----------------------------------------------------------------------------------------------


@with_each
def test_the_same_seed_gives_the_same_weights_and_another_does_not(injection) -> None:
    torch.manual_seed(1)
    first = shared_parameters(prompted("bert", INJECTIONS[injection], seed=5))
    torch.manual_seed(2)
    again = shared_parameters(prompted("bert", INJECTIONS[injection], seed=5))
    other = shared_parameters(prompted("bert", INJECTIONS[injection], seed=6))
    for name, values in first.items():
        np.testing.assert_array_equal(values, again[name])
    assert any((values != other[name]).any() for name, values in first.items())


def test_a_soft_prompt_starts_as_words() -> None:
    table = backbone("roberta").on("cpu")["embeddings.word_embeddings.weight"]
    for row in prompted("roberta").prompt.vectors.weight:
        assert bool((row == table).all(dim=1).any())


@of_each
def test_every_dropout_draws_from_the_modules_generator(family) -> None:
    ids, _ = texts(family)
    for task in (CLOZE,) if family.startswith("t5") else (CLOZE, Head()):
        module = prompted(family, "prefix", task, dropout=0.4)
        found = []
        for process in (1, 2):
            torch.manual_seed(process)
            module.seed(7)
            found.append(module(ids).detach())
            torch.testing.assert_close(torch.get_rng_state(), torch.random.manual_seed(process).get_state())
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        module.seed(8)
        assert float((module(ids).detach() - found[0]).abs().max()) > 1e-3


# ---- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "task", "labels", "mask", "message"),
    [
        ("t5", Head(), 3, None, "use a cloze with T5"),
        ("bert", CLOZE, 3, None, "mask's id is None"),
        ("bert", CLOZE, 3, VOCABULARY, "not one of the backbone's 50 rows"),
        ("bert", CLOZE, 2, 4, "words for 3 labels, and 2 labels"),
        ("bert", Cloze(((7,), (VOCABULARY,))), 2, 4, "label word 50 is not one of"),
    ],
    ids=["head-on-t5", "no-mask", "mask-outside", "labels", "word-outside"],
)
def test_a_task_that_the_backbone_cannot_do_is_refused(family, task, labels, mask, message) -> None:
    with pytest.raises(BackboneInvalid, match=message):
        PromptedModel(backbone(family), PromptTuning(2), task, labels, 0, mask, 1)


def test_a_backbone_without_a_head_for_words_cannot_do_a_cloze() -> None:
    tensors = {name: each.numpy() for name, each in library("bert").state_dict().items() if not name.startswith("cls")}
    bare = Backbone(FAMILIES["bert"].config, tensors)
    with pytest.raises(BackboneInvalid, match="no head for masked words"):
        PromptedModel(bare, PromptTuning(2), CLOZE, 3, 0, 4, 1)
    module = PromptedModel(bare, PromptTuning(2), Head(), 3, 0, None, 1)
    assert [tuple(each.shape) for each in module.parameters()] == [(2, WIDTH), (3, WIDTH), (3,)]


def test_a_prompt_longer_than_the_backbone_is_refused() -> None:
    with pytest.raises(BackboneInvalid, match="leaves 6 of the backbone's 48 positions"):
        PromptedModel(backbone("bert"), PromptTuning(42), CLOZE, 3, 0, 4, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptTuning(0), "tokens must be a whole number from 1"),
        (lambda: PromptTuning(10_000), "to 512"),
        (lambda: PTuning(4, "gru", 8), "mlp or lstm"),
        (lambda: PTuning(4, "mlp", 0), "hidden must be"),
        (lambda: PrefixTuning(4, 10**9), "hidden must be"),
        (lambda: LoRA(0, 1.0), "rank must be"),
        (lambda: LoRA(2, float("nan")), "alpha of LoRA"),
        (lambda: Cloze(((1,),)), "at least two labels"),
        (lambda: Cloze(((1,), ())), "each with at least one word"),
        (lambda: Cloze(((1,), (2, 1))), "occurs twice"),
        (lambda: Cloze(((1,), (-2,))), "never below 0"),
    ],
    ids=["no-tokens", "tokens", "encoder", "hidden", "prefix", "rank", "alpha", "labels", "words", "twice", "negative"],
)
def test_an_invalid_setting_is_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
