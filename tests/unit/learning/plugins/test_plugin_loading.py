"""Nothing of a plugin is imported before it is admitted and checked, and what runs is what was checked."""

import base64
import hashlib
import importlib.util
import py_compile
import sys

import pytest

from learning.plugins.installed import PluginUnusable
from learning.plugins.loading import admit, loaded
from tests.support.plugins import GOOD, forgotten, found, installed, model_of


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "imported"


def marking(mark):
    return f"open({str(mark)!r}, 'a').write('x')\n{GOOD}"


def test_nothing_is_imported_before_somebody_admits_exactly_it(site, mark):
    installed(site, {"tacit_own.py": marking(mark)})
    model = model_of()
    with pytest.raises(PluginUnusable, match="was not allowed on this machine"):
        loaded(model)
    for change in ({"version": "0.9"}, {"files": b"\1" * 32}, {"distribution": "other"}):
        admit(model.model_copy(update=change))
    with pytest.raises(PluginUnusable, match="was not allowed on this machine"):
        loaded(model)
    assert not mark.exists()
    admit(model)
    assert not mark.exists()
    assert loaded(model) is loaded(model)
    assert mark.read_text() == "x"


def test_a_file_that_was_changed_is_not_imported_even_if_admitted(site, mark):
    installed(site, {"tacit_own.py": GOOD})
    model = model_of()
    admit(model)
    (site / "tacit_own.py").write_text(marking(mark))
    with pytest.raises(PluginUnusable, match="is not the file that was installed"):
        loaded(model)
    assert not mark.exists()
    assert "tacit_own" not in sys.modules


def test_byte_code_beside_a_checked_module_never_runs(site, tmp_path, mark):
    """An ordinary import would run it: its header names the source's time and size."""
    installed(site, {"tacit_own.py": GOOD})
    source, hidden = site / "tacit_own.py", tmp_path / "hidden.py"
    hidden.write_text(marking(mark))
    cached = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(hidden), cfile=cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    importlib.import_module("tacit_own")
    assert mark.exists(), "the attack works on an ordinary import"
    mark.unlink()
    del sys.modules["tacit_own"]
    model = model_of()
    admit(model)
    loaded(model)
    assert not mark.exists()


def test_byte_code_that_a_wheel_brings_alone_never_runs(site, tmp_path, mark):
    """`__pycache__` is a folder like others, so Python imports byte code from it by name."""
    source, brought = tmp_path / "more.py", site / "__pycache__" / "more.pyc"
    source.write_text(marking(mark))
    py_compile.compile(str(source), cfile=str(brought))
    hashed = base64.urlsafe_b64encode(hashlib.sha256(brought.read_bytes()).digest()).rstrip(b"=").decode()
    files = {"tacit_own.py": f"import __pycache__.more\n{GOOD}"}
    installed(site, files, also={"__pycache__/more.pyc": f"sha256={hashed}"})
    model = model_of(files=found().digest or bytes(32))
    admit(model)
    with pytest.raises(PluginUnusable, match="compiled code"):
        loaded(model)
    assert not mark.exists()


def test_a_file_that_the_record_does_not_list_is_not_the_plugins(site):
    text = "from tacit_own_pack.more import own\n"
    installed(site, {"tacit_own_pack/__init__.py": text}, entry="tacit_own_pack:own")
    (site / "tacit_own_pack" / "more.py").write_text(GOOD)
    model = model_of()
    admit(model)
    with pytest.raises(PluginUnusable, match="raises ModuleNotFoundError when it is imported") as refused:
        loaded(model)
    assert "tacit_own_pack.more is not among the files of tacit-own" in refused.value.private
    assert not [name for name in sys.modules if name.startswith("tacit_own_pack")]


def test_a_package_of_several_modules_is_loaded(site):
    files = {"tacit_own_pack/__init__.py": "", "tacit_own_pack/inner.py": GOOD}
    installed(site, files, entry="tacit_own_pack.inner:own")
    model = model_of()
    admit(model)
    assert loaded(model).settings.__module__ == "tacit_own_pack.inner"


@pytest.mark.parametrize("entry", ["os:system", "learning.models.textcnn:TextCNN", "tacit_own", "tacit_own:a.b"])
def test_an_entry_point_outside_the_plugins_own_modules_is_refused(site, entry):
    installed(site, {"tacit_own.py": GOOD}, entry=entry)
    model = model_of()
    admit(model)
    with pytest.raises(PluginUnusable, match="which is in none of its own modules"):
        loaded(model)


def test_a_module_named_like_pythons_own_is_refused(site):
    installed(site, {"nntplib.py": GOOD, "antigravity.py": GOOD}, entry="antigravity:own")
    model = model_of()
    admit(model)
    with pytest.raises(PluginUnusable, match="which is Python's own"):
        loaded(model)


@pytest.mark.parametrize("root", ["numpy", "learning", "onnxruntime"])
def test_a_module_inside_another_distributions_package_is_refused(site, root):
    """Whether that package is loaded already or not, it stays whole."""
    installed(site, {f"{root}/own_more.py": GOOD}, entry=f"{root}.own_more:own")
    model = model_of()
    admit(model)
    with pytest.raises(PluginUnusable, match=f"has modules in {root}, which is not its own package"):
        loaded(model)
    importlib.import_module(
        f"{root}.{'version' if root == 'numpy' else 'capi' if root == 'onnxruntime' else 'artifacts'}"
    )


def test_a_module_that_was_imported_unchecked_is_refused(site):
    installed(site, {"tacit_own.py": GOOD})
    importlib.import_module("tacit_own")
    model = model_of()
    admit(model)
    with pytest.raises(PluginUnusable, match="was imported before its files were checked"):
        loaded(model)
    del sys.modules["tacit_own"]
    loaded(model)


@pytest.mark.parametrize("fault", ["raise RuntimeError('not today')", "raise SystemExit(3)", "import nothing_here"])
def test_a_plugin_that_raises_when_it_is_imported_ends_nothing(site, fault):
    installed(site, {"tacit_own.py": fault + "\n"})
    model = model_of()
    admit(model)
    with pytest.raises(PluginUnusable, match=r"raises (\w+) when it is imported") as refused:
        loaded(model)
    # The text of the error may hold anything, so only this machine's log has it.
    assert "not today" not in str(refused.value)
    forgotten()
    installed(site, {"tacit_own.py": GOOD})
    model = model_of()
    admit(model)
    loaded(model)


def test_a_package_that_raises_halfway_leaves_nothing(site):
    files = {"tacit_own_pack/__init__.py": "import tacit_own_pack.inner\n1 / 0\n", "tacit_own_pack/inner.py": ""}
    installed(site, files, entry="tacit_own_pack:own")
    model = model_of()
    admit(model)
    finders = list(sys.meta_path)
    for _ in range(2):
        with pytest.raises(PluginUnusable, match="raises ZeroDivisionError when it is imported"):
            loaded(model)
        assert not [name for name in sys.modules if name.startswith("tacit_own_pack")]
        assert sys.meta_path == finders


def test_an_entry_point_must_be_an_architecture(site):
    installed(site, {"tacit_own.py": GOOD}, entry="tacit_own:Module")
    model = model_of()
    admit(model)
    with pytest.raises(PluginUnusable, match="something other than a learning"):
        loaded(model)
