"""Refuses one string where several values are asked for. Python would take it letter by letter, and raise nothing."""

__all__ = ["check_several"]


def check_several(given: object, name: str) -> None:
    """Checks that an argument is not one string.

    Args:
        given: the argument.
        name: its name, for the sentence.

    Raises:
        ValueError: it is a string.
    """
    if isinstance(given, str):
        raise ValueError(f"{name} is one string; give a list, also of one")
