"""`coordinator authority`, `coordinator operator` and an institution's own authority, as a person uses them."""

import contextlib
import json
import os

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from sqlalchemy import update
from typer.testing import CliRunner

from coordinator.authority import load_authorities
from coordinator.cli import app
from coordinator.cli.member import days_left
from coordinator.config import CoordinatorFolder, load_config, load_operator
from coordinator.pki import Authority, AuthorityUnusable, key_pem, pem
from coordinator.storage import open_database, records
from coordinator.storage.models import OperatorCertificateRow
from tacit.identity import Identity, Role, federation_of
from tests.support import party
from toolkit.console import CommandFailed, ExitCode
from toolkit.durable import durable_file
from toolkit.private_files import user_name

WORD = "correct horse battery"


@pytest.fixture(autouse=True)
def _quick_keys(monkeypatch):
    """Reuses keys of this test run; other tests check that commands create fresh ones."""
    numbers = iter(range(200, 300))
    for where in ("coordinator.pki", "coordinator.operators", "coordinator.services.credentials"):
        monkeypatch.setattr(f"{where}.new_key", lambda: party.key(next(numbers) % 6))


def _run(*words, code=ExitCode.OK):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, CommandFailed):
        assert result.exception.code is code, result.exception
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.output


def _json(*words):
    return json.loads(_run(*words, "--json"))


@pytest.fixture
def chain(tmp_path, now):
    """An institution's root, and the subordinate CA that it issued for the federation; its key has a passphrase."""
    above = party.authority(1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Clinic CA 3")]))
        .issuer_name(above.certificate.subject)
        .public_key(party.key(100).public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(above.certificate.not_valid_before_utc)
        .not_valid_after(above.certificate.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    certificate = builder.sign(above.key, hashes.SHA256())
    files = tmp_path / "chain.pem", tmp_path / "ca.key"
    files[0].write_bytes(pem(certificate, above.certificate))
    durable_file(files[1], key_pem(party.key(100), WORD.encode()))
    return certificate, *files


def test_a_federation_under_an_institutions_subordinate_ca(tmp_path, chain, monkeypatch, now):
    certificate, cert_file, key_file = chain
    own = ("--authority-cert", cert_file, "--authority-key", key_file)
    said = _run("init", tmp_path / "one", *own, code=ExitCode.USAGE)
    assert "TACIT_AUTHORITY_PASSPHRASE_FILE" in said
    assert not (tmp_path / "one").exists()
    secret = tmp_path / "passphrase"
    durable_file(secret, f"{WORD}\nnot this line\n".encode())
    made = _json("init", tmp_path / "fed", *own, "--authority-passphrase-file", secret)
    assert bytes.fromhex(made["federation"]) == federation_of(certificate)
    folder = CoordinatorFolder(tmp_path / "fed")
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in folder.authority_key.read_bytes()
    # Nothing above it is trusted: a certificate from the institution's root itself is a stranger's.
    book = load_authorities(folder, now=now, passphrase=WORD.encode())
    assert book.trust.roots == (certificate,)
    stranger = party.authority(1).issue(party.key(2).public_key(), Role.MEMBER, "north", now=now)
    with pytest.raises(ValueError, match="not issued by"):
        book.trust.verify(stranger.public_bytes(Encoding.DER), role=Role.MEMBER, now=now)
    # From now on, commands that use the keys need the passphrase.
    assert "is encrypted" in _run("authority", "rotate", "--yes", "--dir", folder.path, code=ExitCode.USAGE)
    monkeypatch.setenv("TACIT_AUTHORITY_PASSPHRASE", WORD)
    assert _json("authority", "rotate", "--yes", "--dir", folder.path)["federation"] == made["federation"]
    monkeypatch.setenv("TACIT_AUTHORITY_PASSPHRASE", "another")
    assert "the passphrase does not open" in _run(
        "authority", "rotate", "--yes", "--dir", folder.path, code=ExitCode.USAGE
    )


def test_certificates_that_are_not_a_chain_are_refused(tmp_path, chain, now):
    _, cert_file, key_file = chain
    first, second = x509.load_pem_x509_certificates(cert_file.read_bytes())
    for wrong in ((first, party.authority(2).certificate), (first, first)):
        cert_file.write_bytes(pem(*wrong))
        with pytest.raises(AuthorityUnusable, match="2 certificates that are not a chain"):
            Authority.load(cert_file, key_file, now=now, passphrase=WORD.encode())
    cert_file.write_bytes(pem(second, first))
    with pytest.raises(AuthorityUnusable):
        Authority.load(cert_file, key_file, now=now, passphrase=WORD.encode())


def test_operators_are_issued_listed_and_revoked(tmp_path):
    where = ("--dir", tmp_path / "fed")
    _run("init", tmp_path / "fed", "--operator", "anna")
    _run("operator", "issue", "bert", "--role", "operator", "--out", tmp_path / "bert", *where)
    found = load_operator(tmp_path / "bert")
    assert found.config == load_operator(tmp_path / "fed" / "operator").config
    assert (tmp_path / "bert" / "key.pem").stat().st_mode & 0o777 == 0o600
    # A renewal keeps the key.
    _run("operator", "issue", "bert", "--role", "operator", "--out", tmp_path / "bert", *where)
    again = load_operator(tmp_path / "bert")
    assert (again.key_pem, again.certificate_pem != found.certificate_pem) == (found.key_pem, True)
    assert _json("operator", "revoke", "bert", "--yes", *where)["revoked"] == 2
    listed = _json("operator", "list", *where)["operators"]
    assert [(item["operator"], item["status"]) for item in listed] == [
        ("anna", "good"),
        ("bert", "revoked"),
        ("bert", "revoked"),
    ]
    assert "no operator named carla" in _run("operator", "revoke", "carla", "--yes", *where, code=ExitCode.NOT_FOUND)
    assert "is not a valid operator name" in _run(
        "operator", "issue", "Bert!", "--role", "operator", "--out", tmp_path / "x", *where, code=ExitCode.USAGE
    )
    assert "REVOKED" in _run("operator", "list", *where).upper()
    # The stolen key is not certified again, although it is still there. The key that follows it is.
    assert _json("operator", "issue", "bert", "--role", "operator", "--out", tmp_path / "bert", *where)["key_replaced"]
    third = load_operator(tmp_path / "bert")
    assert third.key_pem != found.key_pem
    assert not _json("operator", "issue", "bert", "--role", "operator", "--out", tmp_path / "bert", *where)[
        "key_replaced"
    ]
    assert load_operator(tmp_path / "bert").key_pem == third.key_pem
    # A key without its certificate is not certified again either.
    (tmp_path / "bert" / "cert.pem").unlink()
    assert _json("operator", "issue", "bert", "--role", "operator", "--out", tmp_path / "bert", *where)["key_replaced"]
    acts = [entry for entry in _journal(tmp_path / "fed") if entry.subject == "bert"]
    assert {entry.kind for entry in acts} == {"operator_issued", "operator_revoked"}
    assert {entry.fields["by"] for entry in acts} == {f"machine:{user_name(os.getuid())}"}


def test_a_key_serves_one_name_and_role(tmp_path):
    """Certificates are public (a passport has one), so whoever kept a viewer's key would be what it is raised to."""
    where = ("--dir", tmp_path / "fed")
    _run("init", tmp_path / "fed", "--operator", "anna")
    issue = ("--out", tmp_path / "bert", *where)
    _run("operator", "issue", "bert", "--role", "viewer", *issue)
    viewer = load_operator(tmp_path / "bert").key_pem
    assert _json("operator", "issue", "carla", "--role", "viewer", *issue)["key_replaced"]
    assert _json("operator", "issue", "dora", "--role", "administrator", *issue)["key_replaced"]
    administrator = load_operator(tmp_path / "bert").key_pem
    assert len({viewer, administrator}) == 2
    assert not _json("operator", "issue", "dora", "--role", "administrator", *issue)["key_replaced"]
    # Also where the name stays, because the certificate of its lower role has ended.
    with contextlib.closing(open_database(load_config(tmp_path / "fed").database_url)) as database:
        database.run_now(lambda s: s.execute(update(OperatorCertificateRow).values(expires_ms=1)))
    assert _json("operator", "issue", "dora", "--role", "operator", *issue)["key_replaced"]


def test_a_name_has_one_role_at_a_time(tmp_path):
    where = ("--dir", tmp_path / "fed")
    _run("init", tmp_path / "fed", "--operator", "anna")
    issue = ("operator", "issue", "bert", "--out", tmp_path / "bert", *where)
    assert "--role" in _run(*issue, code=ExitCode.USAGE)
    assert _json(*issue, "--role", "viewer")["role"] == "viewer"
    first = load_operator(tmp_path / "bert").certificate_pem
    said = _run(*issue, "--role", "administrator", code=ExitCode.REFUSED)
    assert "bert has a valid certificate with the role viewer" in said
    assert load_operator(tmp_path / "bert").certificate_pem == first
    _run("operator", "revoke", "bert", "--yes", *where)
    # The old key is not raised with the name.
    assert _json(*issue, "--role", "administrator")["key_replaced"]
    listed = _json("operator", "list", *where)["operators"]
    assert [(item["operator"], item["role"], item["status"]) for item in listed] == [
        ("anna", "administrator", "good"),
        ("bert", "viewer", "revoked"),
        ("bert", "administrator", "good"),
    ]
    assert Identity.of(x509.load_pem_x509_certificate(load_operator(tmp_path / "bert").certificate_pem)).role == (
        "administrator"
    )
    issued = [entry.fields["role"] for entry in _journal(tmp_path / "fed") if entry.kind == "operator_issued"]
    assert issued == ["administrator", "viewer", "administrator"]


def test_a_new_authority_does_not_readmit_a_revoked_operator(tmp_path):
    where = ("--dir", tmp_path / "fed")
    _run("init", tmp_path / "fed", "--operator", "anna")
    _run("operator", "revoke", "anna", "--yes", *where)
    before = load_operator(tmp_path / "fed" / "operator")
    _run("authority", "rotate", "--yes", *where)
    assert load_operator(tmp_path / "fed" / "operator").certificate_pem == before.certificate_pem
    assert [item["status"] for item in _json("operator", "list", *where)["operators"]] == ["revoked"]


def test_commands_rotate_and_retire_the_authority(tmp_path, now):
    folder = CoordinatorFolder(tmp_path / "fed")
    where = ("--dir", folder.path)
    made = _json("init", folder.path, "--operator", "anna")
    assert "only one authority" in _run("authority", "retire", "--yes", *where, code=ExitCode.USAGE)
    _run("operator", "issue", "bert", "--role", "operator", "--out", tmp_path / "bert", *where)
    before = load_operator(folder.operator)
    _run("authority", "rotate", "--yes", *where)
    status = _json("authority", "status", *where)
    assert status["federation"] == made["federation"]
    assert [item["state"] for item in status["authorities"]] == ["trusted", "certifies"]
    assert status["operators_of_earlier"] == ["bert"]
    # The operator's folder on this machine was renewed: the same key, a new certificate, both roots.
    after = load_operator(folder.operator)
    assert (after.key_pem, after.certificate_pem == before.certificate_pem) == (before.key_pem, False)
    assert len(x509.load_pem_x509_certificates(after.root_pem)) == 2
    assert "operators bert" in _run("authority", "retire", "--yes", *where, code=ExitCode.REFUSED)
    # One member has a certificate from the earlier authority, and one has an expired certificate.
    database = open_database(f"sqlite:///{folder.database}")
    try:
        for name, ends in (("north", 10**15), ("south", 1)):
            database.run_now(lambda s, name=name: records.invite(s, name, f"t-{name}", b"h" * 32, 10**15, 1))
            database.run_now(lambda s, name=name, ends=ends: _enrolled(s, name, ends, before.certificate_pem))
    finally:
        database.close()
    assert _json("authority", "status", *where)["members_of_earlier"] == ["north"]
    _run("operator", "issue", "bert", "--role", "operator", "--out", tmp_path / "bert", *where)
    assert "members north" in _run("authority", "retire", "--yes", *where, code=ExitCode.REFUSED)
    assert _json("authority", "retire", "--yes", "--force", *where)["trusted"] == 1
    told = {entry.kind: entry for entry in _journal(folder.path) if entry.subject == "authority"}
    roots = [item["fingerprint"] for item in status["authorities"]]
    who = f"machine:{user_name(os.getuid())}"
    assert dict(told["authority_rotated"].fields) == {
        "fingerprint": roots[1],
        "before": roots[0],
        "brought": False,
        "by": who,
    }
    assert dict(told["authority_retired"].fields) == {
        "fingerprint": roots[0],
        "following": roots[1],
        "force": True,
        "by": who,
    }
    states = [item["state"] for item in _json("authority", "status", *where)["authorities"]]
    assert states == ["retired", "certifies"]
    assert len(x509.load_pem_x509_certificates(load_operator(folder.operator).root_pem)) == 1
    assert "belong together" in _run("authority", "rotate", "--authority-key", "x", *where, code=ExitCode.USAGE)


def _journal(path):
    with contextlib.closing(open_database(f"sqlite:///{path / 'tacit.db'}")) as database:
        return database.run_now(records.journal)


def _enrolled(s, name, ends, certificate):
    from coordinator.storage.certificates import keep_first
    from coordinator.storage.models import MemberRow

    row = s.get_one(MemberRow, name)
    row.status, row.fingerprint, row.certificate_expires_ms = "enrolled", b"f" * 32, ends
    keep_first(s, name, x509.load_pem_x509_certificate(certificate).public_bytes(Encoding.DER), 1)


@pytest.mark.parametrize(
    ("hours", "shown"),
    [(14 * 24, "14 days"), (48, "2 days"), (47, "47 hours"), (0, "expired"), (-5, "expired")],
)
def test_days_left(hours, shown):
    now_ms = 1_800_000_000_000
    assert days_left(now_ms + hours * 3_600_000, now_ms) == shown
    assert days_left(0, now_ms) == "-"
