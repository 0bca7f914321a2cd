"""Who runs a command on the coordinator's machine, for the journal."""

__all__ = ["os_user"]


def os_user() -> str:
    """The operating system's user, as the machine knows them; "unknown" where it does not."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
