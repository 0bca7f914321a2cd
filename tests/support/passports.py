"""Verifies passports as outsiders do: with the tool, with openssl and jq alone, and after changes of single bytes."""

import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.support.places import ROOT
from tests.support.processes import Federation, command, succeed
from toolkit.console import ExitCode

__all__ = ["by_openssl", "party_of", "refused_after_changes", "verified"]


def party_of(federation: Federation) -> str:
    """The federation's name, as the operator knows it."""
    text = (federation.dir / "operator" / "operator.toml").read_text()
    (name,) = re.findall(r'federation = "([0-9a-f]{64})"', text)
    return str(name)


def verified(passport: Path, federation: str, export: Path) -> dict[str, Any]:
    """What the tool says of a passport that holds, and of the exported folder beside it."""
    words = ("coordinator", "passport", "verify", passport, "--federation", federation)
    said: dict[str, Any] = json.loads(succeed(*words, "--export", export, "--json"))
    assert said["valid"]
    return said


def by_openssl(passport: Path, federation: str, scratch: Path) -> "subprocess.CompletedProcess[str]":
    """Runs the recipe of docs/passport.md as it stands there."""
    recipe = re.search(r"```text\n(set -eu\n.*?)```", (ROOT / "docs" / "passport.md").read_text(), re.DOTALL)
    assert recipe is not None
    variables = {"FILE": str(passport), "FEDERATION": federation, "PATH": "/usr/bin:/bin"}
    words = ["bash", "-c", recipe[1]]
    return subprocess.run(words, cwd=scratch, env=variables, capture_output=True, text=True, check=False)


def refused_after_changes(passport: Path, federation: str, edited: Path, seed: int, changes: int = 20) -> None:
    """Checks that the tool refuses the passport after each of some changes of one byte, and names a part each time."""
    whole = passport.read_bytes()
    for position in sorted(random.Random(seed).sample(range(len(whole)), changes)):
        edited.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        refused = command("coordinator", "passport", "verify", edited, "--federation", federation, "--json")
        assert refused.returncode == ExitCode.FAILED, position
        assert all(each["part"] for each in json.loads(refused.stdout)["findings"]), position
