"""Names the person who runs a command on the coordinator's machine, for the journal."""

__all__ = ["os_user"]


def os_user() -> str:
    """Returns the name of the operating system's user, or "unknown" if the machine has none."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
