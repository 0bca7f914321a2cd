"""The benchmark of large cohorts in groups, on few members. It plays the protocol, and wrong sums are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization

import secure_agg
from benchmarks.secure_aggregation import groups
from benchmarks.secure_aggregation.crowd import Crowd, context_with, layout_for
from benchmarks.secure_aggregation.groups import GroupsFailed, Split, Told, Worker
from secure_agg import grouped_thresholds

VALUES = 16


class Here:
    """An engine in this process."""

    workers = shares = 1

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.asked: list[str] = []

    def each(self, what: str, calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        for arguments in calls:
            self.asked.append(what)
            yield getattr(self.worker, what)(*arguments)


@pytest.fixture(scope="module")
def crowd(members: Crowd) -> Crowd:
    return members.first(15)


def played(crowd: Crowd) -> tuple[Here, list[Any]]:
    graph, threshold, corrupt = grouped_thresholds(15, 3, 1)
    layout = layout_for(5, VALUES)
    split = Split(context_with(15, layout, threshold, corrupt, graph), layout)
    root = crowd.root.public_bytes(serialization.Encoding.DER)
    engine = Here(Worker(Told(split, root, bytes(32))))
    return engine, groups.measured(engine, crowd, split, dropped=1)


def test_every_group_is_played_and_measured_once(crowd: Crowd) -> None:
    engine, figures = played(crowd)
    assert engine.asked == ["advertise", "play", "play", "play"]
    found = {figure.name: figure for figure in figures}
    assert found["client_cpu_seconds"].more["timed"] == 3
    assert found["client_cpu_seconds"].more["honest"] == 3
    sent, received = found["client_bytes"].more["sent"], found["client_bytes"].more["received"]
    # Up: keys, and five dealt shares. Down: keys, certificates and dealings of four.
    assert 2432 + 4 * 1346 < sent < 2432 + 5 * 2000 + 3000
    assert 4 * (2432 + 1000 + 1346) < received < 4 * (2432 + 1400 + 2000 + 1000) + 3000
    assert found["server_bytes"].value == pytest.approx(15 * (sent + received), abs=15)


def test_a_sum_that_is_not_the_survivors_is_refused(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    real = secure_agg.add_packed

    def wrong(total: Any, packed: Any, offset: int, bits: int) -> None:
        real(total, packed, offset, bits)
        total[0] ^= np.uint32(1)

    monkeypatch.setattr(secure_agg, "add_packed", wrong)
    with pytest.raises(GroupsFailed, match="not that of the survivors"):
        played(crowd)


def test_a_member_made_again_is_the_one_that_advertised(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(range(10**6))
    monkeypatch.setattr(groups._Seeded, "bytes", lambda self, n: next(drawn).to_bytes(4, "big") * (n // 4))
    with pytest.raises(GroupsFailed, match="is not the one that advertised"):
        played(crowd)
