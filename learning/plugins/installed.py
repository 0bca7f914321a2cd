"""Finds the distributions that register models, and the digest of their files. It imports nothing of them.

The digest is SHA-256 of the distribution's name, version and the SHA-256 of each file that its RECORD lists, computed
anew over the real files. Of the installer's own folder (dist-info) only METADATA and entry_points.txt count, since
installers write the others. Cached byte code of a listed source does not count, since nothing runs it.

Guarantees: every counted file is what its installer wrote (its RECORD has the same hash), inside the folder of the
installation, and either Python source or no code. An installation that cannot promise this has a reason instead of a
digest.
"""

import base64
import csv
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from learning.training.outcome import ModelUnsuitable
from tacit.plugin import PluginModel

__all__ = ["GROUP", "Installed", "PluginUnusable", "checked", "installed_plugins"]

# The entry point group.
GROUP = "tacit.models"

# Bytes of all files of a distribution together.
_MAX_BYTES = 64 * 1024 * 1024
_MAX_FILES = 10_000
_SCRIPTS = ("console_scripts", "gui_scripts")
# The files of dist-info that decide what runs.
_DECIDING = frozenset({"METADATA", "entry_points.txt"})
# What runs without anybody importing it, or cannot be read by a person before it runs.
_STARTS_BY_ITSELF = frozenset({"sitecustomize", "usercustomize"})
_COMPILED = frozenset({".so", ".pyd", ".dylib", ".dll", ".pyc", ".pyo"})


class PluginUnusable(ModelUnsuitable):
    """The plugin that a job names cannot be used here.

    The text says nothing of the member's data, so the coordinator may hear it. `private` is for this machine alone.
    """

    def __init__(self, detail: str, private: str = "") -> None:
        super().__init__(detail)
        self.private = private


@dataclass(frozen=True, slots=True)
class Installed:
    """A distribution that registers models.

    Attributes:
        distribution: Its normalised name.
        version: Its version.
        models: What its entry points in the group name, by their names.
        digest: The digest of its files; None if it cannot be used.
        unusable: Why not; empty if it can.
        sources: Path and bytes of each Python module, by the module's full name.
    """

    distribution: str
    version: str
    models: Mapping[str, str]
    digest: bytes | None = None
    unusable: str = ""
    sources: Mapping[str, tuple[Path, bytes]] = field(default_factory=dict, repr=False)


def installed_plugins() -> list[Installed]:
    """Every distribution here with entry points in the group, by name."""
    # The entry points come first: reading all distributions' metadata for their names takes twelve times as long.
    names = sorted({_name_of(each) for each in distributions() if _models(each)})
    # As for an import, the first on the path counts, even if it registers none.
    found = [(name, there) for name in names if (there := _first(name)) is not None and _models(there)]
    return [_read(name, there) for name, there in found]


def checked(model: PluginModel) -> Installed:
    """The distribution that a job names, if it is here with the same version and files. Nothing of it is imported.

    Raises:
        PluginUnusable: It is not.
    """
    named = f"plugin {model.distribution} {model.version}"
    there = _first(model.distribution)
    if there is None:
        raise PluginUnusable(
            f"{named} is not installed here, and the job's model comes from it; install its wheel from a source that "
            "you trust"
        )
    if there.version != model.version:
        raise PluginUnusable(
            f"{named} is not installed here: this machine has version {there.version[:63]}; install the version that "
            "the job names"
        )
    found = _read(model.distribution, there)
    if found.digest is None:
        raise PluginUnusable(f"{named} cannot be used here: {found.unusable}")
    if found.digest != model.files:
        raise PluginUnusable(
            f"{named} has other files here ({found.digest.hex()}) than the job names ({model.files.hex()}); install "
            "the wheel that the operator has, and compare with `edge_client models`"
        )
    if model.name not in found.models:
        has = ", ".join(sorted(found.models)) or "none"
        raise PluginUnusable(f"{named} registers no model {model.name} (it has: {has}); change model.name in the job")
    return found


def _first(name: str) -> Distribution | None:
    """The first distribution of that name on the path."""
    return next(iter(distributions(name=name)), None)


def _name_of(distribution: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()


def _models(distribution: Distribution) -> dict[str, str]:
    return {entry.name: entry.value for entry in distribution.entry_points.select(group=GROUP)}


def _read(name: str, distribution: Distribution) -> Installed:
    version, models = distribution.version, _models(distribution)
    try:
        digests: dict[str, str] = {}
        sources: dict[str, tuple[Path, bytes]] = {}
        for inside, path, data in _files(distribution):
            digests[str(inside)] = hashlib.sha256(data).hexdigest()
            if (module := _module_of(inside)) is not None:
                # The digest does not hold the order of RECORD, which would decide between them.
                if sources.get(module, (path,))[0] != path:
                    raise _NotAsInstalled(f"it has two files of the module {module}; leave one out")
                sources[module] = path, data
    except _NotAsInstalled as error:
        return Installed(name, version, models, unusable=str(error))
    content = {"distribution": name, "version": version, "files": digests}
    named = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return Installed(name, version, models, hashlib.sha256(b"tacit/plugin/v1/" + named).digest(), sources=sources)


class _NotAsInstalled(Exception):
    """The text says why the files have no digest, and what to do."""


def _files(distribution: Distribution) -> Iterator[tuple[PurePosixPath, Path, bytes]]:
    """Yields each counted file: its path inside the installation, where it is, and its bytes.

    Raises:
        _NotAsInstalled: The installation cannot be named by a digest.
    """
    if _editable(distribution):
        raise _NotAsInstalled(
            "it is installed in editable mode, so its files change without an installer; build a wheel and install that"
        )
    if any(entry.group in _SCRIPTS for entry in distribution.entry_points):
        raise _NotAsInstalled("it installs commands, whose files differ between machines; leave scripts out")
    record = distribution.read_text("RECORD")
    if record is None:
        raise _NotAsInstalled("its installation has no RECORD of its files; build a wheel and install that with pip")
    rows = [row for row in csv.reader(record.splitlines()) if row]
    if len(rows) > _MAX_FILES:
        raise _NotAsInstalled(f"it has {len(rows):,} files, more than {_MAX_FILES:,}; keep data out of a plugin")
    room, listed, missing = _MAX_BYTES, {PurePosixPath(row[0]) for row in rows}, set(_DECIDING)
    for row in rows:
        inside, hashed = PurePosixPath(row[0]), row[1] if len(row) > 1 else ""
        if inside.is_absolute() or ".." in inside.parts or not inside.parts:
            raise _NotAsInstalled(f"it installs {inside} outside its folder; leave scripts and data files out")
        if inside.suffix == ".pth" or inside.parts[0].partition(".")[0] in _STARTS_BY_ITSELF:
            raise _NotAsInstalled(f"it installs {inside}, which runs whenever Python starts; leave that file out")
        in_info, name = inside.parts[0].endswith(".dist-info"), str(PurePosixPath(*inside.parts[1:]))
        if in_info and inside.suffix in _COMPILED | {".py"}:
            raise _NotAsInstalled(f"it has code in its dist-info, {inside}; leave that file out")
        if (in_info and name not in _DECIDING) or _is_cached(inside, listed):
            continue
        if inside.suffix in _COMPILED:
            raise _NotAsInstalled(f"it installs compiled code, {inside}; a plugin is Python source, which people read")
        path = Path(str(distribution.locate_file(str(inside))))
        data = _bytes(path, inside, room)
        room -= len(data)
        if hashed != "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode():
            raise _NotAsInstalled(f"{inside} is not the file that was installed; install the wheel again")
        if in_info and data.decode(errors="replace").splitlines() == (distribution.read_text(name) or "").splitlines():
            missing.discard(name)
        yield inside, path, data
    if missing:
        raise _NotAsInstalled(f"its RECORD does not list its {min(missing)}; build a wheel and install that with pip")


def _is_cached(inside: PurePosixPath, listed: Collection[PurePosixPath]) -> bool:
    """Whether a file is byte code of a listed source, by a name that no import finds: NAME.TAG.pyc."""
    name, _, rest = inside.name.partition(".")
    cached = inside.parent.name == "__pycache__" and inside.suffix == ".pyc" and rest != "pyc"
    return cached and inside.parent.parent / f"{name}.py" in listed


def _editable(distribution: Distribution) -> bool:
    try:
        told = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return isinstance(told, dict) and bool((told.get("dir_info") or {}).get("editable"))


def _bytes(path: Path, inside: PurePosixPath, room: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(room + 1)
    except OSError as error:
        raise _NotAsInstalled(f"{inside} cannot be read ({error.strerror}); install the wheel again") from error
    if len(data) > room:
        raise _NotAsInstalled(f"its files have more than {_MAX_BYTES >> 20} MiB; keep data out of a plugin")
    return data


def _module_of(inside: PurePosixPath) -> str | None:
    """The full name of the module that a file is; None if it is none."""
    if inside.suffix != ".py":
        return None
    parts = [*inside.parts[:-1], *(() if inside.stem == "__init__" else (inside.stem,))]
    return ".".join(parts) if parts and all(part.isidentifier() for part in parts) else None
