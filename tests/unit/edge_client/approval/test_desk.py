"""The desk over a real ledger and a real folder: what is recorded, what stops counting, and what no file can do."""

import asyncio
import json

import numpy as np
import pytest
from structlog.testing import capture_logs

from edge_client.approval.deciding import DecisionRefused, decide, put, standing_at
from edge_client.approval.desk import Desk
from edge_client.approval.folder import ApprovalFolder
from edge_client.ledger.chain import ApprovalKept, RecordInvalid, record_after
from edge_client.ledger.ledger import Ledger, LedgerMisused, ledger_path
from edge_client.ledger.replay import LedgerState
from edge_client.ledger.store import LedgerUnwritable
from edge_client.ledger.verification import export_lines, verify, verify_export
from edge_client.policy.policy import Policy, PolicyRefusal
from learning.accounting.filter import Limit
from tacit.manifest import Manifest
from tacit.reason import Reason
from tests.support.stewards import DAY_MS, JOHN, MARY, NOW, Steward
from tests.unit.learning.mechanisms.test_mechanisms import GAUSSIAN, job

LIMIT = Limit(4.0, 1e-5)
FEDERATION = bytes(32)
JOB = job(GAUSSIAN)
CHANGED = job({**GAUSSIAN, "noise_multiplier": 1.9})
MANIFEST = Manifest.of({"w": np.zeros((2, 2), np.float32)})


class Recorder:
    """A member's budget, as far as a desk uses it, over a real ledger."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.full = False

    @property
    def now_ms(self):
        return self.ledger.now_ms

    def heard(self):
        return self.ledger.approvals()

    def hear(self, signed):
        if self.full:
            raise LedgerUnwritable("no space")
        return self.ledger.approval(signed)

    def lapse(self, signed):
        self.ledger.lapse(signed)


class Place:
    """A member's home with an open ledger, and a clock that the test sets."""

    def __init__(self, home, **rules):
        self.home = home
        self.now = (NOW + 1) / 1000
        self.rules = {"jobs": "ask", "stewards": {"mary": MARY.public, "john": JOHN.public}, **rules}
        self.start()

    def start(self):
        """Starts the member's process, as if for the first time or again."""
        self.ledger = Ledger.open(ledger_path(self.home, "data"), "data", LIMIT, clock=lambda: self.now)
        self.recorder = Recorder(self.ledger)
        self.policy = Policy(**self.rules)
        self.desk = Desk(self.home, self.policy, self.recorder, federation=FEDERATION, member="north", data="data")
        asyncio.run(self.desk.ask(JOB, MANIFEST, None))

    def restart(self, **rules):
        self.ledger.close()
        self.rules |= rules
        self.start()

    @property
    def folder(self):
        return ApprovalFolder(self.home, "data", "questions")

    def put(self, signed):
        """Puts a statement into the home, at the member's time."""
        return put(self.home, signed, now_ms=int(self.now * 1000))

    def says(self, steward, decision, *, at=NOW, **more):
        """The steward decides about what the member asks now."""
        return steward.says(decision, self.folder.request().question, at=at, **more)

    def stage(self, document=JOB):
        try:
            self.desk.check(document)
        except PolicyRefusal as refusal:
            return {Reason.REASON_APPROVAL_AWAITED: "awaited", Reason.REASON_APPROVAL_DECLINED: "declined"}[
                refusal.reason
            ]
        return "approved"

    def decisions(self):
        return [signed.statement.decision for signed, _ in self.ledger.approvals()]


@pytest.fixture
def place(tmp_path):
    opened = []

    def make(**rules):
        opened.append(Place(tmp_path, **rules))
        return opened[-1]

    yield make
    for each in opened:
        each.ledger.close()


def test_an_approval_in_the_folder_is_recorded_and_counts(place):
    made = place()
    assert made.stage() == "awaited"
    made.put(made.says(MARY, "approve"))
    assert made.stage() == "approved"
    assert made.decisions() == ["approve"]
    # It stands in the ledger: neither the file nor this process is needed any more, and it is recorded once.
    for path in made.folder.path.iterdir():
        path.unlink()
    made.restart()
    assert made.stage() == "approved"
    assert made.decisions() == ["approve"]


def test_a_statement_stands_in_the_chain_once(place):
    """Recorded a second time, after a withdrawal, it would look newer than it is."""
    made = place()
    approval = made.says(MARY, "approve")
    assert made.ledger.approval(approval)
    assert not made.ledger.approval(approval)
    state = LedgerState()
    for record in made.ledger.records():
        state.apply(record)
    again = ApprovalKept(statement=approval.statement, signature=approval.signature)
    with pytest.raises(RecordInvalid, match="already in the ledger"):
        state.check(record_after(state.head, state.sequence + 1, state.at_ms, again))
    withdrawal = made.says(MARY, "withdraw")
    made.ledger.approval(withdrawal)
    for signed, why in ((withdrawal, "no approval"), (made.says(JOHN, "approve"), "no approval")):
        with pytest.raises(LedgerMisused, match=why):
            made.ledger.lapse(signed)


def test_a_changed_job_and_a_changed_policy_ask_again(place):
    made = place()
    made.put(made.says(MARY, "approve"))
    assert made.stage() == "approved"
    assert made.stage(CHANGED) == "awaited"
    made.restart(max_approval_days=80.0)
    assert made.stage() == "awaited"
    assert [why for _, why in made.desk.standing(JOB).unread] == ["it was signed under another policy"]


def test_a_withdrawal_counts_after_its_file_is_removed_and_the_approval_is_shown_again(place):
    made = place()
    approval = made.says(MARY, "approve")
    made.put(approval)
    assert made.stage() == "approved"
    made.put(made.says(MARY, "withdraw", at=NOW + 1))
    assert made.stage() == "awaited"
    for path in made.folder.path.iterdir():
        path.unlink()
    made.folder.put(approval)
    made.restart()
    assert made.stage() == "awaited"
    assert made.decisions() == ["approve", "withdraw"]


@pytest.mark.parametrize("decision", ["withdraw", "decline"])
def test_a_full_disk_approves_nothing_and_loses_no_withdrawal(place, decision):
    made = place()
    made.recorder.full = True
    made.put(made.says(MARY, "approve"))
    assert made.stage() == "awaited"
    made.recorder.full = False
    assert made.stage() == "approved"
    made.recorder.full = True
    made.put(made.says(MARY, decision, at=NOW + 1))
    assert made.stage() == {"withdraw": "awaited", "decline": "declined"}[decision]


def test_four_eyes(place):
    made = place(min_approvals=2)
    made.put(made.says(MARY, "approve"))
    made.put(made.says(MARY, "approve", at=NOW + 1, days=20))
    assert made.stage() == "awaited"
    with pytest.raises(PolicyRefusal, match="given 1 of the 2 approvals"):
        made.desk.check(JOB)
    made.put(made.says(JOHN, "approve"))
    assert made.desk.check(JOB) == 2


def test_an_expired_approval_stays_expired_whatever_the_clock_says(place):
    made = place()
    made.put(made.says(MARY, "approve", days=1))
    assert made.stage() == "approved"
    made.now = (NOW + DAY_MS) / 1000
    assert made.stage() == "awaited"
    # The clock goes back while the process runs, and before the next start.
    made.now = (NOW + 1) / 1000
    assert made.stage() == "awaited"
    made.restart()
    assert made.stage() == "awaited"
    assert verify(made.ledger.path).state.lapsed == {made.ledger.approvals()[0][0].digest()}
    # A new approval counts, also by a clock that is behind the ledger.
    made.put(made.says(MARY, "approve", at=NOW + DAY_MS))
    assert made.stage() == "approved"


def test_a_clock_that_went_back_revives_nothing_that_other_records_outlived(place):
    """No one looked when it expired, but the ledger has a record from later."""
    made = place()
    made.put(made.says(MARY, "approve", days=1))
    assert made.stage() == "approved"
    made.now = (NOW + 2 * DAY_MS) / 1000
    made.ledger.approval(JOHN.says("withdraw"))
    made.now = (NOW + 1) / 1000
    made.restart()
    assert made.stage() == "awaited"


def test_files_that_are_no_statements_of_a_steward_are_refused_once_and_recorded_never(place):
    made = place()
    good, mallory = made.says(MARY, "approve"), Steward.named("mallory")
    forged = good.model_copy(update={"signature": mallory.key.sign(good.statement.signed_bytes).hex()})
    for bad in (
        forged,
        made.says(mallory, "approve"),
        made.says(MARY, "approve", member="south"),
        made.says(MARY, "approve", federation=bytes([7]) * 32),
        made.says(MARY, "approve", job="another"),
        made.says(MARY, "approve", document=bytes([7]) * 32),
        made.says(MARY, "approve", data="archive"),
    ):
        made.folder.put(bad)
    (made.folder.path / "note.json").write_text("{}")
    (made.folder.path / "broken.json").write_text("{" * 100_000)
    with capture_logs() as logs:
        assert made.stage() == "awaited"
        assert made.stage() == "awaited"
    refused = [line for line in logs if line["event"] == "approval_refused"]
    assert len(refused) == 7
    assert made.decisions() == []


def test_the_commands_take_no_statement_that_would_not_count(place):
    made = place()
    mallory = Steward.named("mallory")
    good = made.says(MARY, "approve")
    for bad, why in (
        (made.says(mallory, "approve"), "not one of the stewards"),
        (made.says(MARY, "approve", member="south"), "about member south, and this home is of member north"),
        (made.says(MARY, "approve", document=bytes([7]) * 32), "asks again"),
        (made.says(MARY, "approve", policy=bytes([7]) * 32), "another policy"),
        (made.says(MARY, "approve", job="another"), "asked nobody about job another"),
        (good.model_copy(update={"signature": "00" * 64}), "does not hold"),
        (made.says(MARY, "approve", at=NOW - 2 * DAY_MS, days=1), "it has expired"),
        (made.says(MARY, "approve", days=400), "for longer than max_approval_days"),
        (made.says(MARY, "approve", at=NOW + DAY_MS), "clock of the machine that signs"),
        (made.says(MARY, "withdraw", at=NOW + 30 * DAY_MS), "clock of the machine that signs"),
    ):
        with pytest.raises(DecisionRefused, match=why):
            made.put(bad)
    assert made.folder.names() == ()


def test_an_approval_shown_again_after_a_withdrawal_is_not_taken(place):
    made = place()
    approval = made.says(MARY, "approve")
    made.put(approval)
    made.put(made.says(MARY, "withdraw", at=NOW + 1))
    assert made.stage() == "awaited"
    with pytest.raises(DecisionRefused, match="decided otherwise since"):
        made.put(approval)


def test_a_decision_that_follows_one_of_the_future_is_not_signed(place):
    request = place().folder.request()
    ahead = decide(request, "withdraw", MARY.key, now_ms=NOW + 30 * DAY_MS)
    with pytest.raises(DecisionRefused, match="in the future"):
        decide(request, "approve", MARY.key, known=[ahead], now_ms=NOW)
    end_of_time = MARY.says("withdraw", request.question, at=253_402_300_799_999)
    with pytest.raises(DecisionRefused, match="9999-12-31"):
        decide(request, "approve", MARY.key, known=[end_of_time], now_ms=NOW)


def test_recorded_decisions_hide_no_new_one(place, monkeypatch):
    monkeypatch.setattr("edge_client.approval.folder._MAX_STATEMENTS", 3)
    made = place()
    said = [made.says(MARY, "approve", at=NOW + at) for at in range(4)]
    for each in said:
        (made.folder.path / f"{each.digest().hex()}.json").write_bytes(each.canonical())
    for new in said:
        known = [each.digest() for each in said if each is not new]
        assert list(made.folder.statements(known)) == [new]


def test_files_of_no_steward_hide_no_decision(place):
    made = place()
    made.put(made.says(MARY, "approve"))
    assert made.stage() == "approved"
    for number in range(1000):
        (made.folder.path / f"{number:04}.json").write_text("{}")
    with pytest.raises(OSError, match="take away those of no steward"):
        made.put(made.says(MARY, "withdraw", at=NOW + 1))


def test_a_decision_is_signed_later_than_those_before_it_whatever_the_clock_says(place):
    made = place()
    request = made.folder.request()
    approval = decide(request, "approve", MARY.key, now_ms=NOW)
    assert approval.statement.expires_ms == NOW + 30 * DAY_MS
    back = decide(request, "withdraw", MARY.key, known=[approval], now_ms=NOW - 60_000)
    assert back.statement.issued_ms == NOW + 1
    for each in (approval, back):
        made.put(each)
    assert made.stage() == "awaited"
    with pytest.raises(DecisionRefused, match="90 days at most"):
        decide(request, "approve", MARY.key, days=91)
    declined = decide(request, "decline", MARY.key, reason="no\x1b[2J " + "x" * 1000, now_ms=NOW)
    assert declined.statement.reason.startswith("no\N{REPLACEMENT CHARACTER}[2J x")
    assert len(declined.statement.reason) == 300


def test_the_request_holds_the_dry_run_and_is_made_anew_only_for_another_question(place):
    made = place()
    described = []

    def describe(document, manifest, tokenizer):
        described.append((document, manifest, tokenizer))
        return [f"trains {document.name}"], {"columns": ["text", "label"]}

    made.desk = Desk(
        made.home, made.policy, made.recorder, federation=FEDERATION, member="north", data="data", describe=describe
    )
    for document in (JOB, CHANGED, CHANGED):
        asyncio.run(made.desk.ask(document, MANIFEST, b"tokens"))
    assert described == [(CHANGED, MANIFEST, b"tokens")]
    request = made.folder.request()
    assert (request.lines, request.dry_run()) == (("trains questions",), {"columns": ["text", "label"]})
    assert request.document == CHANGED
    assert request.question.policy == made.policy.digest()
    assert made.folder.path.stat().st_mode & 0o077 == 0


def test_a_job_that_cannot_be_described_is_asked_about_all_the_same(place):
    made = place()

    def describe(*_):
        raise RuntimeError("a table is gone")

    made.desk = Desk(
        made.home, made.policy, made.recorder, federation=FEDERATION, member="north", data="data", describe=describe
    )
    asyncio.run(made.desk.ask(CHANGED, MANIFEST, None))
    assert "could not describe" in made.folder.request().lines[0]


def test_the_commands_see_what_the_running_member_will_count(place):
    made = place()
    request = made.folder.request()
    assert standing_at(made.home, request).stage == "awaited"
    # By this machine's clock, so that the command and the member agree.
    signed = decide(request, "approve", MARY.key)
    put(made.home, signed)
    assert standing_at(made.home, request).approved == ("mary",)
    made.now = signed.statement.issued_ms / 1000
    assert made.stage() == "approved"
    assert standing_at(made.home, request).approved == ("mary",)


def test_the_chain_verifies_with_its_statements_and_names_a_forged_one(place):
    made = place()
    made.put(made.says(MARY, "approve"))
    assert made.stage() == "approved"
    assert verify(made.ledger.path).sound
    lines = list(export_lines(made.ledger.path, made.home / "receipts"))
    assert verify_export(lines).sound
    # Somebody who can write the file appends an approval that no steward signed: the chain holds, the signature not.
    good = made.says(JOHN, "approve")
    made.ledger.approval(good.model_copy(update={"signature": "00" * 64}))
    verdict = verify(made.ledger.path)
    assert [str(each) for each in verdict.problems] == [
        f"record {made.ledger.sequence}: a steward's statement does not hold: its signature is not that of the key "
        "that it names"
    ]
    # Nor does it count here.
    assert made.desk.standing(JOB).approved == ("mary",)
    shown = json.loads(lines[-1])
    assert shown["kind"] == "approval"
    assert shown["body"]["statement"]["steward"] == MARY.public.hex()
