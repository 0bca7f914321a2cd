"""kill -9 at every point of a run: afterwards the old state or the new one counts, and never none.

A light interpreter of its own forks the processes, since this one may have threads.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.private_store.files import POINTS
from tests.support.places import ROOT

_PROGRAM = """
import json, os, shutil, signal, sys, tempfile
from pathlib import Path
from edge_client.private_store import PrivateStore
from edge_client.private_store.backup import back_up, restore
from edge_client.private_store.errors import StateSealed
from edge_client.private_store.upkeep import rekey
from tests.support.private_states import *

def confirmed(home):
    # The journal of these lives: vectors that were confirmed, by number.
    path = home / "journal"
    return [int(line) for line in path.read_text().split()] if path.exists() else []

def confirm(home, number):
    with (home / "journal").open("a") as journal:
        journal.write(f"{number}\\n")

def rounds(home, faults, say):
    with PrivateStore(home, FEDERATION, "data", faults=faults) as store:
        store.recover(lambda job, token: int(token.split("-")[0]) in confirmed(home))
        number = number_of(store.load("desk", DOCUMENT)) or 0
        for number in (number + 1, number + 2):
            store.stage("desk", f"{number}-aa", made(number))
            say("staged", number)
            confirm(home, number)
            store.commit("desk", f"{number}-aa")
            say("committed", number)
        store.stage("desk", "99-aa", made(99))
        store.discard("desk", "99-aa")

def rounds_after(home, said):
    journal = confirmed(home)
    with store_of(home) as store:
        store.recover(lambda job, token: int(token.split("-")[0]) in journal)
        number = number_of(store.load("desk", DOCUMENT)) or 0
        assert number == max([0, *journal]), (number, journal)
        assert number >= max([0, *(n for word, n in said if word == "committed")]), (number, said)
        assert store.staged("desk") == []
    assert not list(home.rglob("*.partial")), list(home.rglob("*"))

def moving(home, faults, say):
    restore(home, home.parent / "backup", federation=FEDERATION, member="north", faults=faults)
    say("restored", 9)

def moving_after(home, said):
    number = loaded(home)
    assert number == (9 if said else number) and number in (1, 9), number
    restore(home, home.parent / "backup", federation=FEDERATION, member="north")
    assert loaded(home) == 9

def sealing(home, faults, say):
    rekey(home, None, file_key(1), faults)
    say("sealed", 1)

def sealing_after(home, said):
    open_ones = 0
    for job in ("desk", "ward"):
        try:
            assert loaded(home, file_key(1), job) == 1
        except StateSealed:
            assert not said
            assert loaded(home, None, job) == 1
            open_ones += 1
    # Again: the rest follows, also what was staged.
    rekey(home, None, file_key(1))
    assert [loaded(home, file_key(1), job) for job in ("desk", "ward")] == [1, 1]
    with store_of(home, file_key(1)) as store:
        store.commit("desk", "5-aa")
    assert loaded(home, file_key(1)) == 5

def before(home, kind):
    if kind == "rounds":
        return
    kept(home, 1)
    if kind == "moving":
        other = home.parent / "other"
        other.mkdir()
        kept(other, 7, 8, 9)
        back_up(other, home.parent / "backup", member="north")
        with store_of(home) as store:
            store.stage("desk", "3-aa", made(3))
    if kind == "sealing":
        kept(home, 1, job="ward")
        with store_of(home) as store:
            store.stage("desk", "5-aa", made(5))

def lived(life, home, at):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        passed = 0
        def faults(point):
            nonlocal passed
            passed += 1
            if passed == at:
                os.write(theirs, f"killed {point}\\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
        code = 1
        try:
            life(home, faults, lambda word, number: os.write(theirs, f"{word} {number}\\n".encode()))
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\\n".encode())
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        lines = [line.split() for line in pipe]
    status = os.waitpid(child, 0)[1]
    point = next((line[1] for line in lines if line[0] == "killed"), None)
    return point, [(word, int(number)) for word, number in lines if word != "killed"], status

tally = {"points": [], "lives": 0, "kills": 0}
for kind in sys.argv[2:]:
    life, after = globals()[kind], globals()[kind + "_after"]
    for earlier in (0, 1) if kind == "rounds" else (0,):
        at, status = 0, -1
        while at == 0 or os.WIFSIGNALED(status):
            at += 1
            scratch = Path(tempfile.mkdtemp(dir=sys.argv[1]))
            home = scratch / "home"
            home.mkdir(mode=0o700)
            before(home, kind)
            if earlier:
                # The life after one that was killed between confirming and committing.
                with store_of(home) as store:
                    store.stage("desk", "1-aa", made(1))
                confirm(home, 1)
            point, said, status = lived(life, home, at)
            assert os.WIFSIGNALED(status) or status == 0, status
            tally["points"] += [point] if point else []
            tally["lives"] += 1
            tally["kills"] += os.WIFSIGNALED(status)
            after(home, said)
            shutil.rmtree(scratch)
tally["points"] = sorted(set(tally["points"]))
print(json.dumps(tally))
"""


def tallied(scratch: Path, *kinds: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(scratch), *kinds], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tally(tmp_path_factory) -> dict:
    return tallied(tmp_path_factory.mktemp("killed"), "rounds", "moving", "sealing")


def test_a_kill_at_any_point_loses_no_state(tally):
    """The program itself fails if a state is lost, mixed or brought back."""
    assert tally["kills"] == tally["lives"] - 4 > 80


def test_every_point_had_a_kill(tally):
    assert set(tally["points"]) == set(POINTS)
