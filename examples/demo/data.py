"""Chooses the demonstration's data and deals it to five members in unequal parts."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from learning.text.data import read_examples
from learning.text.examples import DataInvalid, Example

__all__ = ["MEMBERS", "DemoData", "choose_data"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "desk"
TREC = ROOT.parent / "shared" / "data" / "trec"
WORD_PIECES = ROOT.parent / "shared" / "data" / "bert_vocab" / "bert-base-uncased-vocab.txt.gz"

# Shares of the training data, largest first.
MEMBERS = {"aster": 5, "birch": 4, "cedar": 3, "dogwood": 2, "elm": 1}


@dataclass(frozen=True)
class DemoData:
    """The data of one demonstration, and the training options of its small model."""

    name: str
    train: list[Example]
    test_file: Path
    test: list[Example]
    labels: tuple[str, ...]
    vocabulary_kind: str
    vocabulary_file: Path
    # The demonstration fails below this accuracy: of the small model, and of a head on a backbone.
    min_accuracy: float
    min_backbone_accuracy: float
    epochs: int

    def deal(self, folder: Path) -> dict[str, Path]:
        """Write each member's file, and return the paths by member."""
        rows = list(self.train)
        random.Random(0).shuffle(rows)
        files, at, total = {}, 0, sum(MEMBERS.values())
        for place, (member, share) in enumerate(MEMBERS.items(), start=1):
            end = len(rows) if place == len(MEMBERS) else at + len(rows) * share // total
            files[member] = folder / f"{member}.jsonl"
            lines = (json.dumps({"text": row.text, "label": row.label}) for row in rows[at:end])
            files[member].write_text("\n".join(lines) + "\n", encoding="utf-8")
            at = end
        return files


def _file(folder: Path, stem: str) -> Path:
    for name in (f"{stem}.jsonl", f"{stem}.jsonl.gz"):
        if (folder / name).exists():
            return folder / name
    if not folder.is_dir():
        raise DataInvalid(f"{folder} is no folder; name one that has train.jsonl and test.jsonl")
    raise DataInvalid(
        f'{folder} has neither {stem}.jsonl nor {stem}.jsonl.gz; write one {{"text": ..., "label": ...}} a line there'
    )


def choose_data(folder: Path | None) -> DemoData:
    """Read `folder` if it is given, else TREC if it is installed, else examples/desk.

    Raises:
        DataInvalid: a file is missing or invalid.
    """
    if folder is None:
        folder = TREC if TREC.exists() else EXAMPLES
    own = folder.resolve() == EXAMPLES
    test_file = _file(folder, "test")
    train, test = read_examples(_file(folder, "train")), read_examples(test_file)
    if len(train) < (least := sum(MEMBERS.values())):
        raise DataInvalid(f"{_file(folder, 'train')} has {len(train)} rows, and five members share them; give {least}")
    pieces = WORD_PIECES.exists() and not own
    return DemoData(
        name="desk messages (examples/desk)" if own else str(folder),
        train=train,
        test_file=test_file,
        test=test,
        labels=tuple(sorted({str(example.label) for example in train})),
        vocabulary_kind="wordpiece" if pieces else "words",
        vocabulary_file=WORD_PIECES if pieces else EXAMPLES / "words.txt",
        min_accuracy=0.60 if own else 0.70,
        # Logistic regression on word counts, with all the data in one place, gets 84 % of the desk messages at best.
        min_backbone_accuracy=0.88 if own else 0.70,
        epochs=3 if own else 1,
    )
