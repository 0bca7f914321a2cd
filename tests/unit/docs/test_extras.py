"""Whoever installs one side gets everything that side imports, also what is imported late."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OURS = {"coordinator", "edge_client", "export", "secure_agg", "tacit"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def plain(requirement: str) -> str:
    """The distribution's name in its normal form."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def imported(room: str) -> dict[str, Path]:
    """Third-party packages by name, with a file that imports each."""
    found: dict[str, Path] = {}
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
            for name in names:
                top = name.split(".")[0]
                if top not in OURS and top not in sys.stdlib_module_names:
                    found.setdefault(top, path)
    return found


@pytest.mark.parametrize(
    ("room", "extras"),
    [
        ("proto/tacit", []),
        ("secure_agg", []),
        ("coordinator", ["coordinator"]),
        ("edge_client", ["edge"]),
        ("export", ["export"]),
    ],
)
def test_an_extra_brings_what_its_room_imports(room, extras):
    declared = {plain(each) for each in PROJECT["dependencies"]}
    declared |= {plain(each) for extra in extras for each in PROJECT["optional-dependencies"][extra]}
    providers = packages_distributions()
    packages = imported(room)
    assert packages, "nothing was looked at"
    missing = {
        name: str(path.relative_to(ROOT))
        for name, path in packages.items()
        if not declared & {plain(each) for each in providers.get(name, [name])}
    }
    assert not missing
