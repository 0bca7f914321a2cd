"""A log that cannot be written costs lines, and nothing of what the process does."""

import contextlib
import io
import json
import logging
import sys
from errno import ENOSPC

import pytest
import structlog

from toolkit import logs
from toolkit.logs import configure, configure_beside


@pytest.fixture(autouse=True)
def _as_it_was():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logs._lost = logs._Lost()
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


class Disk(io.StringIO):
    """A stream on a disk that may be full."""

    full = False
    room = 0

    def write(self, text):
        if self.full and self.room:
            self.room -= 1
        elif self.full:
            raise OSError(ENOSPC, "No space left on device")
        return super().write(text)

    def lines(self):
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_full_disk_reaches_no_caller(form):
    full = open("/dev/full", "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    try:
        configure(form, "debug", stream=full)
        log = structlog.get_logger("coordinator")
        for write in (log.debug, log.info, log.warning, log.error, log.critical, log.exception):
            write("attempt_ended")
        assert logs._lost.news() == 6
        logging.getLogger("grpc").warning("a line of a library")
    finally:
        with contextlib.suppress(OSError):
            full.close()


def test_a_closed_stream_reaches_no_caller():
    stream = io.StringIO()
    configure("json", stream=stream)
    stream.close()
    structlog.get_logger("edge_client").info("round_sent")
    assert logs._lost.news() == 1


def test_the_log_says_how_many_lines_are_missing_once():
    disk = Disk()
    configure("json", stream=disk)
    log = structlog.get_logger("coordinator")
    log.info("serving")
    disk.full = True
    for _ in range(3):
        log.info("attempt_ended")
    disk.full = False
    log.info("job_paused")
    log.info("stopping")
    assert [each["event"] for each in disk.lines()] == ["serving", "job_paused", "log_lines_lost", "stopping"]
    assert disk.lines()[2]["lines"] == 3
    assert disk.lines()[2]["level"] == "error"


@pytest.mark.parametrize("level", ["info", "error"])
def test_a_disk_at_its_brink_hides_no_line(level):
    """The line that says so is refused as well."""
    disk = Disk()
    configure("json", level, stream=disk)
    log = structlog.get_logger("coordinator")
    disk.full = True
    for _ in range(10):
        log.error("attempt_ended")
    disk.room = 1
    log.error("serving")
    disk.full = False
    log.error("stopping")
    assert [each["event"] for each in disk.lines()] == ["serving", "stopping", "log_lines_lost"]
    assert disk.lines()[2]["lines"] == 11


def test_a_member_inside_a_program_is_not_ended_by_its_full_log(monkeypatch):
    disk = Disk()
    disk.full = True
    monkeypatch.setattr(sys, "stderr", disk)
    configure_beside("edge_client")
    structlog.get_logger("edge_client").warning("declined")
    disk.full = False
    structlog.get_logger("edge_client").warning("declined")
    assert "log_lines_lost" in disk.getvalue()
