"""What the site adds to mkdocs: links of a repository page, a navigation with patterns, the README as first page.

People read a page of docs/ in the repository and in the site, and the same links must work in both. A link to another
page stays a link. A link to any other file of the repository becomes the file's path, because the site holds no sources
and refers to no foreign host. A link to a file that does not exist stays as it is, and mkdocs reports it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["GENERATED", "expand", "on_files", "on_page_markdown", "rewrite_links"]

# Files at the top of the repository that are pages of the site, too.
GENERATED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}

_CODE = re.compile(r"^(`{3,}).*?^\1`*$", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_SCHEME = re.compile(r"[a-z][a-z+.-]*:")


def rewrite_links(markdown: str, source: Path, page: str, root: Path) -> str:
    """Return the text of a page with the links that the site needs.

    Args:
        markdown: text of the page.
        source: file in the repository that the text comes from; its links are relative to it.
        page: path of the page in the site's documentation folder.
        root: folder of the repository.
    """
    docs = root / "docs"

    def link(found: re.Match[str]) -> str:
        target, hash_sign, anchor = found["target"].partition("#")
        if not target or _SCHEME.match(target):
            return found[0]
        file = Path(os.path.normpath(source.parent / target))
        if not file.is_relative_to(root) or not file.exists():
            return found[0]
        path = file.relative_to(root).as_posix()
        if path in GENERATED:
            file = docs / GENERATED[path]
        if file.is_relative_to(docs) and file != docs:
            to = os.path.relpath(file, (docs / page).parent)
            return f"{found['image']}[{found['text']}]({to}{hash_sign}{anchor})"
        return f"`{path}`" if found["text"].strip("`") == path else f"{found['text']} (`{path}`)"

    return _outside_code(markdown, lambda text: _LINK.sub(link, text))


def expand(nav: Sequence[Any], pages: Iterable[str]) -> list[Any]:
    """Return the navigation with each pattern (`decisions/*.md`) replaced by the pages that it does not name itself."""
    known = sorted(pages)
    named = set(_paths(nav))

    def filled(value: Any) -> list[Any]:
        if isinstance(value, str):
            if "*" not in value:
                return [value]
            return [page for page in known if fnmatch(page, value) and page not in named]
        if isinstance(value, dict):
            ((title, inside),) = value.items()
            if isinstance(inside, str) and "*" not in inside:
                return [value]
            return [{title: within}] if (within := filled(inside)) else []
        return [each for item in value for each in filled(item)]

    return filled(list(nav))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that come from the top of the repository, then fill in the navigation's patterns."""
    root = Path(config.config_file_path).parent
    for name, page in GENERATED.items():
        files.append(File.generated(config, page, content=(root / name).read_text(encoding="utf-8")))
    config.nav = expand(config.nav or [], [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of one page."""
    root = Path(config.config_file_path).parent
    came_from = {site: name for name, site in GENERATED.items()}
    path = page.file.src_uri
    source = root / came_from[path] if path in came_from else Path(config.docs_dir) / path
    return rewrite_links(markdown, source, path, root)


def _paths(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    else:
        for inside in value.values() if isinstance(value, dict) else value:
            yield from _paths(inside)


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for block in _CODE.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])
