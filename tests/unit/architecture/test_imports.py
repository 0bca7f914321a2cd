"""No file imports itself through others. Deferred and TYPE_CHECKING imports count."""

import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.support.places import ROOT

PACKAGES = (
    "benchmarks",
    "coordinator",
    "deploy",
    "edge_client",
    "examples",
    "export",
    "learning",
    "secure_agg",
    "simulation",
    "tacit_api",
)
PACKAGES += ("tacit", "tests", "toolkit")  # type: ignore[assignment]


def first_cycle(packages: Iterable[str]) -> list[str]:
    """The modules of one import cycle, with the first repeated at the end. Empty if there is none."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def test_no_import_cycles_between_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    assert first_cycle(PACKAGES) == []


@pytest.mark.parametrize(
    "back",
    [
        "from looped import one\n",
        "def late():\n    import looped.one\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from looped.one import x\n",
    ],
    ids=["plain", "deferred", "type-checking"],
)
def test_the_search_finds_an_import_cycle_of_any_kind(back, tmp_path: Path, monkeypatch):
    package = tmp_path / "looped"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("import looped.two\nx = 1\n")
    (package / "two.py").write_text(back)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert set(first_cycle(["looped"])) == {"looped.one", "looped.two"}
    finally:
        sys.modules.pop("looped", None)
