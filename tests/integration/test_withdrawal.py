"""Real processes: a member withdraws while the coordinator is down, and a job starts anew without it."""

import asyncio
import json
import os
import re
import subprocess

import grpc.aio
import pytest

from edge_client.identity.connection import open_channel
from edge_client.identity.home import MemberIdentity
from edge_client.withdrawal.folder import KeptWithdrawal
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2, federation_pb2_grpc
from tacit.v1 import operator_pb2 as pb
from tacit.withdrawal import WithdrawalRequest, check_request
from tests.support.places import ROOT
from tests.support.processes import EXAMPLES, command, running_federation, succeed
from toolkit.console import ExitCode

OTHERS = {"east", "south", "west"}
POLICY = 'schema = 1\nepsilon = 1000.0\nmechanisms = ["none", "gaussian-update"]\n'
NOISY = '[mechanism]\nname = "gaussian-update"\nnoise_multiplier = 2.0\nclip = 0.01\nlot = 32\nsampling = "poisson"\n'
# A job whose members make text at its end.
STORIES = """
schema = 1
name = "stories"
labels = {labels}
[vocabulary]
kind = "words"
file = {words}
[model]
architecture = "rvae"
words = 300
hidden = 16
max_tokens = 12
[mechanism]
name = "dp-sgd"
noise_multiplier = 2.0
lot = 16
steps = 2
[rounds]
count = 6
min_members = 3
[rounds.deadlines]
training = 60
reconnect = 2
[corpus]
texts = 20
histogram_std = 16.0
"""


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("withdrawal")) as federation:
        federation.enrol("north", *OTHERS, policy=POLICY)
        yield federation


def withdraw(federation, *words):
    done = command("edge_client", "withdraw", *words, "--home", federation.home("north"), "--json")
    return done.returncode, json.loads(done.stdout)


def receipts(federation, job):
    return len(list((federation.home("north") / "receipts" / job).glob("*.json")))


def sent_as(federation, member, kept):
    """Sends north's request over another member's channel, signed as it is."""

    async def call():
        async with open_channel(MemberIdentity.load(federation.home(member))) as channel:
            stub = federation_pb2_grpc.FederationServiceStub(channel)
            message = federation_pb2.WithdrawRequest(
                statement=kept.request.canonical(), signature=bytes.fromhex(kept.signature)
            )
            await stub.Withdraw(message, timeout=60)

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        asyncio.run(call())
    return reason_of(refused.value)


def openssl(folder, root):
    """Runs the page's lines on the entry in the folder."""
    page = (ROOT / "docs" / "withdrawal.md").read_text()
    (lines,) = re.findall(r"```text\n(set -eu\n.*?)```", page, flags=re.DOTALL)
    named = {**os.environ, "ENTRY": str(folder / "entry.json"), "ROOT": str(root)}
    return subprocess.run(["bash", "-c", lines], cwd=folder, env=named, capture_output=True, text=True, check=False)


def journal(federation, **wanted):
    lines = (json.loads(line) for line in federation.operator("audit", "show", "--json").splitlines())
    return [each for each in lines if all(each[key] == value for key, value in wanted.items())]


def test_a_member_withdraws_while_the_coordinator_is_down_and_a_job_starts_anew_without_it(town, tmp_path):
    town.job("desk", count=12, mechanism=NOISY)
    for name in OTHERS:
        town.start(name)
    north = town.start("north")
    detail = town.wait_for("desk", lambda detail: detail.job.version_number >= 2)
    assert "north" in detail.rounds[0].attempts[-1].survivors
    town.coordinator.kill()

    # It counts here at once, and is kept for later.
    code, said = withdraw(town, "desk", "--yes")
    assert (code, said["withdrawals"][0]["taken_ms"]) == (ExitCode.UNREACHABLE, None)
    (own,) = said["own"]
    assert own["job"] == "desk"
    assert own["rounds"]
    assert (own["unbounded"], own["spent"][0]["epsilon"] > 0) == (False, True)
    town.serve()
    north.wait_for("withdrawal_taken", scope="desk")
    left = town.show("desk").job.attempt
    sent = receipts(town, "desk")
    town.wait_for("desk", lambda detail: detail.job.status == pb.JOB_STATUS_FINISHED)
    detail = town.show("desk")
    later = [attempt for each in detail.rounds for attempt in each.attempts if attempt.number > left]
    assert later
    assert not any("north" in attempt.cohort for attempt in later)
    assert [each.withdrawn for each in detail.versions] == [0] + [1] * 12
    assert receipts(town, "desk") == sent

    # A restart takes no part again, and hears that it withdrew.
    north.kill()
    north = town.start("north")
    north.wait_for("job_over", job="desk", reason="member_withdrew")
    code, said = withdraw(town)
    (told,) = said["withdrawals"]
    assert (code, told["jobs"][0]["first"], told["jobs"][0]["newest"]) == (ExitCode.OK, 1, 12)

    # A name that nobody knows is said before anything is written.
    code, said = withdraw(town, "dsek", "--dry-run")
    assert (code, any("no job named dsek" in each for each in said["problems"])) == (ExitCode.OK, True)
    assert withdraw(town, "desk", "--dry-run")[1]["problems"] == []

    # The journal proves who asked, and a request sent by somebody else is refused and changes nothing.
    (entry,) = journal(town, kind="withdrawal_taken")
    assert (entry["id"], entry["hash"]) == (told["journal_entry"], told["journal_hash"])
    fields, identity = entry["fields"], MemberIdentity.load(town.home("north"))
    proven = WithdrawalRequest.from_json(fields["request"].encode())
    check_request(
        proven, bytes.fromhex(fields["signature"]), bytes.fromhex(fields["certificate"]), identity.authorities
    )
    assert (proven.member, proven.job) == ("north", "desk")
    (tmp_path / "entry.json").write_text(json.dumps(entry))
    offline = openssl(tmp_path, town.home("north") / "identity" / "root.pem")
    assert "Verified OK" in offline.stdout, offline.stderr
    assert "/member/north\n" in offline.stdout
    (tmp_path / "entry.json").write_text(json.dumps(entry).replace('\\"desk\\"', '\\"ward\\"'))
    assert "Verified OK" not in openssl(tmp_path, town.home("north") / "identity" / "root.pem").stdout
    kept = KeptWithdrawal.from_file(town.home("north") / "withdrawals" / "jobs" / "desk.json")
    reason, sentence = sent_as(town, "east", kept)
    assert (reason, "east sends it" in sentence) == (Reason.REASON_WITHDRAWAL_INVALID, True)
    assert len(journal(town, kind="withdrawal_taken")) == 1

    # What the others pay again is said first; then the job starts anew without it.
    words = ("member", "withdraw", "north", "--job", "desk", "--restart", "--json")
    (dry,) = json.loads(town.operator(*words, "--dry-run"))["restarts"]
    assert (dry["start"], dry["new_job"], dry["rounds"], set(dry["members"])) == (0, "desk-r1", 12, OTHERS)
    assert [each.job for each in town.show("desk").successors] == []
    town.operator(*words, "--yes")
    assert town.finished("desk-r1").job.version_number == 12
    again = town.show("desk-r1")
    assert not any("north" in attempt.cohort for each in again.rounds for attempt in each.attempts)
    assert {each.withdrawn for each in again.versions} == {0}
    assert again.versions[0].digest == detail.versions[0].digest
    # It is made once.
    town.operator(*words, "--yes")
    assert [each.job for each in town.show("desk").successors] == ["desk-r1"]
    assert "Versions 1 to 12 hold updates of a member that withdrew" in town.operator("job", "show", "desk")

    town.operator("export", "desk", "--out", tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Started anew from a version with updates of fewer of them: `desk-r1`" in card
    root = town.dir / "operator" / "root.pem"
    verify = ("coordinator", "passport", "verify", tmp_path / "model" / "passport.json", "--authority", root)
    told = json.loads(succeed(*verify, "--json"))
    assert (told["withdrawals"][0]["first"], told["withdrawals"][0]["members"]) == (1, 1)
    assert [(each["job"], each["version"], each["withdrawn"]) for each in told["successors"]] == [("desk-r1", 0, 0)]
    assert "every version from 1 on holds" in succeed(*verify)
    # The passport names nobody.
    assert b"north" not in (tmp_path / "model" / "passport.json").read_bytes()

    # For good: the running member stops, and starts no more.
    code, said = withdraw(town, "--for-good", "--yes")
    assert (code, said["withdrawals"][0]["job"]) == (ExitCode.OK, None)
    assert north.process.wait(60) == ExitCode.REFUSED
    refused = command("edge_client", "run", "--data", town.data("north"), "--home", town.home("north"))
    assert (refused.returncode, "withdrew from all jobs" in refused.stderr) == (ExitCode.REFUSED, True)
    town.job("new", count=1)
    assert town.finished("new").job.version_number == 1

    # Without noise, a job that starts anew would hand over the update of a member that leaves.
    plain = command(
        "coordinator", "member", "withdraw", "east", "--job", "new", "--restart", "--dir", town.dir, "--yes"
    )
    assert (plain.returncode, "nothing was changed" in plain.stderr) == (ExitCode.REFUSED, True)
    assert "minus that of a job from the same version" in plain.stderr
    assert [each.withdrawn for each in town.show("new").versions] == [0, 0]

    # Another one leaves the job that started anew: that is the chain's next job, and desk is not started anew again.
    town.operator("member", "withdraw", "south", "--job", "desk-r1", "--restart", "--yes")
    (again,) = json.loads(
        town.operator("member", "withdraw", "north", "--job", "desk", "--restart", "--json", "--yes")
    )["restarts"]
    assert (again["follower"], again["new_job"]) == ("desk-r2", None)
    followers = {job: [each.job for each in town.show(job).successors] for job in ("desk", "desk-r1", "desk-r2")}
    assert followers == {"desk": ["desk-r1"], "desk-r1": ["desk-r2"], "desk-r2": []}
    nobody = command("coordinator", "member", "withdraw", "nobody", "--dir", town.dir, "--yes")
    assert (nobody.returncode, "no member named nobody" in nobody.stderr) == (ExitCode.NOT_FOUND, True)


def test_a_member_that_withdraws_between_two_rounds_makes_no_text(tmp_path):
    """The coordinator is down when it withdraws, so that nobody but the home keeps it."""
    with running_federation(tmp_path) as federation:
        federation.enrol("north", *OTHERS, policy='schema = 1\ncorpora = "always"\n')
        running = {name: federation.start(name) for name in ("north", *OTHERS)}
        for member in running.values():
            member.wait_for("connected")
        labels = sorted({json.loads(line)["label"] for line in (EXAMPLES / "train.jsonl").open()})
        spec = tmp_path / "stories.toml"
        spec.write_text(STORIES.format(labels=json.dumps(labels), words=json.dumps(str(EXAMPLES / "words.txt"))))
        federation.create(spec)
        running["north"].wait_for("attempt_ended", outcome="published")
        federation.operator("job", "pause", "stories")
        federation.coordinator.kill()
        home = federation.home("north")
        charged = charges(home)
        assert (home / "synthesis" / "stories" / "model.safetensors").exists()
        code, _ = withdraw(federation, "stories", "--yes")
        assert code == ExitCode.UNREACHABLE
        assert not (home / "synthesis" / "stories").exists()
        federation.serve()
        running["north"].wait_for("withdrawal_taken", scope="stories")
        federation.operator("job", "resume", "stories")
        federation.finished("stories")
        for name in OTHERS:
            running[name].wait_for("corpus_sent")
        # A start asks about everything that is left over, and there is nothing.
        running["north"].kill()
        federation.start("north").wait_for("connected")
        given = json.loads(federation.operator("job", "corpora", "stories", "--json"))["members"]
        assert {each["member"] for each in given if each["answer"] == "given"} == OTHERS
        assert charges(home) == charged
        assert not list((home / "corpora").glob("*"))


def charges(home):
    """What was charged. What is only reserved for the next round is given back with the withdrawal."""
    return json.loads(succeed("edge_client", "ledger", "show", "--home", home, "--json"))["charged"]
