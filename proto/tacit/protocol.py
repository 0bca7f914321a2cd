"""The version of `tacit.v1`. Member and coordinator each state theirs and work together only if the two are equal."""

from typing import Final

__all__ = ["PROTOCOL_VERSION", "disagreement"]

PROTOCOL_VERSION: Final = 1


def disagreement(*, member: int, coordinator: int) -> str | None:
    """Says which side to upgrade, or returns None if the two work together.

    Args:
        member: protocol version in the member's Hello.
        coordinator: protocol version in the coordinator's Welcome, or of this program.
    """
    if member == coordinator:
        return None
    behind = "member" if member < coordinator else "coordinator"
    return (
        f"the member speaks protocol version {member}, the coordinator version {coordinator}; "
        f"upgrade the {behind}'s software"
    )
