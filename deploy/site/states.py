"""Draws docs/states.svg, the states of a job, from the coordinator's table of transitions.

python deploy/site/states.py            writes docs/states.svg
python deploy/site/states.py --check    fails if the file is not what this would write
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Run as a file, this folder is what Python sees; imported by a test, the project's root.
sys.path.insert(0, str(ROOT))

from coordinator.rounds.state import Aggregating, Halted, Publishing, TrainingWindow  # noqa: E402
from coordinator.rounds.transitions import TRANSITIONS, Transition  # noqa: E402
from deploy.site.drawing import box, checked_or_written, frame, text, way  # noqa: E402

__all__ = ["FILE", "main", "rendered"]

FILE = ROOT / "docs" / "states.svg"
# From left to right, in the order of a round.
STATES = (Halted, TrainingWindow, Aggregating, Publishing)
WIDTH, HEIGHT, GAP = 140, 48, 250
LEFT, TOP = 30, 190
# Where arrows leave and enter a box, in pixels from its middle: a box has at most three on a side.
DOORS = 38


def rendered() -> str:
    """Return the picture as SVG."""
    parts = []
    for place, state in enumerate(STATES):
        x = LEFT + GAP * place
        parts += [box(x, TOP, WIDTH, HEIGHT), text(x + WIDTH // 2, TOP + 29, state.__name__, "title", centred=True)]
    for row in TRANSITIONS:
        parts += _arrow(row)
    return frame("The states of a job and what moves it from one to the next.", 2 * LEFT + 3 * GAP + WIDTH, 400, parts)


def _arrow(row: Transition) -> list[str]:
    source, target = STATES.index(row.source), STATES.index(row.target)
    middle = LEFT + WIDTH // 2
    if target == source + 1:
        # The way of a round that succeeds: straight to the right.
        y, start = TOP + HEIGHT // 2, LEFT + GAP * source + WIDTH
        return [
            way(f"M{start} {y} H{start + GAP - WIDTH - 2}"),
            *_label(start + (GAP - WIDTH) // 2, y - 8, row.when, -1),
        ]
    # Ends above the boxes, the next attempt or round below them; longer ways further out.
    ends = target == 0
    side, edge = (-1, TOP) if ends else (1, TOP + HEIGHT)
    span = source - target
    y = edge + side * (20 + 40 * span)
    # The longest way is the outermost: it leaves and enters furthest from the others.
    x1, x2 = middle + GAP * source - DOORS * (1 if span == 1 else 0), middle + GAP * target + DOORS * (2 - span)
    label = [text(x2 + 8, y - 6, row.when, "small")] if ends else _label((x1 + x2) // 2, y + 16, row.when, 1)
    return [way(f"M{x1} {edge} V{y} H{x2} V{edge + 2 * side}"), *label]


def _label(x: int, y: int, words: str, direction: int) -> list[str]:
    """Lines of at most 15 characters, centred at x. direction: -1 if the last one stands at y, 1 if the first does."""
    lines: list[str] = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + len(word) + 1 > 15:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    first = y if direction > 0 else y - 15 * (len(lines) - 1)
    return [text(x, first + 15 * number, line, "small", centred=True) for number, line in enumerate(lines)]


def main() -> int:
    """Command line."""
    return checked_or_written(FILE, rendered(), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
