"""Logs: fields instead of sentences, on standard error, the same on both sides.

An event is a short name in the past tense with fields: `log.info("attempt_ended", job=..., reason=...)`. Times are UTC,
ISO 8601. The console format is for people, json (one object a line) for collectors. Fields never carry text, tokens of
text, keys, shares, secrets or unmasked vectors. Bytes are digests and appear in hexadecimal.

Logs of libraries that use the standard library appear in the same form, from level warning up.

No value reaches the log with a character on which a terminal or log viewer acts, whatever the caller passed
(`toolkit.text.clean`). Only a traceback keeps its line breaks.

A stream that takes no line, because its disk is full or its reader has gone, costs lines and nothing else: no caller
hears of it. Once it takes lines again, `log_lines_lost` says how many it refused since the process began. Those that
were in its buffer may stand in the log after all.
"""

import logging
import sys
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TextIO

import structlog

from toolkit.text import MAX_SHOWN, clean

__all__ = ["configure", "configure_beside"]

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

# Of longer bytes only the length is logged: a digest has 32, and nothing longer belongs in a log.
_MAX_BYTES = 32
# Maximum characters of one value. A traceback may have more (`toolkit.text.MAX_SHOWN`).
_MAX_VALUE = 4096
_LINES = ("exception", "stack")


def configure(
    format: str,
    level: str = "info",
    *,
    stream: TextIO | None = None,
    first: Sequence[structlog.types.Processor] = (),
) -> None:
    """Sets up logging for the process. The last call counts.

    Args:
        format: console or json.
        level: debug, info, warning or error.
        stream: where lines go; by default standard error.
        first: processors that see each of our lines before it is written, and may drop it.

    Raises:
        ValueError: the format or level does not exist.
    """
    if format not in ("console", "json"):
        raise ValueError(f"log format {format!r} does not exist; choose console or json")
    threshold = _LEVELS.get(level)
    if threshold is None:
        raise ValueError(f"log level {level!r} does not exist; choose {', '.join(_LEVELS)}")
    out = sys.stderr if stream is None else stream
    renderer: structlog.types.Processor = _console(out)
    if format == "json":
        renderer = structlog.processors.JSONRenderer(sort_keys=True, default=str)
    structlog.configure(
        processors=[*first, *_SHARED, *_LAST, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *names: _Lines(out, names),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_LAST, renderer],
            foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.WARNING))


class _Lost:
    """The number of lines that were refused since the process began. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines = self._told = 0

    def add(self) -> None:
        with self._lock:
            self._lines += 1

    def news(self) -> int:
        """Returns the number if it has grown since the last call; 0 otherwise."""
        with self._lock:
            grown, self._told = self._lines > self._told, self._lines
            return self._lines if grown else 0


_lost = _Lost()


class _Lines(structlog.WriteLogger):
    """Writes lines to a stream, for the logger of these names."""

    def __init__(self, stream: TextIO, names: Sequence[str]) -> None:
        super().__init__(stream)
        self._names = names

    def msg(self, message: str) -> None:
        """Writes a line."""
        try:
            super().msg(message)
        except (OSError, ValueError):
            # ValueError: somebody has closed the stream.
            _lost.add()
            return
        if lines := _lost.news():
            # If this line is refused, too, the next one says so. No level leaves it out.
            structlog.get_logger(*self._names).error("log_lines_lost", lines=lines)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


class _OursBeside(_Lines):
    """Writes our lines in a program's process."""


def configure_beside(ours: str) -> None:
    """Sets up our own loggers in the process of a program, from level warning up, in the console's form.

    The program's loggers stay as they are, those of structlog and those of the standard library. If it has configured
    structlog, then that is where our lines go, too.

    Args:
        ours: the name of our loggers.
    """
    if structlog.is_configured():
        return
    config = structlog.get_config()
    theirs, make = tuple(config["processors"]), config["logger_factory"]
    own = (*_SHARED, *_LAST, _console(sys.stderr))

    def logger(*names: Any) -> Any:
        return _OursBeside(sys.stderr, names) if names[:1] == (ours,) else make(*names)

    def line(logger: Any, method: str, event: Any) -> Any:
        if isinstance(logger, _OursBeside) and _LEVELS.get(method, logging.CRITICAL) < logging.WARNING:
            raise structlog.DropEvent
        for process in own if isinstance(logger, _OursBeside) else theirs:
            event = process(logger, method, event)
        return event

    structlog.configure(processors=[line], logger_factory=logger)


def _console(out: TextIO) -> structlog.types.Processor:
    return structlog.dev.ConsoleRenderer(
        colors=out.isatty(), timestamp_key="at", exception_formatter=structlog.dev.plain_traceback
    )


def _hexadecimal(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if isinstance(value, bytes | bytearray | memoryview):
            data = bytes(value)
            event[key] = data.hex() if len(data) <= _MAX_BYTES else f"{len(data)} bytes"
    return event


def _cleaned(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in list(event):
        value = event.pop(key)
        if key in _LINES and isinstance(value, str):
            event[key] = clean(value, MAX_SHOWN, lines=True)
        else:
            event[clean(str(key), _MAX_VALUE)] = _shown(value)
    return event


def _shown(value: object) -> object:
    """Converts a value for JSON, with all text in it cleaned."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {clean(str(key), _MAX_VALUE): _shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return clean(str(value), _MAX_VALUE)


_SHARED: tuple[structlog.types.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    _hexadecimal,
)
# Directly before the renderer, because what is added after cleaning would reach the log unchanged.
_LAST: tuple[structlog.types.Processor, ...] = (structlog.processors.format_exc_info, _cleaned)
