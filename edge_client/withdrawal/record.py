"""What a member can say by itself about its part in jobs, from its receipts and its ledgers. It only reads files."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edge_client.ledger.gate import Gate
from edge_client.ledger.history import current
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.receipts import SENDING, CorpusReceipt, Receipt, receipt_from
from edge_client.ledger.replay import LedgerState
from edge_client.ledger.store import LedgerError, reading
from learning.accounting.events import PrivacyEvent
from tacit.documents import DocumentInvalid

__all__ = ["OwnPart", "Spent", "own_parts"]


@dataclass(frozen=True, slots=True)
class Spent:
    """What a job cost by one ledger: epsilon of this job alone, as the gate counts it, at the limit's delta."""

    data: str
    epsilon: float
    delta: float


@dataclass
class OwnPart:
    """This member's part in one job.

    Args:
        job: the job's name.
        rounds: the rounds whose published sum holds its update, by its receipts.
        left: masked vectors that left this machine.
        unknown: those of them whose end this member does not know: a sum may hold them.
        texts: whether a file of synthetic text left.
        unbounded: whether a vector left without a mechanism, so that no epsilon bounds what it reveals.
        spent: what the ledgers say.
    """

    job: str
    rounds: set[int] = field(default_factory=set)
    left: int = 0
    unknown: int = 0
    texts: bool = False
    unbounded: bool = False
    spent: list[Spent] = field(default_factory=list)


def own_parts(home: Path, federation: bytes, member: str) -> tuple[dict[str, OwnPart], list[str]]:
    """Collects what this member's receipts and ledgers say, by job.

    Args:
        home: the member's folder.
        federation: the federation's fingerprint, 32 bytes.
        member: the member's name.

    Returns:
        The parts by job, and a sentence for each file that could not be read.
    """
    parts: dict[str, OwnPart] = {}
    problems: list[str] = []

    def part(job: str) -> OwnPart:
        return parts.setdefault(job, OwnPart(job))

    by_attempt: dict[tuple[str, int, int], list[Receipt]] = defaultdict(list)
    for receipt in _receipts(home, problems):
        if (receipt.federation, receipt.member) != (federation, member):
            continue
        if isinstance(receipt, CorpusReceipt):
            part(receipt.job).texts = True
        else:
            by_attempt[receipt.job, receipt.round, receipt.attempt].append(receipt)
    for (job, round, _), receipts in sorted(by_attempt.items()):
        mine = part(job)
        mine.left += 1
        mine.unbounded = mine.unbounded or any(each.event is None for each in receipts)
        ended = [each for each in receipts if each.outcome != SENDING]
        if any(each.outcome == "published" and (each.survivors is None or member in each.survivors) for each in ended):
            mine.rounds.add(round)
        elif not ended:
            mine.unknown += 1
    for path in sorted((home / "ledgers").glob("*.db")):
        try:
            with reading(path) as store:
                _spend(current(store), path.stem, federation, part)
        except LedgerError as error:
            problems.append(str(error))
    return parts, problems


def _receipts(home: Path, problems: list[str]) -> Iterator[Receipt | CorpusReceipt]:
    for path in ReceiptBook(home / "receipts").files():
        try:
            yield receipt_from(path.read_bytes(), what=str(path))
        except (OSError, DocumentInvalid) as error:
            problems.append(f"{path} cannot be read ({error}); `edge_client ledger verify` says more")


def _spend(state: LedgerState, name: str, federation: bytes, part: Callable[[str], OwnPart]) -> None:
    if state.limit is None:
        return
    gate = Gate(state.limit, state.monthly)
    counts: dict[str, Counter[PrivacyEvent]] = {}
    for each in state.reservations.values():
        if each.released is None and each.purpose.federation == federation:
            counts.setdefault(each.purpose.job, Counter())[each.event] += 1
    for job, events in counts.items():
        part(job).spent.append(Spent(name, gate.epsilon(events), state.limit.delta))
