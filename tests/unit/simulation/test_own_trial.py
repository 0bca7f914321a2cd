"""A trial of a job whose members keep a part: its variants, its gains, and what an attacker reads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.rounds.in_memory import InMemory
from export.bundle import make_job_bundle, read_job_bundle
from learning.models import build, division_of
from learning.text.encoder import word_tokenizer, wordpiece_tokenizer
from learning.text.examples import Example
from learning.training.outcome import TrainingDiverged
from simulation import own_trial, table_attack
from simulation.alone import alone_recipes
from simulation.own_trial import Accuracy, Compared, gains, own_rows, try_own, unknown_words, variants
from simulation.table_attack import Read, Step, read_by_tables, sentences
from simulation.trial import Divided, Rows, RowsUnfit
from tacit.job import JobSpec
from tacit.method import FedVocab
from tacit.model import TransformerModel
from tests.support.tiny_models import saved
from tests.support.tried_jobs import written_rows

torch.set_num_threads(1)
ROWS = tuple(Example(row["text"], row["label"]) for row in written_rows(120))


def job(**tables) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "kept",
            "labels": ("day", "night"),
            "method": "fedvocab",
            "model": {"architecture": "transformer", "base": "base", "max_tokens": 24, "dropout": 0.0},
            "vocabulary": {"kind": "wordpiece", "size": 200},
            "training": {"learning_rate": 0.02, "batch": 8},
            "rounds": {"count": 2, "min_members": 3},
            **tables,
        }
    )


def test_the_variants_are_what_the_private_part_is_measured_against():
    found = variants(job())
    assert list(found) == ["the job as written", "the base's word pieces", "everything shared"]
    assert [each.whose_vocabulary for each in found.values()] == ["own-from-base", "public", "public"]
    assert [each.method.name for each in found.values()] == ["fedvocab", "fedvocab", "fedavg"]
    assert list(variants(job(vocabulary=None))) == ["the job as written", "everything shared"]
    # Nothing is public where members' own words stand over no base.
    words = job(model={"architecture": "bilstm"}, vocabulary={"kind": "words"})
    assert list(variants(words)) == ["the job as written"]


FOUR = [Compared(10, 0.1), Compared(20, 0.4), Compared(40, 0.2), Compared(30, 0.3)]


def accuracies(*own):
    return [Accuracy(each, 0.5) for each in own]


def test_a_gain_is_a_mean_of_each_members_difference_with_its_interval():
    written, other = accuracies(0.8, 0.9, 0.6, 0.7), accuracies(0.7, 0.8, 0.6, 0.8)
    every, small, large, few, many = gains(written, other, "x", FOUR)
    assert (every.members, every.gain) == (4, pytest.approx(0.025))
    assert (every.better, every.worse) == (2, 1)
    # Student's t with three degrees of freedom.
    reach = 3.1824463 * np.std([0.1, 0.1, 0.0, -0.1], ddof=1) / 2
    assert every.interval == pytest.approx((0.025 - reach, 0.025 + reach))
    assert (small.of, small.gain) == (
        "the 2 smaller members (10 to 20 rows, 10 to 40 % unknown words)",
        pytest.approx(0.1),
    )
    assert (large.of, large.gain) == (
        "the 2 larger members (30 to 40 rows, 20 to 30 % unknown words)",
        pytest.approx(-0.05),
    )
    assert few.of == "the 2 members with fewer unknown words (10 to 40 rows, 10 to 20 % unknown words)"
    assert few.gain == pytest.approx(0.05)
    assert (many.gain, many.better, many.worse) == (pytest.approx(0.0), 1, 1)
    assert every.sentence == (
        "The private part against x, all 4 members (10 to 40 rows, 10 to 40 % unknown words): too few members to tell "
        "(+2.5 points; 2 better, 1 worse)."
    )


def test_members_that_differ_from_each_other_do_not_hide_that_each_gains():
    """Among themselves they are 60 points apart, so means of groups would show nothing of a gain of 4 to 6."""
    other = [0.2, 0.3, 0.4, 0.5, 0.6, 0.8]
    written = [each + gain for each, gain in zip(other, [0.04, 0.06, 0.05, 0.04, 0.06, 0.05], strict=True)]
    same = [Compared(10)] * 6
    (helped,) = gains(accuracies(*written), accuracies(*other), "x", same)
    assert "helps (+5.0 points, 95 % interval +4.1 to +5.9; 6 better, 0 worse)" in helped.sentence
    (costs,) = gains(accuracies(*other), accuracies(*written), "x", same)
    assert "costs (-5.0 points, 95 % interval -5.9 to -4.1; 0 better, 6 worse)" in costs.sentence
    (level,) = gains(accuracies(*other), accuracies(*other), "x", same)
    assert "cannot be told from chance (+0.0 points, 95 % interval +0.0 to +0.0; 0 better, 0 worse)" in level.sentence
    # The same values without their pairs.
    (apart,) = gains(accuracies(*written), accuracies(*reversed(other)), "x", same)
    assert "cannot be told from chance" in apart.sentence


def test_an_interval_of_two_standard_errors_would_be_too_narrow_for_five_members():
    apart = [0.01, 0.02, 0.03, 0.04, 0.14]
    (found,) = gains(accuracies(*apart), accuracies(*[0.0] * 5), "x", [Compared(10)] * 5)
    assert found.gain > 2 * np.std(apart, ddof=1) / np.sqrt(5)
    assert found.interval[0] < 0
    assert "cannot be told from chance" in found.sentence


def test_a_group_of_one_is_said_to_be_one():
    members = [Compared(10, 0.2), Compared(30, 0.2), Compared(10, 0.2)]
    every, small, large = gains(accuracies(0.5, 0.9, 0.5), accuracies(0.5, 0.4, 0.5), "x", members)
    assert (every.members, small.members, large.members) == (3, 2, 1)
    assert large.interval is None
    assert large.sentence == (
        "The private part against x, the 1 larger member (30 rows, 20 % unknown words): one member says nothing of "
        "others (+50.0 points; 1 better, 0 worse)."
    )
    # Most of them at the median are no reason to leave the small one out.
    _, small, large = gains(
        accuracies(0.5, 0.9, 0.5), accuracies(0.5, 0.4, 0.5), "x", [Compared(n) for n in (9, 30, 30)]
    )
    assert (small.members, large.members) == (1, 2)


def test_rows_that_measure_a_member_are_not_trained_on():
    train, test = own_rows(ROWS[:20], 0)
    assert (len(train), len(test)) == (15, 5)
    assert not {each.text for each in train} & {each.text for each in test}
    with pytest.raises(RowsUnfit, match="one text only"):
        own_rows(ROWS[:1] * 5, 0)


def test_unknown_words_are_those_that_the_list_does_not_have_whole():
    pieces = wordpiece_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "owl", "cafe", "h", "##e", "##r"])
    assert unknown_words(["The heron, the owl"], pieces) == 0.25
    # As the tokenizer reads it.
    assert unknown_words(["Caf\u00e9 her"], pieces) == 0.5
    assert unknown_words([""], pieces) == 0.0
    assert unknown_words(["the sun"], word_tokenizer(["sun", "moon"])) == 0.5


def test_a_job_is_played_beside_its_variants(tmp_path: Path):
    words = sorted({word for row in ROWS for word in row.text.split() if not word.isdigit() and len(word) > 1})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words[:4], *"abcdefghijklmnopqrstuvwxyz0123456789"]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    saved(tmp_path / "base", "bert", bare=True, words=len(pieces), tokenizer=False)
    (tmp_path / "base" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    divided = Divided(Rows(ROWS[:90]), (), ROWS[90:])
    dealt = [ROWS[:15], ROWS[15:40], ROWS[40:90]]

    def made(spec, out):
        make_job_bundle(spec, tmp_path, out)
        return read_job_bundle(out)

    def tried(spec, plays, *seeds):
        """Plays so many variants in time."""
        said = []
        found = try_own(
            spec, divided, dealt, seeds, made, InMemory(), late=lambda: len(said) >= plays, report=said.append
        )
        return found, said

    based = {"architecture": "transformer", "base": "base", "max_tokens": 24}
    found, said = tried(job(model={**based, "injection": "lora"}), 100, 0)
    assert list(found.variants) == [
        *("the job as written", "the base's word pieces", "everything shared", "each member alone"),
    ]
    assert [each.rows for each in found.members] == [15, 25, 50]
    assert found.measured == (4, 12)
    assert all(0 < each.unknown < 1 for each in found.members)
    assert {each.against for each in found.gains} == set(found.variants) - {"the job as written"}
    for each in found.gains:
        if "all 3 members" in each.of:
            apart = np.subtract(found.own["the job as written"], found.own[each.against])
            assert each.gain == pytest.approx(apart.mean())
            assert (each.better, each.worse) == ((apart > 1e-9).sum(), (apart < -1e-9).sum())
    assert (found.rows, found.seeds, found.cut) == ((90, 30), (0,), False)
    assert found.attacked[0].startswith("An attacker that sees one member's step")
    assert "the first 8 training rows of members " in found.attacked[0]
    assert "on the last version of the job as written, seed 0" in found.attacked[0]
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["members"][0]["rows"] == 15
    # Without time, the job as written and each member alone are left.
    head = job(model={**based, "injection": "none"}, vocabulary=None, rounds={"count": 1, "min_members": 3})
    short, said = tried(head, 0, 0, 1)
    assert list(short.variants) == ["the job as written", "each member alone"]
    assert (short.seeds, short.cut, len(said)) == ((0,), True, 2)
    # A seed that the limit cuts is left out of all variants: otherwise some would be means over other rows.
    whole, _ = tried(head, 100, 0)
    cut, said = tried(head, 5, 0, 1)
    assert said[3:] == ["seed 1: the job as written", "seed 1: each member alone"]
    assert (cut.seeds, cut.cut, cut.own) == ((0,), True, whole.own)


def recipes(folder: Path, examples: int, share: float = 1.0, **tables):
    words = folder / "words.txt"
    words.write_text("sun\nmoon\n")
    small = {"embedding": 4, "widths": [1], "maps": 2}
    tables = {"model": small, "vocabulary": {"kind": "words", "file": str(words)}, **tables}
    return alone_recipes(make_job_bundle(job(**tables), folder, folder / "bundle"), examples, share)


def test_alone_is_the_jobs_own_recipe_for_its_epochs(tmp_path: Path):
    training = {"learning_rate": 0.02, "batch": 8, "epochs": 3}
    (found,) = recipes(tmp_path, 100, 0.5, training=training, rounds={"count": 20, "min_members": 3})
    assert (found.learning_rate, found.batch, found.epochs) == (0.02, 8, 30)


def test_alone_follows_the_schedule_of_the_rounds(tmp_path: Path):
    training = {"learning_rate": 0.1, "epochs": 2, "schedule": {"decay": "linear"}}
    whole = recipes(tmp_path, 100, training=training, rounds={"count": 4, "min_members": 3})
    assert [each.epochs for each in whole] == [2] * 4
    assert [each.learning_rate for each in whole] == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_alone_takes_the_share_of_a_schedules_rounds(tmp_path: Path):
    training = {"learning_rate": 0.1, "epochs": 2, "schedule": {"decay": "linear"}}
    half = recipes(tmp_path, 100, 0.5, training=training, rounds={"count": 4, "min_members": 3})
    assert [each.learning_rate for each in half] == pytest.approx([0.075, 0.025])


@pytest.mark.parametrize(("examples", "epochs"), [(50, 500), (400, 125)])
def test_alone_under_dp_sgd_goes_over_its_rows_as_often_as_the_draws(tmp_path: Path, examples, epochs):
    mechanism = {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 100, "steps": 10}
    training = {"optimiser": "sgd", "learning_rate": 30.0}
    found = recipes(tmp_path, examples, mechanism=mechanism, training=training, rounds={"count": 50, "min_members": 3})
    assert [(each.optimiser, each.learning_rate, each.batch, each.epochs) for each in found] == [
        ("adam", 0.001, 32, epochs)
    ]


def test_alone_under_dp_sgd_takes_enough_steps(tmp_path: Path):
    mechanism = {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 10, "steps": 1}
    found = recipes(tmp_path, 400, mechanism=mechanism, training={"optimiser": "sgd", "learning_rate": 30.0})
    # 13 batches in an epoch.
    assert [each.epochs for each in found] == [47]


def test_what_diverges_is_left_out_and_the_rest_is_reported(tmp_path: Path, monkeypatch):
    """The job as written fails on seed 1, each member alone on seed 2, and everything shared on no seed."""
    words = tmp_path / "words.txt"
    words.write_text("\n".join(sorted({word for row in ROWS for word in row.text.split()})))
    tables = {"model": {"embedding": 4, "widths": [1], "maps": 2}, "method": "lg-fedavg"}
    spec = job(**tables, vocabulary={"kind": "words", "file": "words.txt"}, rounds={"count": 1, "min_members": 3})
    divided, dealt = Divided(Rows(ROWS[:90]), (), ROWS[90:]), [ROWS[:15], ROWS[15:40], ROWS[40:90]]
    inner = own_trial._played

    def played(bundle, members, common, seed, states, server, cores, *, alone):
        if (seed, alone) in {(1, False), (2, True)}:
            raise TrainingDiverged("training diverged; lower training.learning_rate (it is 0.02) in the job")
        return inner(bundle, members, common, seed, states, server, cores, alone=alone)

    def made(spec, out):
        make_job_bundle(spec, tmp_path, out)
        return read_job_bundle(out)

    monkeypatch.setattr(own_trial, "_played", played)
    found = try_own(spec, divided, dealt, (0, 1, 2), made, InMemory(), late=lambda: False)
    assert (found.seeds, found.cut) == ((0, 2), False)
    assert list(found.variants) == ["the job as written", "everything shared"]
    assert found.failed == (
        "Seed 1 is left out, because the job as written failed on it: training diverged; lower training.learning_rate "
        "(it is 0.02) in the job.",
        '"each member alone" is left out, because it failed on seed 2: training diverged; lower training.learning_rate '
        "(it is 0.02) in the job.",
    )
    assert found.as_json()["failed"] == list(found.failed)


def attacked(*, public: str, injection: object = None) -> Read:
    """The attack on a small BERT, wide enough for the span of a text."""
    config = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 64, "max_position_embeddings": 32, "initializer_range": 0.3}
    model = TransformerModel.model_validate(
        {"config": config, "max_tokens": 24, "dropout": 0.0, "injection": injection}
    )
    module = build(model, 200, 2, 0, seed=1)
    with torch.no_grad():
        # The gain of a normalisation that training moved: without it LoRA's start would have no gradient.
        for name, parameter in module.named_parameters():
            if name.endswith(".up.weight"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(3))
    random = np.random.default_rng(4)
    present = module.embedding.weight.detach().numpy().copy()
    tables = {"same": present, "near": present + 0.005 * random.standard_normal(present.shape), "none": None}
    tables["unrelated"] = 0.3 * random.standard_normal(present.shape)
    ids = np.stack([np.array([2, *random.choice(np.arange(4, 200), 10, replace=False), 3]) for _ in range(4)])
    table = tables[public]
    chosen = None if table is None else np.asarray(table, np.float32)
    return read_by_tables([Step(module, division_of(FedVocab(), module), ids, np.array([0, 1, 0, 1]), chosen)])


def test_a_public_table_reads_what_stayed_near_it_and_an_unrelated_one_does_not():
    same = attacked(public="same")
    assert (same.public, same.present, same.texts, same.tokens) == (1.0, 1.0, 4, 40)
    near, far = attacked(public="near"), attacked(public="unrelated")
    assert near.public is not None
    assert near.public > 0.9
    assert far.public is not None
    assert far.public < 0.2
    assert far.present == 1.0
    # An unrelated table names no more than random rows.
    assert abs(far.public - far.chance) < 0.15
    assert attacked(public="none").public is None


def test_lora_of_low_rank_shows_less_and_a_head_alone_nothing():
    low = attacked(public="same", injection={"name": "lora", "rank": 2})
    assert low.public is not None
    assert low.public < 0.6
    assert attacked(public="same", injection="none") == Read(None, None, None, 0)


def test_a_frozen_matrix_leaves_an_attacker_another_gradient_and_that_is_said():
    """Under noise a bundle takes it (FFA-LoRA), and this attack then reads nothing, which is no defence."""
    read = attacked(public="same", injection={"name": "lora", "train": "up"})
    assert read == Read(None, None, None, 0, projected=True)
    (said,) = sentences(read, "")
    assert "does not share one" not in said
    assert "only as a public random matrix of low rank leaves them" in said
    assert "no defence: another attack might" in said


def test_what_an_attacker_reads_is_said_in_words():
    both = sentences(Read(0.5, 0.75, 0.1, 8, 70), "rows of two members")
    assert (
        "(8 texts with 70 tokens: rows of two members) names 50 % of the tokens (F1) with the public table" in both[0]
    )
    assert "with the member's present table it would name 75 %; with random rows, by chance, 10 %" in both[0]
    assert "worth 25 of 100 points" in both[0]
    near = sentences(Read(0.624, 0.636, 0.1, 8, 70), "")[0]
    assert "names 62 %" in near
    assert "would name 64 %" in near
    assert "worth 2 of 100 points" in near
    assert "rows start from the member's secret" in sentences(Read(None, 0.75, 0.1, 8), "")[0]
    assert "has no gradient" in sentences(Read(None, None, None, 0), "")[0]
    assert table_attack._f1((0, 0, 0)) == 0.0
