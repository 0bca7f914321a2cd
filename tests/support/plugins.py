"""Small distributions that register models, laid out as an installer lays them out, and a way to unload them."""

import base64
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from learning.plugins import examination, loading
from learning.plugins.installed import Installed, installed_plugins
from tacit.plugin import PluginModel

__all__ = ["GOOD", "forgotten", "found", "installed", "model_of"]

# A mean of word vectors under one linear layer, with places where a test puts something else.
GOOD = """
from learning.plugins.architecture import Architecture, Part, Sizes, TextClassifier
import torch
from torch import nn

class Settings(Part):
    hidden: int = 4

class Module(TextClassifier):
    parts = {"embedding": "embedding", "hidden": "encoder", "output": "head"}

    def __init__(self, settings, sizes):
        super().__init__()
        self.hidden = nn.Linear(sizes.embedding, settings.hidden)
        self.output = nn.Linear(settings.hidden, sizes.labels)
        # MORE

    def mean(self, vectors, seen):
        return (vectors * seen[:, :, None]).sum(dim=1) / seen.sum(dim=1, keepdim=True).clamp(min=1)

    def classify(self, vectors, seen):
        x = self.dropout(torch.tanh(self.hidden(self.mean(vectors, seen))))
        # LATER
        return self.output(x)

def values(settings, sizes):
    return (sizes.embedding + 1) * settings.hidden + (settings.hidden + 1) * sizes.labels

own = Architecture(settings=Settings, module=Module, values=values)
"""


def installed(
    site: Path,
    files: Mapping[str, str],
    *,
    name: str = "tacit-own",
    version: str = "1.0",
    entry: str = "tacit_own:own",
    also: Mapping[str, str] | None = None,
    direct_url: object = None,
) -> Path:
    """Lays out a distribution in a folder; returns its dist-info.

    Args:
        site: The folder, on the path.
        files: Contents by path, which RECORD lists.
        name: The distribution.
        version: Its version.
        entry: What its entry point `own` names.
        also: Lines of RECORD for other paths, with their hashes.
        direct_url: What direct_url.json says, if there is one.
    """
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    written = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/entry_points.txt": f"[tacit.models]\nown = {entry}\n",
        f"{info}/INSTALLER": "tests\n",
    }
    if direct_url is not None:
        written[f"{info}/direct_url.json"] = json.dumps(direct_url)
    rows = []
    for path, text in written.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        hashed = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={hashed},{len(text)}")
    rows += [f"{path},{hashed},0" for path, hashed in (also or {}).items()]
    (site / info / "RECORD").write_text("\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return site / info


def found(name: str = "tacit-own") -> Installed:
    """The distribution, as it is found on the path."""
    return next(each for each in installed_plugins() if each.distribution == name)


def model_of(of: str = "tacit-own", /, **changes: object) -> PluginModel:
    """A job's model table that names the distribution as it is on the path."""
    there = found(of)
    named = {"distribution": of, "version": there.version, "files": there.digest, "name": "own", "embedding": 6}
    return PluginModel.model_validate(named | changes)


def forgotten() -> None:
    """Unloads every plugin, so that the next test starts as a new process would."""
    for finder in [each for each in sys.meta_path if isinstance(each, loading._Finder)]:
        loading._forget(finder.plugin)
    loading._admitted.clear()
    loading._loaded.clear()
    examination._passed.clear()
