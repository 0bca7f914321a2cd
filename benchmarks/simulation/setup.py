"""Makes a comparison's folder: the job's bundle for this side, and the same model, start and rows for Flower's.

TREC has 5,452 training questions, fewer than 10,000 members. So each member has ROWS of them, dealt round and round in
drawn orders: a client's work is the same for any number of members, and at 10,000 members a question is with 36 of
them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.institutional.setup import GLOVE, TREC, check_data
from benchmarks.library.minilm import minilm

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from learning.text.examples import Example

__all__ = ["MODELS", "ROWS", "Case", "accuracy_of", "data_of", "places_of", "prepare"]

ROWS, BATCH, EPOCHS = 20, 10, 1
MODELS = ("textcnn", "head")
# TextCNN has the product's default optimiser and rate. The head's rate was fixed in advance, as features have length 1.
_RECIPES = {"textcnn": ("adam", 0.001), "head": ("sgd", 20.0)}
_MAX_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """What is simulated. cohort: clients of a round. rounds: the first is a warm-up."""

    model: str
    members: int
    cohort: int
    rounds: int


def data_of() -> "tuple[tuple[Example, ...], tuple[Example, ...]]":
    """Return TREC's training and test questions.

    Raises:
        NoData: a file is missing.
    """
    check_data(GLOVE)
    from learning.text.data import read_examples

    return tuple(read_examples(TREC / "train.jsonl.gz")), tuple(read_examples(TREC / "test.jsonl.gz"))


def places_of(members: int, questions: int) -> NDArray[np.int64]:
    """Return the questions of each member, (members, ROWS)."""
    turns = -(-members * ROWS // questions)
    random = np.random.Generator(np.random.Philox(0))
    dealt = np.concatenate([random.permutation(questions) for _ in range(turns)])
    return dealt[: members * ROWS].reshape(members, ROWS)


def _specification(model: str, labels: list[str]) -> dict[str, Any]:
    optimiser, rate = _RECIPES[model]
    spec: dict[str, Any] = {"schema": 1, "name": model, "labels": labels}
    spec["training"] = {"optimiser": optimiser, "learning_rate": rate, "batch": BATCH, "epochs": EPOCHS}
    # The most rounds and members; a simulation plays as many as it is told.
    spec["rounds"] = {"count": 1000, "min_members": 3, "target_members": 3}
    if model == "textcnn":
        spec["vocabulary"] = {"kind": GLOVE.kind, "file": str(GLOVE.file), "pretrained": str(GLOVE.file)}
        return spec | {"model": {"embedding": GLOVE.embedding}}
    head = {"architecture": "prompted", "base": str(minilm().resolve()), "injection": "none"}
    return spec | {"model": {**head, "max_tokens": _MAX_TOKENS, "dropout": 0.0, "task": {"name": "head"}}}


def prepare(model: str, folder: Path) -> None:
    """Write the folder, unless it is there.

    Raises:
        NoData: a file or the encoder is missing.
    """
    if (folder / "told.json").exists():
        return
    from export.bundle import make_job_bundle, read_job_bundle
    from learning.text.corpus import EncodedExamples
    from simulation.kept_features import StoredFeatures
    from tacit.job import JobSpec

    folder.mkdir(parents=True, exist_ok=True)
    train, test = data_of()
    labels = sorted({str(each.label) for each in train})
    if not (folder / "bundle").exists():
        make_job_bundle(JobSpec.model_validate(_specification(model, labels)), folder, folder / "bundle")
    bundle = read_job_bundle(folder / "bundle")
    job, start = bundle.document, bundle.manifest.unflatten(bundle.manifest.decode(bundle.weights))
    corpus = EncodedExamples([*train, *test], job, bundle.public_tokenizer, StoredFeatures(folder / "features"))
    read = corpus.read()
    inputs: NDArray[Any] = read.ids
    told: dict[str, Any] = {"optimiser": job.training.optimiser, "learning_rate": job.training.learning_rate}
    told |= {"batch": BATCH, "epochs": EPOCHS}
    if model == "head":
        inputs = _features(bundle, corpus)
        told["head"] = {"width": inputs.shape[1], "labels": len(labels)}
    else:
        shape: Any = job.model
        told["textcnn"] = {
            "rows": corpus.vocabulary_size,
            "width": shape.embedding,
            "filters": {str(width): shape.maps for width in shape.widths},
            "labels": len(labels),
            "pad": corpus.pad_id,
            "dropout": shape.dropout,
        }
        told["shortest"] = shape.min_tokens
    np.save(folder / "inputs.npy", inputs[: len(train)])
    np.save(folder / "labels.npy", read.labels[: len(train)])
    np.savez(folder / "start.npz", **start)  # type: ignore[arg-type]
    # Last, so that a folder that was cut off is made again.
    (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")


def _features(bundle: "JobBundle", corpus: Any) -> NDArray[np.float32]:
    """Return the features of all questions, computed once for both sides."""
    from learning.models.assembly import assembled
    from learning.prompts.features import features_of, kind_of
    from simulation.rounds import backbone_of

    values = bundle.manifest.decode(bundle.weights)
    module: Any
    module, _ = assembled(bundle.document, corpus, bundle.manifest, values, {}, backbone_of(bundle), bundle.frozen)
    found = features_of(module, corpus.read().ids, kind_of(bundle.document), corpus.features)
    return np.asarray(found)


def accuracy_of(folder: Path, values: NDArray[np.float32]) -> float:
    """Return the accuracy of a version on TREC's test questions, of either side."""
    from export.bundle import read_job_bundle
    from simulation.kept_features import StoredFeatures
    from simulation.scoring import figures_of_version

    _, test = data_of()
    store = StoredFeatures(folder / "features")
    return float(figures_of_version(read_job_bundle(folder / "bundle"), values, test, store).accuracy)
