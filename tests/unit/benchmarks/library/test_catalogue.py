"""`python -m benchmarks` and `--help` list every benchmark and say what it does."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks.library.catalogue import BENCHMARKS, TOOLS, summary
from benchmarks.library.record import ROOT, parser

KNOWN = {**BENCHMARKS, **TOOLS}
FOLDER = ROOT / "benchmarks"


def modules():
    for path in sorted(FOLDER.rglob("*.py")):
        yield ".".join(path.relative_to(FOLDER).with_suffix("").parts), path.read_text(encoding="utf-8")


def test_every_benchmark_is_listed():
    with_options = {name for name, text in modules() if f'parser("{name}")' in text}
    assert with_options == KNOWN.keys() - {"report", "operations.dashboard"}
    others = {name for name, text in modules() if re.search(r"\bparser\(\"", text)} - with_options
    assert others == set(), "a benchmark passes its own name"


@pytest.mark.parametrize("name", KNOWN)
def test_each_line_is_one_sentence_and_opens_the_module(name):
    line = summary(KNOWN[name])
    assert line.endswith(".")
    assert "\n" not in line
    assert len(line) < 90
    if name != "report":
        source = (FOLDER / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        assert (ast.get_docstring(ast.parse(source)) or "").startswith(line)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_help_says_what_is_measured(name):
    text = parser(name).format_help()
    assert KNOWN[name] in text
    assert "write nothing" in text


def test_the_list_names_each_with_one_line():
    done = subprocess.run([sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name, text in KNOWN.items():
        assert re.search(rf"^{re.escape(name)} +{re.escape(summary(text))}$", done.stdout, re.MULTILINE)


def test_every_listed_module_exists():
    assert all(find_spec(f"benchmarks.{name}") for name in KNOWN)
