"""Real processes: a member with canaries audits a finished job, and the operator exports it only with an audit."""

import json

import pytest

from learning.auditing.planted import largest_bound
from tests.support.places import ROOT
from tests.support.processes import command, running_federation, succeed
from toolkit.console import ExitCode

MEMBERS = ("north", "east", "south")
JOB = "dp-sgd"
CANARIES = 600


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("audit")) as running:
        running.enrol("north", policy=f"schema = 1\nmax_canaries = {CANARIES}\n")
        running.enrol("east", "south", policy="schema = 1\n")
        example = (ROOT / "examples" / "mechanisms" / "dp-sgd.toml").read_text()
        spec = running.folder / "audited.toml"
        words = ROOT / "examples" / "desk" / "words.txt"
        spec.write_text(
            example.replace("../desk/words.txt", str(words)).replace("count = 5", "count = 2")
            + f"\n[audit]\ncanaries = {CANARIES}\n"
        )
        running.create(spec)
        for name in MEMBERS:
            running.data(name, 160)
        members = [running.start(name, "--until-finished") for name in MEMBERS]
        running.finished(JOB)
        for member in members:
            member.process.wait()
        yield running


def audited(federation, name, *more):
    words = ("edge_client", "audit", JOB, "--data", federation.data(name), "--home", federation.home(name))
    return command(*words, "--minutes", "0", *more)


def files(home):
    """The member's files without the cache, which any command may fill."""
    found = [path for path in home.rglob("*") if path.is_file() and home / "cache" not in path.parents]
    return {path.relative_to(home): path.read_bytes() for path in found}


def test_a_member_audits_what_was_published_and_the_operator_asks_for_it(federation, tmp_path):
    home = federation.home("north")
    record = json.loads((home / "canaries" / "data" / f"{JOB}.json").read_bytes())
    assert len(record["rows"]) == CANARIES
    assert {each["present"] for each in record["rows"]} == {True, False}
    assert (home / "canaries" / "data" / f"{JOB}.json").stat().st_mode & 0o777 == 0o600
    # Canaries are charged like rows: this member's rate is that of more rows.
    rate = {
        name: json.loads(shown.splitlines()[0])["spent"]["epsilon"]
        for name in ("north", "east")
        if (shown := succeed("edge_client", "ledger", "show", "--home", federation.home(name), "--json"))
    }
    assert rate["north"] < rate["east"]
    before = files(home)
    released = tmp_path / "north.audit.json"
    done = audited(federation, "north", "--release", released, "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"] == "sound"
    tests = {(each["attack"], each["on"]): each for each in told["tests"]}
    assert set(tests) == {("canaries", "update"), ("loss", "update"), ("rmia", "update"), ("canaries", "version-2")}
    planted = tests["canaries", "version-2"]
    assert (planted["rows"], planted["claim"]) == (CANARIES, pytest.approx(rate["north"], rel=0.2))
    # Four tests share five per cent.
    assert {each["confidence"] for each in told["tests"]} == {0.9875}
    assert files(home) == before
    # What may leave has no score of a row and no figure of a rehearsal.
    statement = json.loads(json.loads(released.read_bytes())["statement"])
    assert set(statement) == {
        *("schema", "federation", "member", "job", "document", "number", "version", "verdict", "claim"),
        *("lower_bound", "possible", "delta", "confidence", "tests", "canaries", "guesses", "correct", "made_ms"),
    }
    assert (statement["canaries"], statement["member"], statement["verdict"]) == (CANARIES, "north", "sound")

    # The job demands an audit: without one, no export.
    out = tmp_path / "model"
    words = ("coordinator", "export", JOB, "--dir", federation.dir, "--out", out)
    refused = command(*words)
    assert (refused.returncode, "--release FILE" in refused.stderr) == (ExitCode.REFUSED, True), refused.stderr
    assert not out.exists()
    # The same file twice is one audit.
    federation.operator("export", JOB, "--out", out, "--audit", released, "--audit", released)
    federations = json.loads((home / "identity" / "identity.json").read_bytes())["federation"]
    verified = ("coordinator", "passport", "verify", out / "passport.json", "--federation", federations)
    (audit,) = json.loads(succeed(*verified, "--json"))["audits"]
    assert (audit["verdict"], audit["canaries"], audit["number"]) == ("sound", CANARIES, 2)
    assert "north" not in json.dumps(audit)
    assert "A member audited version 2: sound" in succeed(*verified)

    # An audit that could not have refuted the claim is none.
    few = tmp_path / "few.json"
    numbers = {"canaries": 20, "guesses": 8, "correct": 8, "possible": largest_bound(20, statement["delta"])}
    few.write_bytes(resigned(home, statement, **numbers, lower_bound=numbers["possible"], verdict="cannot-tell"))
    again = (*words[:-1], tmp_path / "other")
    refused = command(*again, "--audit", few)
    assert (refused.returncode, "can tell: 20 canaries" in refused.stderr) == (ExitCode.REFUSED, True), refused.stderr

    # An audit above the claim, which only its member's key can sign, stops the export unless the operator insists.
    above = tmp_path / "above.json"
    most = {"correct": statement["guesses"], "lower_bound": statement["possible"]}
    above.write_bytes(resigned(home, statement, verdict="above-claim", **most))
    refused = command(*again, "--audit", above)
    proved = f"at least {statement['possible']:.3g}"
    assert (refused.returncode, proved in refused.stderr) == (ExitCode.ABOVE_CLAIM, True), refused.stderr
    succeed(*again, "--audit", above, "--despite-audit")
    forged = json.loads(released.read_bytes())
    forged["statement"] = forged["statement"].replace('"sound"', '"above-claim"')
    above.write_text(json.dumps(forged))
    refused = command(*again[:-1], tmp_path / "third", "--audit", above)
    assert (refused.returncode, "not a member's audit" in refused.stderr) == (ExitCode.USAGE, True), refused.stderr


def resigned(home, statement, **changes):
    from edge_client.identity.home import MemberIdentity
    from tacit.audit import AuditStatement, sign_audit

    identity = MemberIdentity.load(home)
    changed = AuditStatement.from_json(json.dumps({**statement, **changes}).encode())
    return sign_audit(changed, identity.key, identity.certificate).canonical()


def test_the_operator_attacks_the_job_with_made_texts_and_with_public_rows(federation):
    words = ("coordinator", "redteam", JOB, "--dir", federation.dir, "--minutes", "0")
    told = json.loads(succeed(*words, "--json"))
    # Two rehearsals may be too few to tell.
    assert (told["verdict"] in ("sound", "cannot-tell"), list(told["versions"])) == (True, ["2"])
    assert {(each["attack"], each["on"]) for each in told["tests"]} == {
        (attack, "update") for attack in ("canaries", "loss", "rmia")
    }
    assert told["tests"][0]["claim"] > 0
    rows = federation.data("public", 100)
    assert command(*words, "--data", rows).returncode == ExitCode.USAGE
    said = succeed(*words, "--data", rows, "--rows", "public").splitlines()
    assert said[-1].startswith(("sound:", "cannot tell:"))


def test_a_member_without_canaries_trains_and_has_nothing_to_release(federation, tmp_path):
    home = federation.home("east")
    assert not (home / "canaries").exists()
    held_out = federation.data("held-out", 120)
    done = audited(federation, "east", "--held-out", held_out, "--release", tmp_path / "east.json")
    assert (done.returncode, "nothing of this audit may leave" in done.stderr) == (ExitCode.REFUSED, True), done
    done = audited(federation, "east", "--held-out", held_out)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "membership by RMIA, version 2: epsilon is at least" in done.stdout
    assert "canaries, version 2: does not apply" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(("sound:", "cannot tell:"))
