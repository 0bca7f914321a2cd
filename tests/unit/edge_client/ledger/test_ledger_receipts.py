"""Receipts are signed and chained, and can be checked with public tools alone."""

import json
import subprocess
from base64 import b64decode
from datetime import UTC, datetime
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from benchmarks.operations.ledger_faults import EVENT, LIMIT, purpose_of, receipt_of
from benchmarks.operations.ledger_faults import Member as Identity
from edge_client.ledger.ledger import Ledger, LedgerMisused, LedgerUnwritable, ledger_path
from edge_client.ledger.overlap import marks_of
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.receipts import (
    SENDING,
    GroupNumbers,
    Party,
    Receipt,
    ReceiptInvalid,
    check_receipt,
)
from edge_client.ledger.verification import export_lines, verify, verify_export
from learning.accounting.events import SampledGaussian
from learning.mechanisms.banded import best_coefficients
from secure_agg.transcript import Purpose, frame
from tacit.documents import DocumentInvalid
from tacit.mechanism import DpSgd, OwnDiscreteGaussian
from tests.support import party


@pytest.fixture(scope="session")
def signer(tmp_path_factory):
    """An enrolled member, with what the benchmark's helpers need of one."""
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


def identity_of(signer) -> Identity:
    return Identity(signer.member, signer.key, signer.certificate, signer.root_pem, signer.federation)


class Place:
    """A home with an open ledger and its receipts."""

    def __init__(self, home: Path, signer) -> None:
        self.home, self.signer = home, signer
        self.path, self.receipts = ledger_path(home, "data"), home / "receipts"
        self.book = ReceiptBook(self.receipts)
        self.ledger = Ledger.open(self.path, "data", LIMIT)

    def receipt(self, round_: int = 3, attempt: int = 5, job: str = "desk", **other) -> Receipt:
        held = self.ledger.reserve(EVENT, purpose_of(identity_of(self.signer), job, round_))
        self.ledger.charge(held.number, attempt)
        self.ledger.settle(held.number, attempt, "published", b"")
        made = receipt_of(self.ledger, held, attempt, identity_of(self.signer))
        return made.model_copy(update={"at_ms": int(party.present().timestamp() * 1000) + 1000, **other})

    def write(self, **how) -> Path:
        return self.book.write(self.receipt(**how), self.signer, self.ledger)

    def problems(self) -> list[str]:
        return [str(problem) for problem in verify(self.path, self.receipts).problems]


@pytest.fixture
def place(tmp_path, signer):
    made = Place(tmp_path / "home", signer)
    yield made
    made.ledger.close()


def ran(*command: object, cwd: Path | None = None, stdin: bytes | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, input=stdin, capture_output=True, check=False)
    return (done.stdout + done.stderr).decode() if done.returncode == 0 else f"failed: {done.stderr!r} {done.stdout!r}"


def test_openssl_and_sha256sum_alone_verify_a_receipt(place, tmp_path):
    """Runs the commands of the documentation, in its order."""
    path = place.write()
    receipt = json.loads(path.read_bytes())
    assert path == place.receipts / "desk" / "3.5.json"
    certificates = place.receipts / "certificates"
    (fingerprint,) = (each["certificate"] for each in receipt["cohort"] if each["member"] == receipt["member"])
    certificate, root = certificates / f"{fingerprint}.pem", certificates / f"{receipt['federation']}.pem"
    # Shows whose certificate it is, and that the federation's authority issued it.
    shown = ran("openssl", "x509", "-in", certificate, "-noout", "-fingerprint", "-sha256")
    assert fingerprint in shown.replace(":", "").lower()
    shown = ran("openssl", "x509", "-in", root, "-noout", "-fingerprint", "-sha256")
    assert receipt["federation"] in shown.replace(":", "").lower()
    when = receipt["at_ms"] // 1000
    assert "OK" in ran("openssl", "verify", "-attime", when, "-CAfile", root, certificate)
    # Shows that its key signed this file.
    (tmp_path / "pub.pem").write_text(ran("openssl", "x509", "-in", certificate, "-pubkey", "-noout"))
    check = [
        *("openssl", "dgst", "-sha256", "-sigopt", "rsa_padding_mode:pss", "-sigopt", "rsa_pss_saltlen:32"),
        *("-verify", tmp_path / "pub.pem", "-signature", path.with_suffix(".sig"), path),
    ]
    assert "Verified OK" in ran(*check)
    path.write_bytes(path.read_bytes().replace(b'"vector_bytes":4096', b'"vector_bytes":4095'))
    assert "failed" in ran(*check)


def test_sha256sum_follows_the_chain_of_an_export(place):
    path = place.write()
    digest = ran("sha256sum", path).split()[0]
    lines = list(export_lines(place.path, place.receipts))
    records = [line for line in lines if b'"sequence":' in line]
    assert len(records) == place.ledger.sequence == 5
    for line, after in pairwise(records):
        assert json.loads(after)["previous"] == ran("sha256sum", stdin=line).split()[0]
    assert ran("sha256sum", stdin=records[-1]).split()[0] == place.ledger.head.hex()
    assert json.loads(records[-1])["body"]["receipt"] == digest
    # The receipt and its signature follow the records, as they are in their files.
    (kept,) = (json.loads(line) for line in lines if b'"signature"' in line and b'"receipt":"{' in line)
    assert kept["receipt"].encode() == path.read_bytes()
    assert b64decode(kept["signature"]) == path.with_suffix(".sig").read_bytes()


def test_receipts_are_chained_and_verify(place):
    first, second = place.write(), place.write(round_=4, attempt=6)
    assert json.loads(first.read_bytes())["previous"] == "00" * 32
    assert json.loads(second.read_bytes())["previous"] == sha256(first.read_bytes()).hexdigest()
    assert place.problems() == []
    assert verify_export(export_lines(place.path, place.receipts)).sound
    for path in place.receipts.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


def other_key(path: Path, place: Place) -> None:
    path.with_suffix(".sig").write_bytes(party.member(place.home / "thief", "x:1", number=3).sign(path.read_bytes()))


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (lambda path, _: path.unlink(), "its file is missing"),
        (lambda path, _: path.with_suffix(".sig").unlink(), "its file is missing"),
        (
            lambda path, _: path.write_bytes(path.read_bytes().replace(b"published", b"abandoned")),
            "differs from what was recorded",
        ),
        (lambda path, _: path.with_suffix(".sig").write_bytes(bytes(384)), "signature is not the one"),
        (other_key, "signature is not the one"),
        (lambda _, place: next((place.receipts / "certificates").glob("*.pem")).write_text("x"), "missing or damaged"),
    ],
)
def test_a_tampered_receipt_is_named(place, tamper, what):
    path = place.write()
    place.write(round_=4, attempt=6)
    tamper(path, place)
    assert any("receipt desk/3.5 (record 5)" in line and what in line for line in place.problems()), place.problems()
    assert not verify_export(export_lines(place.path, place.receipts)).sound


def signed(place: Place, **other) -> tuple[Receipt, bytes]:
    receipt = place.receipt(**other)
    return receipt, place.signer.sign(receipt.canonical())


def test_a_signature_must_be_the_members_over_this_file(place):
    place.write()
    receipt, signature = signed(place, round_=4, attempt=6)
    data, certificate = receipt.canonical(), place.book.certificate
    check_receipt(receipt, data, signature, certificate)
    with pytest.raises(ReceiptInvalid, match="canonical"):
        check_receipt(receipt, data + b"\n", signature, certificate)
    with pytest.raises(ReceiptInvalid, match="signature does not match"):
        check_receipt(receipt, data, bytes(384), certificate)
    other = party.member(place.home / "south", "x:1", name="south", number=3)
    with pytest.raises(ReceiptInvalid, match="signature does not match"):
        check_receipt(receipt, data, other.sign(data), certificate)
    fingerprint = x509.load_der_x509_certificate(other.certificate).fingerprint(hashes.SHA256())

    def known(wanted: bytes) -> bytes:
        return other.certificate if wanted == fingerprint else certificate(wanted)

    # Another member's key and certificate, listed in the cohort under this member's name.
    lie = receipt.model_copy(update={"cohort": (Party(member="north", certificate=fingerprint),)})
    with pytest.raises(ReceiptInvalid, match="belongs to south"):
        check_receipt(lie, lie.canonical(), other.sign(lie.canonical()), known)
    nobody = receipt.model_copy(update={"cohort": ()})
    with pytest.raises(ReceiptInvalid, match="does not hold north"):
        check_receipt(nobody, nobody.canonical(), place.signer.sign(nobody.canonical()), certificate)
    late = receipt.model_copy(update={"at_ms": int(datetime(2190, 1, 1, tzinfo=UTC).timestamp() * 1000)})
    with pytest.raises(ReceiptInvalid, match="expired"):
        check_receipt(late, late.canonical(), place.signer.sign(late.canonical()), certificate)


def test_a_receipt_under_another_federations_authority_is_refused(place):
    place.write()
    stranger = party.authority(1)
    receipt, _ = signed(place, round_=4, attempt=6)
    lie = receipt.model_copy(update={"federation": stranger.federation})

    def known(wanted: bytes) -> bytes:
        if wanted == stranger.federation:
            return stranger.certificate.public_bytes(Encoding.DER)
        return place.book.certificate(wanted)

    with pytest.raises(ReceiptInvalid, match="not issued by this federation"):
        check_receipt(lie, lie.canonical(), place.signer.sign(lie.canonical()), known)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"event": SampledGaussian(multiplier=9.0, rate=0.02, steps=20)}, "another event"),
        ({"version": bytes(32)}, "another purpose"),
        ({"job_document": bytes(32)}, "another purpose"),
    ],
)
def test_a_receipt_that_contradicts_its_ledger_is_named(place, other, what):
    place.write(**other)
    assert [what in line for line in place.problems()] == [True]


def test_a_receipt_that_does_not_name_the_one_before_is_named(place, monkeypatch):
    place.write()
    monkeypatch.setattr(Ledger, "check_follows", lambda *_: None)
    place.write(round_=4, attempt=6, previous=bytes(32))
    assert ["does not name the receipt before it" in line for line in place.problems()] == [True]


def test_a_job_without_noise_leaves_a_receipt_too(place):
    path = place.book.write(place.receipt(reservation=None, event=None, job="plain"), place.signer, place.ledger)
    assert json.loads(path.read_bytes())["event"] is None
    assert place.problems() == []
    place.book.write(place.receipt(round_=4, reservation=None, job="plain"), place.signer, place.ledger)
    assert any("was not charged for" in line for line in place.problems())


def test_only_a_receipt_that_follows_is_accepted(place):
    receipt = place.receipt()
    for other in ({"previous": bytes([1]) * 32}, {"ledger": "00" * 16}):
        with pytest.raises(LedgerMisused, match="does not follow"):
            place.book.write(receipt.model_copy(update=other), place.signer, place.ledger)
    with pytest.raises(ReceiptInvalid, match="another certificate"):
        place.book.write(
            receipt.model_copy(update={"cohort": (Party(member="north", certificate=bytes(32)),)}),
            place.signer,
            place.ledger,
        )
    assert not place.receipts.exists()
    with pytest.raises(LedgerMisused, match="never charged for attempt 99"):
        place.book.write(receipt.model_copy(update={"attempt": 99}), place.signer, place.ledger)


def test_the_next_start_adds_a_receipt_that_a_crash_left_out(place):
    class Killed(Exception):
        pass

    def faults(point: str) -> None:
        if point == "receipt.folder-synced":
            raise Killed

    with pytest.raises(Killed):
        ReceiptBook(place.receipts, faults).write(place.receipt(), place.signer, place.ledger)
    assert place.problems() == []
    assert any("not in the chain yet" in note for note in verify(place.path, place.receipts).notes)
    path = place.receipts / "desk" / "3.5.json"
    assert place.book.recover(place.ledger) == (path,)
    assert place.book.recover(place.ledger) == ()
    assert place.ledger.holds(sha256(path.read_bytes()).digest())
    assert place.problems() == []


def test_a_stray_receipt_is_a_problem_and_is_not_added(place):
    place.write()
    receipt = place.receipt(round_=4, attempt=6).model_copy(update={"previous": bytes([7]) * 32})
    stray = place.receipts / "desk" / "4.6.json"
    stray.write_bytes(receipt.canonical())
    stray.with_suffix(".sig").write_bytes(place.signer.sign(receipt.canonical()))
    assert place.book.recover(place.ledger) == ()
    assert any("desk/4.6" in line and "does not follow" in line for line in place.problems())
    # A receipt that follows, but that nobody signed.
    forged = receipt.model_copy(update={"previous": place.ledger.last_receipt})
    stray.write_bytes(forged.canonical())
    assert place.book.recover(place.ledger) == ()


def test_a_receipt_never_replaces_another_of_the_same_numbers(place):
    first = place.write()
    content = first.read_bytes()
    second = place.write()
    assert first.read_bytes() == content
    assert second.name == f"3.5.{sha256(second.read_bytes()).hexdigest()[:8]}.json"
    assert place.problems() == []


def test_the_two_receipts_of_an_attempt_have_different_names(place):
    sending = place.receipt(outcome=SENDING)
    sent = place.book.write(sending, place.signer, place.ledger)
    after = {"outcome": "published", "previous": place.ledger.last_receipt}
    ended = place.book.write(sending.model_copy(update=after), place.signer, place.ledger)
    assert (sent.name, ended.name) == ("3.5.sent.json", "3.5.json")
    assert json.loads(sent.read_bytes())["outcome"] == "sending"
    assert sorted(path.name for path in sent.parent.iterdir()) == [
        "3.5.json",
        "3.5.sent.json",
        "3.5.sent.sig",
        "3.5.sig",
    ]
    # Another receipt with the same numbers gets another file; the same receipt keeps its file.
    assert place.book.path(sending) == sent
    again = place.write(outcome=SENDING)
    assert again.name == f"3.5.sent.{sha256(again.read_bytes()).hexdigest()[:8]}.json"
    assert set(place.book.candidates("desk", 3, 5)) == {sent, ended, again}
    assert place.problems() == []
    assert verify_export(export_lines(place.path, place.receipts)).sound


def test_receipts_of_other_ledgers_are_skipped_before_their_signatures(place):
    class Asked(ReceiptBook):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.asked = 0

        def certificate(self, fingerprint: bytes) -> bytes:
            self.asked += 1
            return super().certificate(fingerprint)

    place.write()
    for round_, ledger in ((4, "00" * 16), (5, place.ledger.id.hex())):
        receipt = place.receipt(round_=round_, attempt=6, ledger=ledger)
        path = place.receipts / "desk" / f"{round_}.6.json"
        path.write_bytes(receipt.canonical())
        path.with_suffix(".sig").write_bytes(place.signer.sign(receipt.canonical()))
        book = Asked(place.receipts)
        own = ledger == place.ledger.id.hex()
        assert book.recover(place.ledger) == ((path,) if own else ())
        # The member's certificate and the authority's.
        assert book.asked == (2 if own else 0)


def test_a_full_disk_gives_a_sentence(place):
    (place.receipts / "desk").mkdir(parents=True)
    (place.receipts / "desk" / ".3.5.json.partial").mkdir()
    with pytest.raises(LedgerUnwritable, match=r"receipt of desk/3\.5 cannot be written"):
        place.write()


def test_a_charge_without_a_receipt_is_a_note(place):
    place.receipt()
    verdict = verify(place.path, place.receipts)
    assert verdict.sound
    assert any("without a receipt" in note for note in verdict.notes)


def test_nothing_else_that_the_key_signs_begins_like_a_receipt(place):
    assert place.receipt().canonical()[:1] == b"{"
    assert {frame(purpose)[:1] for purpose in Purpose} == {b"S"}


@pytest.mark.parametrize("job", ["../x", "a/b", "", ".hidden", "Desk"])
def test_a_job_that_cannot_name_a_folder_is_refused(place, job):
    content = json.loads(place.receipt().canonical()) | {"job": job}
    with pytest.raises(DocumentInvalid, match="job"):
        Receipt.from_json(json.dumps(content).encode())


# ---- exports -------------------------------------------------------------------------------------------------------


def test_an_export_that_was_changed_is_found(place):
    place.write()
    place.write(round_=4, attempt=6)
    lines = list(export_lines(place.path, place.receipts))
    whole = verify_export(lines)
    assert whole.sound
    assert whole.state.head == place.ledger.head
    for number, line in enumerate(lines):
        at = line.index(b":") + 3
        changed = [*lines[:number], line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :], *lines[number + 1 :]]
        assert not verify_export(changed).sound, line
        assert not verify_export(lines[:number] + lines[number + 1 :]).sound or number == len(lines) - 1, line
    records = sum(b'"sequence":' in line for line in lines)
    swapped = lines.copy()
    swapped[1], swapped[2] = swapped[2], swapped[1]
    assert verify_export(swapped).record == 2
    # The export holds a receipt that no record names.
    extra = json.dumps({"receipt": "{}", "signature": ""}).encode()
    assert any("not in the chain" in str(problem) for problem in verify_export([*lines, extra]).problems)
    assert verify_export(lines[: records - 1]).state.sequence == records - 1


def test_an_export_holds_no_marks(place):
    marks = marks_of(bytes(32), ["a text"])
    place.ledger.data_seen(marks)
    (mark,) = marks.values
    text = b"\n".join(export_lines(place.path, place.receipts))
    assert str(mark).encode() not in text
    assert (mark % 2**64).to_bytes(8, "big").hex().encode() not in text
    assert b"a text" not in text


def test_a_receipt_says_whether_the_cohort_was_in_groups(place):
    bare = place.receipt()
    assert json.loads(bare.canonical())["groups"] is None
    assert Receipt.from_json(bare.canonical()) == bare
    split = {"groups": 3, "least": 2, "sigma": 80, "absent": 4}
    grouped = bare.model_copy(update={"groups": GroupNumbers(**split)})
    assert json.loads(grouped.canonical())["groups"] == split
    assert Receipt.from_json(grouped.canonical()) == grouped
    assert grouped.digest() != bare.digest()


def test_an_answer_that_is_sent_again_in_a_later_round_has_a_receipt_for_it(place):
    """It was charged once, in the first of the rounds. A training's receipt is for its own round."""
    answer = OwnDiscreteGaussian(std=5.0)
    place.write(round_=3, attempt=5, mechanism=answer)
    assert place.problems() == []
    place.write(round_=3, attempt=6, mechanism=answer, round=4)
    assert place.problems() == []
    place.write(round_=3, attempt=7, mechanism=answer, round=2)
    (problem,) = place.problems()
    assert "it names another purpose than the ledger was charged for" in problem
    place.write(round_=3, attempt=8, round=4)
    assert len(place.problems()) == 2


def test_a_job_that_was_charged_whole_has_receipts_for_rounds_before_and_after_its_charge(place):
    """A coordinator that was restored from a backup counts on from an earlier round."""
    mechanism = DpSgd(noise_multiplier=1.0, coefficients=best_coefficients(4, 12))
    for attempt, round_ in ((5, 3), (6, 4), (7, 2)):
        place.write(round_=3, attempt=attempt, mechanism=mechanism, round=round_, version=bytes([round_]) * 32)
        assert place.problems() == []
    place.write(round_=3, attempt=8, mechanism=mechanism, round=2, job_document=bytes(32))
    (problem,) = place.problems()
    assert "it names another purpose than the ledger was charged for" in problem
