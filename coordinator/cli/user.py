"""Names the person who runs a command on the coordinator's machine, for the journal.

No operator's name holds a colon, so the journal never mistakes a user of the machine for an operator.
"""

__all__ = ["os_user"]


def os_user() -> str:
    """Returns `machine:` and the name of the operating system's user, or "unknown" if the machine has none."""
    import getpass

    try:
        return f"machine:{getpass.getuser()}"
    except (KeyError, OSError):
        return "machine:unknown"
