"""Receipts across renewals and a new authority: each is checked offline, with the files beside it."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from benchmarks.operations.ledger_faults import EVENT, LIMIT, purpose_of, receipt_of
from benchmarks.operations.ledger_faults import Member as Identity
from edge_client.identity.home import Home, MemberIdentity
from edge_client.ledger.budget import Budget
from edge_client.ledger.ledger import Ledger, ledger_path
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.verification import export_lines, verify, verify_export
from edge_client.policy.policy import Policy
from tacit.identity import Role
from tests.support import party


def _of(identity: MemberIdentity) -> Identity:
    return Identity(identity.member, identity.key, identity.certificate, identity.root_pem, identity.federation)


@pytest.fixture
def identities(tmp_path) -> list[MemberIdentity]:
    """A member as enrolled, after a renewal, after the authority was replaced, and after the first one was retired."""
    home = tmp_path / "home"
    found = [party.member(home, "localhost:7441")]
    first, second = party.authority(), party.authority(1)
    following = type(second)(second.certificate, second.key, first.federation)

    def renewed(by, hours):
        made = by.issue(party.key(2).public_key(), Role.MEMBER, "north", timedelta(hours=hours), now=party.present())
        Home(home).replace_certificate(made.public_bytes(Encoding.DER))
        return MemberIdentity.load(home)

    found.append(renewed(first, 30))
    rotated = found[0].authorities.succeeded_by(second.certificate, old=first.key, new=second.key)
    Home(home).keep_authorities(rotated)
    found.append(renewed(following, 31))
    Home(home).keep_authorities(rotated.without(1, key=second.key))
    found.append(renewed(following, 32))
    return found


def _written(home: Path, identities: list[MemberIdentity]) -> tuple[Path, ReceiptBook]:
    path, book = ledger_path(home, "data"), ReceiptBook(home / "receipts")
    with Ledger.open(path, "data", LIMIT) as ledger:
        for number, identity in enumerate(identities, start=1):
            held = ledger.reserve(EVENT, purpose_of(_of(identity), "desk", number))
            ledger.charge(held.number, 1)
            ledger.settle(held.number, 1, "published", b"")
            at_ms = int(party.present().timestamp() * 1000) + number
            made = receipt_of(ledger, held, 1, _of(identity)).model_copy(update={"at_ms": at_ms})
            book.write(made, identity, ledger, identity.known_authorities)
    return path, book


def test_receipts_of_four_certificates_and_two_authorities_verify(tmp_path, identities):
    path, book = _written(tmp_path / "home", identities)
    assert len({identity.certificate for identity in identities}) == 4
    assert verify(path, tmp_path / "home" / "receipts").problems == ()
    # The newest list stays, whichever was written last.
    assert book.authorities(identities[0].federation).number == 2
    lines = list(export_lines(path, tmp_path / "home" / "receipts"))
    assert verify_export(lines).problems == ()
    without = [line for line in lines if not line.startswith(b'{"authorities"')]
    assert len(without) == len(lines) - 1
    problems = [str(problem) for problem in verify_export(without).problems]
    assert len(problems) == 2
    assert all("was not issued by" in problem for problem in problems)


def test_an_altered_list_of_authorities_is_refused(tmp_path, identities):
    path, book = _written(tmp_path / "home", identities)
    listed = book._authorities(identities[0].federation)
    content = json.loads(listed.read_bytes())
    listed.write_text(json.dumps(content | {"number": 7}))
    problems = [str(problem) for problem in verify(path, tmp_path / "home" / "receipts").problems]
    assert sum("was not issued by" in problem for problem in problems) == 2


def test_an_attempts_receipts_keep_the_certificate_it_was_joined_with(tmp_path, identities):
    before, after = identities[0], identities[1]
    with Ledger.open(tmp_path / "ledgers" / "data.db", "data", LIMIT) as ledger:
        budget = Budget(ledger, Policy(), before, ReceiptBook(tmp_path), b"d" * 32)
        budget.renewed(after)
        for identity in (before, after):
            held = ledger.reserve(EVENT, purpose_of(_of(identity), "desk", 1))
            receipt = receipt_of(ledger, held, 1, _of(identity))
            assert budget.signer_of(receipt) is identity
