"""kill -9 at every point that matters and at random points, and the order of writes to the disk.

A light interpreter of its own forks the processes, since this one may have threads.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.operations.ledger_faults import EVENT, LIMIT, new_member, purpose_of, receipt_of
from edge_client.ledger.ledger import Ledger, LedgerRolledBack, ledger_path
from edge_client.ledger.pin import pin_path, read_pin
from edge_client.ledger.points import POINTS
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.receipts import SENDING
from edge_client.ledger.verification import verify
from tests.support.places import ROOT

# A killed process loses nothing that the kernel has, so a folder in memory is enough.
MEMORY = next((path for path in (Path("/dev/shm"),) if path.is_dir()), None)  # noqa: S108

_RUN = """
import json, sys, tempfile
from pathlib import Path
from benchmarks.operations import ledger_faults
with tempfile.TemporaryDirectory(dir=sys.argv[1] or None) as scratch:
    print(json.dumps(vars(ledger_faults.{call})))
assert not any(heavy in sys.modules for heavy in ("torch", "sqlalchemy", "grpc"))
"""


def tallied(call: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(call=call), str(MEMORY or "")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_nothing_lost(tally: dict) -> None:
    found = {key: tally[key] for key in ("lost_charges", "blocked_starts", "broken_chains", "over_limit")}
    assert not any(found.values()), (found, tally["sentences"])


def test_a_kill_at_any_point_loses_no_charge():
    """One release in two attempts, with receipts: every point of it, in a first life and in one after a kill."""
    tally = tallied("at_every_point(Path(scratch), (3,))")
    assert_nothing_lost(tally)
    assert set(tally["points"]) == set(POINTS)
    assert tally["kills"] == tally["cycles"] - 2 > 150
    assert tally["charges"] > 100


@pytest.mark.long
def test_a_kill_at_any_point_of_a_longer_life_loses_no_charge():
    """A release in two attempts, one that is given back, and one more."""
    tally = tallied("at_every_point(Path(scratch), (3, 4, 5))")
    assert_nothing_lost(tally)
    assert tally["kills"] == tally["cycles"] - 2 > 300


@pytest.mark.long
def test_two_hundred_random_kills_lose_no_charge():
    tally = tallied("at_random(Path(scratch), 200, 7)")
    assert_nothing_lost(tally)
    assert tally["cycles"] == 200
    # Otherwise the test would have tried nothing.
    assert tally["kills"] > 80
    assert tally["charges"] > 80
    assert tally["refusals"] > 10
    assert len(tally["points"]) > 20


_CHARGE = """
import os, sys
from pathlib import Path
from benchmarks.operations.ledger_faults import EVENT, LIMIT, purpose_of, Member
from edge_client.ledger.ledger import Ledger, ledger_path
from benchmarks.operations.ledger_faults import EVENT, LIMIT, purpose_of, Member
from edge_client.ledger.ledger import Ledger, ledger_path
member = Member("north", None, b"", b"", bytes(32))
with Ledger.open(ledger_path(Path(sys.argv[1]), "data"), "data", LIMIT) as ledger:
    held = ledger.reserve(EVENT, purpose_of(member, "desk", 1))
    os.write(1, b"CHARGING")
    ledger.charge(held.number, 1)
    os.write(1, b"CHARGED")
"""


def test_a_charge_is_flushed_before_it_returns_and_pinned_after_that(tmp_path):
    """The kernel's calls, in order: the log is written and flushed, then the pin is flushed and renamed."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    calls = "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2"
    done = subprocess.run(
        [strace, "-y", "-o", trace, "-e", f"trace={calls}", sys.executable, "-c", _CHARGE, str(tmp_path / "home")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip("this machine does not allow tracing")
    assert done.returncode == 0, done.stderr
    text = trace.read_text()
    charge = text[text.index('"CHARGING"') : text.index('"CHARGED"')]
    wal, pin = r"<[^>]*data\.db-wal>", r"<[^>]*\.data\.json\.partial>"
    order = [
        rf"pwrite64\(\d+{wal}",
        rf"(?:fsync|fdatasync)\(\d+{wal}\)",
        rf"write\(\d+{pin}",
        rf"fsync\(\d+{pin}\)",
        r'rename\w*\([^\n]*\.data\.json\.partial"',
        r"fsync\(\d+<[^>]*/pins>\)",
    ]
    assert re.search(".*?".join(order), charge, flags=re.DOTALL), charge
    # After the flush, nothing of the ledger is written.
    flushed = list(re.finditer(order[1], charge))[-1].end()
    assert not re.search(r"pwrite64\(\d+<[^>]*data\.db", charge[flushed:])


class _Flushes:
    """What reaches the disk, in order: commits of the ledger, flushes of files and folders, and renames."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[str] = []
        fsync, replace = os.fsync, Path.replace

        def flushed(descriptor):
            fsync(descriptor)
            self.seen.append(f"flushed {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

        def renamed(path, target):
            replace(path, target)
            self.seen.append(f"renamed {path.name}")

        monkeypatch.setattr(os, "fsync", flushed)
        monkeypatch.setattr(Path, "replace", renamed)

    def at(self, point: str) -> None:
        if point == "append.committed":
            # In WAL mode with synchronous FULL, SQLite flushes once for each transaction.
            self.seen.append("committed")

    def taken(self) -> list[str]:
        taken, self.seen[:] = list(self.seen), []
        return taken


PINNED = ["flushed .data.json.partial", "renamed .data.json.partial", "flushed pins"]


def kept(name: str) -> list[str]:
    """Both files of a receipt are on the disk before either has its name, and the folder before the ledger's record."""
    files = [f".{name}.sig.partial", f".{name}.json.partial"]
    return [
        *(f"flushed {each}" for each in files),
        *(f"renamed {each}" for each in files),
        "flushed desk",
        "committed",
    ]


def test_what_a_round_flushes_and_in_which_order(tmp_path, monkeypatch):
    member, flushes = new_member(), _Flushes(monkeypatch)
    with Ledger.open(ledger_path(tmp_path, "data"), "data", LIMIT, faults=flushes.at) as ledger:
        book = ReceiptBook(tmp_path / "receipts", flushes.at)
        for round_ in (1, 2):
            flushes.taken()
            held = ledger.reserve(EVENT, purpose_of(member, "desk", round_))
            assert flushes.taken() == ["committed"]
            ledger.charge(held.number, round_)
            assert flushes.taken() == ["committed", *PINNED]
            sending = receipt_of(ledger, held, round_, member).model_copy(update={"outcome": SENDING, "result": None})
            book.write(sending, member, ledger)
            # The first receipt also keeps folders and certificates.
            sent = flushes.taken()[-6:]
            assert sent == kept(f"{round_}.{round_}.sent")
            ledger.settle(held.number, round_, "published", b"")
            assert flushes.taken() == ["committed"]
            book.write(receipt_of(ledger, held, round_, member), member, ledger)
            assert flushes.taken() == kept(f"{round_}.{round_}")
        last = ledger.sequence
    # The end pins what waited for it.
    assert flushes.taken() == PINNED
    pin = read_pin(pin_path(ledger_path(tmp_path, "data")))
    assert pin.sequence == last


def test_a_first_charge_flushes_the_folders_of_the_ledger_and_its_pin(tmp_path, monkeypatch):
    """The file system may else forget a folder at a power cut, with the charge in it."""
    member, flushes = new_member(), _Flushes(monkeypatch)
    with Ledger.open(ledger_path(tmp_path / "home", "data"), "data", LIMIT) as ledger:
        ledger.charge(ledger.reserve(EVENT, purpose_of(member, "desk", 1)).number, 1)
    flushed = flushes.taken()
    assert flushed.count("flushed home") == 2
    assert flushed.index("flushed home") < flushed.index("flushed pins")
    assert flushed[0] == f"flushed {tmp_path.name}"


def test_a_copy_that_lacks_a_charge_is_refused_and_one_that_lacks_a_receipt_is_mended(tmp_path):
    """Although receipts are not pinned at once, as after a kill."""
    member, path = new_member(), ledger_path(tmp_path, "data")
    book = ReceiptBook(tmp_path / "receipts")
    with Ledger.open(path, "data", LIMIT) as ledger:
        held = ledger.reserve(EVENT, purpose_of(member, "desk", 1))
        before_charge = copied(path)
        ledger.charge(held.number, 1)
        before_receipt, pin = copied(path), pin_path(path).read_bytes()
        book.write(receipt_of(ledger, held, 1, member), member, ledger)
        assert pin_path(path).read_bytes() == pin
    pin_path(path).write_bytes(pin)
    put_back(path, before_charge)
    with pytest.raises(LedgerRolledBack):
        Ledger.open(path, "data", LIMIT)
    put_back(path, before_receipt)
    with Ledger.open(path, "data", LIMIT) as ledger:
        assert ledger.reservation(held.number).charged
        assert len(book.recover(ledger)) == 1
    assert verify(path, tmp_path / "receipts").sound


def copied(path: Path) -> dict[str, bytes]:
    return {name: path.with_name(name).read_bytes() for name in (path.name, path.name + "-wal")}


def put_back(path: Path, files: dict[str, bytes]) -> None:
    for name in (path.name, path.name + "-wal", path.name + "-shm"):
        path.with_name(name).unlink(missing_ok=True)
    for name, content in files.items():
        path.with_name(name).write_bytes(content)
