"""Recognises a member's home. It imports nothing, so that a command can ask before it loads a model library."""

from pathlib import Path

__all__ = ["in_a_members_home"]

# Folders of a member's home (docs/architecture.md).
_OF_A_MEMBER = ("identity", "ledgers")


def in_a_members_home(path: Path) -> Path | None:
    """Return the member's home that a file lies in; None if it lies in none."""
    for folder in path.resolve().parents:
        # A member that has enrolled and not run yet has no ledger.
        if (folder / "identity" / "identity.json").is_file() or all((folder / name).is_dir() for name in _OF_A_MEMBER):
            return folder
    return None
