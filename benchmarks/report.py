"""Tables and plots from benchmarks/results: docs/benchmarks.md and docs/benchmarks/*.svg.

Guarantees: every number comes from a line of results, the newest of its case and figure; the same results give the same
files, byte for byte; a benchmark without results has no section, and nothing is measured here.

    python -m benchmarks.report [--out FOLDER]
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, ROOT, read_lines

__all__ = ["SECTIONS", "Section", "newest", "section_text", "write_report"]

Line = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """A drawing from a section's lines. file: its name in docs/benchmarks. alt: what it shows."""

    file: str
    alt: str
    draw: Callable[[Sequence[Line], Path], None]


@dataclass(frozen=True)
class Section:
    """One benchmark in the report: a sentence or two, and which fields of a line stand beside its value.

    wide: figures that stand as columns of one row a case, in place of a row a figure; `beside` is then of the first.
    where: keys of a case that must have these values for a line to be the section's. figures: the figures that are the
    section's; all of them where there are none here.
    """

    bench: str
    title: str
    text: str
    beside: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    figures: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()

    def lines(self, lines: Sequence[Line]) -> list[Line]:
        """The lines of its figures, and those that open runs."""
        return [line for line in lines if "figure" not in line or self._holds(line)]

    def _holds(self, line: Line) -> bool:
        if self.figures and line["figure"] not in self.figures:
            return False
        return all(line["case"].get(key) in values for key, values in self.where.items())


_INTRODUCTION = """# Benchmarks

This page is made by `python -m benchmarks.report` from the files in `benchmarks/results`; do not edit it.

A benchmark is run with `python -m benchmarks.NAME`. It prints one JSON object a line and appends the same lines to
a file of its own in `benchmarks/results`. Cells that this version of the code has measured are skipped, so an
interrupted run goes on where it stopped. `--quick` runs a small case within a minute and writes nothing. The public
data sets lie in
`../shared/data` beside the repository: `trec/train.jsonl.gz` and `trec/test.jsonl.gz` (objects with `text` and
`label`), `bert_vocab/bert-base-uncased-vocab.txt.gz`, and `glove/glove.6B.50d.subset.txt.gz`; a benchmark that misses
one says so.
"""


def newest(lines: Sequence[Line]) -> list[Line]:
    """The last line of each case, figure and seed, in the order of the cases."""
    found: dict[str, Line] = {}
    for line in lines:
        if "figure" in line:
            found[json.dumps([line["case"], line["figure"], line.get("seed")], sort_keys=True)] = line
    return sorted(found.values(), key=lambda line: json.dumps([line["figure"], _sortable(line["case"])]))


def _sortable(case: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, f"{value:012d}" if isinstance(value, int) else str(value)) for key, value in sorted(case.items())]


def section_text(section: Section, lines: Sequence[Line]) -> str:
    """A benchmark's part of the page."""
    figures = newest(section.lines(lines))
    # Where there is a mean over seeds, single seeds stand in its `values`.
    means = {json.dumps([line["case"], line["figure"]], sort_keys=True) for line in figures if "seed" not in line}
    shown = [
        line
        for line in figures
        if "seed" not in line or json.dumps([line["case"], line["figure"]], sort_keys=True) not in means
    ]
    keys = list(dict.fromkeys(key for line in shown for key in line["case"]))
    beside = [name for name in section.beside if any(name in line for line in shown)]
    if any("seed" in line for line in shown):
        keys.append("seed")
    if section.wide:
        rows = _wide_rows(section, shown, keys, beside)
        return "\n".join([f"## {section.title}", "", section.text, "", *_table(rows), "", _of_runs(lines, shown)])
    rows = [[*keys, "figure", "value", *beside]]
    for line in shown:
        named = {**line["case"], "seed": line.get("seed", "")}
        rows.append(
            [
                *(_cell(named.get(key, "")) for key in keys),
                line["figure"],
                _value(line),
                *(_cell(line.get(name, "")) for name in beside),
            ]
        )
    return "\n".join([f"## {section.title}", "", section.text, "", *_table(rows), "", _of_runs(lines, shown)])


def _wide_rows(section: Section, shown: Sequence[Line], keys: Sequence[str], beside: Sequence[str]) -> list[list[str]]:
    """A row a case and seed. Where there are means over seeds, there are means of all figures."""
    by_row: dict[str, dict[str, Line]] = {}
    for line in shown:
        by_row.setdefault(json.dumps([line["case"], line.get("seed")]), {})[line["figure"]] = line
    first, *others = section.wide
    columns = [name for name in others if any(name in row for row in by_row.values())]
    rows = [[*keys, first, *beside, *columns]]
    for row in by_row.values():
        if first not in row:
            continue
        line = row[first]
        named = {**line["case"], "seed": line.get("seed", "")}
        rows.append(
            [
                *(_cell(named.get(key, "")) for key in keys),
                _value(line),
                *(_cell(line.get(name, "")) for name in beside),
                *(_value(row[name]) if name in row else "" for name in columns),
            ]
        )
    return rows


def _value(line: Line) -> str:
    unit = "" if line["unit"] == "1" else f" {line['unit']}"
    return f"{line['value']:.4g}{unit}"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_cell(each) for each in value)
    if isinstance(value, dict):
        return "; ".join(f"{key} {_cell(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]


def _of_runs(lines: Sequence[Line], shown: Sequence[Line]) -> str:
    codes = {line["code"] for line in shown}
    found: dict[str, None] = {}
    for line in lines:
        if "run" in line and line["run"]["code"] in codes:
            run = line["run"]
            machine, versions = run["machine"], run["versions"]
            where = f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"
            named = ", ".join(f"{name} {version}" for name, version in versions.items())
            found[f"Measured from commit {run['commit'][:12]} (code {run['code']}) on {where}: {named}."] = None
    return "\n\n".join(found)


def write_report(results: Path, out: Path) -> list[Path]:
    """Writes OUT/benchmarks.md and OUT/benchmarks/*.svg; returns what was written."""
    parts, written = [_INTRODUCTION], []
    for section in SECTIONS:
        lines = read_lines(results / f"{section.bench}.jsonl")
        if not any("figure" in line for line in section.lines(lines)):
            continue
        text = section_text(section, lines)
        for plot in section.plots:
            path = out / "benchmarks" / plot.file
            path.parent.mkdir(parents=True, exist_ok=True)
            plot.draw(section.lines(lines), path)
            written.append(path)
            text += f"\n\n![{plot.alt}](benchmarks/{plot.file})"
        parts.append(text + "\n")
    page = out / "benchmarks.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts), encoding="utf-8")
    return [page, *written]


def draw_learning_curves(lines: Sequence[Line], path: Path) -> None:
    """Test accuracy after each round, a panel a vocabulary: the mean over the seeds, and the range between them."""
    plt = _pyplot()
    curves: dict[str, dict[int, list[list[float]]]] = {}
    for line in newest(lines):
        if "curve" in line:
            by_members = curves.setdefault(line["case"]["vocabulary"], {})
            by_members.setdefault(line["case"]["members"], []).append(line["curve"])
    panels = sorted(curves, reverse=True)
    figure, axes = plt.subplots(1, max(len(panels), 1), figsize=(5.2 * max(len(panels), 1), 3.6), squeeze=False)
    for axis, vocabulary in zip(axes[0], panels, strict=False):
        for members, found in sorted(curves[vocabulary].items()):
            rounds = range(1, min(map(len, found)) + 1)
            columns = [[curve[at - 1] for curve in found] for at in rounds]
            label = "centralised" if members == 1 else f"{members} members"
            (drawn,) = axis.plot(rounds, [sum(each) / len(each) for each in columns], label=label, linewidth=1.4)
            axis.fill_between(
                rounds, list(map(min, columns)), list(map(max, columns)), alpha=0.15, color=drawn.get_color()
            )
        axis.set(title=vocabulary, xlabel="round (epochs over each member's part)", ylabel="test accuracy")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    _save(figure, path)


def draw_grid(lines: Sequence[Line], path: Path) -> None:
    """Test accuracy against rounds under the greatest limit that was reached, a panel for lots of 128 and one for other
    lots; the paper's accuracy as a dashed line to a cross where our run ended."""
    plt = _pyplot()
    found = [line for line in newest(lines) if "curve" in line and line["figure"] == "test_accuracy"]
    # The longest curve of each training: where the greatest limit is not reached yet, that of a lower one.
    longest: dict[str, Line] = {}
    for line in sorted(found, key=lambda line: float(line["case"]["limit"])):
        if line.get("seed") == 0:
            longest[json.dumps({**line["case"], "limit": None})] = line
    runs = list(longest.values())
    panels = [
        ("lot 128, by members and sigma", [line for line in runs if line["case"]["lot"] == 128]),
        ("3 members, sigma 4, other lots and loads", [line for line in runs if line["case"]["lot"] != 128]),
    ]
    panels = [(title, here) for title, here in panels if here]
    figure, axes = plt.subplots(1, max(len(panels), 1), figsize=(5.2 * max(len(panels), 1), 3.8), squeeze=False)
    for axis, (title, here) in zip(axes[0], panels, strict=False):
        for line in here:
            case = line["case"]
            name = f"{case['members']} members, sigma {case['sigma']:g}" if case["lot"] == 128 else f"lot {case['lot']}"
            name += "" if case["load"] == "equal" else f", {case['load']}"
            rounds, values = zip(*line["curve"], strict=True)
            (drawn,) = axis.plot(rounds, values, label=name, linewidth=1.2)
            if "paper" in line:
                axis.plot([rounds[0], rounds[-1]], [line["paper"]] * 2, "--", color=drawn.get_color(), linewidth=0.8)
                axis.plot(rounds[-1], line["paper"], "x", color=drawn.get_color())
        axis.axhline(1 / 6, color="grey", linewidth=0.8, linestyle=":")
        axis.set(title=title, xlabel="round (x: the paper's accuracy)", ylabel="test accuracy", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(loc="upper right", fontsize="small")
    _save(figure, path)


def draw_by_epsilon(lines: Sequence[Line], path: Path) -> None:
    """Test accuracy of dp-sgd against the gate's epsilon: seeds and their mean; without noise as a line."""
    plt = _pyplot()
    by_epsilon: dict[float | None, list[float]] = {}
    for line in newest(lines):
        if line["figure"] == "test_accuracy" and "seed" in line:
            by_epsilon.setdefault(line["case"].get("epsilon"), []).append(line["value"])
    figure, axis = plt.subplots(figsize=(5.6, 3.8))
    plain = by_epsilon.pop(None, [])
    points = sorted((epsilon, values) for epsilon, values in by_epsilon.items() if epsilon is not None)
    axis.plot([at for at, _ in points], [sum(values) / len(values) for _, values in points], "o-", label="dp-sgd")
    for at, values in points:
        axis.plot([at] * len(values), values, ".", color="C0", alpha=0.5)
    if plain:
        axis.axhline(sum(plain) / len(plain), color="C1", linestyle="--", label="the same model, no noise")
    axis.axhline(1 / 6, color="grey", linewidth=0.8, linestyle=":", label="chance")
    axis.set_xscale("log", base=2)
    axis.set_xticks([at for at, _ in points], [f"{at:g}" for at, _ in points])
    axis.set(xlabel="epsilon of a member's gate (delta 1e-5)", ylabel="test accuracy", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    _save(figure, path)


def draw_secure_cost(lines: Sequence[Line], path: Path) -> None:
    """A member's processor time and the server's time against members, and against the length of the vector."""
    plt = _pyplot()
    found = [line for line in newest(lines) if line["figure"] in ("client_cpu_seconds", "server_seconds")]
    panels = (
        ("members", "values", "members (a tenth lost)", "values"),
        ("values", "members", "values (a tenth lost)", "members"),
    )
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 3.8), sharey=True)
    for axis, (along, fixed, label, unit) in zip(axes, panels, strict=True):
        here = _longest_sweep(found, along, fixed)
        names = {"client_cpu_seconds": "a member, CPU", "server_seconds": "the server"}
        for index, (figure_name, name) in enumerate(names.items()):
            for graph, style in (("complete", "o-"), ("sparse", "s--")):
                points = sorted(
                    (line["case"][along], line["value"])
                    for line in here
                    if line["figure"] == figure_name and line["case"]["graph"] == graph
                )
                if points:
                    axis.plot(*zip(*points, strict=True), style, color=f"C{index}", label=f"{name}, {graph} graph")
        title = f"{here[0]['case'][fixed]:,} {unit}" if here else ""
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds", title=title)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", fontsize="small")
    _save(figure, path)


def _longest_sweep(lines: Sequence[Line], along: str, fixed: str) -> list[Line]:
    """The lines with a tenth lost that share the one value of `fixed` with the most different values of `along`."""
    by_fixed: dict[int, list[Line]] = {}
    for line in lines:
        if line["case"]["dropped"] == line["case"]["members"] // 10:
            by_fixed.setdefault(line["case"][fixed], []).append(line)
    return max(by_fixed.values(), key=lambda found: len({line["case"][along] for line in found}), default=[])


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    # Without a salt, ids in the file would differ from run to run.
    mpl.rcParams.update({"svg.hashsalt": "tacit", "svg.fonttype": "none"})
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    _pyplot().close(figure)


SECTIONS = (
    Section(
        "institutional",
        "TREC over a few institutions",
        "Test accuracy of TextCNN on TREC over 1 (plain training) to 4 equal members, through the services, without "
        "noise; mean of three seeds, last round. `paper` is table 1 of Zhu et al. 2020, whose standard error on 500 "
        "test questions is 1.3 points. Rounds and recipe were fixed before anything was run.",
        ("paper", "spread", "values"),
        plots=(Plot("institutional.svg", "Test accuracy after each round", draw_learning_curves),),
    ),
    Section(
        "institutional_dp",
        "TREC under differential privacy, as the paper adds it",
        "Algorithm 1 of Zhu et al. 2020 (`gaussian-update`): Adam on a lot, the change clipped to length C, Gaussian "
        "noise of deviation sigma C on every coordinate; TextCNN of 4.6 million parameters, H = 50 epochs, C = 1 (the "
        "paper does not say its own), delta 1e-5. `limit` is E: each member accounts for itself the paper's way and "
        "sends while it has spent less; E = 1 and 2 are points of the run with E = 4. `paper` is its tables 2 and 3, "
        "and no target.\n\n"
        "These runs are at chance, and must be: answers that know nothing of the question get a sixth, and one answer "
        "to all questions between 0.018 and 0.276. "
        "The noise of one update has length sigma C sqrt(d), 8,600 C at sigma = 4, against a change of at most C; in "
        "the mean of three it is still some 5,000 times as long (`noise_to_signal`, measured as it left the members), "
        "and over the rounds it piles up on weights of 0.1. A figure near the paper's 0.84 would mean that the noise "
        "is not there, or is not what its algorithm says. Nor does the paper's epsilon hold: neighbouring data sets' "
        "changes lie up to 2 C apart, so that the multiplier is sigma / 2 (`epsilon_sound`, PLD; `epsilon_paper` is "
        "the moments accountant at sigma, whose rounds are the paper's own to within one, but for lots of 128, where "
        "table 3 says 354 rounds and 50 epochs are 709). What the same epsilon buys with `dp-sgd` stands below.",
        ("paper", "spread"),
        wide=("test_accuracy", "rounds", "epsilon_paper", "epsilon_sound", "noise_to_signal"),
        where={"mechanism": ("gaussian-update",)},
        plots=(Plot("institutional_dp.svg", "Test accuracy under gaussian-update, ours and the paper's", draw_grid),),
    ),
    Section(
        "institutional_dp",
        "TREC at a true epsilon",
        "The best `dp-sgd` found for three equal members, delta 1e-5: `epsilon` is what a member's empty ledger must "
        "allow for all rounds to pass its gate, `epsilon_sound` the PLD of the same rounds. A step's noise is on a sum "
        "over the lot and is divided by the lot, and a small model that starts from a public embedding (GloVe, 50 "
        "wide) has little for it to fall on: `noise_to_signal` is about 1 where `gaussian-update` has thousands. That "
        "of a trained embedding counts all its rows, most of which no question reads. Everything, whether the "
        "embedding is frozen too, was tuned on 500 questions held back from training, whose standard error is 2 points "
        "(benchmarks/results/institutional_dp_search.jsonl has every trial). Then each choice was tested with three "
        "seeds; the choosing itself is not accounted for. `none` is the model of the last row's recipe without noise.",
        ("values", "recipe"),
        wide=("test_accuracy", "rounds", "epsilon_sound", "noise_to_signal"),
        where={"mechanism": ("dp-sgd", "none")},
        plots=(Plot("dp_sgd.svg", "Test accuracy of dp-sgd by epsilon", draw_by_epsilon),),
    ),
    Section(
        "secure_agg",
        "What secure aggregation costs",
        "Wall time of a round over the services, without training, divided by that of the same round in the clear: "
        "medians of several rounds. All members share the machine's cores.",
        ("target", "secure_seconds", "clear_seconds"),
        figures=("secure_over_clear_round",),
    ),
    Section(
        "secure_agg",
        "Beside Flower's SecAgg+",
        "The same cohort, vectors, threshold (two thirds, complete graph) and losses under this project's protocol and "
        "under Flower's own workflow and client modifier, in one process each and in memory. `server` is everything "
        "from the first message to the opened mean, `client` all answers of one member with encoding and without "
        "training; `peer` and `ours` are wall seconds, `peer_cpu` and `ours_cpu` processor seconds. Flower signs "
        "nothing and does not check that all were told the same list of survivors; here every signature is RSA-3072 "
        "under a certificate of the federation, and `checked` is how many one member and the server verified in an "
        "attempt, which the benchmark insists on. Certificates were verified before (`certificate_seconds` each, once "
        "in a member's life). An upload counts the packed vector and the signed digest beside it; the error is that of "
        "the mean, for values in [-8, 8].",
        ("target", "peer", "ours", "peer_cpu", "ours_cpu", "checked", "certificate_seconds", "versions"),
        figures=(
            "server_times_faster_than_flower",
            "client_times_faster_than_flower",
            "upload_bytes_per_value",
            "max_abs_error",
        ),
    ),
    Section(
        "secure_agg",
        "How near masking comes to the cipher",
        "`share_of_cipher_limit`: 50 masks put on one vector by one thread, over a bare loop of AES-256-CTR and one "
        "addition that never leaves the cache; `thread_speedup`: two threads over one; rates in gigabytes of key "
        "stream a second. `ours` of one thread and `one_thread` are the same work, measured minutes apart: where they "
        "differ, it is the machine. `server_peak_vectors`: the highest resident size of a server process above idle, "
        "in vectors of four bytes a value, with uploads spooled as the coordinator does it.",
        ("target", "ours", "raw", "one_thread", "raw_block_bytes", "idle_bytes", "peak_bytes"),
        figures=("share_of_cipher_limit", "thread_speedup", "server_peak_vectors"),
    ),
    Section(
        "secure_agg",
        "Secure aggregation by members and length",
        "Processor time of one member and wall time of the server in one attempt, in memory, all signatures checked "
        "and counted. Sparse graphs are for a tenth corrupt, a tenth lost and 80 bits. Goals at 100,000 values: 0.2 s "
        "for a member of 1000 with 120 neighbours, 6 s for the server of that cohort when 50 are lost, and 10 s on the "
        "complete graph of 500 when 150 are. Where members are many, `timed` of them are timed.",
        ("timed", "checked"),
        wide=("client_cpu_seconds", "server_seconds"),
        figures=("client_cpu_seconds", "server_seconds"),
        plots=(Plot("secure_agg_cost.svg", "Time of a member and of the server", draw_secure_cost),),
    ),
    Section(
        "aggregation_memory",
        "Memory of a round at the coordinator",
        "The coordinator's highest resident size above idle (all members connected, after a small job), in vectors of "
        "the job.",
        ("target", "idle_bytes", "peak_bytes"),
    ),
    Section(
        "dp_cost",
        "What per-example clipping costs",
        "A private step over a plain step of the same model and optimiser over all parameters, medians taken in turns "
        "in one run; the goal is 3. `ours` is this project's clipping (ghost norms, one backward pass), "
        "`opacus-ghost` and `opacus-hooks` are Opacus 1.6 on the same model, `narrowed` is plain training of the rows "
        "in use. TextCNN is the only architecture there is.",
        ("target", "step_seconds", "plain_seconds"),
    ),
    Section(
        "privacy_audit",
        "Attacking the claim",
        "Lower bounds on epsilon at 95 % confidence, from attacks on the member's own code with everything a "
        "worst-case adversary has; beside each what the ledger claims for the same releases. In place the bound must "
        "lie under the claim; with noise or clipping broken on purpose above it. `gaussian` bounds assume the family "
        "that is claimed, `rates` nothing. `paper` is what Zhu et al. 2020 would account for: the attack on "
        "gaussian-update is above it.",
        ("method", "rates", "runs", "paper"),
    ),
    Section(
        "ledger_faults",
        "Killing the ledger",
        "Processes that are killed (kill -9) at random points of a release, or by a timer, and started again. All "
        "but `cycles` must be 0.",
        ("killed", "points", "charges", "refusals", "seconds", "target"),
    ),
)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="the folder to write into (default: docs)")
    for path in write_report(RESULTS, parser.parse_args().out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
