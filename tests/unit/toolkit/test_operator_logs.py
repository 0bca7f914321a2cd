"""Logs: the same fields on both sides, in two formats."""

import io
import json
import logging
import re

import pytest
import structlog

from toolkit.logs import configure


@pytest.fixture(autouse=True)
def as_before():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def written(form: str, level: str = "info") -> io.StringIO:
    out = io.StringIO()
    configure(form, level, stream=out)
    return out


def test_json_is_one_object_a_line_with_utc_times():
    out = written("json")
    log = structlog.get_logger("test")
    log.info("attempt_ended", job="desk", attempt=3, digest=b"\xab" * 32, survivors=["a", "b"])
    log.warning("dropout", phase="mask")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", first.pop("at"))
    assert first == {
        "event": "attempt_ended",
        "level": "info",
        "job": "desk",
        "attempt": 3,
        "digest": "ab" * 32,
        "survivors": ["a", "b"],
    }
    assert second["level"] == "warning"


def test_console_is_for_people():
    out = written("console")
    structlog.get_logger().info("attempt_ended", job="desk", digest=b"\xab" * 4)
    assert "attempt_ended" in out.getvalue()
    assert "job=desk" in out.getvalue()
    assert "digest=abababab" in out.getvalue()
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("form", ["json", "console"])
def test_bytes_longer_than_a_digest_are_not_logged(form):
    out = written(form)
    structlog.get_logger().info("masked_input", vector=b"\x07" * 4096)
    assert "4096 bytes" in out.getvalue()
    assert "0707" not in out.getvalue()


def test_lines_below_the_level_are_dropped():
    out = written("json", "warning")
    log = structlog.get_logger()
    log.info("unseen")
    log.error("seen")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["seen"]


@pytest.mark.parametrize("form", ["json", "console"])
def test_library_logs_have_the_same_form(form):
    out = written(form)
    logging.getLogger("some.library").info("unseen")
    logging.getLogger("some.library").warning("%s went wrong", "something")
    assert "unseen" not in out.getvalue()
    assert "something went wrong" in out.getvalue()
    if form == "json":
        assert json.loads(out.getvalue())["level"] == "warning"


def test_an_exception_is_written_with_its_trace():
    out = written("json")
    try:
        raise ValueError("in the middle")
    except ValueError:
        structlog.get_logger().exception("failed")
    line = json.loads(out.getvalue())
    assert "ValueError: in the middle" in line["exception"]


def test_the_last_call_counts():
    first, second = written("json"), written("json")
    structlog.get_logger().info("once")
    logging.getLogger("library").warning("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 2


def test_the_default_is_standard_error(capsys):
    configure("json")
    structlog.get_logger().info("event")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "event"


@pytest.mark.parametrize(("form", "level"), [("xml", "info"), ("json", "loud")])
def test_an_unknown_format_or_level_is_refused(form, level):
    with pytest.raises(ValueError, match="does not exist; choose"):
        configure(form, level)
