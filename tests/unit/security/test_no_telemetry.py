"""No library tells anybody of what a member or an operator does."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.telemetry import has_reported, where_it_reports

# A graph of one operator, loaded as an exported model is.
PROGRAM = """
import os
from onnx import TensorProto, helper
{first}
import onnxruntime

one = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "graph", one[:1], one[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
# At once, so that nothing is sent at the end.
os._exit(0)
"""


def reports(folder: Path, first: str) -> bool:
    """Whether a process that begins with this line reports the model that it loads."""
    words = [sys.executable, "-c", PROGRAM.format(first=first)]
    subprocess.run(words, env=where_it_reports(folder), check=True, cwd=ROOT)
    return has_reported(folder)


@pytest.mark.parametrize(
    "first",
    [
        "import tacit",
        "import coordinator.cli",
        "import edge_client.cli",
        # What reads models.
        "import export.generating",
        "import export.predictor",
        "import learning.backbones.onnx_features",
    ],
)
def test_onnxruntime_starts_no_session_with_its_maker(tmp_path: Path, first: str) -> None:
    assert not reports(tmp_path, first)


def test_without_us_it_starts_one(tmp_path: Path) -> None:
    assert reports(tmp_path, "")
