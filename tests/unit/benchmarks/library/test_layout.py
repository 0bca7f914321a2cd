"""The packages of benchmarks have no import cycles, and the library imports none of them."""

import ast

from benchmarks.library.record import ROOT

FOLDER = ROOT / "benchmarks"


def imports():
    """Map each module to the benchmark modules that it imports, anywhere in its file."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FOLDER.rglob("*.py")
    }
    found = {}
    for name, path in paths.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{each.name}" for each in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                named = {each.name for each in node.names}
            else:
                continue
            found[name] |= named & paths.keys() - {name, "benchmarks"}
    return found


def cycles(graph):
    """Return the modules in or before a cycle: repeatedly remove those that import none of the rest."""
    left = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return left


def test_no_module_imports_itself_through_others():
    assert cycles(imports()) == {}


def test_a_cycle_is_found():
    assert cycles({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}).keys() == {"a", "b", "c"}


def test_the_library_imports_no_benchmark():
    others = {
        (name, other)
        for name, found in imports().items()
        if name.startswith("benchmarks.library.")
        for other in found
        if not other.startswith("benchmarks.library")
    }
    assert others == set()


def test_there_are_no_loose_modules():
    assert {path.name for path in FOLDER.glob("*.py")} == {"__init__.py", "__main__.py", "report.py"}
