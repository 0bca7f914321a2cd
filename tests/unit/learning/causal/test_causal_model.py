"""Every family computes what transformers computes, every injection what peft computes, and examples stay apart."""

import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from learning.backbones.paging import page_out
from learning.causal.backbone import CausalBackbone
from learning.causal.config import check_causal, tensor_shapes
from learning.causal.model import CausalModel
from learning.causal.sizes import IGNORED, frozen_values, trained_values
from learning.models import widened
from learning.models.division import division_of
from learning.prompts.backbone import BackboneInvalid
from learning.prompts.setting import BitFit, LoRA, PrefixTuning, PromptTuning
from tacit.method import FedAvg
from tests.support.products import Multiplied
from tests.support.tiny_causal import CONFIGS, INJECTIONS, WORDS, backbone, causal, library_model, rows

FAMILIES = tuple(CONFIGS)


def tensors() -> tuple[Tensor, Tensor]:
    ids, targets = rows()
    return torch.from_numpy(ids), torch.from_numpy(targets)


def expected_losses(scores: Tensor, targets: Tensor) -> Tensor:
    """(B,) The mean loss over each row's targets, computed from all scores."""
    each = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return each.view_as(targets).sum(dim=1) / (targets != IGNORED).sum(dim=1).clamp(min=1)


# ---- the same numbers as the libraries -----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_loss_are_those_of_transformers(family: str) -> None:
    ids, targets = tensors()
    ours = CausalModel(backbone(family), LoRA(2, 4.0), 0, 1).eval()
    theirs = library_model(family)
    scores = theirs(ids).logits
    torch.testing.assert_close(ours(ids), scores, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.losses(ids, targets), expected_losses(scores, targets), atol=1e-5, rtol=1e-5)
    # The library's own loss, which shifts labels itself, on a single row.
    labels = functional.pad(targets[:1], (1, 0), value=IGNORED)[:, :-1]
    torch.testing.assert_close(ours.losses(ids[:1], targets[:1])[0], theirs(ids[:1], labels=labels).loss)


def peft_model(family: str, injection: str, module: CausalModel) -> Any:
    """peft's model around transformers' own, with our trained values."""
    from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model

    chosen = INJECTIONS[injection]
    trained = {name: value.detach() for name, value in module.named_parameters()}
    if isinstance(chosen, LoRA):
        targets = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "up": "up_proj"}
        targets["down"] = "down_proj"
        config: Any = LoraConfig(
            task_type=TaskType.CAUSAL_LM, r=2, lora_alpha=4, target_modules=[targets[each] for each in chosen.matrices]
        )
        made = get_peft_model(library_model(family), config)
        for name, value in made.named_parameters():
            if "lora_" in name:
                parts = name.split(".")
                kind = next(key for key, each in targets.items() if each == parts[-4])
                number = parts[parts.index("layers") + 1]
                value.data = trained[f"lora.layer{number}_{kind}.{'down' if 'lora_A' in name else 'up'}.weight"]
        return made.eval()
    made_of = PromptTuningConfig if isinstance(chosen, PromptTuning) else PrefixTuningConfig
    made = get_peft_model(library_model(family), made_of(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3))
    made.prompt_encoder["default"].embedding.weight.data = trained["prompt.vectors.weight"]
    return made.eval()


# peft adapts GPT-2's fused matrix as a whole; the test after this one takes it apart.
PEFTS = [
    (family, injection)
    for family in ("llama3", "mistral", "qwen2", "qwen3", "gpt2")
    for injection in ("lora", "prompt", "prefix")
    if (family, injection) != ("gpt2", "lora")
]


@pytest.mark.parametrize(("family", "injection"), PEFTS)
def test_scores_are_those_of_peft(family: str, injection: str) -> None:
    ids, _ = tensors()
    module = causal(family, injection)
    theirs = peft_model(family, injection, module)(ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(module(ids), theirs[:, -ids.shape[1] :], atol=1e-5, rtol=1e-5)


def test_gpt2s_fused_matrix_is_changed_part_by_part() -> None:
    ids, _ = tensors()
    module = causal("gpt2", "lora")
    theirs = library_model("gpt2")
    width = 16
    with torch.no_grad():
        for number, block in enumerate(theirs.transformer.h):
            for place, kind in enumerate(("query", "key", "value")):
                adapted = module.lora[f"layer{number}_{kind}"]
                change = 2.0 * adapted.up.weight @ adapted.down.weight
                block.attn.c_attn.weight[:, place * width : (place + 1) * width] += change.T
            for kind, layer in (("output", block.attn.c_proj), ("up", block.mlp.c_fc), ("down", block.mlp.c_proj)):
                adapted = module.lora[f"layer{number}_{kind}"]
                layer.weight += (2.0 * adapted.up.weight @ adapted.down.weight).T
    torch.testing.assert_close(module(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_the_gate_can_be_changed() -> None:
    ids, _ = tensors()
    module, plain = causal("llama", LoRA(2, 4.0, ("gate",))), causal("llama", LoRA(2, 4.0), seed=None)
    assert sorted(module.lora) == ["layer0_gate", "layer1_gate"]
    assert not torch.allclose(module(ids), plain(ids))


# ---- losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("injection", tuple(INJECTIONS))
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_all_scores(family: str, injection: str) -> None:
    ids, targets = tensors()
    module = causal(family, injection)
    trained = [each for each in module.parameters() if each.requires_grad]
    weights = torch.arange(1.0, len(ids) + 1)
    losses, expected = module.losses(ids, targets), expected_losses(module(ids), targets)
    torch.testing.assert_close(losses, expected)
    ours = torch.autograd.grad(losses @ weights, trained)
    theirs = torch.autograd.grad(expected @ weights, trained)
    for here, there in zip(ours, theirs, strict=True):
        torch.testing.assert_close(here, there, atol=1e-6, rtol=1e-4)


def test_blocks_of_words_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, targets = tensors()
    module = causal("llama", "lora")
    whole = module.losses(ids, targets)
    whole.sum().backward()
    gradients = [each.grad for each in module.parameters()]
    module.zero_grad(set_to_none=True)
    monkeypatch.setattr("learning.causal.model._BLOCK", 3 * WORDS)
    apart = module.losses(ids, targets)
    apart.sum().backward()
    torch.testing.assert_close(apart, whole)
    for each, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(each.grad, gradient)


def test_sums_over_words_and_what_is_right() -> None:
    ids, targets = tensors()
    module = causal("llama", "lora")
    best = module(ids).argmax(dim=2)
    right = torch.where(targets == IGNORED, targets, best)
    right[1, 2] = (right[1, 2] + 1) % WORDS
    losses, correct, count = module.token_scores(ids, right)
    assert count.tolist() == (targets != IGNORED).sum(dim=1).tolist()
    assert (count - correct).tolist() == [0, 1, 0, 0, 0]
    torch.testing.assert_close(losses / count, module.losses(ids, right))
    assert module.judged(ids, right)[1].tolist() == [True, False, True, True, True]


def test_a_row_without_targets_has_no_loss_and_no_gradient() -> None:
    ids, targets = tensors()
    targets[1] = IGNORED
    module = causal("llama", "lora")
    losses = module.losses(ids, targets)
    assert losses[1].item() == 0.0
    gradients = torch.autograd.grad(losses[1], list(module.parameters()))
    assert all(not each.any() for each in gradients)


# ---- examples stay apart, and padding counts for nothing -----------------------------------------------------


@pytest.mark.parametrize("injection", ["lora", "prompt", "prefix"])
@pytest.mark.parametrize("family", FAMILIES)
def test_neither_padding_nor_the_batch_matters(family: str, injection: str) -> None:
    ids, targets = tensors()
    module = causal(family, injection)
    together = module.losses(ids, targets)
    lengths = module.lengths(ids.numpy(), targets.numpy())
    for number, length in enumerate(lengths.tolist()):
        alone = module.losses(ids[number : number + 1, :length], targets[number : number + 1, :length])
        torch.testing.assert_close(alone[0], together[number])
    # What the padding's positions hold is nothing to the loss.
    noise = torch.where(torch.arange(ids.shape[1]) >= torch.from_numpy(lengths)[:, None], 7, ids)
    torch.testing.assert_close(module.losses(noise, targets), together)


def test_the_padding_may_be_the_end_token() -> None:
    """SmolLM2 pads with the token that ends every turn, so a text holds it in its middle."""
    ids = np.array([[5, 9, 6, 9, 9, 9], [5, 6, 7, 8, 9, 9]])
    targets = np.full_like(ids, IGNORED)
    targets[0, 2], targets[1, 3] = 9, 9
    module = CausalModel(backbone("llama"), LoRA(2, 4.0), 9, 1)
    assert module.lengths(ids, targets).tolist() == [3, 4]
    targets[0, 4] = 9
    assert module.lengths(ids, targets).tolist() == [5, 4]
    empty = np.zeros((0, 6), dtype=np.int64)
    assert module.lengths(empty, empty).tolist() == []


def test_a_text_that_is_too_long_is_refused() -> None:
    module = causal("llama", "prefix")
    assert module.room == 61
    with pytest.raises(ValueError, match="there is room for 61"):
        module(torch.ones(1, 62, dtype=torch.int64))
    with pytest.raises(BackboneInvalid, match="use a shorter prompt"):
        CausalModel(backbone("llama"), PromptTuning(60), 0, 1)


def test_a_prompts_cache_stands_for_it() -> None:
    """What a prompt or prefix amounts to is a prefix of the same model."""
    ids, targets = tensors()
    for injection in ("prompt", "prefix", "prefix-mlp"):
        module = causal("qwen3", injection)
        cache = module.cache()
        assert cache is not None
        assert cache.shape == (3, 2, 2, 2, 8)
        stands = CausalModel(backbone("qwen3"), PrefixTuning(3), 0, None).eval()
        with torch.no_grad():
            stands.prompt.vectors.weight.copy_(cache.flatten(1))
        torch.testing.assert_close(stands.losses(ids, targets), module.losses(ids, targets))
    assert causal("qwen3", "lora").cache() is None


@pytest.mark.parametrize("injection", ["lora", "lora-up", "prompt", "prefix"])
def test_dropout_acts_in_training_alone_and_follows_its_seed(injection: str) -> None:
    ids, targets = tensors()
    module, plain = causal("llama", injection, dropout=0.5), causal("llama", injection)
    torch.testing.assert_close(module.losses(ids, targets), plain.losses(ids, targets), rtol=0, atol=0)
    module.train()
    found = []
    for seed in (1, 1, 2):
        module.seed(seed)
        found.append(module.losses(ids, targets))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    assert not torch.allclose(found[0], plain.losses(ids, targets))


# ---- what is trained, and what is only there -----------------------------------------------------------------


@pytest.mark.parametrize("injection", tuple(INJECTIONS))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_counts_are_those_of_the_module(family: str, injection: str) -> None:
    module = CausalModel(backbone(family), INJECTIONS[injection], 0, None)
    sizes = {name: each.numel() for name, each in module.named_parameters()}
    frozen = division_of(FedAvg(), module).frozen
    assert all(name.startswith(("lora.", "prompt.")) for name in sizes)
    assert not list(module.buffers())
    held = sum(size for name, size in sizes.items() if name in frozen)
    assert frozen_values(CONFIGS[family], INJECTIONS[injection]) == held
    assert trained_values(CONFIGS[family], INJECTIONS[injection]) == sum(sizes.values()) - held


def test_ffa_lora_freezes_the_random_matrix_and_keeps_it_public() -> None:
    module = CausalModel(backbone("llama"), INJECTIONS["lora-up"], 0, 7)
    division = division_of(FedAvg(), module)
    assert division.frozen == {f"lora.layer{n}_{kind}.down.weight" for n in (0, 1) for kind in ("query", "value")}
    assert set(division.shared(module)) == {name.replace("down", "up") for name in division.frozen}
    again = CausalModel(backbone("llama"), INJECTIONS["lora-up"], 0, 7)
    for name, values in division.frozen_values(module).items():
        np.testing.assert_array_equal(values, division.frozen_values(again)[name])
        assert values.any()


def test_the_mean_of_products_is_the_product_of_means_only_with_one_side_frozen() -> None:
    """Why FFA-LoRA: with both sides trained, the mean of two members' changes is another matrix."""
    random = np.random.default_rng(5)
    shared, first, second = (random.standard_normal((2, 16)) for _ in range(3))
    ups = [random.standard_normal((16, 2)) for _ in range(2)]
    frozen = (ups[0] @ shared + ups[1] @ shared) / 2
    np.testing.assert_allclose((ups[0] + ups[1]) / 2 @ shared, frozen)
    both = (ups[0] @ first + ups[1] @ second) / 2
    assert not np.allclose((ups[0] + ups[1]) / 2 @ ((first + second) / 2), both, atol=0.1)


def test_a_seed_gives_the_same_start_and_a_sensible_one() -> None:
    for injection in INJECTIONS.values():
        first, same, other = (CausalModel(backbone("llama"), injection, 0, seed) for seed in (4, 4, 5))
        for name, values in first.named_parameters():
            torch.testing.assert_close(values, same.get_parameter(name), rtol=0, atol=0)
        assert any(not torch.equal(v, other.get_parameter(n)) for n, v in first.named_parameters())
    # A prefix starts as words of the model: their keys and values at its first positions.
    prompt = CausalModel(backbone("llama"), PromptTuning(3), 0, 4)
    prefix = CausalModel(backbone("llama"), PrefixTuning(3), 0, 4)
    assert prompt.cache() is not None
    torch.testing.assert_close(prefix.cache(), prompt.cache())


def test_what_the_backbone_lacks_is_refused() -> None:
    with pytest.raises(BackboneInvalid, match="no such matrices: gate"):
        causal("gpt2", LoRA(2, 4.0, ("gate",)))
    with pytest.raises(BackboneInvalid, match="lora, prompt-tuning or prefix-tuning"):
        causal("llama", BitFit())


# ---- precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [True, False], ids=["units", "widened"])
@pytest.mark.parametrize("injection", ["lora", "prompt", "prefix"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_computes_nearly_the_same_and_keeps_what_is_trained_in_float32(
    family: str, injection: str, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widened, "has_matrix_units", lambda: units)
    ids, targets = tensors()
    module = causal(family, injection)
    exact = module.losses(ids, targets)
    with module.computing_in("bfloat16"):
        rough = module.losses(ids, targets)
        rough.sum().backward()
    assert rough.dtype == torch.float32
    assert all(each.dtype == each.grad.dtype == torch.float32 for each in module.parameters() if each.grad is not None)
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, atol=0.15, rtol=0.05)
    torch.testing.assert_close(module.losses(ids, targets), exact, rtol=0, atol=0)


@pytest.mark.parametrize("injection", ["lora", "prompt", "prefix"])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_matrix_units_no_product_is_in_bfloat16(
    family: str, injection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, targets = tensors()
    module, kinds, losses = causal(family, injection), {}, {}
    for units in (True, False):
        monkeypatch.setattr(widened, "has_matrix_units", lambda units=units: units)
        with module.computing_in("bfloat16"), Multiplied() as seen:
            losses[units] = module.losses(ids, targets)
            losses[units].sum().backward()
        kinds[units] = seen.kinds
    assert torch.bfloat16 in kinds[True]
    assert kinds[False] == {torch.float32}
    torch.testing.assert_close(losses[False], losses[True], atol=0.05, rtol=0.02)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems cannot let go of pages")
def test_bfloat16_lets_go_of_the_files_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network in bfloat16 takes its own bytes, not those of the file next to them, and the file is read again."""
    config = {**CONFIGS["llama"], "hidden_size": 256, "intermediate_size": 4096}
    shapes = tensor_shapes(check_causal(config), WORDS)
    size = sum(math.prod(shape) for shape in shapes.values())
    random = np.random.default_rng(0)
    with (tmp_path / "values").open("wb") as file:
        file.write((0.02 * random.standard_normal(size, dtype=np.float32)).tobytes())
        file.flush()
        # A page that is not on the disk yet stays.
        os.fsync(file.fileno())
    whole = np.memmap(tmp_path / "values", dtype=np.float32, mode="r")
    tensors, first = {}, 0
    for name, shape in shapes.items():
        tensors[name] = np.asarray(whole[first : first + math.prod(shape)]).reshape(shape)
        first += math.prod(shape)

    def resident() -> int:
        """Bytes of the file in this process's memory."""
        maps = Path("/proc/self/smaps").read_text().split(str(tmp_path / "values"))
        return 1024 * sum(int(re.search(r"Rss: +(\d+) kB", each)[1]) for each in maps[1:])

    module = CausalModel(CausalBackbone(config, tensors), LoRA(2, 4.0), 0, 1).eval()
    ids, targets = (torch.from_numpy(each) for each in rows())
    exact = module.losses(ids, targets)
    assert resident() > 3.9 * size
    places, converted = module._network._places, list[int]()

    def let_go(address: int, size: int) -> None:
        converted.append(sum(getattr(owner, name).dtype is torch.bfloat16 for owner, name, _ in places))
        page_out(address, size)

    monkeypatch.setattr("learning.prompts.backbone.page_out", let_go)
    with module.computing_in("bfloat16"):
        # Tensor by tensor, so that the file and its copy are never both in memory.
        assert converted[: len(places)] == list(range(1, len(places) + 1))
        assert resident() < 0.5 * size
        torch.testing.assert_close(module.losses(ids, targets), exact, atol=0.15, rtol=0.05)
    torch.testing.assert_close(module.losses(ids, targets), exact, rtol=0, atol=0)
