"""Real processes: a steward reads what a job would do, approves, withdraws, and is asked anew about a changed job."""

import json

import pytest

from tacit.reason import Reason
from tacit.v1 import operator_pb2 as pb
from tests.support.processes import EXAMPLES, command, running_federation, succeed, within_patience

SECRET = {"TACIT_STEWARD_PASSPHRASE": "a passphrase of mary"}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("approval"), "north", "east") as running:
        yield running


@pytest.fixture(scope="module")
def key(federation):
    """Mary's key, and south, a member whose policy asks her."""
    file = federation.folder / "mary.key"
    public = succeed("edge_client", "steward", "key", file, variables=SECRET).strip()
    asks = f'{(EXAMPLES / "policy.toml").read_text()}\njobs = "ask"\nstewards = {{ mary = "{public}" }}\n'
    federation.enrol("south", policy=asks)
    return file


def steward(federation, *words):
    done = succeed("edge_client", "job", *words, "--home", federation.home("south"), "--json", variables=SECRET)
    return json.loads(done)


def test_a_member_waits_for_its_steward_and_stops_when_the_approval_is_withdrawn(federation, key):
    federation.job("desk", count=400)
    others = [federation.start(name) for name in ("north", "east")]
    south = federation.start("south")
    south.wait_for("approval_awaited", job="desk", reason="approval_awaited")
    # Two are ready, three are needed: the job waits, and says for whom. It neither pauses nor fails rounds.
    detail = federation.wait_for("desk", lambda detail: detail.job.members_ready == 2)
    assert detail.job.approvals.awaited == 1
    assert list(detail.job.approvals.awaited_members) == ["south"]
    assert "the stewards of south have yet to approve it" in detail.job.waiting
    shown = json.loads(federation.operator("job", "show", "desk", "--json"))
    assert shown["approvals"] == {"approved": 0, "awaited": 1, "awaited_members": ["south"], "declined": 0}
    assert "0 approved by their stewards, 1 not looked at yet (south)" in federation.operator("job", "show", "desk")
    assert not list((federation.home("south") / "receipts").glob("desk/*"))

    told = steward(federation, "show", "desk")
    assert told["stage"] == "awaited"
    assert told["digest"] == detail.job.document.hex()
    assert told["plan"]["columns"] == ["text", "label"]
    assert any("would send, masked" in line for line in told["lines"])
    # Without having read the digest, nothing is signed.
    blind = command("edge_client", "job", "approve", "desk", "--key", key, "--yes", "--home", federation.home("south"))
    assert (blind.returncode, "--digest" in blind.stderr) == (2, True)
    steward(federation, "approve", "desk", "--key", key, "--digest", told["digest"], "--yes")
    south.wait_for("approval_heard", decision="approve", steward="mary")
    south.wait_for("masked_vector_sent")
    detail = federation.wait_for("desk", lambda detail: detail.job.version_number >= 1)
    assert (detail.job.approvals.approved, detail.job.approvals.awaited) == (1, 0)

    steward(federation, "withdraw", "desk", "--key", key, "--digest", told["digest"], "--yes")
    south.wait_for("approval_heard", decision="withdraw")
    south.wait_for("approval_awaited", job="desk")
    detail = federation.wait_for("desk", lambda detail: detail.job.approvals.awaited == 1)
    last, sent = (
        detail.job.version_number,
        len(list((federation.home("south") / "receipts" / "desk").glob("*.sent.json"))),
    )
    within_patience(lambda: federation.show("desk").job.members_ready == 2)
    assert federation.show("desk").job.version_number == last
    assert len(list((federation.home("south") / "receipts" / "desk").glob("*.sent.json"))) == sent
    ledger = json.loads(succeed("edge_client", "ledger", "show", "--home", federation.home("south"), "--json"))
    assert [each["decision"] for each in ledger["approvals"]] == ["approve", "withdraw"]

    # The coordinator's journal keeps which members of each attempt reported an approval.
    opened = [json.loads(line) for line in federation.operator("audit", "show", "--json").splitlines()]
    opened = [each for each in opened if each["kind"] == "attempt_opened" and each["subject"] == "desk"]
    assert opened[0]["fields"]["approved"] == ["south"]

    # A changed job is another job, and asks again.
    federation.operator("job", "abort", "desk", "--yes")
    federation.job("desk-two", count=1)
    south.wait_for("approval_awaited", job="desk-two")
    again = steward(federation, "show", "desk-two")
    assert again["stage"] == "awaited"
    assert again["digest"] != told["digest"]
    # The decision is signed on another machine, and carried over as a file.
    request, signed = federation.folder / "request.json", federation.folder / "signed.json"
    steward(federation, "show", "desk-two", "--out", request)
    words = ("--key", key, "--request", request, "--out", signed, "--digest", again["digest"], "--yes")
    succeed("edge_client", "job", "approve", *words, variables=SECRET)
    succeed("edge_client", "job", "import", signed, "--home", federation.home("south"))
    assert federation.finished("desk-two").job.status == pb.JOB_STATUS_FINISHED
    assert succeed("edge_client", "ledger", "verify", "--home", federation.home("south"))
    south.stop()
    for other in others:
        other.stop()


def test_a_declined_job_pauses_with_the_stewards_reason(federation, key):
    federation.job("poll", count=1, deadlines={"training": 10})
    for name in ("north", "east", "south"):
        federation.start(name)
    federation.wait_for("poll", lambda detail: detail.job.approvals.awaited == 1)
    told = steward(federation, "show", "poll")
    words = ("--key", key, "--digest", told["digest"][:16], "--yes", "--reason", "no consent\x1b[31m for surveys")
    steward(federation, "decline", "poll", *words)
    detail = federation.wait_for("poll", lambda detail: detail.job.approvals.declined == 1)
    assert "a steward declined the job: no consent" in federation.operator("status", "--json")
    assert "\\u001b" not in federation.operator("status", "--json")
    assert detail.job.approvals.awaited == 0
    # Two are left, three are needed: once the window closes, the job pauses rather than wait for nobody.
    detail = federation.wait_for("poll", lambda detail: detail.job.status == pb.JOB_STATUS_PAUSED)
    assert detail.job.reason == Reason.REASON_MEMBERS_DECLINED
