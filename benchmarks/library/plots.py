"""Draws for the report: the same results give the same bytes, and files are small."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["STYLE", "compact", "pyplot", "save"]

# Resolution of dense artists, which are drawn as pixels (`rasterized=True`).
_DOTS_PER_INCH = 110
# The salt makes ids the same in every run. One font, because matplotlib writes the whole list of fonts at each text.
STYLE: dict[Any, Any] = {"svg.hashsalt": "tacit", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}

_PATH = re.compile(r' d="(M[^"]*)"')
_STRAIGHT = re.compile(r"M (\S+ \S+)((?: L \S+ \S+)+)( z)?")
_STYLE = re.compile(r' style="([^"]*)"')
_NO_ROTATION = re.compile(r' transform="rotate\(-?0 [^)]*\)"')
_ID = re.compile(r' id="([^"]*)"')
_LONG_FRACTION = re.compile(r"(\d+\.\d\d)\d+")

Point = tuple[float, float]


def pyplot() -> Any:
    """Return matplotlib's pyplot, for use without a screen."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    from matplotlib import pyplot as found

    return found


def save(figure: Any, path: Path) -> None:
    """Write a figure as a compact SVG, and close it."""
    figure.tight_layout()
    # The layout is made. With the engine that this leaves behind, the figure would be drawn once more to make it.
    figure.set_layout_engine(None)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, dpi=_DOTS_PER_INCH)
    pyplot().close(figure)
    path.write_text(compact(path.read_text(encoding="utf-8")), encoding="utf-8")


def compact(text: str) -> str:
    """Return a smaller SVG: paths in tenths of a point, straight lines without inner points, and each style once."""
    shorter = _PATH.sub(lambda found: f' d="{_shorter(" ".join(found[1].split()))}"', text)
    used = set(re.findall(r"#(\w+)", shorter))

    def named(found: re.Match[str]) -> str:
        return found[0] if found[1] in used or found[1].startswith("axes_") else ""

    shorter = _ID.sub(named, _NO_ROTATION.sub("", shorter))
    shorter = _styled_once(shorter)
    parts = re.split(r"(<image [^>]*>)", shorter, flags=re.DOTALL)
    rounded = (part if part.startswith("<image ") else _LONG_FRACTION.sub(r"\1", part) for part in parts)
    return "\n".join(line.strip() for line in "".join(rounded).splitlines()) + "\n"


def _styled_once(text: str) -> str:
    """Make classes of styles that occur more than once, named in order of appearance."""
    count = Counter(_STYLE.findall(text))
    names = {style: f"s{at}" for at, style in enumerate(style for style in count if count[style] > 1)}
    if not names:
        return text

    def named(found: re.Match[str]) -> str:
        return f' class="{names[found[1]]}"' if found[1] in names else found[0]

    rules = "".join(f".{name}{{{style}}}\n" for style, name in names.items())
    return re.sub(r"(<svg [^>]*>\n)", rf"\1<style>\n{rules}</style>\n", _STYLE.sub(named, text), count=1)


def _shorter(path: str) -> str:
    """Return a path without needless points. A path with curves or holes stays as it is."""
    found = _STRAIGHT.fullmatch(path)
    if found is None:
        return path
    points: list[Point] = []
    for each in [found[1], *found[2].split(" L ")[1:]]:
        x, y = map(float, each.split())
        point = (round(x, 1), round(y, 1))
        if points and point == points[-1]:
            continue
        if len(points) > 1 and _between(points[-2], points[-1], point):
            points.pop()
        points.append(point)
    # A line without length draws a dot.
    points = points if len(points) > 1 else points * 2
    # Points after the first of an M are lines to them.
    return "M " + " ".join(f"{x:g} {y:g}" for x, y in points) + (found[3] or "")


def _between(first: Point, middle: Point, last: Point) -> bool:
    """Tell whether the middle point is between the others on a horizontal or vertical line."""
    return any(
        first[axis] == middle[axis] == last[axis]
        and min(first[1 - axis], last[1 - axis]) <= middle[1 - axis] <= max(first[1 - axis], last[1 - axis])
        for axis in (0, 1)
    )
