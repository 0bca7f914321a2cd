"""The version of `tacit.v1`: member and coordinator each say theirs, and work together only where both are equal."""

from typing import Final

__all__ = ["PROTOCOL_VERSION", "disagreement"]

PROTOCOL_VERSION: Final = 1


def disagreement(*, member: int, coordinator: int) -> str | None:
    """Which side to upgrade; None where the two work together.

    member: protocol version of its Hello.
    coordinator: protocol version of its Welcome, or of this program.
    """
    if member == coordinator:
        return None
    behind = "member" if member < coordinator else "coordinator"
    return (
        f"the member speaks protocol version {member}, the coordinator version {coordinator}; "
        f"upgrade the {behind}'s software"
    )
