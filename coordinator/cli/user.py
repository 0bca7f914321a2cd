"""Names the person who runs a command on the coordinator's machine, for the journal.

No operator's name holds a colon, so the journal never mistakes a user of the machine for an operator.
"""

__all__ = ["os_user"]


def os_user() -> str:
    """Returns `machine:` and the name of the user whom this process runs as, or `#` and the number without a name.

    The system says so. The environment (LOGNAME) does not, because anyone can set it.
    """
    import os

    from toolkit.private_files import user_name

    return f"machine:{user_name(os.getuid())}"
