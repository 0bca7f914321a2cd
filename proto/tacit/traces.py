"""How spans of a round are named, so that coordinator and members write into one trace without telling each other.

A round of a job is a trace. The identifiers are hashes of public names: nothing about them goes over the wire, and a
member needs no word of the coordinator to trace its part.

trace     the first 16 bytes of SHA-256("tacit trace", federation, job, round)
round     its root span; the first 8 bytes of SHA-256("tacit round", federation, job, round)
attempt   a span below the root; the first 8 bytes of SHA-256("tacit attempt", federation, job, round, attempt)

What is hashed are lines: the federation in hexadecimal, numbers in decimal, a line feed between two of them.
"""

import hashlib

from tacit.attempt import AttemptId

__all__ = ["SPAN_BYTES", "attempt_span", "round_span", "trace_of"]

SPAN_BYTES = 8


def trace_of(federation: bytes, job: str, round: int) -> bytes:
    """Returns the 16 bytes of a round's trace.

    Args:
        federation: The federation's name, 32 bytes.
        job: The job's name.
        round: The round's number.
    """
    return _hashed("trace", federation, job, round)[:16]


def round_span(federation: bytes, job: str, round: int) -> bytes:
    """Returns the 8 bytes of a round's root span."""
    return _hashed("round", federation, job, round)[:SPAN_BYTES]


def attempt_span(federation: bytes, attempt: AttemptId) -> bytes:
    """Returns the 8 bytes of an attempt's span."""
    return _hashed("attempt", federation, attempt.job, attempt.round, attempt.attempt)[:SPAN_BYTES]


def _hashed(what: str, federation: bytes, job: str, *numbers: int) -> bytes:
    # A job's name has no line break.
    text = "\n".join([f"tacit {what}", federation.hex(), job, *map(str, numbers)])
    return hashlib.sha256(text.encode()).digest()
