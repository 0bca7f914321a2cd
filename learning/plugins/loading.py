"""Loads what a plugin registers: once it is admitted, and from the bytes that were checked.

Guarantees: nothing of a distribution is imported unless somebody in this process admitted exactly it (`admit`), and its
version and files are those that the job names. Its modules come from the checked bytes: neither byte code beside them
nor a file that its RECORD does not list is ever run. What it imports from elsewhere (torch, its dependencies) comes
from this machine as always.

A member admits after its policy has allowed the job (`edge_client.policy.plugins`). A command of the operator admits
what the operator's own file or folder names.
"""

import importlib
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from learning.plugins.installed import Installed, PluginUnusable, checked
from tacit.model import Model
from tacit.plugin import PluginModel

if TYPE_CHECKING:
    from learning.plugins.architecture import Architecture

__all__ = ["admit", "loaded"]

_Key = tuple[str, str, bytes]

_admitted: set[_Key] = set()
_loaded: dict[_Key, dict[str, Any]] = {}
_lock = threading.RLock()


def admit(model: Model) -> None:
    """Lets this process load the plugin that the model names, with that version and those files. Nothing is loaded.

    Other models need no admission.
    """
    if isinstance(model, PluginModel):
        with _lock:
            _admitted.add(_key(model))


def loaded(model: PluginModel) -> "Architecture[Any]":
    """What the plugin registers under the job's name. Imported on the first call.

    Raises:
        PluginUnusable: Nobody admitted it, it is not installed as the job names it, or it raises when it is imported.
    """
    from learning.plugins.architecture import Architecture

    key, named = _key(model), f"plugin {model.distribution} {model.version}"
    with _lock:
        if key not in _admitted:
            raise PluginUnusable(f"{named} was not allowed on this machine; `edge_client models` says how to allow it")
        found = _loaded.setdefault(key, {})
        if model.name not in found:
            found[model.name] = _imported(checked(model), model.name, named)
        made = found[model.name]
    if not isinstance(made, Architecture):
        raise PluginUnusable(
            f"{named} registers as {model.name} something other than a learning.plugins.architecture.Architecture; "
            "tell its author"
        )
    return made


def _key(model: PluginModel) -> _Key:
    return model.distribution, model.version, bytes(model.files)


def _imported(plugin: Installed, name: str, named: str) -> Any:
    module, _, attribute = plugin.models[name].partition(":")
    if module not in plugin.sources or not attribute.isidentifier():
        raise PluginUnusable(
            f"{named} registers {name} as {plugin.models[name][:100]}, which is in none of its own modules; tell its "
            "author"
        )
    ours = any(isinstance(each, _Finder) and each.plugin.digest == plugin.digest for each in sys.meta_path)
    if not ours:
        _check_names(plugin, named)
        sys.meta_path.insert(0, _Finder(plugin))
    try:
        return getattr(importlib.import_module(module), attribute)
    except BaseException as error:
        # Also SystemExit: a module must not end the member.
        _forget(plugin)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise PluginUnusable(
            f"{named} raises {type(error).__name__} when it is imported; the log of that machine says more",
            private=f"{type(error).__name__}: {error}",
        ) from error


def _check_names(plugin: Installed, named: str) -> None:
    """Checks that every package of the plugin is the plugin's alone, and nobody has imported it."""
    for root in sorted({name.partition(".")[0] for name in plugin.sources}):
        if root in sys.stdlib_module_names:
            raise PluginUnusable(f"{named} has a module {root}, which is Python's own; tell its author")
        own, there = plugin.sources.get(root), sys.modules.get(root)
        spec = find_spec(root) if there is None else there.__spec__
        if own is None or spec is None or spec.origin is None or Path(spec.origin).resolve() != own[0].resolve():
            raise PluginUnusable(
                f"{named} has modules in {root}, which is not its own package with an __init__.py; tell its author"
            )
        if there is not None:
            raise PluginUnusable(
                f"{named}: its module {root} was imported before its files were checked, or in other files; start the "
                "program again"
            )


def _forget(plugin: Installed) -> None:
    sys.meta_path[:] = [
        each for each in sys.meta_path if not (isinstance(each, _Finder) and each.plugin.digest == plugin.digest)
    ]
    for name in plugin.sources:
        sys.modules.pop(name, None)


class _Loader(SourceFileLoader):
    """Runs a module from bytes in memory, never from byte code."""

    def __init__(self, name: str, path: Path, data: bytes) -> None:
        super().__init__(name, str(path))
        self._data = data

    def get_code(self, fullname: str) -> CodeType:
        """The module's code, from the checked bytes."""
        made: CodeType = self.source_to_code(self._data, self.path)
        return made


class _Finder(MetaPathFinder):
    """Finds a plugin's modules. Of its packages there are only those that were checked."""

    def __init__(self, plugin: Installed) -> None:
        self.plugin = plugin
        self._sources: Mapping[str, tuple[Path, bytes]] = plugin.sources
        self._roots = {name.partition(".")[0] for name in plugin.sources}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`. None for a module that is not the plugin's."""
        if fullname.partition(".")[0] not in self._roots:
            return None
        if fullname not in self._sources:
            raise ModuleNotFoundError(f"{fullname} is not among the files of {self.plugin.distribution}", name=fullname)
        place, data = self._sources[fullname]
        return spec_from_file_location(fullname, place, loader=_Loader(fullname, place, data))
