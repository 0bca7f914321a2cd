"""A passport holds only as it was signed, by an operator of the federation that the verifier names."""

import hashlib
import html
import json

import pytest
from cryptography.hazmat.primitives import hashes
from pydantic import ValidationError

from coordinator.pki import pem
from tacit.authorities import Authorities
from tacit.bundle import BundledFile
from tacit.documents import DocumentInvalid
from tacit.identity import Role, sign
from tacit.passport import (
    SIGNED_PREFIX,
    EstimateFacts,
    EvaluationFacts,
    ExportFacts,
    JobFacts,
    LabelEstimate,
    MeasurementFacts,
    NotAPassport,
    Passport,
    RecordFacts,
    Seal,
    SpendFacts,
    VersionFacts,
)
from tacit.passport_proof import make_passport, verify_passport
from tests.support import party

# Verification reads no job document, so a later form of one does not matter.
DOCUMENT = b'{"name":"desk","schema":1}'
OURS = party.authority().federation
MADE = int(party.present().timestamp() * 1000)
DIGEST = bytes(range(32))


def version(number, **more):
    of_sum = {} if number == 0 else {"attempt": number, "cohort": 4, "summed": 3, "sum": DIGEST}
    facts = {"number": number, "version": hashlib.sha256(bytes([number])).digest(), "at_ms": 1, "entry": number + 1}
    return VersionFacts(**{**facts, "entry_hash": DIGEST, "mechanism": "dp-sgd", "round": number, **of_sum, **more})


def average(number, *averaged):
    return ExportFacts(number=number, version=DIGEST, averaged=averaged, format="hf", index=DIGEST, files={})


def made(of=0, *, role=Role.OPERATOR, versions=None, job=None, made_ms=MADE, exports=(), **more):
    # The cache tells `authority(0)` from `authority()`.
    authority, key = party.authority(of) if of else party.authority(), party.key(3)
    job = job or {}
    how = {
        "key": key,
        "certificate": authority.issue(key.public_key(), role, "op", now=party.present()),
        "operator": "op",
        "authorities": Authorities.first(authority.certificate),
        "document": DOCUMENT,
        "job": JobFacts(
            **{
                "name": "desk",
                "document": hashlib.sha256(DOCUMENT).digest(),
                "status": "finished",
                "created_ms": 1,
                "mechanism": "dp-sgd",
                **job,
            }
        ),
        "versions": [
            version(0),
            version(
                1,
                spend=SpendFacts(reported=2, withheld=1, largest_epsilon=3.0, delta=1e-6),
                evaluations=[EvaluationFacts(accuracy=0.8, loss=None, examples=100, data=DIGEST, at_ms=2)],
            ),
        ]
        if versions is None
        else versions,
        "exports": exports,
        "record": RecordFacts(
            made_ms=made_ms, software="1", journal_entry=9, journal_head=DIGEST, roster_entries=1, roster_root=DIGEST
        ),
        **more,
    }
    return make_passport(**how)


@pytest.fixture(scope="module")
def passport():
    return made()


def findings(data, federation=OURS):
    return {each.part: each.sentence for each in verify_passport(data, federation).findings}


def test_a_passport_holds_as_it_was_made(passport):
    verdict = verify_passport(passport.to_bytes(), OURS)
    assert verdict.findings == ()
    assert (verdict.signer.identity.name, verdict.seal.job) == ("op", "desk")
    assert [each.number for each in verdict.passport.versions] == [0, 1]


def test_every_changed_byte_is_found_and_its_part_is_named(passport):
    data = passport.to_bytes()
    for position in range(0, len(data), 23):
        for bit in (1, 32):
            changed = data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]
            assert findings(changed), position
    for name in passport.sections:
        text = passport.sections[name]
        changed = passport.model_copy(update={"sections": {**passport.sections, name: text.replace("1", "2", 1)}})
        assert name in findings(changed.to_bytes()), name
        without = {other: text for other, text in passport.sections.items() if other != name}
        assert "missing" in findings(passport.model_copy(update={"sections": without}).to_bytes())[name]
    added = passport.model_copy(update={"sections": {**passport.sections, "version-2": "{}"}})
    assert "added" in findings(added.to_bytes())["version-2"]
    assert "canonical" in findings(b" " + data)["file"]
    assert "canonical" in findings(data + data[-1:])["file"]
    seal = passport.seal.replace('"job":"desk"', '"job":"dusk"')
    assert "does not match" in findings(passport.model_copy(update={"seal": seal}).to_bytes())["signature"]


def test_a_strangers_passport_does_not_pass_as_ours():
    # Signed by its own authority, which names itself: a passport of another federation.
    stranger = made(1)
    assert findings(stranger.to_bytes(), party.authority(1).federation) == {}
    assert findings(stranger.to_bytes()).keys() == {"authorities"}
    # The stranger shows our authorities, and certifies itself.
    ours = Authorities.first(party.authority().certificate)
    certificate = party.authority(1).issue(party.key(3).public_key(), Role.OPERATOR, "op", now=party.present())
    assert "not issued" in findings(made(1, authorities=ours, certificate=certificate).to_bytes())["certificate"]


def test_only_an_operators_key_signs():
    for role in (Role.MEMBER, Role.VIEWER, Role.SERVER):
        hosts = ("localhost",) if role is Role.SERVER else ()
        certificate = party.authority().issue(
            party.key(3).public_key(), role, "op", host_names=hosts, now=party.present()
        )
        assert f"has the role {role}" in findings(made(certificate=certificate).to_bytes())["certificate"]
    assert findings(made(role=Role.ADMINISTRATOR).to_bytes()) == {}
    # The right certificate with another key, and a signature made for another purpose.
    assert findings(made(key=party.key(2)).to_bytes()).keys() == {"signature"}
    passport = made()
    undomained = passport.model_copy(update={"signature": sign(party.key(3), passport.seal.encode())})
    assert findings(undomained.to_bytes()).keys() == {"signature"}
    assert SIGNED_PREFIX == b"tacit/passport/v1\n"
    assert "another" in findings(made(operator="else").to_bytes())["seal"]
    year = 400 * 24 * 3600 * 1000
    assert "not valid" in findings(made(made_ms=MADE + year).to_bytes())["seal"]


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ({"job": {"document": DIGEST}}, "document"),
        ({"job": {"name": "dusk"}}, None),
        ({"versions": [version(0), version(2)]}, "versions"),
        ({"versions": [version(0), version(1, summed=5)]}, "version-1"),
        ({"versions": [version(0, entry=10)]}, "version-0"),
        ({"exports": [ExportFacts(number=1, version=DIGEST, format="hf", index=DIGEST, files={})]}, "export-1"),
        ({"exports": [average(1, 1)]}, None),
        ({"exports": [average(1, 1, 2)]}, "export-1"),
        ({"exports": [average(2, 1, 2)]}, "export-1"),
    ],
)
def test_a_signers_contradictions_are_found(how, part):
    found = findings(made(**how).to_bytes())
    assert found.keys() == ({part} if part else set())


def test_another_file_is_no_passport():
    for data in (b"", b"{}", b"\xff", b'{"kind": "tacit-receipt"}', b"[]"):
        with pytest.raises(NotAPassport):
            verify_passport(data, OURS)


def test_an_export_is_named_by_its_files():
    file = BundledFile(sha256=DIGEST, size=1)
    export = ExportFacts(number=1, version=version(1).version, format="model", index=DIGEST, files={"a": file})
    assert findings(made(exports=[export]).to_bytes()) == {}


def test_the_seal_names_its_certificate(passport):
    seal = Seal.from_json(passport.seal.encode())
    certificate = party.authority().issue(party.key(3).public_key(), Role.OPERATOR, "op", now=party.present())
    assert seal.certificate != certificate.fingerprint(hashes.SHA256())
    # Another certificate of the same key and name is another certificate.
    changed = passport.model_copy(update={"certificate": pem(certificate).decode()})
    assert "not the certificate" in findings(changed.to_bytes())["certificate"]
    assert Passport.read(changed.to_bytes()).certificate == pem(certificate).decode()


@pytest.mark.parametrize(
    "numbers", [{"reported": 2}, {"reported": 2, "delta": 1e-6}, {"reported": 0, "largest_epsilon": 3.0, "delta": 1e-6}]
)
def test_reports_of_what_was_spent_have_numbers(numbers):
    with pytest.raises(ValidationError, match="epsilon and a delta"):
        SpendFacts(withheld=1, **numbers)


def test_a_time_beyond_the_calendar_is_refused():
    with pytest.raises(ValidationError, match="253402300799999"):
        EvaluationFacts(accuracy=0.5, loss=None, examples=1, data=None, at_ms=2**62)


@pytest.mark.parametrize("name", ["", "Desk", "a b", "../desk", "desk\x1b[2J", "a" * 64])
def test_a_seal_names_a_job_as_jobs_are_named(name):
    seal = {"schema": 1, "federation": "ab" * 32, "operator": "op", "certificate": "ab" * 32, "made_ms": 1}
    assert Seal.from_json(json.dumps({**seal, "job": "desk", "sections": {}}).encode()).job == "desk"
    with pytest.raises(DocumentInvalid, match="job"):
        Seal.from_json(json.dumps({**seal, "job": name, "sections": {}}).encode())


def measured(**changes):
    shown = EstimateFacts(
        members=4, accuracy=0.7, accuracy_error=0.02, loss=1.1, loss_error=0.1, units=300, units_error=9
    )
    facts = {
        "name": "how-well",
        "document": DIGEST,
        "answer": DIGEST,
        "number": 1,
        "version": version(1).version,
        "rows": "all",
        "trained": 3,
        "whole": shown,
        "by_label": (
            LabelEstimate(label="<b>", estimate=shown),
            LabelEstimate(label="rare", estimate=EstimateFacts(members=4)),
        ),
    }
    return MeasurementFacts(**{**facts, **changes})


def test_a_measurement_is_of_a_version_that_the_passport_has_and_shown_with_errors():
    from coordinator.cli.passport_page import measurement_lines, page_of

    held = made(measurements=[measured()])
    verdict = verify_passport(held.to_bytes(), OURS)
    assert (verdict.findings, verdict.passport.measurements) == ((), (measured(),))
    assert (
        "no version 1 has the digest that was measured"
        in findings(made(measurements=[measured(version=DIGEST)]).to_bytes())["measurement-1"]
    )
    first, label, rare = measurement_lines(measured())
    assert first.startswith(
        "4 members measured version 1 on all their rows (3 of them have updates in it): accuracy 70.0 %"
    )
    assert "± 2" in first
    assert "recall 70.0 % ± 2" in label
    assert rare == "Label rare: too few rows beside the noise."
    assert "is not known" in measurement_lines(measured(trained=None))[0]
    page = page_of(verdict.passport, verdict.seal)
    assert "<h2>Measurements</h2>" in page
    assert "<b>" not in page.split("<h2>Measurements</h2>")[1].split("<h2>Job document")[0]
    with pytest.raises(ValidationError, match="all its numbers and their errors"):
        EstimateFacts(members=4, accuracy=0.7)


TUNED = "The job's numbers were tuned on the operator's own private rows. That tuning is in no epsilon."


@pytest.mark.parametrize("tuned_on", ["own-private", None])
def test_it_says_whether_private_rows_tuned_the_job(tmp_path, tuned_on):
    from typer.testing import CliRunner

    from coordinator.cli import app

    file, page = tmp_path / "desk.passport.json", tmp_path / "desk.html"
    file.write_bytes(made(job={"tuned_on": tuned_on}).to_bytes())

    def said(*words):
        done = CliRunner().invoke(app, ["passport", *map(str, words), "--federation", OURS.hex()])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert (TUNED in said("verify", file)) == (tuned_on is not None)
    assert json.loads(said("verify", file, "--json"))["tuned_on"] == tuned_on
    said("page", file, "--out", page)
    assert (html.escape(TUNED) in page.read_text()) == (tuned_on is not None)


def test_private_rows_are_those_that_a_job_may_name():
    with pytest.raises(ValidationError, match="tuned_on"):
        made(job={"tuned_on": "public"})
