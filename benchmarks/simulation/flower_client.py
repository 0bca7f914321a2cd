"""The client of Flower's side: the same model, step for step, in plain PyTorch. It runs in Flower's own Python.

It is written as Flower's PyTorch examples are, with what a careful user would add for speed: a worker builds its model
once, and maps the rows, already tokenised, from the disk.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # type: ignore[import-not-found]
from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
from torch import Tensor, nn

__all__ = ["FOLDER", "app"]

FOLDER = "TACIT_BENCHMARK_FOLDER"
"""Environment variable with the folder that `benchmarks.simulation.setup` wrote."""


class TextCNN(nn.Module):
    """As `learning.models.textcnn`: a filter sees only windows inside a text."""

    def __init__(self, rows: int, width: int, filters: dict[str, int], labels: int, pad: int, dropout: float) -> None:
        super().__init__()
        self.pad = pad
        self.embedding = nn.Embedding(rows, width, padding_idx=pad)
        self.filters = nn.ModuleDict({each: nn.Conv1d(width, maps, int(each)) for each, maps in filters.items()})
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(sum(filters.values()), labels)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, S) to (B, labels)."""
        lengths = (ids != self.pad).sum(dim=1, keepdim=True)
        x = self.embedding(ids).transpose(1, 2)
        features = []
        for width, convolution in self.filters.items():
            answers = convolution(x)
            start = torch.arange(answers.shape[2])
            whole = (start <= (lengths - int(width)).clamp(min=0)) & (start < lengths)
            features.append(answers.masked_fill(~whole[:, None, :], -torch.inf).max(dim=2).values.relu())
        logits: Tensor = self.output(self.dropout(torch.cat(features, dim=1)))
        return logits


class Head(nn.Module):
    """A linear layer without a trained bias over features."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, labels, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """(B, width) to (B, labels)."""
        logits: Tensor = self.output(features)
        return logits


@cache
def _told() -> tuple[Path, dict[str, Any]]:
    folder = Path(os.environ[FOLDER])
    return folder, json.loads((folder / "told.json").read_text())


@cache
def _data() -> tuple[Any, Any, Any]:
    folder, _ = _told()
    inputs, labels, members = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("inputs", "labels", "rows"))
    return inputs, labels, members


@cache
def _module() -> nn.Module:
    torch.set_num_threads(1)
    _, told = _told()
    made: nn.Module = Head(**told["head"]) if "head" in told else TextCNN(**told["textcnn"])
    return made


app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Train from the message's arrays on the client's rows, and reply with the trained arrays."""
    _, told = _told()
    inputs, labels, members = _data()
    module = _module()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rows = np.sort(members[context.node_config["partition-id"]])
    x, y = torch.from_numpy(inputs[rows]), torch.from_numpy(labels[rows])
    kind = torch.optim.Adam if told["optimiser"] == "adam" else torch.optim.SGD
    optimiser = kind(module.parameters(), lr=told["learning_rate"])
    module.train()
    for _ in range(told["epochs"]):
        for batch in torch.randperm(len(rows)).split(told["batch"]):
            optimiser.zero_grad()
            picked = x[batch]
            if picked.dtype == torch.int64:
                # Padded to the batch's own longest text.
                picked = picked[:, : max(int((picked != told["textcnn"]["pad"]).sum(dim=1).max()), told["shortest"])]
            loss = nn.functional.cross_entropy(module(picked), y[batch])
            loss.backward()
            optimiser.step()
    content = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": len(rows)})}
    return Message(content=RecordDict(content), reply_to=message)
