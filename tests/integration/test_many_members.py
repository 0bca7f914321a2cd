"""A cohort above 200 over the real services: a coordinator process, members in several processes, mutual TLS.

The numbers of the sparse graph, the roster of digests and the certificates that it names travel as in production. A few
members are killed in the middle of a round, and the new version is the mean over the survivors.
"""

import asyncio
import hashlib
import json
import sys

import numpy as np
import pytest

from benchmarks.library.members import synthetic_update
from coordinator.cli.common import operator_stub
from tacit.blobs import fetch_blob
from tacit.reason import Reason
from tacit.v1 import operator_pb2 as pb
from tests.support import processes
from tests.support.processes import EXAMPLES, Federation, Process

SIZE = 210
# At most 21 of 210 members may be lost. These run in a process of their own, which is killed.
KILLED = tuple(f"k{number}" for number in range(8))
OTHERS = tuple(f"m{number:03}" for number in range(SIZE - len(KILLED)))
JOB = "many"
pytestmark = [pytest.mark.long, pytest.mark.timeout(420)]


def members(name, federation, tokens):
    """Starts one process that runs many members."""
    words = [sys.executable, "-m", "tests.support.many_members", str(federation.folder)]
    told = "".join(f"{member} {token}\n" for member, token in tokens.items())
    process = Process(name, words, federation.folder / f"{name}.log", told=told)
    federation.processes.append(process)
    return process


async def invited(federation, names):
    """A join token for each name."""
    async with operator_stub(federation.dir / "operator") as stub:
        return {
            name: (await stub.InviteMember(pb.InviteMemberRequest(name=name, valid_seconds=3600))).token
            for name in names
        }


async def values_of(federation, detail):
    """The job's versions by number, float32."""
    found = {}
    async with operator_stub(federation.dir / "operator") as stub:
        for version in detail.versions:
            data = bytearray()
            await fetch_blob(stub.FetchBlob, version.digest, data)
            assert hashlib.sha256(data).digest() == version.digest
            found[version.number] = np.frombuffer(bytes(data), dtype="<f4").astype(np.float64)
    return found


def create(federation):
    spec = federation.folder / f"{JOB}.toml"
    labels = sorted({json.loads(line)["label"] for line in (EXAMPLES / "train.jsonl").open()})
    spec.write_text(
        f'schema = 1\nname = "{JOB}"\nlabels = {json.dumps(labels)}\n'
        f'[vocabulary]\nkind = "words"\nfile = {json.dumps(str(EXAMPLES / "words.txt"))}\n'
        "[model]\nembedding = 2\nwidths = [1]\nmaps = 2\n"
        f"[rounds]\ncount = 2\nmin_members = {len(OTHERS)}\ntarget_members = {SIZE}\nmax_attempts = 1\n"
        "[rounds.deadlines]\ntraining = 240\nreconnect = 3\n"
    )
    federation.create(spec)


def test_210_members_finish_although_some_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 200.0)
    federation = Federation(tmp_path)
    try:
        tokens = asyncio.run(invited(federation, (*OTHERS, *KILLED)))
        few = members("killed", federation, {name: tokens[name] for name in KILLED})
        many = [
            members(f"members-{number}", federation, {name: tokens[name] for name in OTHERS[number::3]})
            for number in range(3)
        ]
        for each in (*many, few):
            each.wait_for("enrolled")
        create(federation)
        detail = federation.wait_for(JOB, lambda detail: detail.job.phase == "share")
        assert detail.job.cohort == SIZE
        few.kill()
        detail = federation.finished(JOB)
        values = asyncio.run(values_of(federation, detail))
    finally:
        federation.close()
    first, second = (attempt for each in detail.rounds for attempt in each.attempts)
    assert (first.outcome, second.outcome) == ("published", "published")
    assert set(OTHERS) <= set(first.survivors)
    gone = {lost.member: lost.reason for lost in first.dropouts}
    assert gone.keys() <= set(KILLED)
    assert set(first.survivors) | gone.keys() == {*OTHERS, *KILLED}
    assert set(gone.values()) <= {Reason.REASON_DISCONNECTED}
    assert sorted(second.survivors) == sorted(OTHERS)
    for number, attempt in ((1, first), (2, second)):
        changes = [synthetic_update(name, values[0].size).change for name in attempt.survivors]
        expected = np.mean(np.asarray(changes, dtype=np.float64), axis=0)
        assert np.abs(values[number] - values[number - 1] - expected).max() < 5e-5
    assert np.abs(expected).max() > 1e-3
    lines = [
        json.loads(line)
        for each in ("members-0", "members-1", "members-2")
        for line in (tmp_path / f"{each}.log").read_text().splitlines()
    ]
    # Every surviving member fetched the others' certificates for the first roster, and none for the second.
    fetched = [line for line in lines if line["event"] == "certificates_fetched"]
    assert len(fetched) == len(OTHERS)
    assert {(line["cached"], line["fetched"], line["missing"]) for line in fetched} == {(0, SIZE - 1, 0)}
    assert not [line for line in lines if line["event"] in ("attempt_refused", "message_failed")]
