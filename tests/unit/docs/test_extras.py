"""An installation of one side includes everything that this side imports, including late imports."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.places import ROOT
from toolkit.install import extra_with

OURS = {"coordinator", "edge_client", "export", "learning", "secure_agg", "simulation", "tacit", "tacit_api", "toolkit"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def plain(requirement: str) -> str:
    """The distribution's name in its normal form."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def brought_by(extras: list[str]) -> set[str]:
    """The distributions of these extras and of the extras that they include."""
    found: set[str] = set()
    for requirement in (each for extra in extras for each in PROJECT["optional-dependencies"][extra]):
        if inner := re.fullmatch(r"tacit-federation\[([a-z,-]+)\]", requirement):
            found |= brought_by(inner[1].split(","))
        else:
            found.add(plain(requirement))
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node. Imports are among them, and most nodes of a tree are parts of expressions."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.stmt | ast.excepthandler | ast.match_case):
            yield each
            yield from statements(each)


@cache
def imported(room: str) -> dict[str, Path]:
    """Imported third-party packages by name, each with a file that imports it."""
    found: dict[str, Path] = {}
    for path in (ROOT / room).rglob("*.py"):
        for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
            for name in names:
                top = name.split(".")[0]
                if top not in OURS and top not in sys.stdlib_module_names:
                    found.setdefault(top, path)
    return found


EXTRAS = {
    "toolkit": ["traces"],
    "proto/tacit": [],
    "secure_agg": [],
    "coordinator": ["coordinator", "plots", "s3", "tensorboard"],
    "edge_client": ["edge"],
    "export": ["export"],
    "learning": ["learning", "arrow", "export"],
    "simulation": ["export", "ray"],
    "tacit_api": ["notebook"],
}


@pytest.mark.parametrize(("room", "extras"), EXTRAS.items())
def test_an_extra_installs_what_its_package_imports(room, extras):
    declared = {plain(each) for each in PROJECT["dependencies"]}
    declared |= brought_by(extras)
    providers = packages_distributions()
    packages = imported(room)
    assert packages, "no imports were found"
    missing = {
        name: str(path.relative_to(ROOT))
        for name, path in packages.items()
        if not declared & {plain(each) for each in providers.get(name, [name])}
    }
    assert not missing


@pytest.mark.parametrize("member", [False, True], ids=["operator", "member"])
def test_an_error_names_an_extra_that_brings_the_module(member):
    base = {plain(each) for each in PROJECT["dependencies"]}
    providers = packages_distributions()
    for module in sorted(set().union(*map(imported, EXTRAS))):
        brings = {plain(each) for each in providers.get(module, [module])}
        extra = extra_with(f"{module}.inner", member=member)
        if brings & base:
            assert extra is None, module
        else:
            assert extra is not None, f"toolkit/install.py does not say which extra brings {module}"
            assert brings & brought_by([extra]), (module, extra)
    assert extra_with("stranger", member=member) is None
