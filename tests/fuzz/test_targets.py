"""The targets: each takes its seeds and what they become, and (long) a short run of the fuzzer finds nothing."""

import importlib.util
import signal
import subprocess
import sys
import threading

import pytest

from tacit import roster_wire
from tacit.roster import HeadInvalid
from tacit.v1 import federation_pb2
from tests.fuzz import __main__ as fuzzing
from tests.fuzz import targets
from tests.fuzz.__main__ import SEEDS
from tests.fuzz.seeds_of import seeds_of
from tests.fuzz.targets import TARGETS
from tests.support.places import ROOT
from tests.unit.tacit.test_document_limits import EXAMPLES


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_seeds_and_what_they_become(name):
    seeds = [file.read_bytes() for file in sorted((SEEDS / name).iterdir())]
    assert seeds
    for seed in seeds:
        # As they are, cut off, with something behind, with a bit of each of the first bytes turned.
        for data in (seed, seed[: len(seed) // 2], seed + seed, b""):
            TARGETS[name](data)
        for place in range(min(len(seed), 40)):
            TARGETS[name](seed[:place] + bytes([seed[place] ^ 4]) + seed[place + 1 :])


def test_every_document_is_fuzzed():
    assert {f"json_{kind.__name__}" for kind in EXAMPLES} <= TARGETS.keys()
    assert {folder.name for folder in SEEDS.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("name", ["json_JobDocument", "join_token", "packed_vector", "ledger_record", "private_state"])
def test_the_seeds_are_read_whole(name, monkeypatch):
    """A seed that its reader refuses at once would reach nothing behind the refusal."""

    class Refused(Exception):
        pass

    def suppress(*errors):
        class Said:
            def __enter__(self):
                return self

            def __exit__(self, kind, error, _):
                if kind is not None and issubclass(kind, errors):
                    raise Refused from error

        return Said()

    monkeypatch.setattr(targets.contextlib, "suppress", suppress)  # type: ignore[attr-defined]
    monkeypatch.setattr(targets, "_sentence", pytest.fail)
    for file in (SEEDS / name).iterdir():
        TARGETS[name](file.read_bytes())


def test_a_reader_that_takes_too_much_is_noticed(monkeypatch):
    monkeypatch.setattr(targets, "unpack_into", lambda out, *_: out.fill(2**31))
    with pytest.raises(AssertionError):
        TARGETS["packed_vector"](next(iter(seeds_of("packed_vector"))))


def test_an_unknown_field_of_a_head_is_dropped_and_no_finding(monkeypatch):
    answer = federation_pb2.FetchLogResponse.FromString(next(iter(seeds_of("roster_log"))))
    head = answer.head.SerializeToString() + b"\x3a\x01c"
    data = b"\x12" + bytes([len(head)]) + head
    assert federation_pb2.FetchLogResponse.FromString(data).head != answer.head
    TARGETS["roster_log"](data)
    # What is lost on the way is still found.
    monkeypatch.setattr(roster_wire, "head_to_pb", lambda head: federation_pb2.LogHead(root=head.head.root))
    with pytest.raises((AssertionError, HeadInvalid)):
        TARGETS["roster_log"](data)


def test_an_input_that_does_not_end_is_a_finding(monkeypatch):
    monkeypatch.setattr(fuzzing, "INPUT_SECONDS", 0.05)
    before = signal.getsignal(signal.SIGPROF)
    try:
        run = fuzzing._timed(_never_ends, seconds=60)
        with pytest.raises(TimeoutError, match="processor time"):
            run(b"")
        # An input that waits uses no processor time, and neither does what follows it.
        fuzzing._timed(lambda _: threading.Event().wait(0.2), seconds=60)(b"")
        assert signal.getitimer(signal.ITIMER_PROF)[0] == 0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _never_ends(_: bytes) -> None:
    while True:
        pass


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_a_short_run_finds_nothing(name):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not here: pip install atheris")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", name, "--seconds", "15"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
