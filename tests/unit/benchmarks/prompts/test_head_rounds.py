"""The benchmark of rounds of a head: the first computes features, and the next finds all of them."""

import torch

from benchmarks.prompts import head_rounds
from learning.prompts.model import PromptedModel


def test_only_the_first_round_of_a_turn_computes_features(monkeypatch):
    read = []
    inner = PromptedModel.features

    def counted(self, ids, prompt):
        read.append(int((ids != self.pad_id).any(dim=1).sum()))
        return inner(self, ids, prompt)

    monkeypatch.setattr(PromptedModel, "features", counted)
    sizes = {**head_rounds.MINILM, "hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 24}
    torch.manual_seed(0)
    figure = head_rounds.measured(sizes, 40, 2)
    # Each round also looks at three probe texts, whether the version has diverged.
    rows = len({each.text for each in head_rounds.examples(40)})
    assert sum(read) == 2 * (rows + 2 * 3)
    assert figure.value == figure.more["computing_seconds"] / figure.more["cached_seconds"]
    assert figure.more["target"] == 20
