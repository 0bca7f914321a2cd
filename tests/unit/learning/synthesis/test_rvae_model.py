"""The autoencoder: each text's loss is its own, gradients are clipped by text, and free bits are free."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from learning.synthesis.model import Coins, Rvae
from learning.synthesis.quality import active_units
from learning.synthesis.setting import RvaeSetting
from learning.synthesis.training import measure, train_plain
from learning.synthesis.words import PAD_ID, UNKNOWN_ID
from learning.training.clipping import ClippedGradients, check_examples_apart
from learning.training.local import evaluate
from tacit.job import Training
from tests.support.toy_texts import SMALL, toy_model, toy_texts, toy_words

torch.set_num_threads(1)
TIED = replace(SMALL, tied=True, freeze_embedding=True)
TRAINED = [
    "embedding.weight",
    "encoder.weight_ih",
    "encoder.weight_hh",
    "encoder.bias",
    "decoder.weight_ih",
    "decoder.weight_hh",
    "decoder.bias",
    "mean.weight",
    "mean.bias",
    "log_variance.weight",
    "log_variance.bias",
    "context.weight",
    "context.bias",
    "label_bias.weight",
    "output.weight",
    "output.bias",
]


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    texts, labels = toy_texts(count, seed)
    texts[0] = "the the the the"  # A repeated word, whose gradients add up within a text.
    texts[1] = ""
    texts[2] = "it is nowhereinthelist and the the"
    return torch.from_numpy(toy_words().encode(texts, labels))


def coins_of(module: Rvae, ids: torch.Tensor, seed: int = 5) -> Coins:
    module.seed(seed)
    return module.toss(ids)


def one(coins: Coins, row: int, length: int) -> Coins:
    return Coins(coins.noise[row : row + 1], coins.kept[row : row + 1, : length - 1])


def by_hand(module: Rvae, ids: torch.Tensor, coins: Coins) -> list[dict[str, torch.Tensor]]:
    """The gradient of each text: one forward and one backward pass for it alone, without padding."""
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    found = []
    for row in range(len(ids)):
        length = int((ids[row] != PAD_ID).sum())
        loss = module.loss(ids[row : row + 1, :length], one(coins, row, length))
        gradients = torch.autograd.grad(loss.sum(), list(trained.values()), allow_unused=True)
        # If the divergence is free, the encoder gets gradients only through the words.
        found.append(
            {
                name: torch.zeros_like(trained[name]) if g is None else g
                for name, g in zip(trained, gradients, strict=True)
            }
        )
    return found


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return sum(float(each.double().square().sum()) for each in gradients.values()) ** 0.5


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        (SMALL, TRAINED),
        (replace(SMALL, free_bits=0.0, kl_weight=3.0), TRAINED),
        (replace(SMALL, freeze_embedding=True), TRAINED[1:]),
        (TIED, [*TRAINED[1:-2], "narrow.weight", "narrow.bias"]),
    ],
    ids=["default", "divergence-paid", "frozen", "tied"],
)
@pytest.mark.parametrize("share", [0.5, 1.0, 100.0], ids=["all-clipped", "some-clipped", "whole"])
def test_clipped_sums_are_those_of_one_text_at_a_time(setting, names, share):
    module, ids = toy_model(setting).train(), rows_of(7)
    coins, trained = coins_of(module, ids), dict(module.named_parameters())
    alone = by_hand(module, ids, coins)
    norms = [norm_of(each) for each in alone]
    clip = share * float(np.median(norms))
    with ClippedGradients(module) as clipped:
        clipped.add(module.loss(ids, coins), clip)
    assert sorted(alone[0]) == sorted(names)
    for name in names:
        expected = sum(each[name] * min(1.0, clip / norm) for each, norm in zip(alone, norms, strict=True))
        assert float(expected.norm()) > 0, name
        assert float((clipped.sums[name] * clip - expected).norm()) <= 1e-4 * float(expected.norm()), name
    assert sorted(clipped.sums) == sorted(name for name, each in trained.items() if each.requires_grad)


@pytest.mark.parametrize("setting", [SMALL, replace(SMALL, free_bits=0.0), TIED], ids=["untied", "paid", "tied"])
def test_the_model_passes_the_check_for_separate_examples(setting):
    check_examples_apart(toy_model(setting).train(), seed=11)


def test_a_loss_that_is_not_a_texts_own_fails_the_check(monkeypatch):
    """Free bits are usually written as a mean of the divergence over the batch, which the check finds."""
    module = toy_model(replace(SMALL, free_bits=0.0)).train()
    loss = module.losses

    def mixed(ids, coins=None, **more):
        found = loss(ids, coins, **more)
        return replace(found, paid=found.paid.mean().expand(len(ids)))

    monkeypatch.setattr(module, "losses", mixed)
    with pytest.raises(ValueError, match="depends on other examples"):
        check_examples_apart(module, seed=11)


@pytest.mark.parametrize("free_bits", [0.0, 4.0], ids=["divergence-paid", "free"])
def test_a_loss_does_not_depend_on_batch_or_padding(free_bits):
    module, ids = toy_model(replace(SMALL, free_bits=free_bits)), rows_of(9)
    coins = coins_of(module, ids)
    together = module.loss(ids, coins)
    for row in range(len(ids)):
        length = int((ids[row] != PAD_ID).sum())
        alone = module.loss(ids[row : row + 1, :length], one(coins, row, length))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-6)


def test_cross_entropy_with_index_0_is_the_loss_and_has_its_gradient():
    module, ids = toy_model().eval(), rows_of(6)
    zeros = torch.zeros(len(ids), dtype=torch.int64)
    entropy = functional.cross_entropy(module(ids), zeros, reduction="none")
    torch.testing.assert_close(entropy, module.loss(ids), rtol=1e-5, atol=1e-6)
    weights = [each for each in module.parameters() if each.requires_grad]
    for found, expected in zip(
        torch.autograd.grad(entropy.sum(), weights), torch.autograd.grad(module.loss(ids).sum(), weights), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    scores = evaluate(module, ids.numpy(), zeros.numpy())
    assert scores.loss == pytest.approx(float(module.loss(ids).mean().detach()), rel=1e-5)


def test_losses_are_a_words_likelihood_and_the_gaussian_divergence():
    module, ids = toy_model().eval(), rows_of(5)
    found = module.losses(ids)
    mean, log_variance = module.posterior(ids)
    posterior = torch.distributions.Normal(mean, (log_variance / 2).exp())
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    expected = torch.distributions.kl_divergence(posterior, prior).sum(dim=1)
    torch.testing.assert_close(found.divergence, expected, rtol=1e-4, atol=1e-5)
    assert found.words.tolist() == [int((row != PAD_ID).sum()) - 1 for row in ids]


def test_sampling_scores_words_like_training():
    module, ids = toy_model().eval(), rows_of(4)[3:]
    z = module.posterior(ids)[0]
    scores, context, state = module.begin(z, ids[:, 0])
    nll = torch.zeros(())
    for at in range(1, int((ids[0] != PAD_ID).sum())):
        nll = nll + functional.cross_entropy(scores, ids[:, at])
        scores, state = module.step(ids[:, at], context, state)
    torch.testing.assert_close(nll, module.losses(ids).reconstruction.sum(), rtol=1e-4, atol=1e-4)


def test_words_are_replaced_at_the_stated_rate_and_labels_never():
    module = toy_model(replace(SMALL, word_dropout=0.25))
    ids = rows_of(400)
    kept = coins_of(module, ids).kept
    assert 1 - float(kept.float().mean()) == pytest.approx(0.25, abs=0.03)
    # With all words replaced, the decoder sees only label and z, whatever the words were.
    nothing = Coins(torch.zeros(2, SMALL.latent), torch.zeros(2, 5, dtype=torch.bool))
    words = toy_words()
    rows = torch.tensor([[words.end_id + 1, 5, 6, 7, 8, words.end_id], [words.end_id + 2, 5, 6, 7, 8, words.end_id]])
    seen = {}

    def keep(_, args, output):
        seen["ids"] = args[0]

    handle = module.embedding.register_forward_hook(keep)
    module.losses(rows, nothing)
    handle.remove()
    assert seen["ids"][:, 6:].tolist() == [
        [words.end_id + 1, *[UNKNOWN_ID] * 4],
        [words.end_id + 2, *[UNKNOWN_ID] * 4],
    ]


def test_coins_depend_on_seed_and_shape_alone():
    module, ids = toy_model(), rows_of(6)
    first, second = coins_of(module, ids), coins_of(module, torch.full_like(ids, 9))
    assert torch.equal(first.noise, second.noise)
    assert torch.equal(first.kept, second.kept)
    assert not torch.equal(first.noise, coins_of(module, ids, seed=6).noise)


def test_weights_follow_from_the_seed_and_leave_torchs_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first, second, other = toy_model(), toy_model(), toy_model(seed=4)
    assert torch.equal(before, torch.random.get_rng_state())
    for name, each in first.named_parameters():
        assert torch.equal(each, second.get_parameter(name)), name
        if name == "label_bias.weight":  # It starts at zero and is learnt.
            assert not each.any()
        else:
            assert not torch.equal(each, other.get_parameter(name)), name
    assert all(not bool(each.any()) for each in Rvae(SMALL, 30, 2, None).parameters())
    assert {name.split(".")[0] for name, _ in first.named_parameters()} <= set(Rvae.parts)


@pytest.mark.parametrize("seed", range(3))
def test_the_divergence_pulls_z_to_the_prior_as_far_as_its_free_bits(seed):
    """The posteriors start far away, and the words' part of the loss is small beside the divergence's."""
    ids, left = toy_words().encode(*toy_texts(16, seed)), {}
    for free_bits in (0.0, 4.0):
        module = toy_model(replace(SMALL, free_bits=free_bits, kl_weight=50.0), seed)
        with torch.no_grad():
            module.mean.bias.fill_(2.0)
        assert measure(module, ids, seed=0).divergence > 7
        train_plain(module, ids, Training(epochs=25, batch=16, optimiser="sgd", learning_rate=0.02), seed=seed)
        left[free_bits] = measure(module, ids, seed=0).divergence
    # Without free bits z knows nothing of its text any more: the posterior has collapsed into the prior.
    assert left[0.0] < 0.01
    assert 3.0 < left[4.0] <= 4.0


def test_words_are_guessed_from_z():
    module, ids = toy_model(), rows_of(9)
    coins = coins_of(module, ids)
    own, others = module.losses(ids, coins), module.losses(ids, coins, prior=True)
    assert bool((own.reconstruction != others.reconstruction).all())
    assert torch.equal(own.divergence, others.divergence)


def test_annealing_weighs_each_epoch_and_leaves_the_setting():
    module, weights = toy_model(), []
    texts, labels = toy_texts(40)

    def weight(epoch):
        weights.append(epoch)
        return min(1.0, epoch / 2)

    recipe = Training(epochs=3, batch=20, learning_rate=0.01)
    train_plain(module, toy_words().encode(texts, labels), recipe, seed=1, kl_weight=weight)
    assert weights == [0, 1, 2]
    assert module.setting == SMALL


def test_a_frozen_embedding_moves_only_on_request():
    texts, labels = toy_texts(40)
    ids, recipe = toy_words().encode(texts, labels), Training(epochs=1, batch=20, learning_rate=0.01)
    for free in (False, True):
        module = toy_model(TIED)
        before = module.embedding.weight.clone()
        train_plain(module, ids, recipe, seed=1, free_embedding=free)
        assert torch.equal(before, module.embedding.weight) is not free
        assert not module.embedding.weight.requires_grad


def test_measuring_nothing_is_refused_and_active_units_are_counted():
    with pytest.raises(ValueError, match="no texts"):
        measure(toy_model(), np.zeros((0, 4), dtype=np.int64), seed=0)
    means = np.zeros((50, 3), dtype=np.float32)
    means[::2, 1] = 1
    means[::2, 2] = 0.1
    assert active_units(means) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"embedding": 0}, "embedding"),
        ({"words": 4001}, "4000"),
        ({"words": 2}, "words"),
        ({"word_dropout": 1.5}, "word_dropout"),
        ({"free_bits": -1.0}, "free_bits"),
        ({"kl_weight": float("nan")}, "kl_weight"),
        ({"label_weight": 101.0}, "label_weight must lie between 0 and 100"),
        ({"tied": True}, "freeze_embedding"),
    ],
    ids=["width", "many-words", "few-words", "dropout", "bits", "weight", "label", "tied"],
)
def test_invalid_settings_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        RvaeSetting(**changes)
