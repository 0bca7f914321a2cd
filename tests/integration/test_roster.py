"""The roster log with real processes: who has joined, and what members and a witness do about a log that lies."""

import json
import re
import shutil
import sqlite3
import sys
import time
from contextlib import closing

import pytest

from tacit.reason import Reason
from tacit.v1 import operator_pb2 as pb
from tests.support.processes import Federation, Process, command, free_ports, running_federation, succeed

SIGNED = "tacit_coordinator_witness_signed_timestamp_seconds"
REFUSED = 4
NAMES = ("north", "east", "south")
TRIGGERS = ("update", "delete", "insert")


def members(federation, name, *more):
    """`edge_client members --json` of a member, and its exit code."""
    done = command("edge_client", "members", "--home", federation.home(name), "--json", *more)
    return json.loads(done.stdout), done.returncode


def change_log(federation, *statements):
    """The owner of the database changes the roster log, while the coordinator is down."""
    federation.coordinator.stop()
    with closing(sqlite3.connect(federation.dir / "tacit.db")) as database:
        for act in TRIGGERS:
            database.execute(f"DROP TRIGGER IF EXISTS roster_log_only_grows_{act}")
        for statement in statements:
            assert database.execute(statement).rowcount == 1
        database.commit()
    federation.serve()


def blind(federation, name):
    """Starts a member that does not look into the log."""
    words = [sys.executable, "-m", "tests.support.unwatching_member", "run", "--log-format", "json"]
    words += ["--data", str(federation.data(name)), "--home", str(federation.home(name))]
    member = Process(name, words, federation.folder / f"blind-{name}.log")
    federation.processes.append(member)
    return member


def witness(federation, *more, port=None):
    """One look of the witness at the coordinator."""
    config = (federation.dir / "coordinator.toml").read_text()
    enrolment = port or int(re.search(r"^enrolment_port = (\d+)", config, re.M)[1])
    name = members(federation, "north", "--offline")[0]["federation"]
    address = f"localhost:{enrolment}"
    folder = federation.folder / "witness"
    return command(
        "edge_client", "witness", "run", "--folder", folder, "--address", address, "--federation", name, "--once", *more
    )


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("roster"), *NAMES) as running:
        yield running


def test_members_says_who_has_joined_and_what_is_new(federation):
    found, code = members(federation, "north")
    assert code == 0
    assert [each["name"] for each in found["members"]] == sorted(NAMES)
    assert [each["kind"] for each in found["new"]] == ["issued"] * 3
    again, _ = members(federation, "north")
    assert (again["new"], again["root"], again["entries"]) == ([], found["root"], 3)

    federation.enrol("west")
    federation.operator("member", "revoke", "west", "--yes")
    after, code = members(federation, "north")
    assert code == 0
    assert [(each["kind"], each["name"]) for each in after["new"]] == [("issued", "west"), ("revoked", "west")]
    assert [each["name"] for each in after["members"]] == sorted(NAMES)
    # What the operator's journal says leads to the root that members see.
    audit = json.loads(federation.operator("audit", "verify", "--json"))
    assert audit["roster_log"] == {"entries": after["entries"], "root": after["root"]}
    plain = succeed("edge_client", "members", "--home", federation.home("east"))
    assert "3 members, 1 revocations, 5 entries" in plain
    assert plain.count("NEW") == 3


def test_two_members_compare_heads_of_one_log(federation):
    for name in NAMES[:2]:
        _, code = members(federation, name, "--export", str(federation.folder / f"log-{name}.jsonl"))
        assert code == 0
    both = (federation.folder / "log-north.jsonl", "--against", federation.folder / "log-east.jsonl")
    said = json.loads(command("edge_client", "members", "--home", "/nowhere", "--json", "--verify", *both).stdout)
    assert said["split"] is False
    # A changed name in the file does not lead to the signed root.
    bent = federation.folder / "bent.jsonl"
    bent.write_text((federation.folder / "log-east.jsonl").read_text().replace('"south"', '"ghost"'))
    done = command("edge_client", "members", "--home", federation.home("north"), "--verify", bent)
    assert done.returncode == 1
    assert "altered" in done.stderr
    # A wrong file is a mistake of whoever typed it, and no finding.
    bent.write_text('{"a": 1}')
    for path, said in ((bent, "is no copy of a roster log"), (federation.folder / "nowhere", "check the path")):
        done = command("edge_client", "members", "--home", "/nowhere", "--verify", path)
        assert done.returncode == 2
        assert said in done.stderr


def test_a_policy_can_ask_for_a_witness(federation):
    """Without the witness's signature there is no round; with it there is one."""
    key = succeed("edge_client", "witness", "key", "--folder", federation.folder / "witness").strip()
    config = federation.dir / "coordinator.toml"
    config.write_text(config.read_text().replace("witnesses = []", f'witnesses = ["{key}"]'))
    federation.coordinator.stop()
    federation.serve()
    policy = federation.home("north") / "policy.toml"
    before = policy.read_text()
    policy.write_text(before + f'\n[witnesses]\nlibrary = "{key}"\n')
    federation.job("witnessed", count=1, max_failed_rounds=100)
    running = [federation.start(name, "--until-finished") for name in NAMES]
    refused = running[0].wait_for("attempt_refused", reason="policy_witnesses")
    assert "min_witnesses" in refused["detail"]
    assert federation.metric(SIGNED, witness=key) == 0
    began = time.time()
    # The first of its coordinators is down.
    (closed,) = free_ports(1)
    real = re.search(r"^enrolment_port = (\d+)", config.read_text(), re.M)[1]
    done = witness(federation, "--address", f"localhost:{real}", port=closed)
    assert done.returncode == 0, done.stderr
    assert began <= federation.metric(SIGNED, witness=key) <= time.time()
    federation.finished("witnessed")
    policy.write_text(before)
    for process in running:
        process.end()
        federation.processes.remove(process)


def test_a_member_that_renews_before_each_attempt_stalls_nobody(tmp_path):
    """The honest members pin a witness, which has not seen west's new certificate. West sits out, and they go on."""
    with running_federation(tmp_path, *NAMES, "west") as federation:
        key = succeed("edge_client", "witness", "key", "--folder", federation.folder / "witness").strip()
        config = federation.dir / "coordinator.toml"
        config.write_text(config.read_text().replace("witnesses = []", f'witnesses = ["{key}"]'))
        federation.coordinator.stop()
        with closing(sqlite3.connect(federation.dir / "tacit.db")) as database:
            # A new key is issued once a minute.
            database.execute("UPDATE member_certificates SET issued_ms = issued_ms - 60000 WHERE member = 'west'")
            database.commit()
        federation.serve()
        for name in NAMES:
            policy = federation.home(name) / "policy.toml"
            policy.write_text(policy.read_text() + f'\n[witnesses]\nlibrary = "{key}"\n')
        assert witness(federation).returncode == 0
        renewed = json.loads(succeed("edge_client", "renew", "--new-key", "--home", federation.home("west"), "--json"))
        assert renewed["renewed"]

        federation.job("stalled", count=1, max_attempts=1, max_failed_rounds=1)
        running = [federation.start(name) for name in ("west", *NAMES)]
        stalled = federation.wait_for("stalled", lambda detail: detail.job.status != pb.JOB_STATUS_RUNNING)
        assert stalled.job.status == pb.JOB_STATUS_FINISHED
        assert sorted(stalled.rounds[0].attempts[-1].survivors) == sorted(NAMES)

        # All four are needed: the job waits for the witness, names whom it waits for, and loses no attempt.
        federation.job("together", count=1, min_members=4, max_attempts=1, max_failed_rounds=1)
        waits = federation.wait_for("together", lambda detail: "witness" in detail.job.waiting)
        assert "west" in waits.job.waiting
        assert witness(federation).returncode == 0
        together = federation.finished("together")
        assert sorted(together.rounds[0].attempts[-1].survivors) == sorted((*NAMES, "west"))
        assert len(together.rounds[0].attempts) == 1
        for process in running:
            process.end()
            federation.processes.remove(process)


def test_a_log_that_was_rolled_back_or_altered_is_refused_and_can_be_brought_back(federation):
    for name in NAMES:
        assert members(federation, name)[1] == 0
    export = federation.folder / "known.jsonl"
    members(federation, "north", "--export", str(export))
    size = members(federation, "north", "--offline")[0]["entries"]

    change_log(federation, f"UPDATE roster_log SET name = 'ghost' WHERE id = {size}")  # noqa: S608
    found, code = members(federation, "east")
    assert code == REFUSED
    assert "is not the one this member has seen" in found["problem"]
    assert found["contradictions"] == 1
    assert witness(federation).returncode == REFUSED

    change_log(federation, f"DELETE FROM roster_log WHERE id = {size}")  # noqa: S608
    found, code = members(federation, "north")
    assert code == REFUSED
    assert f"has {size - 1} entries now" in found["problem"]
    assert "import-log" in found["problem"]
    done = witness(federation)
    assert done.returncode == REFUSED
    assert "ROLLBACK" in done.stderr

    # The operator brings the entries back from what a member has.
    assert json.loads(federation.operator("member", "import-log", export, "--json"))["added"] == 1
    federation.coordinator.stop()
    federation.serve()
    assert members(federation, "north")[1] == 0
    assert witness(federation).returncode == 0


def test_a_member_that_was_revoked_since_the_backup_is_revoked_by_the_imported_log(tmp_path):
    """The database is an older one, in which south is enrolled. A member's copy of the log knows better."""
    with running_federation(tmp_path, *NAMES) as federation:
        federation.coordinator.stop()
        shutil.copy(federation.dir / "tacit.db", tmp_path / "backup.db")
        federation.serve()
        federation.operator("member", "revoke", "south", "--yes")
        export = tmp_path / "known.jsonl"
        assert members(federation, "north", "--export", str(export))[1] == 0
        federation.coordinator.stop()
        shutil.copy(tmp_path / "backup.db", federation.dir / "tacit.db")
        done = json.loads(federation.operator("member", "import-log", export, "--json"))
        assert done == {"added": 1, "entries": 4, "revoked": ["south"]}
        federation.serve()
        found = json.loads(federation.operator("member", "list", "--json"))["members"]
        assert {each["name"]: each["status"] for each in found} == {
            "north": "enrolled",
            "east": "enrolled",
            "south": "revoked",
        }
        assert command("edge_client", "renew", "--home", federation.home("south")).returncode != 0
        assert members(federation, "north")[1] == 0
        audit = json.loads(federation.operator("audit", "verify", "--json"))
        assert audit["roster_log"]["entries"] == 4


def test_a_certificate_behind_the_logs_back_is_refused_by_every_honest_member(tmp_path):
    """The coordinator has a member whose certificate is in no log. Members that do not look take it for one of them."""
    with running_federation(tmp_path, *NAMES, "ghost") as federation:
        change_log(federation, "DELETE FROM roster_log WHERE id = 4 AND name = 'ghost'")
        # An honest coordinator seats no such certificate, and the others go on.
        federation.job("honest", count=1, min_members=4)
        ghost = blind(federation, "ghost")
        running = [federation.start(name) for name in NAMES]
        attempt = federation.finished("honest").rounds[0].attempts[-1]
        assert sorted(attempt.survivors) == sorted(NAMES)
        assert [(each.member, each.reason) for each in attempt.dropouts] == [
            ("ghost", Reason.REASON_LOG_CERTIFICATE_UNKNOWN)
        ]

        federation.coordinator.stop()
        federation.program = (sys.executable, "-m", "tests.support.seating_coordinator")
        federation.serve()
        federation.job("ghostly", count=1, min_members=4, max_attempts=1, max_failed_rounds=1)
        for honest in running:
            refused = honest.wait_for("attempt_refused", reason="log_certificate_unknown")
            assert "ghost" in refused["detail"]
        for process in running:
            process.end()
            federation.processes.remove(process)

        # The baseline: the same attack on members that do not look.
        federation.operator("job", "abort", "ghostly", "--yes")
        federation.job("blind", count=1, min_members=4)
        for name in NAMES:
            blind(federation, name)
        detail = federation.finished("blind")
        attempt = detail.rounds[0].attempts[-1]
        assert sorted(attempt.survivors) == sorted((*NAMES, "ghost"))
        assert ghost.process.poll() is None


def test_two_logs_of_one_authority_are_found_by_members_that_compare_and_by_the_witness(tmp_path):
    """Two coordinators with the same keys show two logs to two members."""
    with running_federation(tmp_path, *NAMES) as here:
        for name in NAMES:
            assert members(here, name)[1] == 0
        key = succeed("edge_client", "witness", "key", "--folder", here.folder / "witness").strip()
        here.coordinator.stop()
        config = here.dir / "coordinator.toml"
        config.write_text(config.read_text().replace("witnesses = []", f'witnesses = ["{key}"]'))
        there = other_coordinator(here)
        here.serve()
        here.enrol("west")
        there.enrol("ghost")
        # East is led to the other coordinator.
        identity = here.home("east") / "identity" / "identity.json"
        identity.write_text(identity.read_text().replace(f":{here.port}", f":{there.port}"))
        files = {}
        for name in ("north", "east"):
            files[name] = tmp_path / f"log-{name}.jsonl"
            found, code = members(here, name, "--export", str(files[name]))
            # Each log holds for itself.
            assert code == 0
            assert len(found["members"]) == 4
        done = command("edge_client", "members", "--home", here.home("north"), "--verify", files["east"])
        assert done.returncode == REFUSED
        assert "SPLIT VIEW" in done.stderr
        assert "entry 4 is issued ghost in one and issued west in the other" in done.stderr

        assert witness(here).returncode == 0
        enrolment = int(re.search(r"^enrolment_port = (\d+)", (there.dir / "coordinator.toml").read_text(), re.M)[1])
        done = witness(here, port=enrolment)
        assert done.returncode == REFUSED
        assert "SPLIT VIEW" in done.stderr
        # Its file holds both signed heads, which anybody can verify.
        log = here.folder / "witness" / "log.jsonl"
        done = command("edge_client", "members", "--home", "/nowhere", "--verify", log, "--against", files["north"])
        assert done.returncode == REFUSED
        assert "both signed by this federation's server" in done.stderr
        there.close()


def other_coordinator(of):
    """A second coordinator with everything that the first one has, on other ports."""
    made = Federation.__new__(Federation)
    made.folder, made.dir = of.folder / "other", of.folder / "other" / "federation"
    made.folder.mkdir()
    shutil.copytree(of.dir, made.dir)
    ports = dict(zip(("enrolment_port", "federation_port", "metrics_port"), free_ports(3), strict=True))
    config = made.dir / "coordinator.toml"
    text = config.read_text()
    for name, port in ports.items():
        text = re.sub(rf"^{name} = \d+", f"{name} = {port}", text, flags=re.M)
    config.write_text(text)
    (made.dir / "database.json").unlink()
    operator = made.dir / "operator" / "operator.toml"
    operator.write_text(operator.read_text().replace(f":{of.port}", f":{ports['federation_port']}"))
    made.port, made.metrics_port, made.processes = ports["federation_port"], ports["metrics_port"], []
    made.keys = of.keys
    made.serve()
    return made
