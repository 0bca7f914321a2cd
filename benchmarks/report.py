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

from benchmarks.drift_report import draw_drift, drift_rows
from benchmarks.fedprompt_report import curve_name, draw_rounds, laplace_rows, quality_rows, sweep_rows
from benchmarks.fedvocab_report import (
    accuracy_rows,
    draw_accuracies,
    draw_kinds,
    draw_partitions,
    kind_rows,
    partition_rows,
    sent_rows,
)
from benchmarks.plots import pyplot, save
from benchmarks.reconstruction_report import draw_found, found_rows
from benchmarks.record import RESULTS, ROOT, read_lines
from benchmarks.synthesis_report import (
    attack_rows,
    comparison_rows,
    cost_rows,
    draw_comparison,
    draw_rounds_at_budget,
    round_rows,
    sample_rows,
    search_rows,
    text_rows,
)
from benchmarks.wobble_report import draw_wobble, wobble_rows

__all__ = ["SECTIONS", "Section", "newest", "section_text", "write_report"]

Line = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """A drawing from the newest of a section's lines. file: its name in docs/benchmarks. alt: what it shows."""

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
    # The whole table, from the newest lines of the section, where a row a case does not do.
    rows: Callable[[Sequence[Line]], list[list[str]]] | None = None

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
interrupted run goes on where it stopped; with `--missing` what any version has measured is skipped as well.
`--quick` runs a small case within a minute and writes nothing. The public data sets lie in `../shared/data` beside
the repository: `trec/train.jsonl.gz` and `trec/test.jsonl.gz` (objects with `text` and `label`), the same two of
`sst2`, `ag_news` and `20newsgroups`, `sst2/dev.jsonl.gz` and `sst2/train_sentences.jsonl.gz`, `wikitext103_small`
(`train`, `valid` and `test`, `.txt.gz`), `bert_vocab/bert-base-uncased-vocab.txt.gz`, and
`glove/glove.6B.50d.subset.txt.gz`; a benchmark that misses one says so.
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
    if section.rows is not None:
        table = _table(section.rows(figures))
        return "\n".join([f"## {section.title}", "", section.text, "", *table, "", _of_runs(lines, figures)])
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
    return f"{_number(line['value'])}{unit}"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_cell(each) for each in value)
    if isinstance(value, dict):
        return "; ".join(f"{key} {_cell(each)}" for key, each in value.items())
    return _number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _number(value: float) -> str:
    """Bytes are compared digit by digit, and not in powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


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
            plot.draw(newest(section.lines(lines)), path)
            written.append(path)
            text += f"\n\n![{plot.alt}](benchmarks/{plot.file})"
        parts.append(text + "\n")
    page = out / "benchmarks.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(parts), encoding="utf-8")
    return [page, *written]


def draw_learning_curves(lines: Sequence[Line], path: Path) -> None:
    """Test accuracy after each round, a panel a vocabulary: the mean over the seeds, and the range between them."""
    plt = pyplot()
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
    save(figure, path)


def draw_grid(lines: Sequence[Line], path: Path) -> None:
    """Test accuracy against rounds under the greatest limit that was reached, a panel for lots of 128 and one for other
    lots; the paper's accuracy as a dashed line to a cross where our run ended."""
    plt = pyplot()
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
    save(figure, path)


def draw_by_epsilon(lines: Sequence[Line], path: Path) -> None:
    """Test accuracy of dp-sgd against the gate's epsilon: seeds and their mean; without noise as a line."""
    plt = pyplot()
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
    save(figure, path)


def draw_secure_cost(lines: Sequence[Line], path: Path) -> None:
    """A member's processor time and the server's time against members, and against the length of the vector."""
    plt = pyplot()
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
    save(figure, path)


def _longest_sweep(lines: Sequence[Line], along: str, fixed: str) -> list[Line]:
    """The lines with a tenth lost that share the one value of `fixed` with the most different values of `along`."""
    by_fixed: dict[int, list[Line]] = {}
    for line in lines:
        if line["case"]["dropped"] == line["case"]["members"] // 10:
            by_fixed.setdefault(line["case"][fixed], []).append(line)
    return max(by_fixed.values(), key=lambda found: len({line["case"][along] for line in found}), default=[])


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
        "fedvocab",
        "Private vocabularies: FedVocab and what it is measured against",
        "100 members of equal size, labels dealt by Dirichlet (alpha 1.0), 10 members a round, 50 rounds of one local "
        "epoch, BiLSTM (hidden 150 each way) over GloVe 6B 50 wide, Adam 0.005, batches of 16 (TREC, 20newsgroups: 8); "
        "every member's rows are split 70:10:20. Per cent: the mean over the seeds that are named, the newest run of "
        "each, and in brackets the largest difference between them. Rows of the same seeds can be compared, others by "
        "the brackets at most (FedAvg moves by 2 to 5 points from one seed to the next). `local` trains ten epochs, "
        "as in the paper; a member of the others is drawn for five of the 50 rounds on the average, and trains an "
        "epoch in each (under adaptive fedvocab one more, on the embedding).\n\n"
        "- `global`: geometric mean over all members of the accuracy on one common test set (1,000 rows; TREC 500), "
        "each with its own private parameters and the last shared ones. `local`: mean over members on their own test "
        "rows.\n"
        "- Both after the last round, read as the method uses what a member keeps: adaptive fedvocab after an epoch on "
        "the embedding alone, fedrecon with its private rows made anew on all of a member's training rows, all others "
        "as members last left them. `other reading` is of the same training: what `edge_client export` makes of it, or "
        "what was there before. What is read differently is to be compared in one reading. Of fedrecon only "
        "the first seeds of TREC and SST-2 are read so; in the other lines rows were made on half of the training rows "
        "(a point more on TREC, none on SST-2), and of lg-fedavg `adapted` is an epoch on the embedding without its "
        "encoder.\n"
        "- `best round`: by the members' validation rows, in both readings where it was read so.\n"
        "- `evened`: with each member's own mixture of labels taken out of its logits (Saerens et al. 2002), so that "
        "what is left is what it reads; `leaning`: with the mixture put into a model that is everybody's, which trains "
        "nothing and sends nothing more.\n"
        "- `same`: one public word list; `own`: each member lists the words of its own training texts, and a word of a "
        "test that it never saw is unknown to it; `wide`: its list goes on with the other words of the table it starts "
        "from, which is what the software does by default. Rows of `own` were measured when the vector of an unknown "
        "word was still random, which costs about five points on AG News "
        "([decision 35](decisions/0035-words-nobody-wrote-yet.md)).\n"
        "- `fedvocab, frozen`: everybody's embedding stays the table that all began with, and is adapted after the "
        "last round ([decision 36](decisions/0036-a-table-that-stays.md)).\n"
        "- `rate`: the learning rate where it is not the paper's 0.005, of everything or of the embedding alone "
        "([decision 29](decisions/0029-slower-embeddings.md)). Batches and rates were chosen on validation rows, but "
        "for 0.001, which came after tests of the slower embedding had been read.\n"
        "- `paper`: tables 4 and 5 of the FedVocab paper, which has no TREC: GloVe 300 wide (here 7,846 words of the "
        "50 wide one), hidden 300, 100 rounds, all 120,000 articles of AG News (here 22,256), newsgroup posts (here "
        'without headers, quotations and signatures). It reports "the best results" (appendix A.2), and says neither '
        "by which rows they are the best nor whether the embedding was adapted to them.",
        where={"model": ("bilstm",)},
        figures=("global_accuracy", "local_accuracy"),
        rows=accuracy_rows,
        plots=(Plot("fedvocab.svg", "Global and local accuracy by method", draw_accuracies),),
    ),
    Section(
        "fedvocab",
        "FedVocab from a pretrained encoder",
        "Per cent, one seed. As above, with a pretrained MiniLM (BERT, six layers, 384 wide) under a linear layer in "
        "place of the paper's DistilBERT: its own word pieces, 64 tokens, Adam 0.0001, batches of 16, 20 rounds, "
        "25,000 of SST-2's rows, tests of every fourth member on 250 common rows.",
        where={"model": ("minilm",)},
        figures=("global_accuracy", "local_accuracy"),
        rows=accuracy_rows,
    ),
    Section(
        "fedvocab",
        "What a member of these federations sends",
        "Values of the shared parameters, and the bytes of one member's masked vector in one round, packed as it "
        'travels (`bits` a value; what TLS and messages add is not in it). The paper\'s text has "only 1.41MB" for '
        "FedVocab with BiLSTM, and its figure 4 is of parameters: 300 hidden units each way over a 300 wide embedding "
        "have 1.44 million values, which are 5.8 MB of float32. "
        "Under `own` the embedding is not shared by any method that allows it.",
        where={"model": ("bilstm",)},
        figures=("values_per_round", "bytes_per_round", "seconds"),
        rows=sent_rows,
    ),
    Section(
        "fedvocab_wire",
        "What it sends in the paper's sizes, on the wire",
        "Bytes of one member's TCP connections in a round, TLS included, counted between `edge_client run` and "
        "`coordinator serve`: three members, TREC, a BiLSTM with 300 hidden units each way over an embedding 300 wide "
        "of 7,846 words. 27 bits a value (three members of small data; the ring is as wide as cohort and weights ask). "
        "What comes once a job is in no round. Received is the version, as float32.",
        wide=("values_per_round", "sent_bytes_per_round", "received_bytes_per_round"),
    ),
    Section(
        "fedvocab",
        "Who holds what",
        "The rows of the first seed: every member draws its proportions of labels from a Dirichlet distribution and "
        "fills up to the same size as all others; a label that has run out is struck from the later ones' proportions. "
        "A member that always says its commonest label has the last column's share of its own rows right, without "
        "reading a text: local accuracies are to be held against that.",
        figures=("rows_per_member",),
        rows=partition_rows,
        plots=(Plot("fedvocab_partitions.svg", "Labels of each member", draw_partitions),),
    ),
    Section(
        "who_holds_what",
        "Who holds what, by other rules",
        "TREC's questions dealt in the four ways that `benchmarks/partitions.py` knows. By column: a member holds all "
        "questions of one of the 50 fine kinds, which decide the label; kinds of fewer than ten are joined.",
        rows=kind_rows,
        plots=(Plot("partition_kinds.svg", "Labels and rows of each member by kind of partition", draw_kinds),),
    ),
    Section(
        "wobble",
        "Why the shared part goes up and down",
        "FedAvg on SST-2, read after every round on 2,000 of the members' validation rows: as the model answers, and "
        "at the threshold at which it says each label as often as the rows have it. `swing` is the mean difference "
        "from one round to the next over the last 30, in points. A round with members of one label moves the "
        "threshold, and with adjusted logits such a member teaches nothing "
        "([decision 34](decisions/0034-logit-adjustment.md)).",
        rows=wobble_rows,
        plots=(Plot("wobble.svg", "Accuracy by round, and members of one label", draw_wobble),),
    ),
    Section(
        "drift",
        "Why everybody's rows lose under private embeddings",
        "FedVocab at the paper's rate, as above; per cent, means over the seeds, in brackets the largest difference. "
        "After the last round the same shared part is read behind each member's `own` table of word vectors (not "
        "adapted first), the `mean` of all members' tables (which nobody can make in a federation: tables stay where "
        "they are), the `start` that everybody began with, and, on members' own rows, `another's`. `moved`: how far a "
        "member's table is from the start, over the start's size. `in common`: the share of that squared movement that "
        "the mean makes too; 1 if all went the same way, 0.01 if each of the hundred went its own.",
        rows=drift_rows,
        plots=(Plot("drift.svg", "Accuracies of one shared part behind four tables", draw_drift),),
    ),
    Section(
        "fedvocab_search",
        "What FedVocab's recipes are chosen by",
        "Accuracies on validation rows, one seed; what was not run is not here, and the choices that were made by "
        "trials stand in [decision 29](decisions/0029-slower-embeddings.md). `validation_accuracy` is the mean over "
        "members on their own, `common_validation_accuracy` the geometric mean over members on 400 rows of "
        "everybody's. No test is asked.",
        ("recipe",),
        figures=("validation_accuracy", "common_validation_accuracy"),
        wide=("validation_accuracy", "common_validation_accuracy"),
    ),
    Section(
        "fedprompt",
        "Prompts over a frozen language model: FedPrompt",
        "Per cent of SST-2's labelled dev set (872 sentences: a standard error of 1.3 points), after the last of 15 "
        "rounds; of three seeds the mean and, in brackets, the largest difference. Ten members, all in every round, "
        "40 local steps of 16, Adam; MiniLM (six layers, 384 wide) in place of the paper's BERT-base, 40 steps in "
        "place of 1000. `classification` reads the states with a linear layer that is trained along; `cloze` asks "
        "for a word and trains the prompt alone, over a head for masked words that was fitted on half a million "
        "words, where BERT's has read billions (`paper` is of BERT's). `centralised`: one training on all rows, as "
        "many steps in all as ten members take together; the target is to be within 3 points of it. Its versions are"
        " single points of a path that Adam's constant rate keeps shaking, a federated one is a mean of ten: `below "
        "centralised` is of the better of its last version and the mean of its last five rounds. `frozen`: the "
        "linear layer alone. `fine-tuning`: all values, without a prompt. `fedavgm`: the coordinator carries that "
        "share of its last step into the next, which the paper has not; it was added when the cloze's test figures "
        "were known, its share chosen on validation rows in fifteen rounds of three members. `dirichlet`: by quantity, "
        "alpha 1. Rates were chosen on 872 sentences held out of training with every phrase of theirs, in three rounds "
        "of four "
        "members (cloze: six of three), that of `centralised` too (benchmarks/results/fedprompt_search.jsonl); where"
        " the table says so, none was searched. `precision`: what the frozen network computed in while prompts were "
        "trained; scores are of float32. Centralised training is compared with as it was last measured, whatever "
        "its precision.",
        where={"tokens": (20, None), "steps": (40,), "mechanism": (None,), "backbone": ("minilm",)},
        figures=("test_accuracy", "values_per_round", "bytes_per_round", "seconds"),
        rows=quality_rows,
        plots=(
            Plot(
                "fedprompt.svg",
                "Test accuracy of prompts after each round, and what they are measured against",
                draw_rounds(curve_name),
            ),
        ),
    ),
    Section(
        "fedprompt_search",
        "What prompts' rates are chosen by",
        "Accuracies on validation rows, seed 0, after a short training: three rounds of four members, six rounds of "
        "three for a cloze, whose prompts stand on a plateau for the first hundred steps and more, fifteen under a "
        "momentum. `rate` is Adam's, under laplace-update the bound in L1, under fedavgm the momentum. The highest is "
        "taken, the first of equal ones; a standard error is 1.4 "
        "points, so that neighbours can hardly be told apart. `untrained`: templates and words before any training.",
        figures=("validation_accuracy",),
    ),
    Section(
        "fedprompt",
        "How many tokens a prompt has",
        "As above, equal members. `paper` is its table IV.",
        where={
            "method": ("prompt-tuning",),
            "partition": ("equal",),
            "steps": (40,),
            "mechanism": (None,),
            "server": (None,),
            "tokens": (1, 5, 10, 20),
        },
        figures=("test_accuracy", "values_per_round"),
        rows=sweep_rows("tokens"),
        plots=(
            Plot(
                "fedprompt_tokens.svg",
                "Test accuracy after each round, by tokens of the prompt",
                draw_rounds(lambda line: f"{line['case']['tokens']} tokens"),
            ),
        ),
    ),
    Section(
        "fedprompt",
        "How many local steps a round has",
        "As above, equal members, 20 tokens. Figure 6 of the paper draws 100, 500, 1000 and 1500 steps and prints no "
        "numbers: 100 and 500 stay below 1000.",
        where={
            "method": ("prompt-tuning",),
            "partition": ("equal",),
            "tokens": (20,),
            "mechanism": (None,),
            "server": (None,),
            "steps": (10, 40, 100),
        },
        figures=("test_accuracy", "values_per_round"),
        rows=sweep_rows("steps"),
        plots=(
            Plot(
                "fedprompt_steps.svg",
                "Test accuracy after each round, by local steps",
                draw_rounds(lambda line: f"{line['case']['steps']} steps"),
            ),
        ),
    ),
    Section(
        "fedprompt",
        "Prompts under Laplace noise",
        "As above, equal members, 20 tokens, `laplace-update`: the whole change clipped in L1, Laplace noise on every "
        "coordinate of it. The paper's table V clips gradients, adds Laplace noise to parameters, loses 4.4 points and "
        "names no epsilon. A round's epsilon, told as if it were all, is the first column; what 15 rounds cost a "
        "member's ledger is the second: epsilons add up.",
        where={"mechanism": ("laplace-update",)},
        figures=("test_accuracy", "epsilon_sound"),
        rows=laplace_rows,
    ),
    Section(
        "fedprompt_backdoor",
        "A backdoor in a prompt",
        "`malicious` of `members` put a trigger into their texts and aim at one label, from a trained prompt, over "
        "five rounds; with `scaling` they also send what moves the mean furthest, with `fitted` what reject-outliers "
        "mostly lets through, knowing every honest change of the round. `attack_success`: the share of "
        "test texts of other labels that the trigger turns; `mistaken`: the same without the trigger. Undefended "
        "there is one sum. The goals: scaling succeeds on one sum (0.8 at least) and not on groups (0.3 at most), "
        "with clean accuracy within 3 points of `control`, the same training without an attacker. What the rules "
        "withstand, and why they differ: docs/jobs.md. One seed; rates and all attacks but `fitted` were fixed before "
        "any test.",
        ("mistaken", "control", "target"),
        figures=("clean_accuracy", "attack_success"),
    ),
    Section(
        "fedprompt_wire",
        "What prompts send, on the paper's backbones",
        "Bytes of one member's TCP connections in a round, TLS included; three members, random values, no training. "
        "Full fine-tuning is computed from the bytes a value of the largest method. Millions beside the paper's.",
        ("percent_of_full", "million", "paper_million", "difference"),
        wide=("values_per_round", "sent_bytes_per_round", "received_bytes_per_round"),
        where={"part": ("wire",)},
    ),
    Section(
        "fedprompt_wire",
        "Joining a job on a backbone",
        "From the coordinator over mutual TLS, through a proxy that resets the connection `cuts` times; then a second "
        "job on the same one.",
        ("megabytes_per_second",),
        wide=("backbone_seconds", "backbone_bytes", "second_job_bytes", "fetching_peak_rss_bytes"),
        where={"part": ("backbone",)},
    ),
    Section(
        "fedprompt",
        "The head for masked words",
        "BERT's head over frozen MiniLM, fitted on WikiText-103's prefix with every fifth piece masked; the step with "
        "the lowest loss on its part `valid`, the share of masked pieces of its part `test` that the head names. "
        "`commonest_word`: what naming one piece everywhere gets.",
        ("commonest_word", "masked_loss", "steps"),
        figures=("masked_accuracy",),
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
        "synthesis",
        "Synthetic text, or private training",
        "Test accuracy in per cent; where three seeds are there, their mean and, in brackets, the largest "
        "difference. Ten members with equal parts of SST-2's 6,920 training sentences (test: 1,821, standard error "
        "1.2 points) or of TREC's questions (500), delta 1e-5; `epsilon` is what a member's empty ledger must allow "
        "for everything that the column paid for: all steps, and of `synthetic` the histogram of labels. One "
        "classifier in all columns, a BiLSTM over a frozen GloVe table. `majority`: the commonest label everywhere. "
        "`raw`: all real texts in one place. `dp-sgd`: trained federatedly on the members' own texts. `synthetic`: "
        "trained in one place on 10,000 texts that were made up by an autoencoder (`sound`): a thousand by each "
        "member from its own last model, or all by the operator from the last global one. Recipes, and the epoch or "
        "round that counts, were chosen on validation rows, which no member has.\n\n"
        "DP-RVAE's section 5.4 says that made-up text beats private training by 4.94 points on the average at "
        "epsilon 0.5, and by 6.33 and 1.96 without noise (tweets and reviews, DistilBERT). Its epsilon bounds "
        "nothing ([why](synthesis.md#why-published-promises-nothing)): by its own formula it is 999.08 at the "
        "numbers that it names, and its decoder learns without noise. `published` is that variant, with **no "
        "differential privacy guarantee**, and belongs beside the row without noise: its texts are private texts "
        "rewritten one by one, under their own labels. Where the promise holds, `synthetic` is to be read against "
        "`dp-sgd` in the same row. What is not measured yet is empty.",
        where={"part": ("quality",)},
        figures=("test_accuracy",),
        rows=comparison_rows,
        plots=(
            Plot(
                "synthesis.svg", "Test accuracy by epsilon of classifiers from made-up and real text", draw_comparison
            ),
        ),
    ),
    Section(
        "synthesis",
        "Accuracy by round at one budget",
        "SST-2, one seed, per cent. The budget is the same whatever the round, so that an earlier "
        "one has more noise than it would need. `synthetic` is a classifier that was trained on 3,000 texts which the "
        "operator made up from the autoencoder of that round. The paper's figure 10 has 62 % after 3 rounds against "
        "56 % after 8, at an epsilon of 30 by its own count.",
        where={"part": ("quality",), "dataset": ("sst2",)},
        figures=("accuracy_by_round",),
        rows=round_rows,
        plots=(Plot("synthesis_rounds.svg", "Test accuracy after each round at one budget", draw_rounds_at_budget),),
    ),
    Section(
        "synthesis",
        "How near made-up texts come to real ones",
        "`reported`: what a member's report says of the ledger whose gate let `epsilon` pass. `label agreement`: share "
        "of the texts whose label the classifier of `raw` gives them. `1-grams` to `4`: share of runs of so many words "
        "that stand in the members' texts; `longest run` of them in words; `whole texts` that are one of theirs, in "
        "the worst seed. "
        "`planted`: made-up texts that hold one of the ten planted ones. `exposure`: bits by which a member's own last "
        "model tells its planted text from 200 that were not planted, 1.4 by chance and 7.7 at most. `perplexity`: of "
        "validation rows, z from the prior, under the last global model. All of it is measured without noise, and is a "
        "sign and no guarantee.",
        where={"part": ("quality",)},
        figures=(
            "label_agreement",
            "rows",
            "four_gram_overlap",
            "longest_verbatim",
            "planted_reproduced",
            "exposure",
            "perplexity",
            "epsilon_reported",
        ),
        rows=text_rows,
    ),
    Section(
        "synthesis",
        "Made-up texts, as they came",
        "The first of each label, of the first seed; the paper's table 2.",
        where={"part": ("quality",)},
        figures=("rows",),
        rows=sample_rows,
    ),
    Section(
        "synthesis",
        "Keyword inference on the released classifiers",
        "Of ten words: is it in the text, said from the features under the classifier's head, for SST-2's validation "
        "and test rows, by attackers that learnt it on all training sentences; mean over the words, `chance` with its "
        "standard deviation. `keyword taken out`: the same texts without the word, so that its company alone tells. "
        "`untrained` is the classifier that everybody starts from. Differential privacy promises nothing here: the "
        "text that is attacked is an input, and no training text; features that are poorer for their noise tell less "
        "of everything. The paper's 8.63 % at epsilon 1 must count something else: guessing gets half of these texts "
        "right.",
        where={"part": ("attack",)},
        rows=attack_rows,
    ),
    Section(
        "synthesis",
        "What a member spends on it",
        "One member's whole part in SST-2 at epsilon 5, one thread: an autoencoder and a corpus (`rvae`), or the "
        "classifier federatedly (`bilstm`), or in its place a pretrained MiniLM with all of its values trained. "
        "Seconds are reckoned from the median of a few steps of DP-SGD; MiniLM's step from two smaller lots, on the "
        "line through them, and that it needs as many rounds as the BiLSTM is assumed. `sent` is the packed vector of "
        "all rounds and the file, `received` the versions.",
        where={"part": ("cost",)},
        rows=cost_rows,
    ),
    Section(
        "synthesis_search",
        "What its recipes were chosen by",
        "SST-2, one seed, validation rows alone (872, standard error 1.6 points), best epoch or round: of the "
        "autoencoder, the accuracy of a classifier that was trained on 6,000 texts of the operator's, at the recipe's "
        "guidance and at others, and the rows' perplexity with z from the prior; under FedAvg and FedAdam on the "
        "server with the same number of noised steps. Of the classifier under DP-SGD, its accuracy. Where there is no "
        "row yet, [decision 28](decisions/0028-labels-lean.md) has what the choice was made by.",
        rows=search_rows,
    ),
    Section(
        "reconstruction",
        "What a member's gradients give away",
        "Sentences of AG News with three digit tokens at least, of one member; `sentences` says how many of its 128 "
        "are attacked in each seed, `tokens` and `digit tokens` what all seeds together hold. The attacker sees one "
        "member's gradient of the shared parameters for one batch (no secure aggregation), knows lengths and labels, "
        "and has a table: the member's present one (`true`), the public one that it started from `rounds` rounds of "
        "training ago (`public`), or another (`unrelated`, the paper's attacker). `rows`: rows of a shared embedding "
        "that have a gradient; `span`: rows of the table that lie in the span of the first layer's gradient; "
        "`states`: texts read word by word from the span of the LSTM's states; `positions`: DAGER's span check on the "
        "first attention layer; `dlg`: vectors fitted to the gradient, the paper's attack, on the shortest sentences "
        "with one start and 600 or 800 steps. Where the note says that an attack fails with the true table too, the "
        "row shows nothing about the method. rows and span name each word once, so that repeated words cap their "
        "recall. `secure-aggregation`: the sum over ten members, each with a table and sentences of its own, counted "
        "against the tokens of one. `own-vocabulary`: a member's own words, with GloVe's rows where it has them; "
        "`own-vocabulary-random`: with rows from a seed of its own, which is the default, while the attacker is told "
        "the words and has the rows that the job's seed would give. The public table of `bilstm-300` is random, as no "
        "GloVe of that width is here, and `bert-2x128` has random weights. The paper's table 2 has digit leakage of "
        "87.6 % (BiLSTM, fedavg), 2.1 % (fedrecon) and 1.2 % (fedvocab), by DLG and with an unrelated table; its "
        "figures for an attacker with the public table are not given. What is not measured yet has no row.",
        rows=found_rows,
        plots=(Plot("reconstruction.svg", "F1 of tokens found, by batch and attacker", draw_found),),
    ),
    Section(
        "dp_cost",
        "What per-example clipping costs",
        "A private step over a plain step of the same model and optimiser over all parameters, medians taken in turns "
        "in one run; the goal is 3. `ours` is this project's clipping (ghost norms, one backward pass), "
        "`opacus-ghost` and `opacus-hooks` are Opacus 1.6 on the same model, `narrowed` is plain training of the rows "
        "in use. The goal is TextCNN's; BiLSTM (embedding and hidden 300) and a BERT of two layers, 128 wide, are "
        "listed beside it. Prompts of 20 over a frozen backbone of MiniLM's shape, batches of 16, have a goal of their "
        "own, 1.2 for prompt tuning.",
        ("target", "step_seconds", "plain_seconds"),
    ),
    Section(
        "precision",
        "What bfloat16 costs and saves",
        "A step of prompt tuning (20 vectors, 16 texts of 48 tokens, a frozen backbone of MiniLM's shape) in bfloat16 "
        "over the same step in float32, in turns in one process, one thread. Each row is a process that may use no "
        "more than those instructions of the one processor that is named below: with AMX, with dot products of "
        "bfloat16, and with neither. Other processors and GPUs were not measured.",
        ("float32_seconds", "bfloat16_seconds"),
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
    Section(
        "load",
        "Many members",
        "Coordinator and members in processes of their own, over mutual TLS; members do all but train and "
        "share the cores with the coordinator. With values and hundreds of members: one full secure round of "
        "members that have met before; `members_cpu_seconds` is the processor time of all of them together. With 0 "
        "values: so many sessions with nothing to do. `peak_vectors`: few members with large vectors, as above.",
        ("target", "members_cpu_seconds", "members_cpu_seconds_each", "connected_bytes", "alone_bytes"),
    ),
    Section(
        "strangers",
        "Strangers on the enrolment port",
        "Ten members make rounds while strangers on the same machine press on the enrolment port from fifty addresses: "
        "silent connections, a ClientHello a byte a second, garbage, and whole TLS handshakes. `ratio` is the median "
        "round under the flood over the median quiet round. `coordinator_open_files` says what became of the "
        "connections until then.",
        (
            *("target", "quiet_seconds", "slowest_seconds", "strangers_cpu_seconds", "forwarded", "network_full"),
            *("all_full", "displaced", "not_tls", "hello_late"),
        ),
    ),
    Section(
        "soak",
        "Rounds with kills",
        "A job of so many rounds while members and coordinator are killed (kill -9) at moments that a seed draws, and "
        "started again. In the end every version is computed again from what its survivors had written down before "
        "they masked it, and compared to the last bit, and so is every receipt. `recovery_seconds` is the longest time "
        "from a kill of the coordinator to the next attempt that is opened.",
        ("attempts", "coordinator_kills", "member_kills", "receipts", "median", "seconds", "target"),
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
