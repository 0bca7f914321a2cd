"""No data from outside becomes code: no pickle, no eval, no shell, nothing downloaded and run.

The tests search the syntax trees of the shipped packages, so a comment about pickles does not count, and an alias does.
`ALLOWED` lists the exceptions with their reasons. Each entry must still be needed.
"""

import ast
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT  # type: ignore[attr-defined]

WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

# Modules that turn bytes into objects or code, or that take commands as text.
MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"),
    *("code", "codeop", "runpy", "imp", "zipimport", "pty", "xmlrpc", "telnetlib", "ftplib"),
    # Transformers models are built from our own config. These two modules would download and run code.
    *("torch.hub", "torch.package"),
}
# Calls refused with any arguments.
CALLS = {
    *("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "commands.getoutput"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "torch.jit.load", "pandas.read_pickle"),
    *("importlib.import_module", "importlib.util.spec_from_file_location", "ctypes.CDLL"),
    *("urllib.request.urlopen", "requests.get", "huggingface_hub.hf_hub_download", "huggingface_hub.snapshot_download"),
}
# Keyword arguments refused unless they are a literal False.
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code", "use_auth_token"}

ALLOWED = {
    ("coordinator/heap.py", "ctypes.CDLL"): "mallopt and malloc_trim of the libc that is loaded already",
    ("coordinator/workers/process.py", "ctypes.CDLL"): "prctl of the libc that is loaded already",
    ("learning/backbones/onnx_features.py", "ctypes.CDLL"): "malloc_trim of the libc that is loaded already",
    ("learning/backbones/paging.py", "ctypes.CDLL"): "madvise of the libc that is loaded already",
    ("learning/backbones/subnormals.py", "ctypes.CDLL"): "fegetenv and fesetenv of the libc that is loaded already",
    ("learning/models/__init__.py", "importlib.import_module"): "a module's name out of a table in the same file",
    ("learning/plugins/loading.py", "importlib.import_module"): (
        "a module of an installed distribution that the policy allows, after its files were hashed"
    ),
    ("learning/plugins/loading.py", "importlib.util.spec_from_file_location"): "with a loader of the hashed bytes",
    ("learning/backbones/hub.py", "huggingface_hub.snapshot_download"): (
        "a base that a job names: safetensors and JSON alone are taken, and no code of it is run"
    ),
    ("proto/tacit/__init__.py", "importlib.import_module"): "a module's name out of a table in the same file",
    ("edge_client/policy/conditions.py", "importlib.import_module"): 'the constant "psutil", where it is installed',
}


def sources() -> Iterator[Path]:
    for package in WHEEL:
        yield from sorted((ROOT / package).rglob("*.py"))


def names_of(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """The full names behind the names that a module imports."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                found[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                found[each.asname or each.name] = f"{node.module}.{each.name}"
    return found


def dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, names)) is not None:
        return f"{base}.{node.attr}"
    return None


def doors(text: str) -> list[tuple[int, str]]:
    """Line and name of every place in a module where data may become code."""
    nodes = list(ast.walk(ast.parse(text)))
    names, found = names_of(nodes), []
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, each.name) for each in node.names if _module(each.name)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = [f"{node.module}.{each.name}" for each in node.names]
            found += [(node.lineno, name) for name in (node.module, *whole) if _module(name)]
        elif isinstance(node, ast.Call):
            name = dotted(node.func, names)
            if name in CALLS:
                found.append((node.lineno, name))
            for keyword in node.keywords:
                shut = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in KEYWORDS and not shut:
                    found.append((node.lineno, f"{keyword.arg}="))
        elif isinstance(node, ast.Name | ast.Attribute) and node not in called and isinstance(node.ctx, ast.Load):
            # Passed on rather than called.
            name = dotted(node, names)
            if name in CALLS:
                found.append((node.lineno, name))
    return sorted(set(found))


def _module(name: str) -> bool:
    return any(name == each or name.startswith(each + ".") for each in MODULES)


def test_no_shipped_module_turns_data_into_code():
    found, used = [], set()
    for path in sources():
        for line, name in doors(path.read_text(encoding="utf-8")):
            place = (str(path.relative_to(ROOT)), name)
            if place in ALLOWED:
                used.add(place)
            else:
                found.append(f"{place[0]}:{line}: {name}")
    assert found == []
    assert used == ALLOWED.keys(), "an allowance that nobody needs"


def test_the_search_covers_every_package_of_the_wheel():
    rooms = {path.relative_to(ROOT).parts[0] for path in sources()}
    assert rooms == {package.split("/")[0] for package in WHEEL}
    assert sum(1 for _ in sources()) > 100


@pytest.mark.parametrize(
    ("text", "door"),
    [
        ("import pickle", "pickle"),
        ("import os.path\nfrom pickle import loads as read", "pickle"),
        ("import torch\ntorch.load(x, weights_only=True)", "torch.load"),
        ("from torch import load as read\nread(x)", "torch.load"),
        ("import numpy as np\nnp.load(x, allow_pickle=True)", "allow_pickle="),
        ("np.load(x, allow_pickle=maybe)", "allow_pickle="),
        ("import subprocess as s\ns.run(x, shell=1)", "shell="),
        ("def f():\n    eval('1')", "eval"),
        ("list(map(eval, x))", "eval"),
        ("from yaml import load\nload(x)", "yaml.load"),
        ("AutoModel.from_pretrained(x, trust_remote_code=flag)", "trust_remote_code="),
        ("import torch.hub", "torch.hub"),
        ("import os\nos.system(x)", "os.system"),
    ],
    ids=range(13),
)
def test_the_search_finds_calls_that_turn_data_into_code(text, door):
    assert door in [name for _, name in doors(text)]


@pytest.mark.parametrize(
    "text",
    [
        "import re\nre.compile(x)",
        "model.eval()",
        "# pickle.loads(x)\n'eval(x)'",
        "np.load(x, allow_pickle=False)",
        "subprocess.run(x, shell=False)",
        "AutoModel.from_pretrained(x, trust_remote_code=False)",
    ],
    ids=range(6),
)
def test_the_search_passes_harmless_calls(text):
    assert doors(text) == []
