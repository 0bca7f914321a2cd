"""Compacted drawings are small and show the same picture."""

import re

import pytest

from benchmarks.library.plots import compact, pyplot, save


def test_inner_points_of_straight_lines_are_removed():
    path = "M 0 0.001 \nL 1.0004 0 \nL 2 0 \nL 2 0 \nL 2 1 \nL 2 3 \nL 2.5 1 \nz\n"
    assert compact(f'<path d="{path}" style="x"/>') == '<path d="M 0 0 2 0 2 3 2.5 1 z" style="x"/>\n'


def test_a_line_that_turns_back_keeps_its_turn():
    assert "M 0 0 5 0 2 0" in compact('<path d="M 0 0 L 5 0 L 2 0"/>')


def test_a_line_without_length_and_a_curve_stay():
    assert compact('<path d="M 1 1 L 1 1"/>') == '<path d="M 1 1 1 1"/>\n'
    curve = '<path d="M 0 3 C 0.79 3 1.55 2.68 2.12 2.12 z"/>'
    assert compact(curve) == curve + "\n"


def test_a_repeated_style_is_written_once():
    text = '<svg x="1">\n<path style="fill: red"/><g style="fill: blue"/><path style="fill: red"/>\n</svg>'
    made = compact(text)
    assert '<path class="s0"/><g style="fill: blue"/><path class="s0"/>' in made
    assert made.startswith('<svg x="1">\n<style>\n.s0{fill: red}\n</style>\n')


def test_an_embedded_picture_is_not_touched():
    image = '<image xlink:href="data:image/png;base64,iVBORw0K12.3456789" x="1.23456"/>'
    assert compact(image) == image + "\n"


def test_a_dense_drawing_is_small(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    plt = pyplot()
    figure, axis = plt.subplots()
    for below in range(10):
        axis.bar(range(100), [1] * 100, 1.0, below, rasterized=True)
    axis.plot(range(3000), [number // 1000 for number in range(3000)])
    save(figure, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert len(text) < 40_000
    assert max(map(len, re.findall(r' d="([^"]*)"', text))) < 1000
