"""Dependencies: each is pinned, installed at its pinned version, and has a permitted licence.

These tests need no network. `make audit` does: it asks an advisory service for known vulnerabilities.
"""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.processes import ROOT  # type: ignore[attr-defined]
from toolkit.install import DISTRIBUTION

SHIPPED = ("coordinator", "learning", "edge", "export", "arrow", "plots", "tensorboard", "traces")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = (ROOT / "constraints.txt").read_text()
PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", LINES, flags=re.MULTILINE)
}

# Licences permitted beside a distribution under Apache-2.0: permissive ones, and weak copyleft for unmodified
# libraries.
PERMITTED = re.compile(
    r"apache|bsd|mit\b|isc|psf|python software foundation|python-2\.0|mpl|mozilla|zlib|unlicense|public domain|cc0|"
    r"hpnd|historical permission|lgpl|lesser general|boost|cnri",
    re.IGNORECASE,
)
REFUSED = re.compile(r"\bA?GPL|(?<!Lesser )General Public|proprietary|non-?commercial|SSPL|BUSL", re.IGNORECASE)


def requirements(of: str, extras: tuple[str, ...]) -> Iterator[Requirement]:
    """The requirements of a distribution on this machine with these extras."""
    for line in metadata.requires(of) or ():
        found = Requirement(line)
        if found.marker is None or any(found.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield found


def shipped() -> set[str]:
    """The canonical names of the distributions that an installation includes, except ours."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in PROJECT["dependencies"]]
    waiting += [Requirement(line) for extra in SHIPPED for line in PROJECT["optional-dependencies"][extra]]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        # One of our extras includes another one, which is in SHIPPED itself.
        if name == DISTRIBUTION or name in found:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found.add(name)
        waiting += requirements(name, tuple(requirement.extras))
    return found


SHIPPED_NAMES = sorted(shipped())


def test_the_search_finds_known_dependencies():
    assert {"torch", "grpcio", "cffi", "sympy"} <= set(SHIPPED_NAMES)
    assert not {"pytest", "ruff", DISTRIBUTION} & set(SHIPPED_NAMES)


@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_a_dependency_is_installed_at_its_pinned_version(name):
    assert name in PINS, f"{name} {metadata.version(name)} is installed and not in constraints.txt"
    # A wheel for one device (+cpu) belongs to the same release.
    assert Version(metadata.version(name)).public == PINS[name].public


@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_a_dependency_has_a_permitted_licence(name):
    about = metadata.metadata(name)
    said = [
        about["License-Expression"] or "",
        *(each for each in about.get_all("Classifier") or () if "License" in each),
    ]
    if not any(PERMITTED.search(each) for each in said):
        # A free text whose first line is the licence's name.
        said.append((about["License"] or "").strip().partition("\n")[0])
    text = "; ".join(each for each in said if each)
    assert PERMITTED.search(text), f"{name}: {text!r} names no licence that is known to permit it"
    assert not REFUSED.search(text) or PERMITTED.search(REFUSED.sub("", text)), f"{name}: {text!r}"


def test_every_version_range_includes_the_pin():
    for line in PROJECT["dependencies"] + [
        each for extra in PROJECT["optional-dependencies"].values() for each in extra
    ]:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name != DISTRIBUTION:
            assert name in PINS, f"{line} is not in constraints.txt"
            assert requirement.specifier.contains(PINS[name], prereleases=True), line
