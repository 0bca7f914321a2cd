"""Code that the benchmarks on TREC share: vocabularies, data, and the test of a version."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.library.record import SHARED, NoData

if TYPE_CHECKING:
    from learning.text.examples import Example

__all__ = ["GLOVE", "PIECES", "TREC", "VOCABULARIES", "Tester", "Vocabulary", "check_data", "deal"]

TREC = SHARED / "trec"


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a run's texts, and the start of its embedding."""

    name: str
    kind: str
    file: Path
    embedding: int = 128
    pretrained: bool = False

    def toml(self) -> str:
        """Return the job file's [vocabulary] table and the model's width."""
        table = f'[vocabulary]\nkind = "{self.kind}"\nfile = {json.dumps(str(self.file))}\n'
        if self.pretrained:
            table += f"pretrained = {json.dumps(str(self.file))}\n"
        return table + f"[model]\nembedding = {self.embedding}\n"


PIECES = Vocabulary("wordpiece", "wordpiece", SHARED / "bert_vocab" / "bert-base-uncased-vocab.txt.gz")
GLOVE = Vocabulary("glove.6B.50d", "words", SHARED / "glove" / "glove.6B.50d.subset.txt.gz", 50, True)
VOCABULARIES = {each.name: each for each in (PIECES, GLOVE)}


def check_data(vocabulary: Vocabulary) -> None:
    """Raise NoData if a file is missing."""
    for path in (TREC / "train.jsonl.gz", TREC / "test.jsonl.gz", vocabulary.file):
        if not path.exists():
            raise NoData(
                f"{path} is missing: this benchmark needs the public TREC questions and a public vocabulary under "
                f"{SHARED}; put them there and run it again"
            )


def deal(rows: Sequence[str], members: int, seed: int) -> list[list[str]]:
    """Deal equal parts (sizes differ by at most one) in an order drawn from the seed."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    return [order[member::members] for member in range(members)]


class Tester:
    """Tests versions of one job in this process, on `examples` or else on TREC's test set."""

    def __init__(self, bundle: Path, examples: "Sequence[Example] | None" = None) -> None:
        import torch

        from export.bundle import read_job_bundle
        from learning.models import build
        from learning.text.corpus import encoder_of
        from learning.text.data import read_examples
        from learning.text.examples import label_ids

        torch.set_num_threads(1)
        self.bundle = read_job_bundle(bundle)
        job = self.bundle.document
        self.encoder = encoder_of(job, self.bundle.public_tokenizer)
        self.module = build(job.model, self.encoder.vocabulary_size, len(job.labels), self.encoder.pad_id)
        examples = read_examples(TREC / "test.jsonl.gz") if examples is None else examples
        self._ids = self.encoder.encode([example.text for example in examples])
        self._labels = label_ids(examples, job.labels)

    def accuracy(self, weights: bytes | None = None) -> float:
        """Return the accuracy of these weights, or of the module as it is."""
        from learning.models import load_shared
        from learning.training.local import evaluate

        if weights is not None:
            load_shared(self.module, self.bundle.parameters(self.bundle.manifest.decode(weights)))
        return evaluate(self.module, self._ids, self._labels).accuracy
