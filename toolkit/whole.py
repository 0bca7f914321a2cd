"""Checks whole numbers of callers. Python would take 0 members or a batch of -1, and give nothing or fail elsewhere."""

from numbers import Integral

__all__ = ["whole"]


def whole(given: object, name: str, least: int) -> int:
    """Checks that an argument is a whole number of at least `least`, and returns it.

    Args:
        given: the argument; numpy's whole numbers count, True and False do not.
        name: its name, for the sentence.
        least: the smallest that is possible.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(given, Integral) or isinstance(given, bool) or given < least:
        raise ValueError(f"{name}={given!r} is not possible; give a whole number, {least} or more")
    return int(given)
