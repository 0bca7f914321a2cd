"""The few shapes that the site's pictures are made of, as SVG that follows the reader's light or dark theme."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

__all__ = ["box", "checked_or_written", "frame", "text", "way"]

_STYLE = """\
    text { font: 14px system-ui, sans-serif; fill: #1f2937 }
    .title { font-weight: 600 }
    .small { font-size: 12px; fill: #4b5563 }
    .ground { fill: #ffffff; stroke: #d1d5db }
    .box { fill: #f3f4f6; stroke: #9ca3af }
    .way { fill: none; stroke: #4b5563; stroke-width: 1.5; marker-end: url(#tip) }
    .tip { fill: #4b5563 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e5e7eb }
      .small { fill: #b6bec9 }
      .ground { fill: #111827; stroke: #374151 }
      .box { fill: #1f2937; stroke: #6b7280 }
      .way { stroke: #b6bec9 }
      .tip { fill: #b6bec9 }
    }
"""


def box(x: int, y: int, width: int, height: int) -> str:
    """Return a rectangle with its upper left corner at x, y."""
    return f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'


def text(x: int, y: int, words: str, kind: str = "", *, centred: bool = False) -> str:
    """Return one line of text that starts at x, or has its middle there. kind: "", "title" or "small"."""
    style = f' class="{kind}"' if kind else ""
    anchor = ' text-anchor="middle"' if centred else ""
    return f'<text x="{x}" y="{y}"{style}{anchor}>{escape(words)}</text>'


def way(path: str) -> str:
    """Return an arrow along an SVG path."""
    return f'<path class="way" d="{path}"/>'


def frame(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Return the whole picture. title: what a screen reader says."""
    body = "\n".join(f"  {part}" for part in parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
  <title>{escape(title)}</title>
  <style>
{_STYLE}  </style>
  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>
  <rect class="ground" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>
{body}
</svg>
"""


def checked_or_written(file: Path, picture: str, arguments: Sequence[str]) -> int:
    """Write a picture, or with --check exit with a sentence if the file is stale."""
    if "--check" not in arguments:
        file.write_text(picture, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != picture:
        sys.exit(f"{file.name} is stale; run python {sys.argv[0]}")
    return 0
