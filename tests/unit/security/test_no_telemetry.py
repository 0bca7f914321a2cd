"""No library tells anybody of what a member or an operator does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

# A graph of one operator, loaded as an exported model is.
PROGRAM = """
from onnx import TensorProto, helper
{first}
import onnxruntime

one = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "graph", one[:1], one[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
"""


def left_by(folder: Path, first: str) -> list[str]:
    """The files that a process leaves in its folder of temporary files."""
    # It is also off where CI is set, and where we have switched it off for this process.
    quiet = {"CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "GITHUB_ACTIONS", "TF_BUILD"}
    environment = {name: value for name, value in os.environ.items() if name not in quiet}
    words = [sys.executable, "-c", PROGRAM.format(first=first)]
    subprocess.run(words, env={**environment, "TMPDIR": str(folder)}, check=True, cwd=ROOT)
    return [path.name for path in folder.iterdir()]


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
    assert left_by(tmp_path, first) == []


def test_without_us_it_starts_one(tmp_path: Path) -> None:
    """Its telemetry keeps the identity of the session in a file, before it sends anything."""
    assert left_by(tmp_path, "") == [".ses"]
