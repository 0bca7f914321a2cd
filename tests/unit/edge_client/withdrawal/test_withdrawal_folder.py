"""What a home remembers of withdrawals counts at once and at every start; what cannot be read allows nothing."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from edge_client.cli import app
from edge_client.policy.policy import PolicyRefusal
from edge_client.withdrawal.folder import KeptWithdrawal, TakenWithdrawal, WithdrawalFolder, WithdrawalsUnreadable
from tacit.authorities import Authorities
from tacit.identity import CertificateInvalid
from tacit.job import EarlierVersion
from tacit.reason import Reason
from tacit.withdrawal import WithdrawalRequest, WithdrawalTaken, check_request
from tests.support import party
from tests.support.fleet import job_document
from tests.support.measurements import bundled, measuring
from toolkit.console import ExitCode


@pytest.fixture
def identity(tmp_path):
    return party.member(tmp_path / "home", "localhost:7441")


@pytest.fixture
def folder(identity):
    return WithdrawalFolder(identity.home, identity.federation, identity.member)


def refused(folder, name, job=None):
    with pytest.raises(PolicyRefusal) as refusal:
        folder.check(name, job)
    return refusal.value


def answer_to(request, entry=17):
    """An answer as it is kept; the folder checks no signatures."""
    taken = WithdrawalTaken(
        federation=request.federation, request=request.digest(), taken_ms=1, entry=entry, entry_hash=bytes(32)
    )
    signed = {"signature": "00", "certificate": "00"}
    return TakenWithdrawal(request=request, request_signature="00", request_certificate="00", taken=taken, **signed)


def test_it_counts_at_once_and_after_a_restart(identity, folder):
    folder.check("desk")
    kept = folder.ask(identity, "desk")
    for each in (folder, WithdrawalFolder(identity.home, identity.federation, identity.member)):
        assert refused(each, "desk").reason == Reason.REASON_MEMBER_WITHDREW
        each.check("ward")
        assert each.all() == (kept,)
        assert each.for_good is None
    assert (identity.home / "withdrawals" / "jobs" / "desk.json").stat().st_mode & 0o777 == 0o600
    # The same again is the same request, so the coordinator has one to keep.
    assert folder.ask(identity, "desk") == kept


def test_a_measurement_of_it_counts_too(identity, folder, tmp_path):
    subject, _ = bundled(tmp_path)
    job, _ = measuring(subject, bytes(32))
    folder.check("asked", job)
    folder.ask(identity, "desk")
    assert "withdrew from desk, which asked measures" in refused(folder, "asked", job).detail


def test_a_job_that_starts_from_it_counts_too_and_for_good_counts_for_all(identity, folder):
    folder.ask(identity, "questions")
    job = job_document()
    later = job.model_copy(
        update={"name": "next", "earlier": EarlierVersion(job=job.name, number=0, document=job.digest())}
    )
    assert "questions, from which next starts" in refused(folder, "next", later).detail
    folder.check("other", job.model_copy(update={"name": "other"}))
    kept = folder.ask(identity, None)
    assert "from all jobs" in refused(folder, "other").detail
    assert folder.for_good == kept
    # A job may be named like the file of those for good.
    assert folder.ask(identity, "all").request.job == "all"


def test_a_withdrawal_of_another_membership_does_not_count(identity, folder, tmp_path):
    folder.ask(identity, None)
    WithdrawalFolder(identity.home, bytes(32), identity.member).check("desk")
    WithdrawalFolder(identity.home, identity.federation, "south").check("desk")


def test_the_withdrawal_of_an_earlier_membership_is_moved_aside_and_not_overwritten(identity, folder):
    folder.ask(identity, None)
    before = (identity.home / "withdrawals" / "all.json").read_bytes()
    later = WithdrawalFolder(identity.home, identity.federation, "south")
    kept = later.ask(identity, None)
    assert later.all() == (kept,)
    assert [each.read_bytes() for each in (identity.home / "withdrawals" / "earlier").iterdir()] == [before]


def test_an_answer_of_one_process_outlasts_a_refusal_that_another_hears(identity, folder):
    kept = folder.ask(identity, "desk")
    answer = answer_to(kept.request)
    assert folder.answered(kept, answer).answer == answer
    # The other process read the file before.
    folder.refused(kept, "no such job")
    (now,) = folder.all()
    assert (now.answers, now.refused) == ((answer,), "no such job")


def test_an_answer_to_another_request_is_not_kept(identity, folder):
    """Somebody moved the file away while its request was sent, and asked anew."""
    sent = folder.ask(identity, "desk")
    path = identity.home / "withdrawals" / "jobs" / "desk.json"
    asked = WithdrawalRequest.model_validate(sent.request.model_dump() | {"asked_ms": sent.request.asked_ms + 1})
    other = KeptWithdrawal.signed(asked, identity).model_copy(update={"refused": "no such job"})
    path.write_bytes(other.canonical())
    assert folder.answered(sent, answer_to(sent.request)) == other
    assert folder.all() == (other,)


@pytest.mark.parametrize("damage", ["garbage", "empty", "folder", "fifo", "other name", "listing"])
def test_a_file_that_cannot_be_read_allows_nothing(identity, folder, damage):
    folder.ask(identity, "desk")
    path = identity.home / "withdrawals" / "jobs" / "desk.json"
    content = path.read_bytes()
    path.unlink()
    match damage:
        case "garbage":
            path.write_bytes(content[:-20])
        case "empty":
            path.write_bytes(b"")
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "other name":
            path.with_name("ward.json").write_bytes(content)
        case "listing":
            path.parent.rmdir()
            path.parent.write_bytes(b"")
    with pytest.raises(WithdrawalsUnreadable, match="withdrawals"):
        folder.all()
    # Of every job: nobody knows what the file said.
    assert refused(folder, "other").reason == Reason.REASON_LEDGER_FAILING
    with pytest.raises(WithdrawalsUnreadable):
        folder.ask(identity, "new")


def test_what_is_not_a_withdrawal_is_not_looked_at(identity, folder):
    folder.ask(identity, "desk")
    (identity.home / "withdrawals" / "jobs" / ".desk.json.partial").write_bytes(b"half")
    (identity.home / "withdrawals" / "notes.txt").write_text("mine")
    assert len(folder.all()) == 1


def test_the_request_is_signed_by_the_certificates_key_and_about_nothing_else(identity, folder):
    kept = folder.ask(identity, "desk")
    authorities = Authorities.first(identity.root)
    signature, certificate = bytes.fromhex(kept.signature), bytes.fromhex(kept.certificate)
    check_request(kept.request, signature, certificate, authorities)
    assert kept.signed_by(identity)
    for change in ({"job": None}, {"job": "ward"}, {"member": "south"}, {"federation": bytes(32)}, {"asked_ms": 1}):
        with pytest.raises(CertificateInvalid):
            check_request(kept.request.model_copy(update=change), signature, certificate, authorities)
    # The bytes alone, without the prefix, are signed for something else.
    with pytest.raises(CertificateInvalid):
        check_request(kept.request, identity.sign(kept.request.canonical()), certificate, authorities)
    with pytest.raises(CertificateInvalid):
        check_request(kept.request, signature, certificate, Authorities.first(party.authority(1).certificate))
    assert KeptWithdrawal.from_json(kept.canonical()) == kept


def test_a_command_and_a_running_client_write_at_the_same_time(identity, folder):
    kept = folder.ask(identity, "desk")

    def write(why):
        for _ in range(20):
            folder.refused(kept, why * 500)
            assert len(folder.all()) == 1

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(write, why) for why in "abcd"]:
            done.result()
    assert len(set(folder.all()[0].refused)) == 1


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder_name", ["corpora", "synthesis"])
def test_a_folder_that_cannot_be_listed_keeps_no_withdrawal_from_being_sent(identity, folder, folder_name):
    (identity.home / folder_name).write_text("not a folder")
    done = CliRunner().invoke(app, ["withdraw", "desk", "--yes", "--json", "--home", str(identity.home)])
    # The coordinator is not there: it was asked.
    assert done.exit_code == ExitCode.UNREACHABLE, done.output
    assert f"error: {identity.home / folder_name} cannot be listed" in done.stderr
    assert "nothing was withdrawn" not in done.stderr
    (sent,) = json.loads(done.stdout)["withdrawals"]
    (kept,) = folder.all()
    assert (sent["job"], sent["request"]) == ("desk", kept.request.digest().hex())
