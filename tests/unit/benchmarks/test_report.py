"""The committed pages are those that the generator writes, are small, and cite existing commits."""

import json
import re
import subprocess

import pytest

from benchmarks import report
from benchmarks.library.record import RESULTS, ROOT
from benchmarks.report import NOT_MEASURED, PAGES, write_report

DOCS = ROOT / "docs"
MAX_OVERVIEW_LINES = 150
MAX_SVG_BYTES = 150_000
COMMIT = re.compile(r"\bcommit ([0-9a-f]{7,40})\b")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    folder = tmp_path_factory.mktemp("docs")
    write_report(RESULTS, folder)
    return folder


def pages(folder):
    return {path.relative_to(folder).as_posix() for path in [folder / "benchmarks.md", *folder.glob("benchmarks/*.md")]}


def test_the_pages_are_those_that_the_generator_writes(written):
    assert pages(DOCS) == pages(written)
    for name in pages(written):
        same = (DOCS / name).read_text(encoding="utf-8") == (written / name).read_text(encoding="utf-8")
        assert same, f"docs/{name} is stale; run `python -m benchmarks.report`"


def test_the_drawings_are_those_that_the_generator_writes(written):
    def drawings(folder):
        return {path.name for path in (folder / "benchmarks").glob("*.svg")}

    assert drawings(DOCS) == drawings(written)


def test_the_overview_is_short_and_links_to_all_pages():
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_OVERVIEW_LINES
    assert NOT_MEASURED not in text
    assert "{{" not in text
    for page in PAGES:
        assert f"(benchmarks/{page.file})" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.package)
def test_a_template_has_each_section_once(page):
    assert sorted(re.findall(r"\{\{(\w+)\}\}", page.template)) == sorted(section.name for section in page.sections)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_is_small(path):
    assert path.stat().st_size < MAX_SVG_BYTES


def history():
    """Return why the history cannot be read, or None."""
    words = ["git", "rev-parse", "--is-shallow-repository"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "this is no git repository"
    return "this clone is shallow" if done.stdout.strip() == "true" else None


def test_every_commit_that_a_page_cites_exists():
    if (why := history()) is not None:
        pytest.skip(f"{why}, so cited commits cannot be looked up")
    cited = {
        commit: path.relative_to(ROOT).as_posix()
        for path in [*DOCS.rglob("*.md"), ROOT / "README.md"]
        for commit in COMMIT.findall(path.read_text(encoding="utf-8"))
    }
    assert cited
    # A commit that was rebased away may still be in this repository's objects, but a clone will not have it.
    reached = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = {path: commit for commit, path in cited.items() if f"\n{commit}" not in f"\n{reached}"}
    assert not missing, "name it in benchmarks/results/lost_commits.txt and run `python -m benchmarks.report`"


# ---- figures of the overview -----------------------------------------------------------------------------------------


def shown(tmp_path, monkeypatch, placeholder, *lines):
    """Return the text that a placeholder becomes."""
    template = tmp_path / "report.md"
    template.write_text(placeholder)
    monkeypatch.setattr(report, "_TEMPLATE", template)
    made = ({"bench": "b", "figure": "f", "unit": "1", "code": "c", **each} for each in lines)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made))
    write_report(tmp_path, tmp_path / "out")
    return (tmp_path / "out" / "benchmarks.md").read_text()


def test_a_figure_is_the_newest_of_its_case(tmp_path, monkeypatch):
    lines = [{"case": {"members": 2}, "value": 0.1}, {"case": {"members": 2}, "value": 0.25, "paper": 0.5}]
    assert shown(tmp_path, monkeypatch, "{{b f members=2 : .1%}}", *lines) == "25.0%"
    assert shown(tmp_path, monkeypatch, "{{b f members=2 field=paper : .1f}}", *lines) == "0.5"
    assert shown(tmp_path, monkeypatch, "{{b f members=2 scale=100 : .0f}}", *lines) == "25"
    assert shown(tmp_path, monkeypatch, "{{b f members=3 : .1f}}", *lines) == NOT_MEASURED


def test_a_figure_of_several_seeds_is_their_mean(tmp_path, monkeypatch):
    lines = [{"case": {}, "seed": seed, "value": value} for seed, value in ((0, 1.0), (1, 2.0))]
    lines.append({"case": {}, "value": 9.0})
    assert shown(tmp_path, monkeypatch, "{{b f : .1f}}", *lines) == "1.5"
    assert shown(tmp_path, monkeypatch, "{{b f seed=1 : .1f}}", *lines) == "2.0"


def test_the_case_with_fewest_keys_counts_and_a_tie_is_an_error(tmp_path, monkeypatch):
    lines = [
        {"case": {"method": "a", "rate": 1, "server": None}, "value": 1.0},
        {"case": {"method": "a"}, "value": 2.0},
    ]
    assert shown(tmp_path, monkeypatch, "{{b f method=a : .0f}}", *lines) == "2"
    tie = [{"case": {"method": "a", "rate": rate}, "value": 1.0} for rate in (1, 2)]
    with pytest.raises(ValueError, match="fits 2 cases"):
        shown(tmp_path, monkeypatch, "{{b f method=a : .0f}}", *tie)
