"""The benchmark of bfloat16 runs steps in both precisions, and its limit on instructions reaches the process."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks.library.record import Results
from benchmarks.privacy import precision
from benchmarks.privacy import step_cost as dp_cost


def test_both_precisions_take_turns(monkeypatch):
    stepped, plain = [], dp_cost.plain

    def watched(made, ids, labels, recipe, steps):
        stepped.append((recipe.precision, steps))
        return plain(made, ids, labels, recipe, steps)

    monkeypatch.setattr(dp_cost, "plain", watched)
    # On a processor without bfloat16 all six layers take a minute.
    monkeypatch.setitem(dp_cost.MINILM, "num_hidden_layers", 1)
    monkeypatch.setattr(dp_cost, "PROMPT_LOT", 2)
    figure = precision.measured(2, 2)
    assert stepped == [("float32", 2), ("bfloat16", 2)] * 2
    assert figure.name == "step_ratio"
    assert figure.value == pytest.approx(figure.more["step_seconds"] / figure.more["plain_seconds"], abs=1e-2)


def test_a_limit_on_instructions_reaches_the_process(monkeypatch):
    limits = []

    def run(call, env, **how):
        limits.append(env.get("ONEDNN_MAX_CPU_ISA"))
        found = {"value": 0.5, "plain_seconds": 0.2, "step_seconds": 0.1}
        return SimpleNamespace(stdout=f"a line before\n{json.dumps(found)}\n")

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(precision, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    results = Results(precision.BENCH, "c", None)
    monkeypatch.setattr(precision, "open_results", lambda *_, **__: results)
    monkeypatch.setattr("sys.argv", ["precision"])
    precision.main()
    precision.main()
    assert limits == [None, "AVX512_CORE_BF16", "AVX512_CORE"]
    assert [line["case"]["instructions"] for line in results.lines] == list(precision.INSTRUCTIONS)
    assert {line["bfloat16_seconds"] for line in results.lines} == {0.1}
