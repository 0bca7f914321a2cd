"""A forger turns a member's file without a privacy promise into a differentially private one.

It can write the coordinator's database, or change what the coordinator tells its operator, or write the folder that the
operator downloaded. It has a key and a certificate of its own making that name the federation and the member, but no
key of an authority.
"""

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from sqlalchemy import update

from coordinator.authority import AuthorityBook
from coordinator.corpus_rules import check_statement
from coordinator.pki import Authority
from coordinator.storage.models import CorpusRow
from export.finetune.corpora import CorporaInvalid, federation_of_corpora, promise_of, read_corpora
from tacit.authorities import Authorities
from tacit.corpus import signed_bytes
from tacit.corpus_proof import AUTHORITIES, CERTIFICATE, SIGNATURE, STATEMENT, verify_member
from tacit.identity import Identity, Role, sign
from tests.support import party
from tests.support.ordered_corpora import lay_down, ordering_job, prove, statement_of
from tests.unit.coordinator.services.test_corpora import FILE, House, housed, quiet

__all__ = ["quiet"]

# The forger's keys: for the authority that it plays, and for the member.
AUTHORITY, MEMBER = 60, 61
DER = serialization.Encoding.DER


def forger() -> Authority:
    """An authority with the name of the federation's own."""
    return Authority.create(now=party.present(), key=party.key(AUTHORITY), of=party.authority().federation)


def certified_by_the_forger() -> x509.Certificate:
    return forger().issue(party.key(MEMBER).public_key(), Role.MEMBER, "north", now=party.present())


def self_signed() -> x509.Certificate:
    made = certified_by_the_forger()
    builder = (
        x509.CertificateBuilder()
        .subject_name(made.subject)
        .issuer_name(made.subject)
        .public_key(made.public_key())
        .serial_number(made.serial_number)
        .not_valid_before(made.not_valid_before_utc)
        .not_valid_after(made.not_valid_after_utc)
    )
    for extension in made.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(party.key(MEMBER), hashes.SHA256())


def forged(job, certificate):
    """North's unchanged file, with a statement that promises what north did not."""
    statement = statement_of(FILE, job, federation=party.authority().federation, member="north")
    assert statement.promise == "differentially-private"
    signature = sign(party.key(MEMBER), signed_bytes(statement))
    return {
        "statement": statement.canonical(),
        "signature": signature,
        "certificate": certificate.public_bytes(DER),
    }


async def written(house, row) -> None:
    await house.database.run(lambda s: s.execute(update(CorpusRow).where(CorpusRow.member == "north").values(**row)))


def believed(job, row, federation):
    """The baseline: the certificate names the member and its key signed the statement. Nobody checks the issuer."""
    certificate = x509.load_der_x509_certificate(row["certificate"])
    assert Identity.of(certificate) == Identity(federation, Role.MEMBER, "north")
    kept = statement_of(FILE, job, federation=federation, member="north")
    return check_statement(
        row["statement"],
        row["signature"],
        federation=federation,
        job=job,
        document=job.digest(),
        member="north",
        key=certificate.public_key(),
        corpus=kept.corpus,
        size=len(FILE),
    )


@pytest.mark.parametrize("certificate", [certified_by_the_forger, self_signed])
def test_writing_the_database_gives_no_file_a_promise(tmp_path, certificate):
    @housed
    async def test(house: House):
        job = await house.job()
        await house.member("north").give(job, FILE, promise="none")
        out, _ = await house.cli("job", "corpora", "questions")
        assert "All together: no differential privacy guarantee." in out
        row = forged(job, certificate())
        assert believed(job, row, house.federation).promise == "differentially-private"
        await written(house, row)
        _, err = await house.cli("job", "corpora", "questions", "--out", str(house.tmp / "given"), code=1)
        assert "the corpus attributed to north does not verify: the certificate was not issued by this fed" in err
        assert "check the coordinator's database" in err
        assert not (house.tmp / "given").exists()

    test(tmp_path)


def with_the_forgers() -> Authorities:
    """The federation's authorities and one more, which only the forger itself signed."""
    key = party.key(AUTHORITY)
    return Authorities.first(party.authority().certificate).succeeded_by(forger().certificate, old=key, new=key)


def test_a_coordinator_that_lies_to_its_operator_adds_no_authority(tmp_path):
    @housed
    async def test(house: House):
        job = await house.job()
        await house.member("north").give(job, FILE, promise="none")
        row, lie = forged(job, certified_by_the_forger()), with_the_forgers()
        # An operator that believed this list would believe the certificate.
        assert verify_member(row["certificate"], lie, "north").identity.name == "north"
        await written(house, row)
        house.book = AuthorityBook(lie, party.authority(), party.authority())
        await house.restart()
        _, err = await house.cli("job", "corpora", "questions", code=1)
        assert "authority 2 is not signed by the one before it" in err
        # A federation of the forger's own, which took over the true authority, does not help either.
        key, own = party.key(AUTHORITY), Authorities.first(forger().certificate)
        foreign = own.succeeded_by(party.authority().certificate, old=key, new=key)
        house.book = AuthorityBook(foreign, party.authority(), party.authority())
        await house.restart()
        _, err = await house.cli("job", "corpora", "questions", code=1)
        assert "the coordinator's list of authorities belongs to another federation" in err

    test(tmp_path)


# ---- in a folder


def rewritten(folder, of: Authority) -> None:
    """Signs north's unchanged file anew. `of` certifies the forger's key, in the name of its own federation."""
    statement = statement_of(FILE, ordering_job(), federation=of.federation, member="north")
    prove(folder, statement, of=of, number=MEMBER)


@pytest.fixture
def folder(tmp_path):
    lay_down(tmp_path, FILE, ordering_job(), member="north", promise="none")
    assert promise_of(read_corpora(tmp_path, "questions")) == "none"
    return tmp_path


def test_writing_a_folder_gives_no_file_a_promise(folder):
    true_list = (folder / AUTHORITIES).read_bytes()
    rewritten(folder, forger())
    # The baseline: file, statement and rows fit, and the key of the certificate beside them signed and names north.
    certificate = x509.load_pem_x509_certificate((folder / f"north{CERTIFICATE}").read_bytes())
    row = {
        "statement": (folder / f"north{STATEMENT}").read_bytes(),
        "signature": (folder / f"north{SIGNATURE}").read_bytes(),
        "certificate": certificate.public_bytes(DER),
    }
    assert believed(ordering_job(), row, party.authority().federation).promise == "differentially-private"
    # The issuer is not in the federation's own list, and another list is not the federation's.
    (folder / AUTHORITIES).write_bytes(true_list)
    for unverified in (False, True):
        with pytest.raises(
            CorporaInvalid, match=r"not what north signed: .* not issued by this federation's authority"
        ):
            read_corpora(folder, "questions", unverified=unverified)
    (folder / AUTHORITIES).write_bytes(Authorities.first(forger().certificate).canonical())
    with pytest.raises(CorporaInvalid, match="belongs to another federation"):
        read_corpora(folder, "questions")
    (folder / AUTHORITIES).write_bytes(with_the_forgers().canonical())
    with pytest.raises(CorporaInvalid, match="authority 2 is not signed by the one before it"):
        read_corpora(folder, "questions")
    # Without a list nothing is promised, whoever removed it.
    (folder / AUTHORITIES).unlink()
    with pytest.raises(CorporaInvalid, match="is missing, so it cannot be checked"):
        read_corpora(folder, "questions")
    assert promise_of(read_corpora(folder, "questions", unverified=True)) == "none"


def test_a_written_folder_can_only_show_another_federation(folder):
    own = Authority.create(now=party.present(), key=party.key(AUTHORITY))
    rewritten(folder, own)
    # Within the forger's federation everything holds, so a command that knows no other shows which one it is.
    found = read_corpora(folder, "questions")
    assert promise_of(found) == "differentially-private"
    assert federation_of_corpora(found) == own.federation != party.authority().federation
    with pytest.raises(CorporaInvalid, match="and the operator's folder belong to different federations"):
        read_corpora(folder, "questions", federation=party.authority().federation)
