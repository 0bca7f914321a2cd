"""How to install a missing part of Tacit, in the one form that every error uses.

Nothing is released yet, so a part is installed from the source folder. A package index would install a stranger's
package.
"""

__all__ = ["DISTRIBUTION", "install_with"]

DISTRIBUTION = "tacit-federation"


def install_with(*extras: str) -> str:
    """Returns the command that installs these extras: `pip install '.[edge,export]'` in Tacit's source folder."""
    wanted = f"'.[{','.join(extras)}]'" if extras else "."
    return f"`pip install {wanted}` in Tacit's source folder"
