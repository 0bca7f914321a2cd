"""docs/threat-model.md: every threat has a defence and a test, and every named test exists."""

import re

import pytest

from tests.support.processes import ROOT  # type: ignore[attr-defined]

PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:tests|benchmarks)/[\w./-]+)`", PAGE)))


def rows(heading: str) -> list[list[str]]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[2:]]


@pytest.mark.parametrize("name", NAMED)
def test_every_named_test_exists(name):
    path = ROOT / name
    assert path.exists(), f"docs/threat-model.md names {name}"
    tests = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert any(re.search(r"^(async )?def (test_|main)", each.read_text(), flags=re.MULTILINE) for each in tests)


def test_every_threat_has_a_defence_and_a_test():
    threats = rows("Threats against the machines")
    groups = [row for row in threats if row[0].startswith("**")]
    assert len(groups) >= 4
    named = [row for row in threats if row not in groups]
    assert len(named) >= 15
    for threat, defence, shown, *_ in named:
        assert defence, threat
        assert re.search(r"`tests/", shown), f"{threat}: no test shows it"


def test_every_claim_has_a_test():
    for claim, _, shown in rows("What holds"):
        assert re.search(r"`(tests|benchmarks)/", shown), claim
