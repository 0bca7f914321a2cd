"""A member inside a program leaves the program's logs and output alone."""

import logging
import os
import re
import sys
from concurrent.futures import wait

import pytest
import structlog

import tacit
from tests.support import party
from toolkit.console import CommandFailed

ROWS = [(f"text {number}", "a") for number in range(10)]


class Seen(tacit.Member):
    """A member that calls `look` once it has begun, in its own thread, and then ends."""

    def __init__(self, home, look):
        super().__init__(home)
        self._look = look

    def _begun(self, stop):
        super()._begun(stop)
        if stop is not None:
            self._look()
            stop()


@pytest.fixture
def home(tmp_path):
    """A member's home, whose coordinator does not answer."""
    return party.member_home(tmp_path / "home", "localhost:9")


@pytest.fixture
def logged():
    """The program's own logging, to a list."""
    lines, root = [], logging.getLogger()
    before = root.handlers[:], root.level

    class Kept(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    root.handlers[:], root.level = [Kept()], logging.INFO
    yield lines
    root.handlers[:], root.level = before


def test_a_member_that_ended_by_itself_starts_again(home):
    member = tacit.Member(home / "nowhere").start(ROWS, ledger="own")
    assert not wait([member._ended]).not_done
    assert not member.running
    member.home = home
    with member.start(ROWS, ledger="own"):
        assert member.running
        with pytest.raises(RuntimeError, match="this member runs already; stop it first"):
            member.start(ROWS, ledger="own")
    assert not member.running


def test_logging_stays_as_it_is(home, logged):
    root = logging.getLogger()
    before = root.handlers[:]
    Seen(home, lambda: logging.getLogger("my.program").info("while it runs")).run(ROWS, ledger="own")
    logging.getLogger("my.program").info("after it")
    with pytest.raises(CommandFailed):
        tacit.Member(home / "nowhere").run(ROWS, ledger="own")
    assert (root.handlers, root.level) == (before, logging.INFO)
    assert logged == ["while it runs", "after it"]


def test_structlog_stays_as_it_is(home, capsys):
    """A program that uses it without a configuration sees all its lines, on standard output."""
    log = structlog.get_logger("my.program")
    log.debug("done", who="me")
    before = capsys.readouterr().out
    Seen(home, lambda: log.debug("done", who="me")).run(ROWS, ledger="own")
    log.debug("done", who="me")
    # But for the time.
    assert re.sub(r"\d", "0", capsys.readouterr().out) == re.sub(r"\d", "0", before) * 2


def test_a_configuration_of_structlog_is_kept(home):
    lines = []
    structlog.configure(processors=[lambda *given: lines.append(given[2]) or "", structlog.processors.JSONRenderer()])
    before = structlog.get_config()
    Seen(home, lambda: None).run(ROWS, ledger="own")
    assert structlog.get_config() == before
    assert any(line["event"] == "runtime" for line in lines)


def test_the_members_own_warnings_are_on_standard_error(home, capsys):
    """Cleaned, as everywhere; what is less than a warning is not shown."""

    def look():
        structlog.get_logger("edge_client").warning("odd", said="a\x1bb")
        structlog.get_logger("edge_client").info("usual")

    Seen(home, look).run(ROWS, ledger="own")
    out, err = capsys.readouterr()
    assert out == ""
    assert "odd" in err
    assert "said=a\ufffdb" in err
    assert "usual" not in err
    assert "runtime" not in err


def test_standard_output_stays_where_it_is_although_standard_error_is_a_terminal(home, monkeypatch):
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", 0), os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        out, seen = sys.stdout, []
        Seen(home, lambda: seen.append((sys.stdout, sys.stderr))).run(ROWS, ledger="own")
        assert seen == [(out, terminal)]
