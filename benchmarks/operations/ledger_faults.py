"""Kills a ledger thousands of times and checks that it loses nothing.

A worker is forked, opens the ledger, recovers, and makes releases as a member does: reserve, charge, settle, receipt,
with a second attempt or a released reservation now and then. It is killed at a fault point (`toolkit.durable`) drawn at
random, or every fourth time by a timer, wherever it is. Over a pipe it reports which calls have returned. Then the
ledger is opened again and compared:

    lost_charges     charges that had returned and are not in the ledger
    blocked_starts   starts that failed
    broken_chains    chains or receipts that do not verify
    over_limit       ledgers whose charges no order of the filter covers

Killing shows that everything is written in the right order and before its call returns. It does not show that the disk
keeps flushed data when the power fails; that depends on fsync. The parent process has no threads, so it can fork.
"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from benchmarks.library.record import Figure, open_results, parser
from edge_client.ledger.chain import Charged, Reserved
from edge_client.ledger.ledger import BudgetSpent, Ledger, LedgerError, Purpose, Reservation, ledger_path
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.receipts import Party, Receipt, Segment
from edge_client.ledger.verification import verify
from learning.accounting.events import SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import PrivacyFilter
from tacit.identity import Role, new_key, sign
from tacit.mechanism import DpSgd
from toolkit.durable import Faults

BENCH = "ledger_faults"

CYCLES = 10_000
QUICK_CYCLES = 200
SEED = 1

LIMIT = Limit(2.7, 1e-5)
# 45 of them fit.
EVENT = SampledGaussian(multiplier=1.2, rate=0.02, steps=20)
# A spent ledger is used for a while longer, then the next one begins.
CYCLES_A_LEDGER = 80
# A complete run of a worker takes about 25 milliseconds.
_TIMER_SECONDS = 0.025
_POINTS_A_LIFE = 140


# Reports to the parent that a call has returned.
Say = Callable[[str], None]
Life = Callable[[Say, Faults], None]


@dataclass(frozen=True)
class Member:
    """The member that signs the receipts."""

    name: str
    key: rsa.RSAPrivateKey
    certificate: bytes
    root_pem: bytes
    federation: bytes

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate."""
        return sha256(self.certificate).digest()

    def sign(self, message: bytes) -> bytes:
        """Sign as a member's identity does."""
        return sign(self.key, message)


def new_member(name: str = "north") -> Member:
    """Make the only member of a federation. Takes a second."""
    from coordinator.pki import Authority

    now = datetime.now(UTC)
    authority, key = Authority.create(now=now), new_key()
    certificate = authority.issue(key.public_key(), Role.MEMBER, name, now=now)
    return Member(
        name,
        key,
        certificate.public_bytes(serialization.Encoding.DER),
        authority.certificate.public_bytes(serialization.Encoding.PEM),
        authority.certificate.fingerprint(hashes.SHA256()),
    )


def receipt_of(ledger: Ledger, held: Reservation, attempt: int, member: Member) -> Receipt:
    """Return the receipt that the member would write for an attempt."""
    purpose = held.purpose
    return Receipt(
        at_ms=time.time_ns() // 1_000_000,
        federation=member.federation,
        member=member.name,
        job=purpose.job,
        round=purpose.round,
        attempt=attempt,
        job_document=purpose.document,
        version=purpose.version,
        mechanism=DpSgd(noise_multiplier=0.9),
        event=held.event,
        reservation=held.number,
        vector=sha256(f"vector {held.number}".encode()).digest(),
        vector_bytes=4096,
        bits=32,
        segments=(Segment(name="update", values=1024),),
        cohort=(Party(member=member.name, certificate=member.fingerprint),),
        cohort_size=1,
        assumed_corrupt=0,
        threshold=1,
        honest=1,
        sparse_graph=None,
        survivors=(member.name,),
        outcome="published",
        result=sha256(b"result").digest(),
        ledger=ledger.id.hex(),
        previous=ledger.last_receipt,
    )


def purpose_of(member: Member, job: str, round: int) -> Purpose:
    """Return the purpose of a release."""
    digest = sha256(f"{job}/{round}".encode()).digest()
    return Purpose(
        federation=member.federation,
        job=job,
        round=round,
        version=digest,
        document=sha256(job.encode()).digest(),
        mechanism="dp-sgd",
        data=sha256(b"data").digest(),
    )


def releases(home: Path, member: Member, rounds: Iterable[int], say: Say, faults: Faults) -> None:
    """Do what a member's process does from its start to its end, and call `say` after each call that returned."""
    with Ledger.open(ledger_path(home, "data"), "data", LIMIT, faults=faults) as ledger:
        book = ReceiptBook(home / "receipts", faults)
        ledger.recover()
        book.recover(ledger)
        say("started")
        for round_ in rounds:
            try:
                held = ledger.reserve(EVENT, purpose_of(member, "desk", round_))
            except BudgetSpent:
                say("spent")
                return
            if round_ % 5 == 4:
                ledger.release(held.number, "training was cancelled")
                continue
            for attempt in (2 * round_, 2 * round_ + 1)[: 1 + (round_ % 3 == 0)]:
                ledger.charge(held.number, attempt)
                say(f"charged {held.number} {attempt}")
                ledger.settle(held.number, attempt, "published", b"")
                book.write(receipt_of(ledger, held, attempt, member), member, ledger)


def killed(life: Life, at: int | None = None, timer: float | None = None) -> tuple[list[str], int]:
    """Run `life` in a forked process, and kill it.

    Args:
        at: number of the fault point, in order of passing, at which it is killed.
        timer: seconds after which it is killed.

    Returns:
        The lines that it reported, and its wait status.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _worker(life, theirs, at, timer)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read().decode().splitlines()
    _, status = os.waitpid(child, 0)
    return said, status


def _worker(life: Life, pipe: int, at: int | None, timer: float | None) -> NoReturn:
    def say(line: str) -> None:
        os.write(pipe, f"{line}\n".encode())

    passed = 0

    def faults(point: str) -> None:
        nonlocal passed
        passed += 1
        if passed == at:
            say(f"killed {point}")
            os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        if timer is not None:
            # Without a handler, SIGALRM ends the process at any instruction.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timer)
        life(say, faults)
        signal.setitimer(signal.ITIMER_REAL, 0)
        code = 0
    except BaseException as error:  # noqa: BLE001  the child must not continue in the parent's code
        say(f"failed {type(error).__name__}: {error}")
    finally:
        os._exit(code)


@dataclass
class Tally:
    """The findings so far."""

    cycles: int = 0
    kills: int = 0
    charges: int = 0
    refusals: int = 0
    lost_charges: int = 0
    blocked_starts: int = 0
    broken_chains: int = 0
    over_limit: int = 0
    # Fault points at which processes were killed; kills by the timer do not count.
    points: Counter[str] = field(default_factory=Counter)
    sentences: list[str] = field(default_factory=list)


def restart(home: Path, member: Member, returned: set[tuple[int, int]], tally: Tally, *, signatures: bool) -> None:
    """Open the ledger again after a kill, and check it. returned: every charge that ever returned."""
    path = ledger_path(home, "data")
    try:
        with Ledger.open(path, "data", LIMIT) as ledger:
            ledger.recover()
            ReceiptBook(home / "receipts").recover(ledger)
            charged = {
                (record.body.reservation, record.body.attempt)
                for record in ledger.records()
                if isinstance(record.body, Charged)
            }
            events = {
                record.sequence: record.body.event for record in ledger.records() if isinstance(record.body, Reserved)
            }
    except LedgerError as error:
        tally.blocked_starts += 1
        tally.sentences.append(str(error))
        return
    tally.lost_charges += len(returned - charged)
    # Computed from the records, independently of the ledger's own gate.
    if not PrivacyFilter(LIMIT).admits([events[number] for number in {number for number, _ in charged}]):
        tally.over_limit += 1
    verdict = verify(path, home / "receipts" if signatures else None)
    if not verdict.sound:
        tally.broken_chains += 1
        tally.sentences += [str(problem) for problem in verdict.problems]


def note(said: list[str], status: int, returned: set[tuple[int, int]], tally: Tally) -> None:
    """Count the lines of a process, and how it ended."""
    tally.cycles += 1
    tally.kills += os.WIFSIGNALED(status)
    for line in said:
        word, _, rest = line.partition(" ")
        if word == "charged":
            number, attempt = rest.split()
            returned.add((int(number), int(attempt)))
            tally.charges += 1
        elif word == "spent":
            tally.refusals += 1
        elif word == "killed":
            tally.points[rest] += 1
        elif word == "failed":
            tally.blocked_starts += 1
            tally.sentences.append(rest)


def at_every_point(scratch: Path, rounds: Sequence[int]) -> Tally:
    """Kill a first run at each of its fault points in turn, then likewise a run that follows a killed one."""
    member, tally = new_member(), Tally()
    for earlier in (False, True):
        status, at = -1, 0
        while at == 0 or os.WIFSIGNALED(status):
            at += 1
            home = Path(tempfile.mkdtemp(dir=scratch))
            returned: set[tuple[int, int]] = set()
            if earlier:
                # Leaves an uncharged reservation for the next run to find.
                killed(partial(_leave_reserved, home, member))
            said, status = killed(partial(releases, home, member, rounds), at)
            note(said, status, returned, tally)
            restart(home, member, returned, tally, signatures=True)
            shutil.rmtree(home)
    return tally


def _leave_reserved(home: Path, member: Member, say: Say, faults: Faults) -> None:
    ledger = Ledger.open(ledger_path(home, "data"), "data", LIMIT)
    ledger.reserve(EVENT, purpose_of(member, "left", 1))
    os.kill(os.getpid(), signal.SIGKILL)


def at_random(scratch: Path, cycles: int, seed: int) -> Tally:
    """Run cycles on one ledger until it has long been spent, then on the next one."""
    member, tally, chance = new_member(), Tally(), random.Random(seed)
    home, returned = scratch, set[tuple[int, int]]()
    for number in range(cycles):
        cycle = number % CYCLES_A_LEDGER
        if cycle == 0:
            home, returned = Path(tempfile.mkdtemp(dir=scratch)), set()
        by_timer = number % 4 == 3
        said, status = killed(
            partial(releases, home, member, range(2 * cycle, 2 * cycle + 2)),
            None if by_timer else chance.randint(1, _POINTS_A_LIFE),
            chance.uniform(0.0, _TIMER_SECONDS) if by_timer else None,
        )
        note(said, status, returned, tally)
        last = cycle == CYCLES_A_LEDGER - 1 or number == cycles - 1
        restart(home, member, returned, tally, signatures=last)
        if last:
            shutil.rmtree(home)
    return tally


def measure(cycles: int, seed: int) -> list[Figure]:
    """Measure one run and return its figures."""
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        started = time.monotonic()
        tally = at_random(Path(scratch), cycles, seed)
        seconds = time.monotonic() - started
    if tally.sentences:
        print(json.dumps({"sentences": tally.sentences[:20]}))
    more = {
        "killed": tally.kills,
        "points": len(tally.points),
        "charges": tally.charges,
        "refusals": tally.refusals,
        "seconds": round(seconds, 1),
    }
    return [
        Figure("cycles", tally.cycles, more=more),
        Figure("lost_charges", tally.lost_charges, more={"target": 0}),
        Figure("blocked_starts", tally.blocked_starts, more={"target": 0}),
        Figure("broken_chains", tally.broken_chains, more={"target": 0}),
        Figure("over_limit", tally.over_limit, more={"target": 0}),
    ]


def main() -> None:
    """Command line."""
    options = parser("operations.ledger_faults")
    options.add_argument("--cycles", type=int, default=CYCLES)
    chosen = options.parse_args()
    results = open_results(BENCH, quick=chosen.quick)
    cycles = QUICK_CYCLES if chosen.quick else chosen.cycles
    case: dict[str, object] = {}
    if not results.done(case, SEED):
        results.open([SEED])
        results.add(case, measure(cycles, SEED), seed=SEED)


if __name__ == "__main__":
    main()
