"""The number of values sent, on real shapes, compared with the FedPrompt paper; no tensor of that size is allocated."""

import pytest

from learning.prompts import LoRA, PrefixTuning, PromptTuning, PTuning, frozen_values, trained_values
from learning.prompts.backbone import BackboneInvalid, check_backbone, tensor_shapes
from learning.prompts.setting import Cloze, Head, prompt_positions
from tests.support.tiny_prompts import CHOSEN, CLOZE, FAMILIES, INJECTIONS, LABELS, PAIRS, prompted

BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
REAL = {
    "bert-base": ({"model_type": "bert", **BASE, "max_position_embeddings": 512}, 30522),
    "roberta-base": (
        {"model_type": "roberta", **BASE, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1},
        50265,
    ),
    "t5-base": (
        {"model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
        32128,
    ),
}
TASK = Cloze(((7,), (9,)))
each = pytest.mark.parametrize("name", REAL)


@each
def test_twenty_vectors_are_fifteen_thousand_values(name) -> None:
    """The paper has 0.015 M for T5, and 0.016 M for BERT and RoBERTa: one row more than there are positions."""
    found = trained_values(REAL[name][0], PromptTuning(20), TASK, 2)
    assert found == 15_360
    paper = {"bert-base": 0.016, "roberta-base": 0.016, "t5-base": 0.015}[name]
    assert paper in (round(found / 1e6, 3), round((found + 768) / 1e6, 3))


@pytest.mark.parametrize(
    ("name", "values", "share"),
    [("bert-base", 109.530, 0.014), ("roberta-base", 124.714, 0.012), ("t5-base", 222.919, 0.007)],
    ids=["bert-base", "roberta-base", "t5-base"],
)
def test_they_are_a_ten_thousandth_of_the_backbone(name, values, share) -> None:
    """The paper's sizes of whole models, in millions, and percentages (RoBERTa: 0.013, with its extra row)."""
    config, vocabulary = REAL[name]
    shapes = tensor_shapes(check_backbone(config), vocabulary)
    own = sum(int(rows) * (shape[1] if len(shape) > 1 else 1) for shape in shapes.body.values() for rows in shape[:1])
    # The paper also counts BERT's and RoBERTa's poolers or heads.
    assert own / 1e6 == pytest.approx(values, rel=0.008)
    assert round(100 * 15_360 / (values * 1e6), 3) == share


@each
def test_p_tuning_is_the_papers_without_second_biases_and_extra_rows(name) -> None:
    found = trained_values(REAL[name][0], PTuning(20, "lstm", 768), TASK, 2)
    assert found == 25_391_616
    second_biases = 4 * 768 * 2 * 2
    assert round((found + second_biases + 21 * 768) / 1e6, 3) == 25.420


def test_prefix_tuning_of_t5_matches_the_paper() -> None:
    assert trained_values(REAL["t5-base"][0], PrefixTuning(5, 512), TASK, 2) == 9_853_184
    assert trained_values(REAL["t5-base"][0], PrefixTuning(5), TASK, 2) == 92_160


def test_other_injections_on_real_shapes() -> None:
    bert, _ = REAL["bert-base"]
    assert trained_values(bert, LoRA(8, 16), TASK, 2) == 24 * 8 * (768 + 768)
    assert trained_values(REAL["t5-base"][0], LoRA(8, 16), TASK, 2) == 72 * 8 * (768 + 768)
    assert trained_values(bert, PTuning(20, "mlp", 768), TASK, 2) == 15_360 + 3 * (768 * 768 + 768)
    assert trained_values(bert, PromptTuning(20), Head(), 2) == 15_360 + 2 * 769


@pytest.mark.parametrize(("family", "injection"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_the_count_is_that_of_the_modules_parameters(family, injection) -> None:
    config = FAMILIES[family].config
    for task in (CLOZE,) if family.startswith("t5") else (CLOZE, Head()):
        module = prompted(family, injection, task)
        own = sum(parameter.numel() for parameter in module.parameters())
        assert trained_values(config, (INJECTIONS | CHOSEN)[injection], task, LABELS) == own


@pytest.mark.parametrize("injection", [*CHOSEN, "prompt"])
def test_layers_that_no_text_goes_through_have_no_values(injection) -> None:
    task = Head((0, 1))
    module = prompted("bert", injection, task)
    own = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    config = FAMILIES["bert"].config
    assert trained_values(config, (INJECTIONS | CHOSEN)[injection], task, LABELS) == own
    assert frozen_values(config, task, LABELS) == module.centre.numel() + LABELS == 32 + LABELS
    assert not [name for name, _ in module.named_parameters() if "layer.1" in name or "layer1" in name]


def test_only_vectors_before_the_text_take_positions() -> None:
    assert [prompt_positions(each) for each in INJECTIONS.values()] == [4, 4, 4, 0, 0, 0]


def test_an_impossible_backbone_has_no_count() -> None:
    with pytest.raises(BackboneInvalid, match="is not a supported backbone"):
        trained_values({"model_type": "lstm"}, PromptTuning(20), TASK, 2)
