"""A trial of a job whose members keep a part: its variants, its gains, and what an attacker reads."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.rounds.in_memory import InMemory
from export.bundle import make_job_bundle, read_job_bundle
from learning.models import build, division_of
from learning.text.data import Example
from simulation import table_attack
from simulation.own_trial import Accuracy, gains, own_rows, try_own, variants, whole_words
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


def test_a_gain_is_a_mean_of_differences_with_its_error():
    written = [Accuracy(own, 0.5) for own in (0.8, 0.9, 0.6, 0.7)]
    other = [Accuracy(own, 0.9) for own in (0.7, 0.8, 0.6, 0.6)]
    every, small, large, few, many = gains(written, other, "x", [10, 20, 40, 30], [0.1, 0.4, 0.2, 0.3])
    assert (every.members, every.gain) == (4, pytest.approx(0.075))
    assert every.error == pytest.approx(np.std([0.1, 0.1, 0.0, 0.1], ddof=1) / 2)
    assert (small.of, small.gain) == ("2 members with at most 25 rows", pytest.approx(0.1))
    assert (large.members, large.gain) == (2, pytest.approx(0.05))
    assert (few.of, few.gain) == ("2 members with at most 25 % unknown words", pytest.approx(0.05))
    assert many.gain == pytest.approx(0.1)
    assert every.sentence == "against x, all 4 members: too few members to tell (+7.5 points, standard error 2.5)"
    more = gains([*written, *written], [*other, *other], "x", [1] * 8, [])
    assert more[0].sentence == "against x, all 8 members: helps (+7.5 points, standard error 1.6)"
    level = gains([*written, *written], [*written, *written], "x", [1] * 8, [])
    assert len(level) == 1
    assert "no difference" in level[0].sentence


def test_rows_that_measure_a_member_are_not_trained_on():
    train, test = own_rows(ROWS[:20], 0)
    assert (len(train), len(test)) == (15, 5)
    assert not {each.text for each in train} & {each.text for each in test}
    with pytest.raises(RowsUnfit, match="one text only"):
        own_rows(ROWS[:1] * 5, 0)


def test_unknown_words_are_those_that_the_list_does_not_have_whole():
    assert whole_words(["The heron, the owl"], {"the": 1, "owl": 2}) == 0.25
    assert whole_words([""], {"the": 1}) == 0.0


def test_a_job_is_played_beside_its_variants(tmp_path: Path):
    words = sorted({word for row in ROWS for word in row.text.split() if not word.isdigit() and len(word) > 1})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words[:4], *"abcdefghijklmnopqrstuvwxyz0123456789"]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    saved(tmp_path / "base", "bert", bare=True, words=len(pieces), tokenizer=False)
    (tmp_path / "base" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    divided = Divided(Rows(ROWS[:90]), (), ROWS[90:])
    dealt = [[ROWS[:15], ROWS[15:40], ROWS[40:90]]]

    def made(spec, out):
        make_job_bundle(spec, tmp_path, out)
        return read_job_bundle(out)

    found = try_own(
        job(model={"architecture": "transformer", "base": "base", "max_tokens": 24, "injection": "lora"}),
        divided,
        dealt,
        (0,),
        made,
        InMemory(),
        until=time.time() + 600,
    )
    assert list(found.variants) == [
        *("the job as written", "the base's word pieces", "everything shared", "each member alone"),
    ]
    assert found.members == (11, 19, 38)
    assert all(0 < share < 1 for share in found.unknown)
    assert {each.against for each in found.gains} == set(found.variants) - {"the job as written"}
    assert (found.rows, found.seeds, found.cut) == ((90, 30), (0,), False)
    assert found.attacked[0].startswith("An attacker that sees one member's step")
    assert json.loads(json.dumps(found.as_json()))["members"] == [11, 19, 38]
    # Without time, the job as written and each member alone are left.
    short = try_own(job(), divided, dealt, (0,), made, InMemory(), until=0)
    assert list(short.variants) == ["the job as written", "each member alone"]
    assert short.cut


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
    assert attacked(public="same") == Read(1.0, 1.0, 4)
    near, far = attacked(public="near"), attacked(public="unrelated")
    assert near.public is not None
    assert near.public > 0.9
    assert far.public is not None
    assert far.public < 0.2
    assert far.present == 1.0
    assert attacked(public="none") == Read(None, 1.0, 4)


def test_lora_of_low_rank_shows_less_and_a_head_alone_nothing():
    low = attacked(public="same", injection={"name": "lora", "rank": 2})
    assert low.public is not None
    assert low.public < 0.6
    assert attacked(public="same", injection="none") == Read(None, None, 0)


def test_a_frozen_matrix_leaves_an_attacker_another_gradient_and_that_is_said():
    """Under noise a bundle takes it (FFA-LoRA), and this attack then reads nothing, which is no defence."""
    read = attacked(public="same", injection={"name": "lora", "train": "up"})
    assert read == Read(None, None, 0, projected=True)
    (said,) = sentences(read)
    assert "does not share one" not in said
    assert "only as a public random matrix of low rank leaves them" in said
    assert "no defence: another attack might" in said


def test_what_an_attacker_reads_is_said_in_words():
    both = sentences(Read(0.5, 0.75, 8))
    assert "reads 50 % of its tokens (F1) with the public table" in both[0]
    assert "worth 25 points of 100" in both[0]
    assert "rows start from the member's secret" in sentences(Read(None, 0.75, 8))[0]
    assert "has no gradient" in sentences(Read(None, None, 0))[0]
    assert table_attack._f1((0, 0, 0)) == 0.0
