"""The synthetic text benchmark: public text, charges to the ledger, stored results, and that no choice uses a test."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from benchmarks.library.record import NoData, Results
from benchmarks.library.report import write_page
from benchmarks.synthesis import cost as synthesis_cost
from benchmarks.synthesis import judge as synthesis_quality
from benchmarks.synthesis import quality as synthesis
from benchmarks.synthesis import search as synthesis_search
from benchmarks.synthesis import setup as synthesis_setup
from benchmarks.synthesis.attack import attack_figures, attacked_texts
from benchmarks.synthesis.cells import BY_ROUND, CELLS, DATASETS, EPSILONS, Cell, Plan
from benchmarks.synthesis.cost import Timed, cost_figures, timed_at
from benchmarks.synthesis.judge import (
    ClassifierRecipe,
    Judge,
    classifier_bundle,
    distance_of,
    fit_centrally,
    fit_federatedly,
    majority_accuracy,
    with_planted,
)
from benchmarks.synthesis.quality import measure, released, released_path, run
from benchmarks.synthesis.report import PAGE
from benchmarks.synthesis.setup import (
    RvaeRecipe,
    Task,
    canaries,
    corpora_of_members,
    corpus_of_operator,
    dealt,
    exposures,
    multiplier_for,
    perplexity,
    public_text,
    public_words_file,
    read_task,
    rewritten,
    rvae_bundle,
    spent_of,
    train_rvae,
)
from benchmarks.synthesis.tables import comparison_rows, sample_rows, text_rows
from export.bundle import read_job_bundle
from learning.accounting.events import SampledGaussian
from learning.synthesis import published
from learning.synthesis.labels import histogram_event
from learning.synthesis.setting import NO_GUARANTEE, PublishedSetting
from learning.text.data import read_examples
from learning.text.examples import Example
from secure_agg import packed_size
from simulation.virtual_members import SeededRandom
from tacit.model import RvaeModel
from tacit.vector import layout_of

torch.set_num_threads(1)
GOOD, BAD = ("warm", "funny", "great"), ("dull", "cold", "awful")
COMMON = ("the", "film", "plot", "song", "was", "and", "very", ".")
RARE = ("river", "castle", "seven", "winter", "market", "engine", "garden", "silver", "letter", "bridge")


def review(number):
    kind = (BAD, GOOD)[number % 2]
    subject = ("film", "plot", "song")[number % 3]
    text = f"the {subject} was very {kind[number % 5 % 3]} and {kind[number % 7 % 3]} ."
    return Example(text, ("negative", "positive")[number % 2])


TASK = Task(
    "sst2",
    ("negative", "positive"),
    [review(number) for number in range(90)],
    [review(number) for number in range(90, 120)],
    [review(number) for number in range(120, 150)],
)


@pytest.fixture
def public(tmp_path, monkeypatch):
    """A table of vectors and an encyclopaedia in the real ones' form, and a cache folder."""
    random = np.random.default_rng(0)
    glove, wiki = tmp_path / "glove.txt", tmp_path / "wiki.txt"
    entries = [*COMMON, "'s", *GOOD, *BAD]
    glove.write_text("".join(f"{word} {' '.join(f'{x:.3f}' for x in random.normal(size=50))}\n" for word in entries))
    sentences = [f"the {RARE[at % 10]} was a {RARE[at % 7]} and the {RARE[at % 3]}" for at in range(60)]
    lines = [" = Heading = ", f" {' . '.join(sentences)} . ", " an <unk> word stands here . too short . "]
    wiki.write_text("\n".join(lines) + "\n")
    for module in (synthesis_setup, synthesis_quality):
        monkeypatch.setattr(module, "GLOVE", glove)
    monkeypatch.setattr(synthesis_setup, "WIKITEXT", wiki)
    cache = tmp_path / "cache"
    monkeypatch.setattr(public_text, "__defaults__", (cache,))
    monkeypatch.setattr(public_words_file, "__defaults__", (cache,))
    return cache


def plan_of(cache, **changed):
    model = RvaeModel(embedding=8, hidden=12, latent=4, words=32, max_tokens=10, free_bits=0.5)
    rvae = RvaeRecipe(
        model=model, members=3, rounds=2, steps=2, lot=16, plain_epochs=1, start_texts=40, texts=20, std=4.0
    )
    classifier = ClassifierRecipe(hidden=8, epochs=3, batch=8, rate=0.02, rounds=3, steps=2, lot=16, plain_rounds=2)
    return Plan(replace(rvae, **changed), classifier, candidates=7, cache=cache)


def trained_by(plan, folder, epsilon, parts=None, **changed):
    parts = dealt(TASK, plan.rvae.members, 0) if parts is None else parts
    recipe = replace(plan.rvae, **changed)
    bundle = rvae_bundle(TASK, recipe, epsilon, min(map(len, parts)), 0, folder, plan.cache)
    return train_rvae(bundle, parts, SeededRandom("test"))


# ---- cells ----------------------------------------------------------------------------------------------------------


def test_every_budget_has_both_sides_and_every_data_set_its_bounds():
    cases = [json.dumps(case, sort_keys=True) for cell in CELLS for case in cell.cases]
    assert len(set(cases)) == len(cases)
    assert EPSILONS["sst2"] == (5.0, None, 1.0)
    for dataset in DATASETS:
        methods = [(cell.method, cell.epsilon) for cell in CELLS if cell.dataset == dataset]
        assert {("majority", None), ("raw", None), ("published", None)} <= set(methods)
        for epsilon in EPSILONS[dataset]:
            assert ("dp-sgd", epsilon) in methods
            assert ("synthetic", epsilon) in methods
    assert Cell(BY_ROUND[0], "synthetic", BY_ROUND[1]) in CELLS


# ---- data and public text -------------------------------------------------------------------------------------------


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def test_no_member_has_validation_or_test_rows(tmp_path, monkeypatch, public):
    monkeypatch.setattr(synthesis_setup, "SHARED", tmp_path)
    with pytest.raises(NoData, match="sst2/train_sentences"):
        read_task("sst2")
    for part in ("train_sentences", "dev", "test"):
        write(tmp_path / "sst2" / f"{part}.jsonl.gz", [{"text": f"{part} {at}", "label": at % 2} for at in range(4)])
    task = read_task("sst2")
    assert [each.text for each in task.validation] == [f"dev {at}" for at in range(4)]
    assert [each.label for each in task.test] == ["negative", "positive"] * 2
    assert list(task.counts(task.train)) == [2, 2]
    questions = [{"text": f"question {at}", "label": ("LOC", "HUM")[at % 2]} for at in range(700)]
    write(tmp_path / "trec" / "train.jsonl.gz", questions)
    write(tmp_path / "trec" / "test.jsonl.gz", questions[:3])
    task = read_task("trec")
    assert (len(task.train), len(task.validation), task.labels) == (200, 500, ("HUM", "LOC"))
    assert not {each.text for each in task.train} & {each.text for each in task.validation}


def test_parts_are_equal_and_hold_every_row_once():
    parts = dealt(TASK, 4, 1)
    assert sorted(map(len, parts)) == [22, 22, 23, 23]
    assert sorted(each.text for part in parts for each in part) == sorted(each.text for each in TASK.train)
    assert parts != dealt(TASK, 4, 2)


def test_words_and_sentences_come_only_from_public_files(public):
    words = public_words_file(30).read_text().split("\n")[:-1]
    assert words[: len(COMMON) + len(GOOD) + len(BAD)] == [*COMMON, *GOOD, *BAD], "in the table's order, without 's"
    assert set(words) == {*COMMON, *GOOD, *BAD, *RARE, "a", "too", "short"}
    assert len(public_words_file(12).read_text().split("\n")[:-1]) == 12
    sentences = public_text().read_text().split("\n")[:-1]
    assert len(sentences) == 60
    assert sentences[1] == "the castle was a castle and the castle ."
    assert not any("unk" in each or "Heading" in each or "short" in each for each in sentences)


# ---- budgets --------------------------------------------------------------------------------------------------------


def test_a_histogram_costs_budget_and_the_gate_admits_both():
    histogram = histogram_event(8.0, 2, "add-remove")
    alone, after = (multiplier_for(3.0, 16, 20, 30, paid) for paid in ((), (histogram,)))
    assert after > alone
    steps = SampledGaussian(multiplier=after, rate=16 / 30, steps=20)
    assert 0 < spent_of([histogram, steps], 3.0) <= 3.0
    with pytest.raises(ValueError, match="does not admit these events"):
        spent_of([histogram, steps.model_copy(update={"multiplier": 0.9 * after})], 3.0)


def test_a_noisy_training_is_charged_for_histogram_and_all_steps(tmp_path, public):
    plan = plan_of(public)
    parts = [TASK.train[:25], TASK.train[25:60], TASK.train[60:]]
    trained = trained_by(plan, tmp_path, 5.0, parts)
    histogram, steps = trained.events
    assert (histogram.std, steps.steps, steps.rate) == (4.0, 4, 16 / 25)
    assert steps.multiplier == trained.bundle.document.mechanism.noise_multiplier
    assert spent_of(trained.events, 5.0) <= 5.0
    assert trained_by(plan, tmp_path / "plain", None).events == ()


# ---- the autoencoder ------------------------------------------------------------------------------------------------


def test_a_members_own_model_is_the_last_sent_with_its_noise(tmp_path, public):
    trained = trained_by(plan_of(public), tmp_path, 5.0)
    assert len(trained.versions) == 2
    for own in trained.own:
        moved = own - trained.versions[0]
        assert np.count_nonzero(moved) > 0.95 * len(moved), "every coordinate except padding has noise"
    # Weights are equal under a mechanism, so the next version is the mean, up to quantisation.
    assert np.mean(trained.own, axis=0) == pytest.approx(trained.versions[1], abs=1e-3)
    assert not np.allclose(trained.own[0], trained.own[1], atol=1e-3)


def test_the_start_is_trained_on_public_text_once_and_kept(tmp_path, public):
    plan = plan_of(public)
    parts = dealt(TASK, 3, 0)
    first = rvae_bundle(TASK, plan.rvae, None, 30, 0, tmp_path / "a", plan.cache)
    (kept,) = public.glob("synthesis-start-*.safetensors")
    halved = {name: array * np.float32(0.5) for name, array in load_file(kept).items()}
    save_file(halved, kept)
    again = rvae_bundle(TASK, plan.rvae, 5.0, 30, 7, tmp_path / "b", plan.cache)
    assert again.weights == again.manifest.encode(again.manifest.flatten(halved)) != first.weights
    assert train_rvae(again, parts, SeededRandom("x")).bundle.document.weights == again.document.weights


def test_a_table_that_members_freeze_is_trained_at_the_start(tmp_path, public):
    plan = plan_of(public)
    frozen = replace(plan.rvae, model=plan.rvae.model.model_copy(update={"freeze_embedding": True, "tied": True}))
    made = rvae_bundle(TASK, frozen, None, 30, 0, tmp_path / "a", plan.cache)
    drawn = read_job_bundle(tmp_path / "a" / "bundle").frozen["embedding.weight"]
    assert made.frozen.keys() == {"embedding.weight"}
    assert not np.array_equal(made.frozen["embedding.weight"], drawn)
    assert trained_by(replace(plan, rvae=frozen), tmp_path / "b", None).versions[0].shape == (made.document.values,)


def test_training_without_noise_learns_texts_and_canaries(tmp_path, public):
    plan = plan_of(public)
    planted = canaries(3 + 7, public_words_file(30).read_text().split("\n"))
    assert planted == canaries(10, public_words_file(30).read_text().split("\n"))
    assert len(set(planted)) == 10
    parts = with_planted(dealt(TASK, 3, 0), planted[:3], TASK.labels)
    assert [part[-1].text for part in parts] == planted[:3]
    alone = [part[-1:] * 30 for part in parts]
    trained = trained_by(plan, tmp_path, None, alone, plain_epochs=8, plain_rate=0.02)
    # 3 bits: ranked first of eight.
    assert exposures(trained, planted[:3], planted[3:]) == [3.0] * 3
    learnt = trained_by(plan, tmp_path / "b", None, plain_epochs=8, plain_rate=0.02)
    start = learnt.bundle.manifest.decode(learnt.bundle.weights)
    assert perplexity(learnt, learnt.versions[-1], TASK.validation) < 0.5 * perplexity(learnt, start, TASK.validation)


def test_members_follow_their_histograms_but_the_operator_does_not(tmp_path, public):
    plan = plan_of(public, texts=40)
    parts = [[each for each in TASK.train if each.label == "positive"] for _ in range(3)]
    trained = trained_by(plan, tmp_path, None, parts, plain_epochs=4, plain_rate=0.02)
    files = corpora_of_members(trained, tmp_path / "made", SeededRandom("m"))
    made = [example for path in files for example in read_examples(path)]
    assert len(files) == 3
    assert {each.label for each in made} == {"positive"}
    operator = read_examples(corpus_of_operator(trained, trained.versions[-1], tmp_path, 40, SeededRandom("o")))
    assert {each.label for each in operator} == {"negative", "positive"}


def test_the_published_variant_rewrites_every_text_without_charges(tmp_path, public, monkeypatch):
    plan = plan_of(public)
    settings = []
    real = published.train_published

    def watched(module, ids, setting, **given):
        settings.append((len(ids), setting))
        return real(module, ids, setting, **given)

    monkeypatch.setattr(published, "train_published", watched)
    model = plan.rvae.model.model_copy(update={"variant": "published", "label_weight": 0.0})
    trained = trained_by(plan, tmp_path, None, model=model, published=PublishedSetting(epochs=1))
    # Three members and two rounds of the product's own training.
    assert settings == [(30, PublishedSetting(epochs=1))] * 6
    assert trained.events == ()
    files = rewritten(trained, tmp_path / "made", random=SeededRandom("p"))
    rows = [row for path in files for row in read_examples(path)]
    labels = [row.label for row in rows]
    assert 60 < len(rows) <= len(TASK.train)
    assert abs(labels.count("positive") - labels.count("negative")) < 20, "each text has its own label"


# ---- the classifier -------------------------------------------------------------------------------------------------


@pytest.fixture
def judge(tmp_path, public):
    return Judge(classifier_bundle(TASK, plan_of(public).classifier, 0, tmp_path / "c", members=3), TASK)


def flipped(rows):
    return [Example(each.text, {"negative": "positive", "positive": "negative"}[each.label]) for each in rows]


def test_test_rows_change_no_choice(judge, tmp_path, public):
    recipe = plan_of(public).classifier
    one = fit_centrally(judge, TASK.train, recipe, 0)
    assert one.test > 0.9
    assert majority_accuracy(TASK) == pytest.approx(0.5, abs=0.1)
    other = replace(TASK, test=flipped(TASK.test))
    judged = Judge(classifier_bundle(other, recipe, 0, tmp_path / "d", members=3), other)
    two = fit_centrally(judged, TASK.train, recipe, 0)
    assert (two.best, two.validation) == (one.best, one.validation)
    assert np.array_equal(one.values, two.values)
    assert two.test == pytest.approx(1 - one.test)


def test_the_first_best_by_validation_counts_not_by_test():
    curve = [(1, 0.5, 0.9), (2, 0.7, 0.4), (3, 0.7, 0.8)]
    fitted = synthesis_quality._best(curve, [np.full(1, at, np.float32) for at in range(3)], ())
    assert (fitted.best, fitted.validation, fitted.test, float(fitted.values[0])) == (2, 0.7, 0.4, 1.0)


def test_the_federated_classifier_pays_for_all_its_rounds(tmp_path, public):
    recipe = plan_of(public).classifier
    parts = dealt(TASK, 3, 0)
    fitted, judge = fit_federatedly(TASK, parts, recipe, 5.0, 0, tmp_path / "dp", SeededRandom("f"))
    (event,) = fitted.events
    assert (event.steps, event.rate) == (6, 16 / 30)
    assert spent_of(fitted.events, 5.0) <= 5.0
    assert [number for number, _, _ in fitted.curve] == [1, 2, 3]
    assert judge.bundle.document.model.freeze_embedding
    plain, _ = fit_federatedly(TASK, parts, recipe, None, 0, tmp_path / "plain", SeededRandom("f"))
    assert plain.events == ()


def test_wrong_labels_are_detected(judge, public):
    real = fit_centrally(judge, TASK.train, plan_of(public).classifier, 0)
    assert judge.agreement(real.values, TASK.test) > 0.9
    assert judge.agreement(real.values, flipped(TASK.test)) < 0.1
    assert np.isnan(judge.agreement(real.values, []))


def test_distance_distinguishes_copies_from_new_texts():
    training = [each.text for each in TASK.train] + ["river castle seven winter market engine"]
    copies = distance_of(training[:5] + training[-1:], training, training[-1:])
    assert (copies.overlap, copies.verbatim, copies.planted, copies.longest) == ((1.0,) * 4, 1.0, 1, 8)
    new = distance_of(["the garden was silver", "cold letter"], training, training[-1:])
    assert new.overlap[0] == pytest.approx(3 / 6)
    assert (new.verbatim, new.planted, new.longest) == (0.0, 0, 1)


# ---- whole cells ----------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path, public, monkeypatch):
    monkeypatch.setattr(synthesis, "_ROUND_TEXTS", 20)
    plan = plan_of(public)

    def figures(cell, keep=None):
        found = measure(cell, TASK, plan, 0, tmp_path / f"{cell.method}-{cell.epsilon}", keep)
        return [(case, {figure.name: figure for figure in each}) for case, each in found]

    return figures


def test_one_training_gives_the_members_corpus_and_the_operators(measured, tmp_path):
    cell = Cell("sst2", "synthetic", 5.0)
    (members, own), (operator, common) = measured(cell, tmp_path / "kept.npy")
    assert [members, operator] == cell.cases
    assert own["test_accuracy"].more["recipe"]["steps"] == 2
    assert own["rows"].value <= 60
    assert own["planted_reproduced"].more["planted"] == 3
    assert len(own["exposure"].more["values"]) == 3
    assert 0 < own["epsilon_reported"].value <= 5
    assert len(own["four_gram_overlap"].more["ngrams"]) == 4
    assert {each["label"] for each in own["rows"].more["samples"]} <= set(TASK.labels)
    assert [number for number, _ in common["accuracy_by_round"].more["curve"]] == [1, 2]
    assert "accuracy_by_round" not in own
    assert np.load(tmp_path / "kept.npy").dtype == np.float32


def test_the_published_variant_is_labelled_as_without_guarantee(measured):
    ((case, figures),) = measured(Cell("sst2", "published"))
    assert case["epsilon"] is None
    assert figures["formula_epsilon"].value == 999.08
    assert figures["formula_epsilon"].more["promise"] == NO_GUARANTEE
    assert "epsilon_reported" not in figures


def test_measured_cells_are_skipped_and_classifiers_are_stored(tmp_path, public, monkeypatch):
    plan = plan_of(public)
    monkeypatch.setattr(synthesis, "read_task", lambda _: TASK)
    results = Results("synthesis", "c0de", None)
    cells = [Cell("sst2", "majority"), Cell("sst2", "raw")]
    assert not run(results, cells, plan, [0], until=0.0)
    assert results.lines == []
    assert run(results, cells, plan, [0], until=float("inf"))
    lines = list(results.lines)
    monkeypatch.setattr(synthesis, "measure", lambda *_: pytest.fail("measured again"))
    assert run(results, cells, plan, [0], until=float("inf"))
    assert results.lines == lines
    kept = np.load(released_path(cells[1], 0, "c0de", public))
    assert np.array_equal(released(results, cells[1], TASK, plan, 0), kept)


# ---- search, attack, cost -------------------------------------------------------------------------------------------


def test_the_search_has_no_test_rows(tmp_path, public, monkeypatch):
    plan = plan_of(public)
    task = replace(TASK, test=TASK.test[:1])
    figure = synthesis_search.rvae_figure(task, plan.rvae, 5.0, tmp_path / "a", texts=24, cache=public)
    assert [number for number, _ in figure.more["curve"]] == [0, 1, 2]
    assert figure.more["perplexity"] == figure.more["curve"][-1][1]
    assert [guidance for guidance, _ in figure.more["by_guidance"]] == [0.0, 1.0, 3.0]
    assert figure.value == dict(figure.more["by_guidance"])[plan.rvae.guidance]
    results = Results("synthesis_search", "c0de", None)
    monkeypatch.setattr(synthesis_search, "read_task", lambda _: replace(TASK, test=[]))
    monkeypatch.setattr(synthesis_search, "RVAES", ((plan.rvae, 5.0), (replace(plan.rvae, rounds=1), 4.0)))
    monkeypatch.setattr(synthesis_search.rvae_figure, "__defaults__", (24,))
    monkeypatch.setattr(synthesis_search, "CLASSIFIERS", ())
    monkeypatch.setattr(synthesis_search.rvae_bundle, "__defaults__", (public,))  # type: ignore[attr-defined]
    synthesis_search.search(results, until=float("inf"))
    assert [line["case"]["recipe"]["rounds"] for line in results.lines] == [2, 1]
    assert [line["case"]["epsilon"] for line in results.lines] == [5.0, 4.0]
    servers = [recipe.server.optimiser for recipe, _ in synthesis_search.RVAES]
    assert servers == ["fedavg", "fedavg"]


def test_both_server_optimisers_have_equally_many_noisy_steps():
    assert {each.server.optimiser for each, _ in synthesis_search.RVAES} == {"fedavg", "fedadam"}
    assert {(each.rounds * each.steps, each.lot) for each, _ in synthesis_search.RVAES} == {(20, 256)}


def test_features_with_the_words_are_easier_to_attack_than_empty_ones(judge, public):
    auxiliary, held_back = attacked_texts(TASK)
    assert not set(auxiliary) & set(held_back)
    # The language is so regular that few texts are new. The other half of all combinations serves as held-back texts.
    train = [each for at, each in enumerate(_every()) if at % 2]
    rest = [each for at, each in enumerate(_every()) if not at % 2]
    task = replace(TASK, train=train, validation=rest, test=[])
    judge.load(fit_centrally(judge, train, plan_of(public).classifier, 0).values)
    known = {figure.name: figure for figure in attack_figures(judge, task, ["film", "warm"], 0)}
    assert known["attack_accuracy_linear"].value > 0.8
    assert known["attack_accuracy_deep"].more["chance"] == 0.5
    judge.load(np.zeros_like(judge.values()))
    blind = attack_figures(judge, task, ["film"], 0)[0]
    assert blind.value == pytest.approx(0.5, abs=0.1)


def _every():
    return [
        Example(f"the {subject} was {very}{one} and {two} .", label)
        for label, kind in (("negative", BAD), ("positive", GOOD))
        for subject in ("film", "plot", "song")
        for very in ("", "very ", "very very ")
        for one in kind
        for two in kind
    ]


def test_a_members_cost_is_computed_from_timed_steps(tmp_path, public, monkeypatch):
    plan = plan_of(public)
    parts = dealt(TASK, 3, 0)
    bundle = rvae_bundle(TASK, plan.rvae, 5.0, 30, 0, tmp_path, plan.cache)
    figures = {each.name: each for each in cost_figures(bundle, Timed(0.5, 4, (16,)), corpus_seconds=3, corpus_bytes=9)}
    layout = layout_of(bundle.document, 3)
    assert figures["cpu_seconds"].value == 0.5 * 4 + 3
    assert figures["bytes_sent"].value == 2 * packed_size(layout.values, layout.bits) + 9
    assert figures["bytes_received"].value == 2 * len(bundle.weights)
    real = timed_at(bundle, parts[0], 3, [16])
    assert real.seconds > 0
    monkeypatch.setattr(synthesis_cost, "step_seconds", lambda bundle, rows, steps, lot: 1 + 0.25 * lot)
    # The job's lot is 16, extrapolated on the line through 2 and 4.
    assert timed_at(bundle, parts[0], 3, [2, 4]).seconds == pytest.approx(1 + 0.25 * 16)
    plain = rvae_bundle(TASK, plan.rvae, None, 30, 0, tmp_path / "plain", plan.cache)
    with pytest.raises(TypeError, match="only a job with DP-SGD"):
        cost_figures(plain, real)


# ---- the report -----------------------------------------------------------------------------------------------------


def line(figure, value, case, **more):
    return {"bench": "synthesis", "case": case, "seed": 0, "figure": figure, "value": value, "unit": "1", **more}


def quality(method, epsilon=None, source=None):
    return {"part": "quality", "dataset": "sst2", "method": method, "source": source, "epsilon": epsilon}


def test_the_comparison_is_in_one_row_and_claims_no_false_guarantee():
    lines = [
        line("test_accuracy", 0.5, quality("majority")),
        line("test_accuracy", 0.7, quality("raw")),
        line("test_accuracy", 0.66, quality("dp-sgd", 5.0)),
        line("test_accuracy", 0.51, quality("synthetic", 5.0, "members")),
        line("test_accuracy", 0.69, quality("published", None, "members")),
    ]
    head, private, plain = comparison_rows(lines)
    assert head[-1] == "published (no guarantee)"
    assert private == ["sst2", "5", "50.0", "70.0", "66.0", "51.0", "", ""]
    assert plain == ["sst2", "none", "50.0", "70.0", "", "", "", "69.0"]
    # A mean replaces its seeds.
    mean = {**lines[2], "value": 0.6, "spread": 0.1}
    del mean["seed"]
    assert comparison_rows([*lines, mean])[1][4] == "60.0 (10.0)"


def test_a_synthetic_text_cannot_break_the_page():
    case = quality("synthetic", 5.0, "operator")
    samples = [{"label": "positive", "text": "a | b `c` <i>*d*"}]
    (_, row) = sample_rows([line("rows", 1, case, samples=samples)])
    assert row[-1] == "a \\| b \\`c\\` \\<i\\>\\*d\\*"
    figures = [
        line("rows", 10_000, case),
        line("label_agreement", 0.5, case),
        line("four_gram_overlap", 0.1, case, ngrams=[0.9, 0.5, 0.2, 0.1]),
        line("longest_verbatim", 6, case, whole_texts=0.01),
    ]
    row = text_rows(figures)[1]
    assert row[1:6] == ["synthetic, operator", "5", "", "10,000", "50.0"]
    assert row[6:12] == ["0.90", "0.50", "0.20", "0.10", "6", "1.00 %"]


def test_a_copied_text_in_one_seed_is_not_averaged_away():
    case = quality("synthetic", 5.0, "operator")
    seeds = [{**line("longest_verbatim", 6, case, whole_texts=each), "seed": n} for n, each in enumerate([0, 0.02, 0])]
    mean = {key: value for key, value in line("longest_verbatim", 6.33, case).items() if key != "seed"}
    row = text_rows([line("label_agreement", 0.5, case), *seeds, mean])[1]
    assert row[10:12] == ["6", "2.00 %"]


def test_every_line_of_the_results_is_on_the_page_and_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    cost = {"part": "cost", "dataset": "sst2", "trained": "minilm", "epsilon": 5.0}
    attack = {"part": "attack", "dataset": "sst2", "model": "raw", "epsilon": None}
    timed = {"rounds": 20, "steps": 100, "lot": 256, "step_seconds": 8.0, "corpus_seconds": 0.0}
    lines = [
        line("test_accuracy", 0.51, quality("synthetic", 5.0, "operator")),
        line("accuracy_by_round", 0.5, quality("synthetic", 5.0, "operator"), curve=[[1, 0.5], [2, 0.5]]),
        line("cpu_seconds", 800.0, cost, **timed, measured_lots=[8, 24]),
        line("bytes_sent", 9_000_000, cost),
        line("attack_accuracy_deep", 0.812, attack, chance_error=0.013, keywords={"film": 0.8}, hidden_words=0.6),
    ]
    for each in lines:
        each["code"] = "c1"
    (tmp_path / "synthesis.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    case = {"dataset": "sst2", "model": "rvae", "epsilon": 5.0, "recipe": {"rounds": 5}}
    more = {"by_guidance": [[0.0, 0.606], [1.0, 0.615]], "perplexity": 84.5}
    tried = {**line("validation_accuracy", 0.615, case, **more), "bench": "synthesis_search", "code": "c1"}
    (tmp_path / "synthesis_search.jsonl").write_text(json.dumps(tried) + "\n")
    written = write_page(PAGE, tmp_path, tmp_path / "out")
    assert [path.name for path in written] == ["synthesis.md", "synthesis.svg", "synthesis_rounds.svg"]
    page = written[0].read_text()
    assert "| minilm |  | 20 | 100 | 256 | 800 | 0 | 8 | 9.0 MB |  | 8, 24 |" in page
    assert "| sst2 | synthetic, operator | 5 | 2 | 50.0 | 50.0, 50.0 |" in page
    assert "| raw | none | deep | 81.2 | 60.0 | 50 +- 1.3 | film 80 |" in page
    assert "| rvae | 5 | 61.5 | 0: 60.6, 1: 61.5 | 84 | rounds 5 |" in page
    assert "no differential privacy guarantee" in page
