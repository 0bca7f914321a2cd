"""Makes the tables and drawings of synthetic text for `benchmarks.report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.library.plots import pyplot, save

__all__ = [
    "attack_rows",
    "comparison_rows",
    "cost_rows",
    "draw_comparison",
    "draw_rounds_at_budget",
    "round_rows",
    "sample_rows",
    "search_rows",
    "text_rows",
]

Line = dict[str, Any]
Found = dict[str, Line]

_DATASETS = ("sst2", "trec")
_METHODS = ("majority", "raw", "dp-sgd", "synthetic", "published")
_MODELS = ("untrained", "raw", "dp-sgd", "synthetic")
_TRAINED = ("rvae", "bilstm", "minilm")
# The name of a column or a bar, by method and source.
_NAMES = {
    ("dp-sgd", None): "dp-sgd",
    ("synthetic", "members"): "synthetic, members",
    ("synthetic", "operator"): "synthetic, operator",
    ("published", "members"): "published (no guarantee)",
}


def comparison_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each data set and epsilon: each method's test accuracy in per cent, with floor and ceiling."""
    cells = {_key(found["test_accuracy"]["case"]): found for found in _by_cell(lines, "test_accuracy")}
    rows = [["dataset", "epsilon", "majority", "raw", *_NAMES.values()]]
    budgets = {(key[0], key[3]) for key in cells if key[1] in ("dp-sgd", "synthetic", "published")}
    for dataset, epsilon in sorted(budgets, key=lambda budget: (_DATASETS.index(budget[0]), _order(budget[1]))):
        wanted: list[tuple[str, str | None, float | None]] = [("majority", None, None), ("raw", None, None)]
        wanted += [(method, source, epsilon) for method, source in _NAMES]
        values = [cells.get((dataset, *key)) for key in wanted]
        rows.append([dataset, _epsilon(epsilon), *("" if each is None else _accuracy(each) for each in values)])
    return rows


def round_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each curve: test accuracy in per cent after each round, of the first seed that has one."""
    rows = [["dataset", "method", "epsilon", "rounds", "last round", "after each"]]
    for found in _by_cell([line for line in lines if "curve" in line], "accuracy_by_round"):
        line, case = found["accuracy_by_round"], found["accuracy_by_round"]["case"]
        values = [f"{100 * value:.1f}" for _, value in line["curve"]]
        named = [case["dataset"], _NAMES[case["method"], case["source"]], _epsilon(case["epsilon"])]
        rows.append([*named, str(len(values)), values[-1], ", ".join(values)])
    return rows


def text_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each corpus: how near it is to the training texts, and how reliable its labels are."""
    rows = [["dataset", "texts of", "epsilon", "reported", "rows", "label agreement", "1-grams", "2", "3", "4"]]
    rows[0] += ["longest run", "whole texts", "planted", "exposure", "perplexity"]
    for found in _by_cell(lines, "label_agreement"):
        case = found["label_agreement"]["case"]
        row = [case["dataset"], _NAMES[case["method"], case["source"]], _epsilon(case["epsilon"])]
        row += [_number(found, "epsilon_reported", 2), _number(found, "rows", 0), _per_cent(found["label_agreement"])]
        grams = found.get("four_gram_overlap", {}).get("ngrams", [])
        row += [f"{share:.2f}" for share in grams] or [""] * 4
        # The largest of all seeds, because a mean would hide a copy.
        copied = [line["whole_texts"] for line in lines if line["case"] == case and "whole_texts" in line]
        whole = max(copied, default=None)
        row += [_number(found, "longest_verbatim", 0), "" if whole is None else f"{100 * whole:.2f} %"]
        row += [_number(found, "planted_reproduced", 0), _number(found, "exposure", 1), _number(found, "perplexity", 0)]
        rows.append(row)
    return rows


def sample_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make rows of the first synthetic texts of each label."""
    rows = [["dataset", "texts of", "epsilon", "label", "text"]]
    for found in _by_cell(lines, "rows"):
        line, case = found["rows"], found["rows"]["case"]
        named = [case["dataset"], _NAMES[case["method"], case["source"]], _epsilon(case["epsilon"])]
        rows += [[*named, each["label"], _plain(each["text"])] for each in line.get("samples", [])]
    return rows


def attack_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each released model and attacker."""
    rows = [["model", "epsilon", "attacker", "accuracy", "without the keyword", "chance", "by keyword"]]
    names = ("attack_accuracy_linear", "attack_accuracy_deep")
    cells: dict[str, Found] = {}
    for name in names:
        for found in _by_cell(lines, name):
            cells.setdefault(found[name]["case"]["model"], {}).update(found)
    for model in sorted(cells, key=_MODELS.index):
        for name in names:
            if name in cells[model]:
                line = cells[model][name]
                chance = f"50 +- {100 * line['chance_error']:.1f}" if "chance_error" in line else "50"
                hidden = f"{100 * line['hidden_words']:.1f}" if "hidden_words" in line else ""
                words = ", ".join(f"{word} {100 * value:.0f}" for word, value in line.get("keywords", {}).items())
                attacker = name.rsplit("_", 1)[1]
                epsilon = _epsilon(line["case"]["epsilon"])
                rows.append([model, epsilon, attacker, _per_cent(line), hidden, chance, words])
    return rows


def cost_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make a row for each training, with a member's total cost."""
    rows = [["trained", "values", "rounds", "steps", "lot", "CPU seconds", "of them the corpus", "seconds a step"]]
    rows[0] += ["sent", "received", "timed at lots"]
    found = _by_cell(lines, "cpu_seconds")
    for each in sorted(found, key=lambda each: _TRAINED.index(each["cpu_seconds"]["case"]["trained"])):
        line = each["cpu_seconds"]
        row = [line["case"]["trained"], _number(each, "values", 0), str(line["rounds"]), str(line["steps"])]
        row += [str(line["lot"]), f"{line['value']:,.0f}", f"{line['corpus_seconds']:g}", f"{line['step_seconds']:g}"]
        row += [_megabytes(each, "bytes_sent"), _megabytes(each, "bytes_received")]
        rows.append([*row, ", ".join(map(str, line["measured_lots"]))])
    return rows


def search_rows(lines: Sequence[Line]) -> list[list[str]]:
    """Make rows of the trials, by model and epsilon, the best last."""
    rows = [["trained", "epsilon", "validation accuracy", "by guidance", "perplexity", "recipe"]]
    tried = [line for line in lines if line["figure"] == "validation_accuracy"]
    for line in sorted(tried, key=lambda line: (line["case"]["model"], line["case"]["epsilon"], line["value"])):
        case = line["case"]
        recipe = ", ".join(f"{name} {value}" for name, value in case["recipe"].items())
        by_guidance = ", ".join(f"{guidance:g}: {100 * value:.1f}" for guidance, value in line.get("by_guidance", []))
        perplexity = f"{line['perplexity']:.0f}" if "perplexity" in line else ""
        value = f"{100 * line['value']:.1f}"
        rows.append([case["model"], _epsilon(case["epsilon"]), value, by_guidance, perplexity, recipe])
    return rows


def draw_comparison(lines: Sequence[Line], path: Path) -> None:
    """Draw a panel for each data set: test accuracy of each method by epsilon, with floor and ceiling as lines."""
    plt = pyplot()
    found = [each["test_accuracy"] for each in _by_cell(lines, "test_accuracy")]
    datasets = [name for name in _DATASETS if any(line["case"]["dataset"] == name for line in found)]
    figure, axes = plt.subplots(1, max(len(datasets), 1), figsize=(5.2 * max(len(datasets), 1), 3.8), squeeze=False)
    for axis, dataset in zip(axes[0], datasets, strict=False):
        here = [line for line in found if line["case"]["dataset"] == dataset]
        budgets = sorted(
            {line["case"]["epsilon"] for line in here if line["case"]["method"] == "synthetic"}, key=_order
        )
        for place, ((method, source), name) in enumerate(_NAMES.items()):
            drawn = [line for line in here if (line["case"]["method"], line["case"]["source"]) == (method, source)]
            # `published` is drawn beside the methods without noise, because it promises nothing either.
            at = [budgets.index(line["case"]["epsilon"]) for line in drawn if line["case"]["epsilon"] in budgets]
            heights = [100 * line["value"] for line in drawn if line["case"]["epsilon"] in budgets]
            axis.bar([each + 0.2 * place - 0.3 for each in at], heights, 0.2, label=name)
        for method, style in (("majority", ":"), ("raw", "--")):
            for line in here:
                if line["case"]["method"] == method:
                    axis.axhline(100 * line["value"], color="grey", linestyle=style, linewidth=1, label=method)
        axis.set_xticks(range(len(budgets)), [_epsilon(each) for each in budgets])
        axis.set(title=dataset, xlabel="epsilon of a member (delta 1e-5)", ylabel="test accuracy, %", ylim=(0, 100))
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", fontsize="x-small")
    save(figure, path)


def draw_rounds_at_budget(lines: Sequence[Line], path: Path) -> None:
    """Draw the test accuracy after each round at one budget, of one seed.

    It shows the classifier itself, and one trained on texts that the round's autoencoder generated.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5.6, 3.8))
    for line in sorted(lines, key=lambda line: _METHODS.index(line["case"]["method"])):
        case = line["case"]
        if line["figure"] == "accuracy_by_round" and line.get("seed") == 0 and case["dataset"] == "sst2":
            rounds, values = zip(*line["curve"], strict=True)
            name = f"{_NAMES[case['method'], case['source']]}, epsilon {_epsilon(case['epsilon'])}"
            axis.plot(rounds, [100 * value for value in values], "o-", markersize=3, label=name)
    axis.set(xlabel="round", ylabel="test accuracy, %", title="sst2")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize="small")
    save(figure, path)


def _by_cell(lines: Sequence[Line], figure: str) -> list[Found]:
    """Return the figures, by name, of each case that has this one: means over seeds, or else the first seed.

    The cases are in the order of data sets, epsilons and methods.
    """
    cells: dict[str, Found] = {}
    for line in lines:
        cell = cells.setdefault(repr(sorted(line["case"].items(), key=repr)), {})
        if "seed" not in line or line["figure"] not in cell:
            cell[line["figure"]] = line
    return sorted(
        (found for found in cells.values() if figure in found), key=lambda found: _place(found[figure]["case"])
    )


def _place(case: dict[str, Any]) -> tuple[Any, ...]:
    method = _METHODS.index(case["method"]) if "method" in case else 0
    return _DATASETS.index(case["dataset"]), _order(case["epsilon"]), method, case.get("source") or ""


def _key(case: dict[str, Any]) -> tuple[str, str, str | None, float | None]:
    return case["dataset"], case["method"], case["source"], case["epsilon"]


def _order(epsilon: float | None) -> float:
    return float("inf") if epsilon is None else epsilon


def _epsilon(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:g}"


def _accuracy(found: Found) -> str:
    return _per_cent(found["test_accuracy"])


def _per_cent(line: Line) -> str:
    value = f"{100 * line['value']:.1f}"
    return f"{value} ({100 * line['spread']:.1f})" if "spread" in line else value


def _number(found: Found, name: str, digits: int) -> str:
    return f"{found[name]['value']:,.{digits}f}" if name in found else ""


def _megabytes(found: Found, name: str) -> str:
    return f"{found[name]['value'] / 1e6:,.1f} MB" if name in found else ""


def _plain(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return "".join(f"\\{each}" if each in "|\\`*_<>[]$" else each for each in text)
