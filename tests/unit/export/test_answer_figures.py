"""The figures of a model that writes: by hand, beside the libraries that define them, and their intervals' coverage."""

import math
import tracemalloc
import warnings

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from export import answer_figures as figures
from export.answer_figures import answer_figures, rouge_l, same_text, token_figures

ANSWERS = [
    "The Vaults is a cheap pub near Cafe Adriatic.",
    "Blue Spice is a coffee shop in the city centre.",
    "",
    "The Mill serves Italian food, by the river; it is cheap.",
]
REFERENCES = [
    ["The Vaults pub near Cafe Adriatic has a 5 star rating. Prices start at 30."],
    ["A coffee shop in the city centre area called Blue Spice.", "Blue Spice is a coffee shop in city centre."],
    ["Nobody knows.", "There is a pub."],
    [
        "The Mill is a cheap Italian place by the river.",
        "By the river is The Mill, cheap and Italian.",
        "Cheap: The Mill.",
    ],
]


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_token_figures_of_three_responses_are_those_computed_by_hand() -> None:
    found = token_figures(np.array([2.0, 9.0, 1.0]), np.array([3, 0, 1]), np.array([4, 5, 1]))
    assert (found.rows, found.tokens) == (3, 10)
    # 12 nats over 10 tokens: the mean over tokens, not the mean of the rows' means (1.1).
    assert found.loss.value == pytest.approx(1.2)
    assert found.perplexity.value == pytest.approx(math.exp(1.2))
    assert found.accuracy.value == pytest.approx(0.4)
    assert found.loss.low <= 1.2 <= found.loss.high
    assert found.perplexity.low == pytest.approx(math.exp(found.loss.low))


def test_a_response_without_tokens_counts_nowhere() -> None:
    some = token_figures(np.array([2.0, 0.0]), np.array([1, 0]), np.array([4, 0]))
    assert (some.rows, some.tokens, some.loss.value, some.accuracy.value) == (1, 4, 0.5, 0.25)
    # Nor in an interval, in which some draws would hold such responses alone.
    three = token_figures(np.array([2.0, 3.0, 0.0]), np.array([1, 2, 0]), np.array([4, 4, 0]))
    assert three == token_figures(np.array([2.0, 3.0]), np.array([1, 2]), np.array([4, 4]))
    with pytest.raises(ValueError, match="give rows with responses"):
        token_figures(np.array([0.0]), np.array([0]), np.array([0]))
    with pytest.raises(ValueError, match="differ in shape"):
        token_figures(np.array([0.0, 1.0]), np.array([0]), np.array([1]))


def test_rows_of_one_prompt_are_drawn_together() -> None:
    """Forty copies of a row say no more than one: the interval stays as wide as that of the prompts."""
    draws = np.random.default_rng(1)
    losses, counts = draws.normal(2.0, 0.5, 20), np.ones(20, np.int64)
    once = token_figures(losses, counts, counts).loss
    many = np.repeat(losses, 40)
    alone = token_figures(many, np.repeat(counts, 40), np.repeat(counts, 40)).loss
    grouped = token_figures(
        many, np.repeat(counts, 40), np.repeat(counts, 40), prompts=np.repeat(np.arange(20), 40).tolist()
    ).loss
    assert (grouped.low, grouped.high) == pytest.approx((once.low, once.high))
    assert alone.high - alone.low < 0.5 * (once.high - once.low)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 200 files of 100 responses whose true loss is 2, about 95 % of the intervals hold 2."""
    draws = np.random.default_rng(2)
    held = 0
    for seed in range(200):
        counts = draws.integers(1, 30, 100)
        losses = counts * 2.0 + np.sqrt(counts) * draws.normal(0, 1, 100)
        loss = token_figures(losses, counts // 2, counts, seed=seed).loss
        held += loss.low <= 2.0 <= loss.high
    # Three standard errors below and above 95 %.
    assert 0.90 <= held / 200 <= 0.995


def test_a_seed_gives_the_same_interval_again() -> None:
    first, second, other = (answer_figures(ANSWERS, REFERENCES, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert first.bleu.value == other.bleu.value
    assert first.bleu.high != other.bleu.high


def test_an_interval_needs_little_memory_and_does_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(5)
    counts = draws.integers(1, 30, 100_000)
    losses = counts * 2.0 + draws.normal(0, 1, len(counts))
    monkeypatch.setattr(figures, "RESAMPLES", 50)
    tracemalloc.start()
    try:
        whole = token_figures(losses, counts // 2, counts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # All counts of the 50 draws are 40 MB, and 80 MB with those in floating point.
    assert peak < 30e6
    assert whole.loss.low < 2.0 < whole.loss.high
    few = [token_figures(losses[:300], counts[:300] // 2, counts[:300])]
    monkeypatch.setattr(figures, "_COUNTS", 2000)
    few.append(token_figures(losses[:300], counts[:300] // 2, counts[:300]))
    for name in ("loss", "accuracy"):
        ends = [(getattr(each, name).low, getattr(each, name).high) for each in few]
        assert ends[0] == pytest.approx(ends[1], rel=1e-12)


# ---- answers --------------------------------------------------------------------------------------------------------


def test_bleu_is_that_of_sacrebleu_over_the_corpus() -> None:
    found = answer_figures(ANSWERS, REFERENCES)
    most = max(map(len, REFERENCES))
    streams = [[right[at] if at < len(right) else None for right in REFERENCES] for at in range(most)]
    assert found.bleu.value == pytest.approx(BLEU().corpus_score(ANSWERS, streams).score)
    assert 5 < found.bleu.value < 95
    assert (found.answers, found.references) == (4, 8)


def test_rouge_l_is_that_of_the_rouge_score_package() -> None:
    """The values are those of rouge-score 0.1.2, `score_multi` with rougeL and without a stemmer."""
    assert rouge_l(ANSWERS[0], REFERENCES[0]) == pytest.approx(0.5)
    assert rouge_l("the cat sat on the mat", ["on the mat sat the cat", "a cat sat on a mat"]) == pytest.approx(2 / 3)
    assert rouge_l("It's 5-star, isn't it?", ["it is 5 star"]) == pytest.approx(0.5454545454545454)
    assert rouge_l("", ["nothing"]) == 0.0
    # The best of the references, wherever it is.
    assert rouge_l("a b", ["a b", "x"]) == rouge_l("a b", ["x", "a b"]) == 1.0


def test_rouge_l_reads_letters_beyond_a_to_z() -> None:
    assert rouge_l("Übelkeit und Fieber", ["übelkeit, Fieber"]) == pytest.approx(0.8)
    # The same letter, composed and decomposed.
    assert rouge_l("caf\u00e9", ["cafe\u0301"]) == 1.0


def test_rouge_l_reads_signs_that_are_parts_of_words() -> None:
    # ka and ki of Hindi differ in their vowel signs alone.
    assert rouge_l("\u0915\u093e", ["\u0915\u0940"]) == 0.0
    assert rouge_l("\u0915\u0940 \u0915\u093e", ["\u0915\u0940"]) == pytest.approx(2 / 3)
    # A virama joins two letters into one word.
    assert rouge_l("\u0938\u094d\u0924", ["\u0938 \u0924"]) == 0.0
    # A joiner within a word is a part of it. Beside a word it is none, and by itself no word.
    joined = "\u0645\u06cc\u200c\u0631\u0648\u062f"
    assert rouge_l(joined, [joined.replace("\u200c", " ")]) == 0.0
    assert rouge_l(f"{joined}\u200c \u200d", [joined]) == 1.0
    # Nor is a mark behind a sign.
    assert rouge_l("\u2764\ufe0f yes", ["yes"]) == 1.0
    # Letters without spaces are one word up to the next sign.
    assert rouge_l("\u6211\u4eec\u6765\uff0c\u597d", ["\u6211\u4eec\u6765\u3002"]) == pytest.approx(2 / 3)
    assert rouge_l("\u6211\u4eec\u6765", ["\u6211\u4eec\u53bb"]) == 0.0


def test_exact_match_forgives_white_space_alone() -> None:
    assert same_text(" a  pub\n", "a pub")
    assert same_text("caf\u00e9", "cafe\u0301")
    assert not same_text("A pub", "a pub")
    assert not same_text("a pub.", "a pub")
    found = answer_figures(["a pub", "x"], [["no", "a  pub"], ["y"]])
    assert found.exact_match.value == 0.5


@pytest.mark.parametrize(
    ("right", "count", "ends"), [(0, 20, (0.0, 0.161)), (20, 20, (0.839, 1.0)), (1, 50, (0.004, 0.105))]
)
def test_exact_match_has_the_interval_of_a_share(right: int, count: int, ends: tuple[float, float]) -> None:
    answers = ["yes"] * right + ["no"] * (count - right)
    found = answer_figures(answers, [["yes"]] * count).exact_match
    assert found.value == right / count
    assert (found.low, found.high) == pytest.approx(ends, abs=5e-4)


@pytest.mark.parametrize(("count", "share"), [(20, 0.05), (50, 0.02), (100, 0.01), (100, 0.98), (100, 0.5)])
def test_intervals_of_exact_match_hold_the_truth_as_often_as_they_say(count: int, share: float) -> None:
    """Over all numbers of right answers, by their binomial probabilities."""
    held = 0.0
    for right in range(count + 1):
        chance = math.comb(count, right) * share**right * (1 - share) ** (count - right)
        if chance > 1e-6:
            answers = ["yes"] * right + ["no"] * (count - right)
            found = answer_figures(answers, [["yes"]] * count).exact_match
            held += chance * (found.low <= share <= found.high)
    # Wilson's interval of a rare share holds it a little less often than a bound would.
    assert held > 0.9


def test_one_prompt_has_no_bootstrap_interval() -> None:
    """Draws of one prompt are all the same, so their interval would be a point."""
    tokens = token_figures(np.array([2.0, 3.0]), np.array([1, 1]), np.array([4, 4]), prompts=["one", "one"])
    beside = token_figures(np.array([2.0, 0.0]), np.array([1, 0]), np.array([4, 0]))
    answers = answer_figures(["a b"], [["a b c"]])
    for found in (tokens.loss, tokens.perplexity, tokens.accuracy, beside.loss, answers.bleu, answers.rouge_l):
        assert math.isfinite(found.value)
        assert math.isnan(found.low)
        assert math.isnan(found.high)
    # A share of one prompt is between 0 and 79 %, or 21 and 100 %.
    assert (answers.exact_match.low, answers.exact_match.high) == (0.0, pytest.approx(0.793, abs=1e-3))


@pytest.mark.parametrize("losses", [[math.inf, 1.0, 2.0], [math.nan, 1.0, 2.0], [math.inf] * 3, [math.nan] * 3])
def test_a_loss_that_is_no_number_has_no_interval_and_ends_nothing(losses: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = token_figures(np.array(losses), np.array([0, 1, 1]), np.array([3, 4, 4]))
    for each in (found.loss, found.perplexity):
        assert not math.isfinite(each.value)
        assert math.isnan(each.low)
        assert math.isnan(each.high)
    # Answers are right or wrong all the same.
    assert found.accuracy.value == 2 / 11
    assert found.accuracy.low < 2 / 11 < found.accuracy.high


def test_answers_without_references_are_refused() -> None:
    with pytest.raises(ValueError, match="give at least one for each prompt"):
        answer_figures(["a"], [[]])
    with pytest.raises(ValueError, match="give one list for each"):
        answer_figures(["a", "b"], [["a"]])
    with pytest.raises(ValueError, match="give one list for each"):
        answer_figures([], [])
