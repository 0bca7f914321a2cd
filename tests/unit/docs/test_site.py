"""The documentation site: its links, its navigation, and a build that fails on a dead link."""

import json
import logging
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from mkdocs.utils.yaml import yaml_load

from deploy.site.hooks import expand, rewrite_links
from tests.support.places import ROOT


def repository_in(folder: Path) -> Path:
    """A small repository with this project's site settings."""
    # Without the plugin that reads source files, which takes seconds: this repository has no sources.
    plugins = [each for each in yaml_load((ROOT / "mkdocs.yml").read_text())["plugins"] if "mkdocstrings" not in each]
    files = {
        "README.md": "# Start\n\n[A page](docs/page.md#a-heading---its-anchor) under [a licence](LICENSE).\n",
        "CHANGELOG.md": "# Changes\n\n[Back](README.md)\n",
        "LICENSE": "",
        "examples/job.toml": "",
        "docs/page.md": "# Page\n\n## A heading - its `anchor`\n\n[A job](../examples/job.toml), [top](../README.md)\n",
        "docs/notes/one.md": "# One\n\n[The page](../page.md), [what changed](../../CHANGELOG.md)\n",
        "deploy/site/hooks.py": (ROOT / "deploy" / "site" / "hooks.py").read_text(encoding="utf-8"),
        "mkdocs.yml": f"INHERIT: {ROOT}/mkdocs.yml\nplugins: {json.dumps(plugins)}\n"
        "nav: [index.md, page.md, changelog.md, {Notes: notes/*.md}]\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return repository_in(tmp_path)


def built(repository: Path) -> dict[str, str]:
    """Builds the site strictly, as `make docs` does, and returns its pages by path."""
    build(load_config(str(repository / "mkdocs.yml"), strict=True))
    site = repository / "site"
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The repository with its site, and the site's pages."""
    repository = repository_in(tmp_path_factory.mktemp("sound"))
    return repository, built(repository)


def test_every_file_becomes_a_page_with_working_links(sound):
    _, pages = sound
    assert pages.keys() == {"404.html", "index.html", "page.html", "changelog.html", "notes/one.html"}
    assert 'href="page.html#a-heading---its-anchor"' in pages["index.html"]
    assert "a licence (<code>LICENSE</code>)" in pages["index.html"]
    assert "A job (<code>examples/job.toml</code>)" in pages["page.html"]
    assert 'href="../changelog.html"' in pages["notes/one.html"]


class Fetched(HTMLParser):
    """Collects the addresses that a browser loads automatically with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.classes |= set((given.get("class") or "").split())
        if tag == "link" or "src" in given:
            self.addresses.append(given.get("href") or given.get("src") or "")


def test_a_page_loads_nothing_from_another_host(sound):
    repository, pages = sound
    for name, text in pages.items():
        page = Fetched()
        page.feed(text)
        assert page.addresses, name
        # The page for unknown addresses uses paths from the root.
        assert not [each for each in page.addresses if "//" in each], name
        # The theme would load a script for this class.
        assert "mermaid" not in page.classes, name
    for sheet in (repository / "site" / "assets").rglob("*.css"):
        assert "url(http" not in sheet.read_text(encoding="utf-8"), sheet.name


def test_no_diagram_needs_a_script():
    """A browser would load mermaid from another host. Diagrams are text, or pictures drawn by our own script."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    assert not [page.name for page in pages if "```mermaid" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    ("file", "text", "warning"),
    [
        ("docs/page.md", "# Page\n\n[Nowhere](missing.md)\n", "missing.md"),
        ("docs/page.md", "# Page\n\n[Nowhere](../examples/missing.toml)\n", "missing.toml"),
        ("docs/page.md", "# Page\n\n[Nowhere](notes/one.md#missing)\n", "missing"),
        ("docs/page.md", "# Page\n\n![Nothing](missing.svg)\n", "missing.svg"),
        ("docs/page.md", "# Page\n\n[The root](/page.md)\n", "/page.md"),
        ("README.md", "# Start\n\n[Nowhere](docs/missing.md)\n", "missing.md"),
        ("docs/forgotten.md", "# Forgotten\n", "forgotten.md"),
    ],
    ids=["page", "file", "anchor", "picture", "absolute", "readme", "not-in-the-navigation"],
)
def test_a_broken_page_fails_the_build(repository, caplog, file, text, warning):
    (repository / file).write_text(text, encoding="utf-8")
    with caplog.at_level(logging.WARNING), pytest.raises(Abort, match="strict"):
        built(repository)
    assert [record for record in caplog.records if warning in record.getMessage()]


def test_make_docs_fails_on_a_dead_link(repository):
    (command,) = re.findall(r"-m (mkdocs .*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    ends = []
    for text in (
        "# Page\n\n## A heading - its anchor\n",
        "# Page\n\n## A heading - its anchor\n\n[Nowhere](missing.md)\n",
    ):
        (repository / "docs" / "page.md").write_text(text, encoding="utf-8")
        words = [sys.executable, "-m", *command.split()]
        ends.append(subprocess.run(words, cwd=repository, capture_output=True, timeout=100, check=False).returncode)
    assert ends == [0, 1]


def test_links_in_code_blocks_stay_unchanged():
    text = "```text\n[a](../LICENSE)\n```\n[b](../LICENSE)\n"
    written = rewrite_links(text, ROOT / "docs" / "page.md", "page.md", ROOT)
    assert written == "```text\n[a](../LICENSE)\n```\nb (`LICENSE`)\n"


def test_a_navigation_pattern_adds_the_pages_not_named():
    pages = ["notes/README.md", "notes/b.md", "notes/a.md", "page.md"]
    nav = ["page.md", {"Notes": ["notes/README.md", "notes/*.md"]}, {"Nothing yet": "other/*.md"}, {"Alone": "page.md"}]
    assert expand(nav, pages) == [
        "page.md",
        {"Notes": ["notes/README.md", "notes/a.md", "notes/b.md"]},
        {"Alone": "page.md"},
    ]
