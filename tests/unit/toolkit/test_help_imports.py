"""Help is drawn without a highlighter and a parser, which stay available to whatever asks for them later."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent("""
    import sys

    from {module} import main

    sys.argv = ["program", *{words!r}]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code or not {words!r}, ended.code
    unwanted = [name for name in ("pygments", "markdown_it", "attr") if name in sys.modules]
    assert not unwanted, unwanted
    from rich.markdown import Markdown
    from rich.traceback import Traceback

    assert Markdown("# a word").parsed
    assert Traceback.from_exception
""")


@pytest.mark.parametrize("module", ["coordinator.cli", "edge_client.cli"])
@pytest.mark.parametrize("words", [["--help"], []], ids=["help", "nothing"])
def test_help_imports_no_highlighter(module: str, words: list[str]) -> None:
    code = PROGRAM.format(module=module, words=words)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "Usage:" in ended.stdout
