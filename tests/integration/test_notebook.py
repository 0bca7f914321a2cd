"""The notebook of `examples/notebook` runs cell by cell, and each cell shows what its reader is promised."""

import ast
import json
import shutil

import pandas
from matplotlib.figure import Figure

from tests.support.places import ROOT

NOTEBOOK = ROOT / "examples" / "notebook" / "desk.ipynb"


def shown(source, names):
    """Runs a cell, and returns the value of its last expression, which a notebook shows."""
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)  # noqa: S102  our own notebook
    return None if last is None else eval(compile(last, "cell", "eval"), names)  # noqa: S307


def test_fifteen_lines_from_a_data_frame_to_a_model_and_a_plot(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples" / "desk", tmp_path / "desk")
    shutil.copytree(ROOT / "examples" / "notebook", tmp_path / "notebook")
    monkeypatch.chdir(tmp_path / "notebook")
    book = json.loads(NOTEBOOK.read_text())
    cells = ["".join(each["source"]) for each in book["cells"] if each["cell_type"] == "code"]
    assert sum(bool(line.strip()) for cell in cells for line in cell.split("\n")) <= 15
    names = {}
    counts, history, plot, answers = [shown(cell, names) for cell in cells]
    assert len(counts) == 6
    assert isinstance(history, pandas.DataFrame)
    assert len(history) == 4
    # Well above the most frequent label, which has a fifth of the rows.
    assert history.accuracy.iloc[-1] > 0.6
    assert isinstance(plot, Figure)
    assert [each.label in names["model"].labels for each in answers] == [True, True]
    assert (tmp_path / "notebook" / "desk-model" / "model.onnx").exists()
