"""The benchmark of bfloat16 runs steps in both precisions, and its limit on instructions reaches the process."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from benchmarks.library.record import Results
from benchmarks.privacy import precision
from benchmarks.privacy import step_cost as dp_cost
from learning.models import widened


@pytest.mark.parametrize("wide", [False, True])
def test_both_precisions_take_turns(monkeypatch, wide):
    stepped, units, plain = [], set(), dp_cost.plain

    def watched(made, ids, labels, recipe, steps):
        stepped.append((recipe.precision, steps))
        units.add(widened.has_matrix_units())
        return plain(made, ids, labels, recipe, steps)

    monkeypatch.setattr(dp_cost, "plain", watched)
    # On a processor without bfloat16 all six layers take a minute.
    monkeypatch.setitem(dp_cost.MINILM, "num_hidden_layers", 1)
    monkeypatch.setattr(dp_cost, "PROMPT_LOT", 2)
    figure = precision.measured(2, 2, widened=wide)
    assert units == {not wide}
    assert stepped == [("float32", 2), ("bfloat16", 2)] * 2
    assert figure.name == "step_ratio"
    assert figure.value == pytest.approx(figure.more["step_seconds"] / figure.more["plain_seconds"], abs=1e-2)


@pytest.mark.parametrize("units", [False, True])
def test_a_limit_on_instructions_reaches_the_process(monkeypatch, units):
    limits = []
    known = {"avx512_bf16": units, "avx512_f": True, "avx2": True}
    monkeypatch.setattr(widened, "has_matrix_units", lambda: units)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)

    def run(call, env, **how):
        limits.append((env.get("ONEDNN_MAX_CPU_ISA"), call[-1]))
        found = {"value": 0.5, "plain_seconds": 0.2, "step_seconds": 0.1}
        return SimpleNamespace(stdout=f"a line before\n{json.dumps(found)}\n")

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(precision, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    results = Results(precision.BENCH, "c", None)
    monkeypatch.setattr(precision, "open_results", lambda *_, **__: results)
    monkeypatch.setattr("sys.argv", ["precision"])
    precision.main()
    precision.main()
    lesser = [(name, wide) for name in ("AVX512_CORE", "AVX2") for wide in "01"]
    most = [(None, "0"), ("AVX512_CORE_BF16", "0"), ("AVX512_CORE_BF16", "1")]
    assert limits == ([*most, *lesser] if units else lesser)
    cases = [(line["case"]["instructions"], "products" in line["case"]) for line in results.lines]
    assert cases == precision.cases()
    assert {line["bfloat16_seconds"] for line in results.lines} == {0.1}
