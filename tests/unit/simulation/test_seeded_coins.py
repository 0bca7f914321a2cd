"""Seeded coins exist in simulations alone: no member has them, and none can be given them."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import tacit
from edge_client.agent import runner
from edge_client.agent.runner import RunOptions, run_member

ROOT = Path(tacit.__file__).parents[2]
# What a member's process loads.
MEMBER = ("edge_client", "learning", "export", "secure_agg", "toolkit", "proto/tacit", "tacit_api")


def sources() -> Iterator[tuple[str, str]]:
    for package in MEMBER:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_one_class_is_a_source_of_coins_and_it_is_the_systems():
    """`RandomSource` is anything with `bytes(n)`, so every class with such a method counts."""
    found = {path: text.count("def bytes(self, ") for path, text in sources() if "def bytes(self, " in text}
    # The protocol and `SystemRandom`; and `Rounding`, which rounds an update without noise twice in the same way.
    assert found == {"secure_agg/randomness.py": 2, "learning/mechanisms/contribution.py": 1}


def test_no_room_of_a_member_imports_seeded_coins():
    for path, text in sources():
        far = re.findall(r"^\s*(?:from|import) ((?:simulation|benchmarks|tests)\b[\w.]*)", text, re.MULTILINE)
        if not path.startswith("tacit_api/"):
            assert not far, path
        # The interface has simulations, too. What makes it a member takes a type of rows, and nothing else.
        elif path in ("tacit_api/joining.py", "tacit_api/rows.py", "tacit_api/local.py"):
            assert set(far) <= {"simulation.trial"}, path


@pytest.mark.parametrize("call", [tacit.Member, tacit.Member.enrol, tacit.Member.run, tacit.Member.start, run_member])
def test_no_call_of_a_member_takes_coins(call):
    known = {*inspect.signature(call).parameters, *(each.name for each in fields(RunOptions))}
    assert not {name for name in known if "seed" in name or "random" in name or "coins" in name}
    # `start` passes its options on, and knows no more than `run`.
    with pytest.raises(TypeError, match="unexpected keyword argument 'seed'"):
        inspect.signature(tacit.Member.run).bind(None, [], ledger="own", seed=1)


def test_a_running_member_is_given_the_systems_coins():
    given = [
        ast.unparse(keyword.value)
        for call in ast.walk(ast.parse(inspect.getsource(runner)))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Environment"
        for keyword in call.keywords
        if keyword.arg == "random"
    ]
    assert given == ["secure_agg.SystemRandom()"]
