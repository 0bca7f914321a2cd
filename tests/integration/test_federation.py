"""The federation with real processes and sockets: what members and the operator experience."""

import json
import sqlite3
from contextlib import closing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.config import load_config, load_operator
from edge_client.session.agent import CHUNK
from secure_agg import packed_size
from tacit.reason import Reason
from tacit.token import JoinToken
from tacit.v1 import operator_pb2 as pb
from tests.support.processes import PATIENCE, Proxy, behind, command, running_federation, within_patience

MEMBERS = ("north", "east", "south", "west")
# Size of the small job's masked vector, 28 bits a value with four members: two chunks and a part of a third.
VECTOR_BYTES = packed_size(3916 * 64 + 16 * 64 * (2 + 3) + 2 * 16 + 6 * 32 + 6 + 4, bits=28)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("federation"), *MEMBERS) as running:
        yield running


@pytest.fixture(autouse=True)
def _members_end(federation):
    yield
    for process in federation.processes[:]:
        if process is not federation.coordinator:
            process.end()
            federation.processes.remove(process)


@pytest.fixture
def proxy(federation):
    """The proxy between west and the coordinator."""
    path = federation.home("west") / "identity" / "identity.json"
    before = path.read_bytes()
    made = Proxy(federation.port)
    behind(made, federation.home("west"))
    yield made
    made.close()
    path.write_bytes(before)


def attempts(detail):
    return [attempt for each in detail.rounds for attempt in each.attempts]


def dropouts(detail):
    return [(lost.member, lost.phase, lost.reason) for attempt in attempts(detail) for lost in attempt.dropouts]


def test_members_train_together_and_metrics_count_it(federation):
    federation.job("plain")
    members = [federation.start(name, "--until-finished") for name in MEMBERS]
    detail = federation.finished("plain")
    assert [member.process.wait(timeout=PATIENCE) for member in members] == [0, 0, 0, 0]
    assert detail.job.version_number == 3
    assert all(attempt.outcome == "published" for attempt in attempts(detail))
    assert sum(len(attempt.survivors) for attempt in attempts(detail)) >= 3 * 3
    assert detail.job.training.examples > 0
    rounds = federation.metric("tacit_coordinator_rounds_total", job="plain", outcome="published", reason="")
    assert rounds == 3
    assert federation.metric("tacit_coordinator_model_version", job="plain") == 3
    masked = federation.metric("tacit_coordinator_bytes_total", channel="masked", direction="in")
    assert masked == VECTOR_BYTES * sum(len(attempt.survivors) for attempt in attempts(detail))
    within_patience(lambda: federation.metric("tacit_coordinator_members_connected") == 0)


def test_a_member_killed_while_training_holds_up_nobody(federation):
    federation.job("killed-training", count=2)
    victim = federation.start("west")
    others = [federation.start(name) for name in MEMBERS[:3]]
    victim.wait_for("assigned", job="killed-training", round=1)
    victim.kill()
    detail = federation.finished("killed-training")
    assert all("west" not in attempt.cohort for attempt in attempts(detail))
    assert dropouts(detail) == []
    for other in others:
        other.wait_for("job_over", job="killed-training", reason="job_finished")


def test_a_member_killed_while_sending_is_a_dropout_of_the_mask_phase(federation, proxy):
    proxy.stall_after = int(0.6 * VECTOR_BYTES)
    federation.job("killed-sending", count=2, min_members=4)
    victim = federation.start("west")
    for name in MEMBERS[:3]:
        federation.start(name)
    assert proxy.stalled.wait(PATIENCE)
    victim.kill()
    detail = federation.wait_for("killed-sending", lambda detail: detail.job.version_number == 1)
    first = attempts(detail)[0]
    assert first.outcome == "published"
    assert sorted(first.cohort) == sorted(MEMBERS)
    assert sorted(first.survivors) == sorted(MEMBERS[:3])
    assert dropouts(detail) == [("west", "mask", Reason.REASON_DISCONNECTED)]
    # The second round needs four members, so it waits until this one is back.
    proxy.stall_after = None
    federation.start("west")
    federation.finished("killed-sending")


def test_an_upload_cut_at_sixty_percent_is_resumed_and_added_once(federation, proxy):
    def arrived():
        return federation.metric("tacit_coordinator_bytes_total", channel="masked", direction="in")

    before = arrived()
    proxy.stall_after = int(0.6 * VECTOR_BYTES)
    federation.job("cut", count=1, min_members=4)
    member = federation.start("west")
    for name in MEMBERS[:3]:
        federation.start(name)
    assert proxy.stalled.wait(PATIENCE)
    # Three members have sent their whole vectors. The coordinator has read one of the fourth's three chunks.
    within_patience(lambda: arrived() - before >= 3 * VECTOR_BYTES + CHUNK)
    assert federation.show("cut").job.answered == 3
    proxy.cut()
    member.wait_for("disconnected")
    member.wait_for("masked_vector_sent")
    detail = federation.finished("cut")
    assert sorted(attempts(detail)[0].survivors) == sorted(MEMBERS)
    assert dropouts(detail) == []
    # The second connection carried only the rest.
    assert 0.5 * VECTOR_BYTES < proxy.passed[1] < 0.7 * VECTOR_BYTES
    assert arrived() - before == 4 * VECTOR_BYTES


def test_a_restarted_coordinator_continues_the_job(federation, proxy):
    proxy.stall_after = int(0.6 * VECTOR_BYTES)
    federation.job("crash", min_members=4)
    members = [federation.start(name, "--until-finished") for name in MEMBERS]
    assert proxy.stalled.wait(PATIENCE)
    federation.wait_for("crash", lambda detail: detail.job.phase == "mask" and detail.job.answered == 3)
    federation.coordinator.kill()
    proxy.stall_after = None
    for member in members[:3]:
        member.wait_for("disconnected")
    federation.serve()
    detail = federation.finished("crash")
    # The members reconnected by themselves, with the updates that they had already trained.
    assert [member.process.wait(timeout=PATIENCE) for member in members] == [0, 0, 0, 0]
    first, second = attempts(detail)[:2]
    assert (first.outcome, first.reason) == ("abandoned", Reason.REASON_COORDINATOR_RESTARTED)
    assert (second.outcome, list(second.survivors)) == ("published", sorted(MEMBERS))
    assert [each.number for each in detail.rounds] == [1, 2, 3]
    assert all(each.outcome == "published" for each in detail.rounds)
    assert [version.number for version in detail.versions] == [0, 1, 2, 3]
    trained = [line for member in members for line in member.lines if line.get("event") == "ready"]
    assert sum(line["round"] == 1 for line in trained) <= 4


def is_decline(line, job):
    """Whether a line of a member's log says that it declined the job."""
    event = json.loads(line) if line.startswith("{") else {}
    return (event.get("event"), event.get("job")) == ("declined", job)


def test_a_job_that_all_members_decline_pauses_and_they_exit(federation):
    """All policies here refuse jobs without noise."""
    policy = federation.folder / "noise-only.toml"
    policy.write_text('schema = 1\nmechanisms = ["dp-sgd"]\n')
    federation.job("nobodys", deadlines={"training": 3})
    options = ("--until-finished", "--job", "nobodys", "--policy", str(policy))
    members = [federation.start(name, *options) for name in MEMBERS[:3]]
    assert [member.process.wait(timeout=PATIENCE) for member in members] == [1, 1, 1]
    logs = [(federation.folder / f"{name}.log").read_text() for name in MEMBERS[:3]]
    assert all(
        "Job nobodys stopped before it was finished: too many members declined it for good." in log for log in logs
    )
    # The last one may have heard of the pause before it had read the job.
    asked = [log for log in logs if any(is_decline(line, "nobodys") for line in log.splitlines())]
    assert len(asked) >= 2
    assert all("This member declined: mechanisms" in log for log in asked)
    job = federation.show("nobodys").job
    assert (job.status, job.reason) == (pb.JOB_STATUS_PAUSED, Reason.REASON_MEMBERS_DECLINED)
    said = federation.operator("job", "show", "nobodys")
    assert "Too few members are left, because others declined the job for good" in said
    assert sum(f"{name} declined: mechanisms" in said for name in MEMBERS[:3]) >= 2
    # Members that accept the job connect, and it continues by itself.
    others = [federation.start(name, "--until-finished", "--job", "nobodys") for name in MEMBERS[:3]]
    federation.finished("nobodys")
    assert [member.process.wait(timeout=PATIENCE) for member in others] == [0, 0, 0]


def test_a_member_offline_for_three_rounds_comes_back(federation):
    federation.job("offline", count=100_000)
    first = [federation.start(name) for name in MEMBERS]
    federation.wait_for("offline", lambda detail: any(len(each.survivors) == 4 for each in attempts(detail)))
    first[3].stop()
    gone = federation.show("offline").job.version_number
    federation.wait_for("offline", lambda detail: detail.job.version_number >= gone + 3)
    federation.start("west")
    back = federation.wait_for(
        "offline",
        lambda detail: any(
            "west" in attempt.survivors for each in detail.rounds if each.number > gone + 3 for attempt in each.attempts
        ),
    )
    missed = [attempt for attempt in attempts(back) if "west" not in attempt.survivors]
    assert len(missed) >= 3
    federation.operator("job", "abort", "offline", "--yes")


def test_a_job_is_paused_resumed_and_aborted(federation):
    federation.job("steered", count=100_000)
    members = [federation.start(name) for name in MEMBERS[:3]]
    federation.wait_for("steered", lambda detail: detail.job.version_number >= 1)
    federation.operator("job", "pause", "steered")
    members[0].wait_for("job_over", job="steered", reason="job_paused")
    paused = federation.show("steered").job
    assert paused.status == pb.JOB_STATUS_PAUSED
    again = command("coordinator", "job", "pause", "steered", "--dir", federation.dir)
    assert again.returncode == 4
    assert "paused" in again.stderr
    federation.operator("job", "resume", "steered")
    federation.wait_for("steered", lambda detail: detail.job.version_number >= paused.version_number + 2)
    federation.operator("job", "abort", "steered", "--yes")
    members[0].wait_for("job_over", job="steered", reason="job_aborted")
    aborted = federation.show("steered").job
    assert aborted.status == pb.JOB_STATUS_ABORTED
    assert command("coordinator", "job", "resume", "steered", "--dir", federation.dir).returncode == 4


def test_the_operator_sees_why_a_policy_declined_a_job(federation):
    home = federation.home("west")
    policy = (home / "policy.toml").read_text()
    (home / "policy.toml").write_text("schema = 1\n")
    try:
        federation.job("unwanted", count=1)
        member = federation.start("west")
        member.wait_for("declined", job="unwanted")
        listed = federation.operator("member", "list")
        assert "mechanisms" in listed
        for name in MEMBERS[:3]:
            federation.start(name)
        federation.finished("unwanted")
    finally:
        (home / "policy.toml").write_text(policy)


def test_declining_wrong_labels_reveals_nothing_of_the_data(federation, tmp_path):
    federation.job("labelled", count=1)
    data = tmp_path / "other.jsonl"
    data.write_text('{"text": "a private sentence", "label": "private_label"}\n')
    (federation.folder / "west.jsonl").write_bytes(data.read_bytes())
    try:
        member = federation.start("west")
        assert "private_label" in member.wait_for("preparation_refused")["why"]
        member.wait_for("declined", job="labelled")
        detail = federation.operator("member", "list", "--json") + (federation.folder / "coordinator.log").read_text()
        assert "the member's own log" in detail
        assert "private_label" not in detail
    finally:
        (federation.folder / "west.jsonl").unlink()
    federation.operator("job", "abort", "labelled", "--yes")


def test_wrong_reused_and_expired_tokens_are_refused(federation, tmp_path):
    token = federation.token("fifth")
    forged = JoinToken.parse(token).model_copy(update={"secret": bytes(32)}).format()
    wrong = command("edge_client", "enrol", forged, "--home", tmp_path / "a")
    assert wrong.returncode == 4
    assert "altered" in wrong.stderr
    assert not (tmp_path / "a" / "identity").exists()
    assert command("edge_client", "enrol", token, "--home", tmp_path / "b").returncode == 0
    reused = command("edge_client", "enrol", token, "--home", tmp_path / "c")
    assert reused.returncode == 4
    assert "used" in reused.stderr
    assert "coordinator member invite" in reused.stderr
    late = federation.token("sixth")
    with closing(sqlite3.connect(federation.dir / "tacit.db")) as database, database:
        database.execute("UPDATE tokens SET expires_ms = 1 WHERE member = 'sixth'")
    expired = command("edge_client", "enrol", late, "--home", tmp_path / "d")
    assert expired.returncode == 4
    assert "expired" in expired.stderr
    assert "coordinator member invite" in expired.stderr
    counted = {
        outcome: federation.metric("tacit_coordinator_enrolments_total", outcome=outcome)
        for outcome in ("token_secret_wrong", "token_used", "token_expired")
    }
    assert counted == {"token_secret_wrong": 1, "token_used": 1, "token_expired": 1}


def test_a_second_process_of_one_member_is_refused(federation):
    federation.job("twice", count=100_000)
    first = federation.start("north")
    first.wait_for("connected")
    second = command("edge_client", "run", "--data", federation.data("north"), "--home", federation.home("north"))
    assert second.returncode == 2
    assert "another `edge_client run`" in second.stderr
    federation.operator("job", "abort", "twice", "--yes")


def test_a_revoked_member_is_disconnected_and_exits(federation):
    federation.enrol("leaver")
    member = federation.start("leaver")
    member.wait_for("connected")
    federation.operator("member", "revoke", "leaver", "--yes")
    assert member.process.wait(timeout=PATIENCE) == 4
    again = command("edge_client", "run", "--data", federation.data("leaver"), "--home", federation.home("leaver"))
    assert again.returncode == 4
    assert "revoked" in again.stderr


def test_health_and_reflection_answer_on_both_ports(federation):
    operator = load_operator(federation.dir / "operator")
    mutual = grpc.ssl_channel_credentials(operator.root_pem, operator.key_pem, operator.certificate_pem)
    enrolment = load_config(federation.dir).enrolment_address
    open_to_all = grpc.ssl_channel_credentials(operator.root_pem)
    expected = {
        operator.config.address: (mutual, {"tacit.v1.FederationService", "tacit.v1.OperatorService"}),
        enrolment: (open_to_all, {"tacit.v1.EnrolmentService"}),
    }
    for address, (credentials, services) in expected.items():
        with grpc.secure_channel(address, credentials) as channel:
            for service in ("", *services):
                request = health_pb2.HealthCheckRequest(service=service)
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            (listed,) = stub.ServerReflectionInfo(asked, timeout=PATIENCE)
            names = {each.name for each in listed.list_services_response.service}
            assert services <= names
            assert {name for name in names if name.startswith("tacit.")} == services


def test_the_coordinator_stops_cleanly_on_sigterm(federation):
    member = federation.start("north")
    member.wait_for("connected")
    assert federation.coordinator.stop() == 0
    member.wait_for("disconnected")
    federation.serve()
    member.wait_for("connected")
