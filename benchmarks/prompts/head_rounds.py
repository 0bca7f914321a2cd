"""Measures a round of a head whose features are cached beside a round that computes them.

A round is one member's `train_update`: it builds the module, loads the version, trains (dp-sgd, full lots, 30 steps),
and protects the change. The backbone has MiniLM's shape (six layers, 384 wide) and random values, the head reads layers
2, 4 and 6, and the member has 1,363 texts of about 12 words, a quarter of TREC's questions. One thread.

    round_speedup     median time of a round that computes all features, over that of one that finds them cached

Times are processor seconds, because other work on the machine lengthens a short round by another share than a long one.
The lines have the seconds of a clock beside them. The goal is 20. Without the cache, a member would compute features in
every step, and not only in every round.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.library.record import Figure, open_results, parser

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from learning.text.examples import Example

__all__ = ["BENCH", "measured"]

BENCH = "head_rounds"

# Raised when times became processor seconds.
REVISION = 2
TARGET = 20.0
LABELS = tuple("abcdef")
EXAMPLES, MEAN_WORDS, WORDS, TURNS = 1_363, 12, 9_600, 3
MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}


def examples(count: int) -> "list[Example]":
    """Return texts of words with Zipf's frequencies, and labels."""
    from learning.text.examples import Example

    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, WORDS + 1)
    made = []
    for place in range(count):
        words = random.choice(WORDS, size=max(3, random.poisson(MEAN_WORDS)), p=weights / weights.sum())
        made.append(Example(" ".join(f"w{word}" for word in words), LABELS[place % len(LABELS)]))
    return made


def job_of(folder: Path, sizes: "dict[str, Any]", lot: int) -> "JobBundle":
    """Return the bundle of a private head over a random encoder of these sizes."""
    from transformers import BertConfig, BertModel

    from export.bundle import make_job_bundle, read_job_bundle
    from tacit.job import JobSpec

    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{word}" for word in range(WORDS))]
    BertModel(BertConfig(vocab_size=len(entries), **sizes)).save_pretrained(folder / "base")
    (folder / "base" / "vocab.txt").write_text("\n".join(entries) + "\n", encoding="utf-8")
    model = {"architecture": "prompted", "base": "base", "max_tokens": 64, "injection": "none", "task": "head"}
    mechanism = {"name": "dp-sgd", "noise_multiplier": 8.0, "clip": 0.3, "lot": lot, "steps": 30}
    spec = {
        "schema": 1,
        "name": "head",
        "labels": list(LABELS),
        "model": model,
        "mechanism": mechanism,
        "training": {"optimiser": "sgd", "learning_rate": 1.0},
    }
    make_job_bundle(JobSpec.model_validate(spec), folder, folder / "bundle")
    return read_job_bundle(folder / "bundle")


def measured(sizes: "dict[str, Any]", count: int, turns: int) -> Figure:
    """Return the figure for an encoder of these sizes and this number of texts."""
    import torch

    import secure_agg
    from benchmarks.library.simulation import backbone_of
    from learning.mechanisms.protection import protection_of
    from learning.text.corpus import EncodedExamples
    from learning.training.update import train_update

    torch.set_num_threads(1)
    rows = examples(count)
    with tempfile.TemporaryDirectory() as scratch:
        job = job_of(Path(scratch), sizes, count)
        backbone = backbone_of(job)

        def seconds(corpus: EncodedExamples) -> tuple[float, float]:
            began, clock = time.process_time(), time.perf_counter()
            train_update(
                job=job.document,
                manifest=job.manifest,
                corpus=corpus,
                base=job.weights,
                protection=protection_of(job.document, count),
                frozen=job.frozen,
                backbone=backbone,
                random=secure_agg.SystemRandom(),
                seed=1,
                device="cpu",
                progress=lambda *_: None,
                cancelled=lambda: False,
            )
            return time.process_time() - began, time.perf_counter() - clock

        first, later = [], []
        for _ in range(turns):
            corpus = EncodedExamples(rows, job.document, job.public_tokenizer)
            corpus.read()
            first.append(seconds(corpus))
            later.append(seconds(corpus))
    (before, slow), (after, fast) = (map(statistics.median, zip(*each, strict=True)) for each in (first, later))
    more = {"target": TARGET, "computing_seconds": before, "cached_seconds": after}
    more |= {"computing_clock_seconds": slow, "cached_clock_seconds": fast}
    return Figure("round_speedup", before / after, more=more)


def main() -> None:
    """Command line."""
    chosen = parser("prompts.head_rounds").parse_args()
    results = open_results(BENCH, quick=chosen.quick, revision=REVISION)
    case = {"model": "minilm-head", "examples": EXAMPLES}
    if not results.done(case):
        results.open([0])
        results.add(case, [measured(MINILM, 200 if chosen.quick else EXAMPLES, 1 if chosen.quick else TURNS)])


if __name__ == "__main__":
    main()
