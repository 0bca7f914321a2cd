"""Keys and dealings cost a member at most 6.5 KB for each neighbour, both ways together, as docs/secure-aggregation.md
says."""

import dataclasses
import re

from secure_agg import DealtShare, Phase
from tests.support.places import ROOT
from tests.support.sum_fleet import Fleet

# An odd number, so that each chooses the seed of half its pairs. What a neighbour costs does not depend on it.
MEMBERS = 5


def secrets(share: DealtShare) -> int:
    every = (getattr(share, field.name) for field in dataclasses.fields(share))
    return sum(len(value) for value in every if isinstance(value, bytes))


def test_keys_and_dealings_are_within_the_bound() -> None:
    fleet = Fleet(MEMBERS).until(Phase.MASK)
    page = (ROOT / "docs" / "secure-aggregation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:two public keys|sealed key, |the pair's seed)[^|]*\|([^\n]*)", page, re.MULTILINE)
    assert len(rows) == 3
    said = sum(int(number) for row in rows for number in re.findall(r"\d+", row))
    dealings, advertisements = fleet.sent[Phase.SHARE], fleet.sent[Phase.ADVERTISE]
    assert len(dealings) == len(advertisements) == MEMBERS
    for one, own in dealings.items():
        up = sum(secrets(share) for share in own.shares if share.receiver != one)
        down = sum(
            secrets(share)
            for dealer, dealing in dealings.items()
            for share in dealing.shares
            if dealer != one and share.receiver == one
        )
        keys = sum(len(other.keys) for name, other in advertisements.items() if name != one)
        assert (up + down + keys) / (MEMBERS - 1) == said <= 6500
