"""The README's picture and figures come from the software and are up to date."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from deploy.site.picture import FILE, real_attempt, rendered
from tests.support.places import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def newest(bench: str, figure: str, field: str = "value", **case: Any) -> Any:
    """A field of the newest benchmark result whose case has these keys and values."""
    lines = (ROOT / "benchmarks" / "results" / f"{bench}.jsonl").read_text(encoding="utf-8").splitlines()
    found: list[Mapping[str, Any]] = [json.loads(line) for line in lines]
    return [
        each[field]
        for each in found
        if each.get("figure") == figure
        and field in each
        and case.items() <= {**each["case"], "seed": each.get("seed")}.items()
    ][-1]


def test_the_picture_matches_its_script():
    assert FILE.read_text(encoding="utf-8") == rendered(), "run python deploy/site/picture.py"
    assert FILE.stat().st_size < 150_000


def test_the_picture_shows_a_real_sum():
    attempt = real_attempt()
    assert np.array_equal(attempt.total, sum(attempt.updates))
    for update, masked in zip(attempt.updates, attempt.masked, strict=True):
        # A masked value is uniform in the ring, so it hardly ever equals the update's.
        assert (update == masked).sum() <= 1


def test_the_figures_match_the_benchmark_results():
    trec = {"mechanism": "none", "vocabulary": "wordpiece", "load": "equal"}
    seconds = [newest("institutional", "test_accuracy", "seconds", members=3, seed=seed, **trec) for seed in range(3)]
    clear = newest("secure_agg", "secure_over_clear_round", members=10, values=1_000_000)
    sent = {
        method: newest("fedvocab_wire", "sent_bytes_per_round", method=method, vocabulary=vocabulary)
        for method, vocabulary in (("fedavg", "same"), ("fedvocab", "own"))
    }
    lora, prompt = (
        newest("fedprompt_wire", "sent_bytes_per_round", method=method, backbone="bert-base")
        for method in ("lora", "prompt-tuning")
    )
    private = [
        newest("institutional_dp", "test_accuracy", mechanism="dp-sgd", members=3, epsilon=epsilon, seed=None)
        for epsilon in (1.0, 2.0, 4.0)
    ]
    frontier = {"dataset": "trec", "members": 3, "seed": None}
    heads, adapted = (
        [
            newest(
                "frontier",
                "test_accuracy",
                epsilon=epsilon,
                method=method,
                mechanism="none" if epsilon == "none" else "dp-sgd",
                **frontier,
            )
            for epsilon in epsilons
        ]
        for method, epsilons in (("head-layers", (1.0, 2.0, 4.0, "none")), ("lora", (1.0, 2.0, 4.0)))
    )
    shared, alone = (newest("institutional", "test_accuracy", members=members, seed=None, **trec) for members in (3, 1))
    table = re.findall(r"^\| (.*) \| (.*) \|$", README[: README.index("## Two commands")], flags=re.MULTILINE)[2:]
    assert [figure for _, figure in table] == [
        f"{shared:.3f}; one institution with all the data gets {alone:.3f}",
        "{:.3f} at epsilon 1, {:.3f} at 2, {:.3f} at 4; {:.3f} without noise".format(*heads),
        "{:.3f}, {:.3f}, {:.3f}".format(*adapted),
        "{:.3f}, {:.3f}, {:.3f}".format(*private),
        f"{sum(seconds) / 180:.1f} minutes",
        f"{sent['fedavg'] / 1e6:.1f} MB",
        f"{sent['fedvocab'] / 1e6:.1f} MB",
        f"{lora / 1e6:.2f} MB, {prompt / 1e6:.2f} MB",
        f"{clear:.1f}",
    ]
