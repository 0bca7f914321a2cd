"""The distributions that a release has, and environments of an extra that are made of what is installed here.

Nothing is downloaded. `tests/unit/deploy/test_installations.py` installs the same wheel from a package index.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.places import ROOT

__all__ = ["Distributions", "build", "clean_copy", "environment", "needed", "tracked"]

_SCRIPT = "#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"


@dataclass(frozen=True)
class Distributions:
    """A wheel and a source distribution."""

    wheel: Path
    sdist: Path

    def requirements(self) -> list[Requirement]:
        """What the wheel's metadata requires, with the extras as markers."""
        with zipfile.ZipFile(self.wheel) as opened:
            (name,) = (each for each in opened.namelist() if each.endswith(".dist-info/METADATA"))
            lines = opened.read(name).decode().partition("\n\n")[0].splitlines()
        return [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist")]


def tracked() -> list[PurePosixPath]:
    """The files of the working copy that git tracks and that are still there. Skips the test where there is no git."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("this folder is no git repository, so nothing says which files belong to it")
    said = subprocess.run([git, "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    return [PurePosixPath(name) for name in said.split("\0") if name and (ROOT / name).is_file()]


def clean_copy(into: Path) -> Path:
    """Copies the tracked files of the working copy, as they are now, into a new folder."""
    for name in tracked():
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return into


def build(tree: Path, into: Path, *kinds: str) -> Distributions:
    """Runs `python -m build` with the build backend that is installed here.

    Args:
        tree: The source tree.
        into: The folder for the results.
        kinds: Options of `build`; without one, it makes the wheel from the source distribution.
    """
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", into, *kinds, tree]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    return Distributions(wheel, next(into.glob("*.tar.gz"), wheel))


def needed(requirements: Iterable[Requirement], extras: Iterable[str] = ()) -> set[str]:
    """The canonical names of the distributions that these requirements install on this machine, except ours.

    Args:
        requirements: The requirements.
        extras: The extras under which their markers count.
    """
    found: set[str] = set()
    waiting = list(_counting(requirements, extras))
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in found:
            found.add(name)
            waiting += _counting(map(Requirement, metadata.requires(name) or ()), requirement.extras)
    return found


def _counting(requirements: Iterable[Requirement], extras: Iterable[str]) -> Iterator[Requirement]:
    for each in requirements:
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield each


def environment(folder: Path, made: Distributions, *extras: str, also: Iterable[str] = ()) -> Path:
    """A virtual environment with the wheel and what these extras need: each distribution is linked from here.

    Args:
        folder: A new folder.
        made: The distributions.
        extras: The extras.
        also: Names of further distributions.

    Returns:
        Its folder of programs.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": folder, "platbase": folder}))
    for name in (*needed(made.requirements(), extras), *also):
        _link(metadata.distribution(name), packages)
    with zipfile.ZipFile(made.wheel) as opened:
        opened.extractall(packages)
    points = ConfigParser()
    (listed,) = packages.glob("tacit_federation-*.dist-info/entry_points.txt")
    points.read(listed)
    for program, place in points["console_scripts"].items():
        module, function = place.split(":")
        script = folder / "bin" / program
        script.write_text(_SCRIPT.format(python=folder / "bin" / "python", module=module, function=function))
        script.chmod(0o755)
    return folder / "bin"


def _link(distribution: metadata.Distribution, packages: Path) -> None:
    """Links what a distribution put into its site-packages; several distributions may share a namespace package."""
    assert distribution.files is not None
    home = Path(str(distribution.locate_file("")))
    waiting = {each.parts[0] for each in distribution.files if each.parts[0] not in ("..", "__pycache__")}
    for name in waiting:
        source, target = home / name, packages / name
        if source.is_dir() and not (source / "__init__.py").exists() and not name.endswith((".dist-info", ".libs")):
            # A namespace: only this distribution's own parts of it.
            target.mkdir(exist_ok=True)
            for inner in {
                each.parts[1] for each in distribution.files if each.parts[0] == name and len(each.parts) > 1
            }:
                if not (target / inner).exists():
                    (target / inner).symlink_to(source / inner)
        elif not target.exists():
            target.symlink_to(source)
